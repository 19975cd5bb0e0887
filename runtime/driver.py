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


class Driver(Protocol):
    """Running on one kind of device."""

    def device_names(self) -> Sequence[str]:
        """Names of the devices there are, in index order."""

    def capability(self) -> Capability:
        """The record of the device in use."""

    def load(self, binary: Path, plan: LaunchPlan, cache: DiskCache) -> Callable[[bytes, int], int]:
        """A function of the packed arguments and a cap on host threads (0: none); 0 is success."""

    def last_error(self) -> str:
        """What the calling thread's last failing kernel said, or ""."""

    def poison(self, on: bool) -> None:
        """Fill scratch memory with NaN before each use (for tests)."""

    def synchronize(self, queue: Queue) -> None:
        """Wait for a queue; raises LaunchError with the kernel's name."""

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use."""
