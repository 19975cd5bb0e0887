"""A program to its launch plan, CUDA C++ and machine code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...device_code import lower
from ...plan import LaunchPlan
from . import source, toolkit

if TYPE_CHECKING:
    from ....schedules.program import Program


def translate(program: Program, entry: str, arch: str) -> tuple[str, LaunchPlan]:
    """All kernels of a program as one translation unit, and how to launch them."""
    target = source.tvm_target(arch)
    functions, plan = lower(program, entry, target)
    return source.generate(functions, target), plan


def build(program: Program, entry: str, arch: str) -> tuple[bytes, str, LaunchPlan]:
    """The cubin of a program, the source it comes from, its plan. Raises CompileError."""
    text, plan = translate(program, entry, arch)
    return (*toolkit.cubin(text, arch, entry), plan)
