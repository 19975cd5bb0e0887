"""The `Target` of NVIDIA devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....dsl.errors import TargetError
from ....schedules.capability import Capability
from ...driver import Artifact, Status
from . import toolkit
from .capability import number, record
from .driver import CudaDriver, driver

if TYPE_CHECKING:
    from ....schedules.program import Program
    from ....schedules.rule import Rule
    from ...cache import DiskCache
    from ...signature import Signature

BINARY = "kernel.cubin"


class Cuda:
    """Code generation for a named architecture (`cuda:sm_90`), or that of the device here."""

    name = "cuda"

    def identity(self, arch: str, cache: DiskCache) -> str:
        return f"{resolve(arch)} {toolkit.identity(toolkit.compiler_name())}"

    def capability(self, arch: str) -> Capability:
        return record(resolve(arch))

    def rules(self) -> Sequence[Rule]:
        from ....schedules.grid import rules

        return rules()

    def compile(self, program: Program, entry: str, arch: str, cache: DiskCache) -> Artifact:
        from .compile import build

        cubin, _, plan = build(program, entry, resolve(arch))
        return Artifact(plan, {BINARY: cubin}, BINARY)

    def source(self, program: Program, entry: str, arch: str) -> tuple[str, str]:
        from .compile import translate

        return translate(program, entry, resolve(arch))[0], "cuda"

    def driver(self) -> CudaDriver:
        return driver()

    def status(self) -> Status:
        found, nvcc = toolkit.find_nvrtc(), toolkit.find_nvcc()
        chosen = toolkit.compiler_name()
        able = (nvcc if chosen == "nvcc" else found) is not None
        tool = f"compiles by {toolkit.identity(chosen)}" if able else f"no {chosen}"
        names = driver().device_names()
        here = ", ".join(names) if names else driver().problem
        hint = ""
        if not names:
            hint = "install NVIDIA's driver; to compile without a device name one, as cuda:sm_90"
        if not able:
            hint = toolkit.HINT
        return Status(able, bool(names), f"{here}; {tool}", hint)

    def export(
        self, program: Program, signature: Signature, arch: str, folder: Path
    ) -> dict[str, Any]:
        from .export import export

        return export(program, signature, resolve(arch), folder)


def resolve(arch: str) -> str:
    """A named architecture, checked, or that of the first device. Raises TargetError."""
    if arch:
        number(arch)
        return arch
    here = driver()
    if not here.device_names():
        raise TargetError(
            "needs an architecture to compile for, such as cuda:sm_90, got cuda where no device "
            f"tells it ({here.problem})"
        )
    return here.arch(0)
