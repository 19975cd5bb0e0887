"""What a target offers the runtime. One folder under `targets/` implements both protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .plan import LaunchPlan

if TYPE_CHECKING:
    from ..schedules.capability import Capability
    from ..schedules.program import Program
    from ..schedules.rule import Rule
    from .cache import DiskCache
    from .device import MemoryUsage, Queue
    from .signature import Signature


@dataclass(frozen=True)
class Artifact:
    """What compiling gives: how to launch it, and files by name; `binary` is the one to load."""

    plan: LaunchPlan
    files: dict[str, bytes]
    binary: str


@dataclass(frozen=True)
class Status:
    """`rudnn doctor`'s answer for a target; `hint` is the one line that mends what is missing."""

    can_compile: bool
    can_run: bool
    detail: str
    hint: str = ""


class Target(Protocol):
    """Code generation for one kind of device; knows no operator."""

    name: str

    def identity(self, arch: str, cache: DiskCache) -> str:
        """Everything that machine code depends on, for the cache key (no compiler needed)."""

    def capability(self, arch: str) -> Capability:
        """What schedules may assume of `arch` ("" is the device at hand)."""

    def rules(self) -> Sequence[Rule]:
        """Scheduling rules in order of preference."""

    def compile(self, program: Program, entry: str, arch: str, cache: DiskCache) -> Artifact:
        """Machine code of a program. Raises CompileError."""

    def source(self, program: Program, entry: str, arch: str) -> tuple[str, str]:
        """The generated source and its language, for people to read."""

    def driver(self) -> Driver:
        """The driver, whether or not a device is there."""

    def status(self) -> Status:
        """Whether compiling and running work here."""

    def export(
        self, program: Program, signature: Signature, arch: str, folder: Path
    ) -> dict[str, Any]:
        """Write what an app without Python needs; the manifest's target part, with its `files`."""


class Loaded(Protocol):
    """A kernel ready to run on one device."""

    def on(self, queue: Queue) -> Callable[[bytes, int], int]:
        """A function of the packed arguments and a cap on host threads (0: none); 0 is success.

        Work on a device is only submitted. Raises LaunchError or DeviceError, naming the kernel.
        """


class Memory(Protocol):
    """Memory on a device, given back when the object goes."""

    address: int
    nbytes: int


class Mark(Protocol):
    """A point in a queue's work."""

    def synchronize(self) -> None:
        """Wait until the queue has come to this point."""

    def since(self, earlier: Any) -> float:
        """Seconds of device time from an earlier mark of the same queue; waits for both."""


class Driver(Protocol):
    """Running on the devices of one kind.

    Addresses are integers; what lies between them is the driver's. Everything that takes a queue
    happens in the order of that queue's work.
    """

    @property
    def dlpack(self) -> int | None:
        """DLPack's number of the kind of device, None where it has no way to share memory."""

    @property
    def host(self) -> bool:
        """Whether addresses are the process's own."""

    def device_names(self) -> Sequence[str]:
        """Names of the devices there are, in index order."""

    def capability(self, index: int) -> Capability:
        """The record of a device."""

    def arch(self, index: int) -> str:
        """The arch to compile for, so that kernels run on a device; "" is the target's default."""

    def load(self, binary: Path, plan: LaunchPlan, cache: DiskCache, index: int) -> Loaded:
        """A kernel on device `index`. Raises LoadError for a file that is not one."""

    def last_error(self) -> str:
        """What the calling thread's last failing kernel said, or ""."""

    def poison(self, on: bool) -> None:
        """Fill scratch memory with NaN before each use (for tests)."""

    def allocate(self, nbytes: int, queue: Queue) -> Memory:
        """Memory of undefined contents. Raises OutOfMemoryError."""

    def copy_in(self, address: int, data: memoryview, queue: Queue) -> None:
        """Host bytes to the device; `data` may change once this returns."""

    def copy_out(self, address: int, data: memoryview, queue: Queue) -> None:
        """Device bytes to the host, waiting for the queue."""

    def copy(self, to: int, start: int, nbytes: int, queue: Queue) -> None:
        """Device bytes to the same device, in the queue's order."""

    def arena(self, queue: Queue, nbytes: int) -> int:
        """Address of the queue's workspace of at least `nbytes`, aligned to 64 bytes."""

    def synchronize(self, queue: Queue) -> None:
        """Wait for a queue; raises LaunchError or DeviceError with the kernel's name."""

    def record(self, queue: Queue) -> Mark:
        """A mark after the work submitted so far."""

    def memory_usage(self, index: int) -> MemoryUsage:
        """Bytes in use on a device."""
