"""Devices, their queues, and events."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from ..dsl.errors import DeviceError
from .locks import fork_safe_lock

if TYPE_CHECKING:
    from ..schedules.capability import Capability
    from .driver import Driver


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes: held by live `Tensor`s, and by workspaces and kernel scratch memory.

    `peak_workspace` is the sum of the greatest of each of the latter two.
    """

    tensors: int
    workspace: int
    peak_workspace: int

    @property
    def total(self) -> int:
        return self.tensors + self.workspace


@dataclass(frozen=True, eq=False)
class Device:
    """One device of one target, `llvm:0` for the host."""

    target: str
    index: int
    name: str
    driver: Driver = field(repr=False)

    @property
    def capability(self) -> Capability:
        """What the device can do, as schedules see it."""
        return self.driver.capability()

    @property
    def default_queue(self) -> Queue:
        return _default_queue(self)

    def __str__(self) -> str:
        return f"{self.target}:{self.index}"


class Event:
    """A point in a queue: `queue.record()` makes one; `seconds` between two is device time."""

    def __init__(self, queue: Queue, stamp: float) -> None:
        self.queue, self._stamp = queue, stamp

    def synchronize(self) -> None:
        """Wait until the work recorded before this point is done."""
        self.queue.synchronize()

    def since(self, earlier: Event) -> float:
        """Seconds from `earlier` to this event."""
        return self._stamp - earlier._stamp


class Queue:
    """Ordered work on one device. `with queue:` makes it the current one of this thread."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._outer: list[Queue | None] = []

    def synchronize(self) -> None:
        """Wait for everything submitted; raises the error of a kernel that failed."""
        self.device.driver.synchronize(self)

    def record(self) -> Event:
        """An event after the work submitted so far."""
        self.synchronize()
        return Event(self, time.perf_counter())

    def __enter__(self) -> Queue:
        self._outer.append(getattr(_CURRENT, "queue", None))
        _CURRENT.queue = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _CURRENT.queue = self._outer.pop()

    def __repr__(self) -> str:
        return f"<queue of {self.device}>"


_CURRENT = threading.local()
_DEFAULTS: dict[int, Queue] = {}
_LOCK = fork_safe_lock()


def _default_queue(device: Device) -> Queue:
    with _LOCK:
        return _DEFAULTS.setdefault(id(device), Queue(device))


def current_queue(device: Device) -> Queue:
    """The queue of the innermost `with queue:` on this device, else its default one."""
    queue: Queue | None = getattr(_CURRENT, "queue", None)
    return queue if queue is not None and queue.device is device else device.default_queue


def devices() -> tuple[Device, ...]:
    """Every device a driver finds, the host first."""
    from .targets import registered

    found: list[Device] = []
    for name, target in registered().items():
        found += [Device(name, i, label, target.driver()) for i, label in _listed(name)]
    return tuple(_intern(d) for d in found)


def _listed(name: str) -> list[tuple[int, str]]:
    from .targets import registered

    return list(enumerate(registered()[name].driver().device_names()))


_INTERNED: dict[str, Device] = {}


def _intern(device: Device) -> Device:
    return _INTERNED.setdefault(str(device), device)


def device(name: str = "llvm:0") -> Device:
    """The device called `name` (`llvm`, `vulkan:1`, …).

    Raises DeviceError where there is none of that name.
    """
    target, _, index = name.partition(":")
    wanted = f"{target}:{index or 0}"
    found = _INTERNED.get(wanted) or next((d for d in devices() if str(d) == wanted), None)
    if found is None:
        have = ", ".join(str(d) for d in devices())
        raise DeviceError(f"needs one of the devices {have}, got {name}")
    return found


def host() -> Device:
    """The device of NumPy arrays and torch CPU tensors."""
    return _INTERNED.get("llvm:0") or device("llvm:0")


def memory_usage(of: Device | None = None) -> MemoryUsage:
    """Bytes in use on a device (default: the host)."""
    where = of or host()
    return where.driver.memory_usage()
