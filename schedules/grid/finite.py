"""Values that are not finite, told by their bits as they are stored."""

from __future__ import annotations

from typing import Any

from ...dsl.dtypes import DType, f32
from ..terms import int32
from .contraction_copy import Factor
from .nest import GridNest

Tir = Any
# The bits of the exponent, all of which are set in what is not finite.
_INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}


def bits(stored: Tir, dtype: DType) -> Tir:
    """The bits of a stored f32, f16 or bf16, as int32."""
    from tvm import tirx

    # No sign by way of uint32: TVM takes an int32 made of one to be ≥ 0.
    kind = "int32" if dtype == f32 else "uint16"
    same = str(stored.ty.dtype) == kind  # bf16 is stored as its bits
    return (stored if same else tirx.reinterpret(kind, stored)).astype("int32")


def finite(stored: Tir, dtype: DType) -> Tir:
    """Whether a stored value is finite."""
    infinity = int32(_INFINITY[dtype.name])
    return bits(stored, dtype) & infinity != infinity


def holds_odd(nest: GridNest, values: Factor, dtype: DType) -> Tir:
    """Whether a value that the thread holds is not finite."""
    from tvm import tirx

    zero, infinity = nest.number(0), int32(_INFINITY[dtype.name])
    worst = nest.private("worst", [], "int32")
    nest.store(worst, [zero], int32(0))
    for i in range(values.per_thread * values.lanes):
        exponent = bits(values.held[nest.number(i)], dtype) & infinity
        nest.store(worst, [zero], tirx.max(worst[zero], exponent))
    return worst[zero].equal(infinity)
