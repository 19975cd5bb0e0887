"""Capability records by compute capability (`sm_80`, `sm_90a`, …)."""

from __future__ import annotations

import re
from dataclasses import replace

from ....dsl.errors import TargetError
from ....schedules.capability import Capability, MatrixUnit

OLDEST, NEWEST = 75, 121
SHARED_BYTES = 48 * 1024  # of a block, declared statically; more needs dynamic shared memory
_ARCH = re.compile(r"sm_(\d{2,3})([af]?)")
_KIB, _MIB = 1024, 1024 * 1024


def _unit(operands: str, short: str) -> MatrixUnit:
    """mma.sync m16n8k16: see prelude.cuh for which lane holds what."""
    return MatrixUnit(
        (16, 8, 16), operands, "float32", f"rudnn_m16n8k16_{short}", a=8, b=4, c=4
    )  # fmt: skip


_TURING = Capability(
    model="grid", vector_bits=128, l1_bytes=64 * _KIB, l2_bytes=4 * _MIB, cores=40,
    shared_bytes=SHARED_BYTES, max_threads=1024, max_blocks=2**31 - 1, subgroup=32, shuffle=True,
    registers=255, atomics=(("add", "float32"),), vector_ldexp=False,
)  # fmt: skip
_AMPERE = replace(
    _TURING, l1_bytes=192 * _KIB, l2_bytes=40 * _MIB, cores=108, async_copy=True,
    matrix=(_unit("float16", "f16"), _unit("bfloat16", "bf16")),
)  # fmt: skip

# The oldest compute capability that a record serves; those in between are no less able. `cores`
# (multiprocessors) and caches are those of the usual card: code must not differ between two cards
# of one architecture, or the compile cache would need to know the card.
_RECORDS = {
    75: _TURING,
    80: _AMPERE,
    86: replace(_AMPERE, l1_bytes=128 * _KIB, l2_bytes=6 * _MIB, cores=84),
    87: replace(_AMPERE, l2_bytes=4 * _MIB, cores=16),
    89: replace(_AMPERE, l1_bytes=128 * _KIB, l2_bytes=72 * _MIB, cores=128),
    90: replace(_AMPERE, l1_bytes=256 * _KIB, l2_bytes=50 * _MIB, cores=132),
    100: replace(_AMPERE, l1_bytes=256 * _KIB, l2_bytes=126 * _MIB, cores=148),
    110: replace(_AMPERE, l1_bytes=256 * _KIB, l2_bytes=32 * _MIB, cores=20),
    120: replace(_AMPERE, l1_bytes=128 * _KIB, l2_bytes=96 * _MIB, cores=170),
}


def number(arch: str) -> int:
    """`sm_90a` → 90. Raises TargetError on what is no architecture that can be compiled for."""
    match = _ARCH.fullmatch(arch)
    value = int(match[1]) if match else 0
    if not OLDEST <= value <= NEWEST:
        raise TargetError(
            f"needs an architecture from sm_{OLDEST} to sm_{NEWEST}, such as cuda:sm_90, got {arch}"
        )
    return value


def record(arch: str) -> Capability:
    """The record of a named architecture. Raises TargetError."""
    value = number(arch)
    return _RECORDS[max(known for known in _RECORDS if known <= value)]
