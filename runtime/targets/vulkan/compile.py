"""A program to SPIR-V: device functions, then one module each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....schedules.capability import Capability
from ...plan import LaunchPlan
from .spirv import Shader, SpirvFeatures, emit

if TYPE_CHECKING:
    from ....schedules.program import Program


def build(
    program: Program, entry: str, caps: Capability, features: SpirvFeatures
) -> tuple[tuple[Shader, ...], LaunchPlan]:
    """The shaders of a program in launch order, and its plan. Raises CompileError."""
    import tvm
    from tvm import tirx

    from ...device_code import lower

    functions, plan = lower(program, entry, tvm_target(caps))
    lowered = tirx.transform.LowerIntrin()
    shaders = []
    for made in functions:
        module = lowered(tvm.IRModule({made.name: made.function}))
        shaders.append(emit(module[made.name], features, made.name))
    return tuple(shaders), plan


def tvm_target(caps: Capability) -> Any:
    """TVM's name for the device; its passes ask for the limits."""
    import tvm

    return tvm.target.Target({
        "kind": "vulkan", "max_num_threads": caps.max_threads,
        "thread_warp_size": caps.subgroup or 1,
        "max_shared_memory_per_block": caps.shared_bytes,
    })  # fmt: skip
