"""The `Target` of AMD devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....dsl.errors import TargetError
from ....schedules.capability import Capability
from ...driver import Artifact, Status
from . import linker
from .capability import Arch, record

if TYPE_CHECKING:
    from ....schedules.program import Program
    from ....schedules.rule import Rule
    from ...cache import DiskCache
    from ...signature import Signature
    from .driver import HipDriver

_BINARY = "kernel.hsaco"
_NO_DEVICE = "install AMD's ROCm; to compile without a device name one, as rocm:gfx942"


class Rocm:
    """Code generation for a named AMD architecture, or that of the device at hand."""

    name = "rocm"

    def arch(self, arch: str) -> Arch:
        """The record of `arch`, "" for the first device's. Raises TargetError."""
        if arch:
            return record(arch)
        driver = self.driver()
        if not driver.device_names():
            raise TargetError(
                "needs an architecture to compile for, such as rocm:gfx942, got rocm where no "
                f"device tells it ({driver.problem})"
            )
        return record(driver.arch(0))

    def identity(self, arch: str, cache: DiskCache) -> str:
        return f"rocm {self.arch(arch).name}"

    def capability(self, arch: str) -> Capability:
        return self.arch(arch).capability

    def rules(self) -> Sequence[Rule]:
        from ....schedules.grid import rules

        return rules()

    def compile(self, program: Program, entry: str, arch: str, cache: DiskCache) -> Artifact:
        """A code object. Raises CompileError."""
        from . import compile as codegen

        code, plan = codegen.build(program, entry, self.arch(arch))
        return Artifact(plan, {_BINARY: code.link()}, _BINARY)

    def source(self, program: Program, entry: str, arch: str) -> tuple[str, str]:
        from . import compile as codegen

        code, _ = codegen.build(program, entry, self.arch(arch))
        return code.ir, "llvm"

    def driver(self) -> HipDriver:
        from .driver import driver

        return driver()

    def status(self) -> Status:
        command, driver = linker.find(), self.driver()
        names = driver.device_names()
        told = [f"links with {' '.join(command)}" if command else "no ld.lld that links"]
        told += [", ".join(names) or driver.problem]
        hint = linker.HINT if command is None else "" if names else _NO_DEVICE
        return Status(command is not None, bool(names), "; ".join(told), hint)

    def export(
        self, program: Program, signature: Signature, arch: str, folder: Path
    ) -> dict[str, Any]:
        from .export import export

        return export(program, signature, self.arch(arch), folder)
