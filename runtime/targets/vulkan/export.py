"""What an app needs to run an operator on Vulkan: SPIR-V, and C that starts it."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from ....dsl.dtypes import BY_NAME
from ....dsl.errors import CompileError, TargetError
from ....schedules.program import Program
from ...embed.device import Parts, export_device
from ...plan import Launch, LaunchPlan
from ...signature import Signature
from .compile import build
from .record import record_of
from .spirv import Shader
from .tools import disassemble

NATIVE = Path(__file__).parent / "native"
_LIBRARIES = "-lvulkan"
_OPENING = "rudnn_vulkan_device.h"
_MOST_BUFFERS, _MOST_BYTES = 32, 1024  # as in native/rudnn_vulkan_device.h


def export(program: Program, signature: Signature, arch: str, folder: Path) -> dict[str, Any]:
    """Write everything into `folder`; the manifest's target part. Raises CompileError.

    The assembly, NAME_0.spvasm and so on, is there where SPIR-V's tools are installed.
    """
    name, (caps, features) = signature.name, record_of(arch)
    shaders, plan = build(program, name, caps, features)
    files = []
    for shader in shaders:
        _check(shader)
        (folder / f"{shader.name}.spv").write_bytes(shader.words)
        files.append(f"{shader.name}.spv")
        with contextlib.suppress(TargetError):
            (folder / f"{shader.name}.spvasm").write_text(disassemble(shader.words), "utf-8")
            files.append(f"{shader.name}.spvasm")
    shutil.copyfile(NATIVE / _OPENING, folder / _OPENING)
    pairs = list(zip(shaders, plan.launches, strict=True))
    rows = [_function(shader, launch, plan, caps.subgroup) for shader, launch in pairs]
    parts = Parts(
        NATIVE / "rudnn_vulkan.h", rows, [*files, _OPENING], _LIBRARIES,
        {"shaders": [_shader(shader, launch, plan, caps.subgroup) for shader, launch in pairs]},
    )  # fmt: skip
    return export_device(program, signature, plan, parts, folder)


def _check(shader: Shader) -> None:
    buffers = len(shader.readonly) + shader.in_buffer
    if buffers > _MOST_BUFFERS or shader.block_bytes > _MOST_BYTES:
        raise CompileError(
            f"needs at most {_MOST_BUFFERS} buffers and {_MOST_BYTES} bytes of numbers, got "
            f"{shader.name} with {buffers} and {shader.block_bytes}"
        )


def element_bytes(launch: Launch, plan: LaunchPlan) -> list[int]:
    """Of each buffer; 0 for a part of the workspace, which is bound where it begins."""
    slots = [plan.slots[a.slot] for a in launch.arguments if a.kind == "pointer"]
    return [0 if s.kind == "workspace" else BY_NAME[s.dtype].bytes for s in slots]


def _function(shader: Shader, launch: Launch, plan: LaunchPlan, subgroup: int) -> str:
    """A `rudnn_function` in C."""
    elements = "".join(f"\\{n}" for n in element_bytes(launch, plan))
    size = subgroup if shader.subgroup else 0
    return (
        f'"{shader.name}.spv", {len(shader.readonly)}, "{elements}", {shader.block_bytes}, '
        f"{int(shader.in_buffer)}, {size}"
    )


def _shader(shader: Shader, launch: Launch, plan: LaunchPlan, subgroup: int) -> dict[str, Any]:
    """How to bind a shader, in words: bindings of set 0, then the block of numbers.

    The block, laid out as Python's `struct` has it, begins with a uint32 for each buffer, the
    element of the bound range at which its tensor begins.
    """
    return {
        "file": f"{shader.name}.spv", "entry": "main", "local_size": [shader.local_size, 1, 1],
        "bindings": [
            {"argument": a.slot, "offset": a.offset, "readonly": readonly, "element_bytes": n}
            for a, readonly, n in zip(
                launch.arguments, shader.readonly, element_bytes(launch, plan), strict=False
            )
        ],
        "numbers": {
            "in": "buffer" if shader.in_buffer else "push constants",
            "layout": shader.layout, "bytes": shader.block_bytes,
            "arguments": [a.slot for a in launch.arguments if a.kind != "pointer"],
        },
        "subgroup_size": subgroup if shader.subgroup else None,
    }  # fmt: skip
