"""Terms of TIR under short names; TVM is imported when one is made."""

from __future__ import annotations

from typing import Any

Tir = Any
# Bits of f32: all of the magnitude, and from which magnitude on it is not finite.
ABS_BITS, INF_BITS = 0x7FFFFFFF, 0x7F800000


def int32(value: int) -> Tir:
    from tvm import tirx

    return tirx.const(value, "int32")


def float32(value: float) -> Tir:
    from tvm import tirx

    return tirx.const(value, "float32")


def both(*conditions: Tir) -> Tir:
    from tvm import tirx

    return tirx.all(*conditions)


def either(*conditions: Tir) -> Tir:
    from tvm import tirx

    return tirx.any(*conditions)


def most(a: Tir, b: Tir) -> Tir:
    """The greater of two integers."""
    from tvm import tirx

    return tirx.max(a, b)


def least(a: Tir, b: Tir) -> Tir:
    """The lesser of two integers."""
    from tvm import tirx

    return tirx.min(a, b)
