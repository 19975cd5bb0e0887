"""Devices, their queues, and events."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..dsl.errors import DeviceError
from .locks import fork_safe_lock

if TYPE_CHECKING:
    from ..schedules.capability import Capability
    from .driver import Driver, Mark


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
        return self.driver.capability(self.index)

    @property
    def code(self) -> str:
        """The target to compile for, so that kernels run here: `llvm`, `cuda:sm_90`, …."""
        arch = self.driver.arch(self.index)
        return f"{self.target}:{arch}" if arch else self.target

    @property
    def default_queue(self) -> Queue:
        return _default_queue(self)

    def __str__(self) -> str:
        return f"{self.target}:{self.index}"


class Event:
    """A point in a queue: `queue.record()` makes one; `since` between two is device time."""

    def __init__(self, queue: Queue, mark: Mark) -> None:
        self.queue, self._mark = queue, mark

    def synchronize(self) -> None:
        """Wait until the work recorded before this point is done."""
        self._mark.synchronize()

    def since(self, earlier: Event) -> float:
        """Seconds from `earlier` to this event. Raises DeviceError for one of another device."""
        here, there = self.queue.device, earlier.queue.device
        if here is not there:
            raise DeviceError(f"needs two events of one device, got {here} and {there}")
        return self._mark.since(earlier._mark)


class Queue:
    """Ordered work on one device. `with queue:` makes it the current one of this thread.

    `handle` is the driver's own object behind it, made when first needed; given, it is a stream
    that someone else owns. What is kept for later calls has but the `reference`. `starting` is
    held from taking the workspace until the kernels that use it are submitted.
    """

    def __init__(self, device: Device, handle: Any = None) -> None:
        self.device, self.handle = device, handle
        self.reference = weakref.ref(self)
        self.starting = fork_safe_lock()

    def synchronize(self) -> None:
        """Wait for everything submitted; raises the error of a kernel that failed."""
        self.device.driver.synchronize(self)

    def record(self) -> Event:
        """An event after the work submitted so far."""
        return Event(self, self.device.driver.record(self))

    def __enter__(self) -> Queue:
        _CURRENT.queues.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _CURRENT.queues.pop()

    def __repr__(self) -> str:
        return f"<queue of {self.device}>"


class _Current(threading.local):
    """The queues a thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.queues: list[Queue] = []


_CURRENT = _Current()
_DEFAULTS: dict[int, Queue] = {}
_FOREIGN: dict[tuple[str, int], Queue] = {}
_LOCK = fork_safe_lock()


def _default_queue(device: Device) -> Queue:
    with _LOCK:
        return _DEFAULTS.setdefault(id(device), Queue(device))


def foreign_queue(device: Device, handle: int) -> Queue:
    """The queue around a stream that someone else owns."""
    with _LOCK:
        found = _FOREIGN.get((str(device), handle))
        if found is None:
            found = _FOREIGN[str(device), handle] = Queue(device, handle)
        return found


def current_queue(device: Device) -> Queue:
    """The queue of the innermost `with queue:` on this device, else its default one."""
    entered = (queue for queue in reversed(_CURRENT.queues) if queue.device is device)
    return next(entered, None) or device.default_queue


def devices() -> tuple[Device, ...]:
    """Every device a driver finds, the host first."""
    from .targets import registered

    return tuple(d for name in registered() for d in devices_of(name))


def devices_of(name: str) -> tuple[Device, ...]:
    """The devices of one target."""
    from .targets import parse

    driver = parse(name)[0].driver()
    names = driver.device_names()
    return tuple(_intern(Device(name, i, label, driver)) for i, label in enumerate(names))


_INTERNED: dict[str, Device] = {}


def _intern(device: Device) -> Device:
    return _INTERNED.setdefault(str(device), device)


def device(name: str = "llvm:0") -> Device:
    """The device called `name` (`llvm`, `vulkan:1`, …).

    Raises DeviceError where there is none of that name, with what would mend it.
    """
    from .targets import registered

    target, _, index = name.partition(":")
    wanted = f"{target}:{index or 0}"
    found = _INTERNED.get(wanted)
    if found is None and target in registered():
        found = next((d for d in devices_of(target) if str(d) == wanted), None)
    if found is None:
        have = ", ".join(str(d) for d in devices())
        status = registered()[target].status() if target in registered() else None
        why = f": {status.detail}: {status.hint}" if status and not status.can_run else ""
        raise DeviceError(f"needs one of the devices {have}, got {name}{why}")
    return found


def host() -> Device:
    """The device of NumPy arrays and torch CPU tensors."""
    return _INTERNED.get("llvm:0") or device("llvm:0")


def memory_usage(of: Device | str | None = None) -> MemoryUsage:
    """Bytes in use on a device, itself or by name (default: the host)."""
    where = device(of) if isinstance(of, str) else of or host()
    return where.driver.memory_usage(where.index)
