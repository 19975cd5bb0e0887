"""The `Target` of Vulkan devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....dsl.errors import DeviceError, TargetError
from ....schedules.capability import Capability
from ...driver import Artifact, Status
from . import api
from .driver import VulkanDriver, driver
from .instance import physical_devices, surveyed
from .record import capability_of, features_of, record_of, resolve
from .spirv import pack

if TYPE_CHECKING:
    from ....schedules.program import Program
    from ....schedules.rule import Rule
    from ...cache import DiskCache
    from ...signature import Signature

BINARY = "kernel.spvs"


class Vulkan:
    """Code generation for the chosen device, the device of a number (`vulkan:1`), or `portable`.

    `portable` asks for no more than common devices have; where there is no device, plain `vulkan`
    is the same.
    """

    name = "vulkan"

    def identity(self, arch: str, cache: DiskCache) -> str:
        facts = resolve(arch)
        if facts is None:
            return "portable"
        record = f"{capability_of(facts)} {features_of(facts)}"
        return f"{facts.name}, {facts.driver} {facts.driver_version:#x}, {record}"

    def capability(self, arch: str) -> Capability:
        return record_of(arch)[0]

    def rules(self) -> Sequence[Rule]:
        from ....schedules.grid import rules

        return rules()

    def compile(self, program: Program, entry: str, arch: str, cache: DiskCache) -> Artifact:
        from .compile import build

        shaders, plan = build(program, entry, *record_of(arch))
        return Artifact(plan, {BINARY: pack(shaders)}, BINARY)

    def source(self, program: Program, entry: str, arch: str) -> tuple[str, str]:
        """The assembly of every module. Raises TargetError without `spirv-dis`."""
        from .compile import build
        from .tools import disassemble

        shaders, _ = build(program, entry, *record_of(arch))
        parts = [f"; {shader.name}\n{disassemble(shader.words)}" for shader in shaders]
        return "\n".join(parts), "spirv"

    def driver(self) -> VulkanDriver:
        return driver()

    def status(self) -> Status:
        """Compiling needs nothing that is not always there."""
        try:
            names = [d.facts.name for d in physical_devices()]
            refused = [f"{d.facts.name} lacks {lacks}" for d, lacks in surveyed() if lacks]
        except (TargetError, DeviceError) as error:
            text, _, hint = str(error).rpartition(": ")
            return Status(True, False, text or str(error), hint if text else "")
        detail = "; ".join([", ".join(names) or "no device", *refused])
        return Status(True, bool(names), detail, "" if names else api.LIBRARY_HINT)

    def export(
        self, program: Program, signature: Signature, arch: str, folder: Path
    ) -> dict[str, Any]:
        from .export import export

        return export(program, signature, arch, folder)
