"""Capability records and SPIR-V features from what devices say of themselves."""

from __future__ import annotations

import os

from ....dsl.errors import TargetError
from ....schedules.capability import Capability, MatrixUnit
from .instance import physical_devices
from .properties import Facts
from .spirv import BASELINE, SpirvFeatures, matrix_unit

_FLOAT_WIDTHS = (16, 32)
_SOFTWARE = 4  # VK_PHYSICAL_DEVICE_TYPE_CPU
_CORES = 16  # where the driver does not say


# What every device has that we run on, or close to: the limits of Vulkan's 2022 roadmap, with the
# shared memory that all Vulkan devices have.
PORTABLE = Capability(
    "grid", shared_bytes=16 * 1024, max_threads=256, max_blocks=65535, cores=_CORES
)


def resolve(arch: str) -> Facts | None:
    """What to compile for: a device, or None for the portable baseline.

    Raises TargetError for an unknown arch, DeviceError where RUDNN_VULKAN_DEVICE fits none.
    """
    if arch == "portable":
        return None
    if arch and not arch.isdecimal():
        raise TargetError(f"needs vulkan, vulkan:portable or a device's number, got vulkan:{arch}")
    try:
        found = physical_devices()
    except TargetError:  # no driver: compiling needs none
        found = ()
    if arch and int(arch) >= len(found):
        raise TargetError(f"needs a Vulkan device among {len(found)}, got vulkan:{arch}")
    return found[int(arch or 0)].facts if found else None


def record_of(arch: str) -> tuple[Capability, SpirvFeatures]:
    """What schedules and the emitter may assume of `arch`. Raises TargetError."""
    facts = resolve(arch)
    return (PORTABLE, BASELINE) if facts is None else (capability_of(facts), features_of(facts))


def capability_of(facts: Facts) -> Capability:
    """A device as schedules see it."""
    cores = facts.processors or _CORES
    if facts.kind == _SOFTWARE:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    adds = "shaderBufferFloat32AtomicAdd" in facts.features
    return Capability(
        "grid", shared_bytes=facts.shared_bytes, max_threads=facts.max_threads,
        max_blocks=facts.max_blocks, cores=cores, subgroup=facts.subgroup, shuffle=facts.shuffle,
        matrix=matrix_units(facts), atomics=(("add", "float32"),) if adds else (),
    )  # fmt: skip


def matrix_units(facts: Facts) -> tuple[MatrixUnit, ...]:
    """Its cooperative matrices, the largest product first."""
    shapes = sorted(set(facts.matrix), key=lambda s: (-s.m * s.n * s.k, s.m, s.operands))
    return tuple(matrix_unit((s.m, s.n, s.k), s.operands, facts.subgroup) for s in shapes)


def features_of(facts: Facts) -> SpirvFeatures:
    """What kernels for a device may use."""
    has = facts.features.__contains__

    def widths(control: str) -> tuple[int, ...]:
        return tuple(w for w in _FLOAT_WIDTHS if f"{control}Float{w}" in facts.float_controls)

    return SpirvFeatures(
        storage16=has("storageBuffer16BitAccess"), storage8=has("storageBuffer8BitAccess"),
        int64=has("shaderInt64"), int16=has("shaderInt16"), int8=has("shaderInt8"),
        float16=has("shaderFloat16"), shuffle=facts.shuffle, shuffle_relative=facts.shuffle,
        atomic_float32_add=has("shaderBufferFloat32AtomicAdd"),
        nan=widths("shaderSignedZeroInfNanPreserve"), denormals=widths("shaderDenormPreserve"),
        round_even=widths("shaderRoundingModeRTE"), matrix=matrix_units(facts),
        push_bytes=facts.push_bytes,
    )  # fmt: skip
