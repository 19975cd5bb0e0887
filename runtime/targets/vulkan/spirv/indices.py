"""Index arithmetic in 32 bits: devices do 64-bit arithmetic, above all division, in many steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .convert import cast
from .opcodes import Op
from .types import I32, U32, Scalar, type_of

if TYPE_CHECKING:
    from .emitter import Emitter

_MODULAR = {"Add": Op.IAdd, "Sub": Op.ISub, "Mul": Op.IMul, "BitwiseAnd": Op.BitwiseAnd,
            "BitwiseOr": Op.BitwiseOr, "BitwiseXor": Op.BitwiseXor}  # fmt: skip


def low32(e: Emitter, index: Any) -> int:
    """An integer expression modulo 2**32."""
    narrow = without_64_bits(e, index)
    if narrow is not None:
        return narrow
    scalar, _ = type_of(index)
    return cast(e.body, e.scalar(index), scalar, Scalar(scalar.kind, 32))


def small(e: Emitter, index: Any) -> bool:
    """Whether an integer expression provably is an int32."""
    bounds = e.analyzer.const_int_bound(index)
    return bounds.min_value >= -(2**31) and bounds.max_value < 2**31


def without_64_bits(e: Emitter, index: Any) -> int | None:
    """`low32` if it can be had without arithmetic in 64 bits, else None."""
    kind, (scalar, _) = type(index).__name__, type_of(index)
    if kind == "IntImm":
        return e.body.index(index.value)
    if not scalar.is_int or scalar.bits < 32:
        return None
    if kind in _MODULAR:
        return e.body.pure(_MODULAR[kind], U32, low32(e, index.a), low32(e, index.b))
    if kind == "Cast":
        source, _ = type_of(index.value)
        return low32(e, index.value) if source.is_int and source.bits >= 32 else None
    if kind == "LShift" and 0 <= getattr(index.b, "value", -1) < 32:
        return e.body.pure(Op.ShiftLeftLogical, U32, low32(e, index.a), low32(e, index.b))
    if scalar.kind != "int" or kind not in ("Div", "Mod", "RShift"):
        return None
    return _division(e, kind, index.a, index.b)


def _division(e: Emitter, kind: str, a: Any, b: Any) -> int | None:
    """a / b, a % b or a >> b of numbers that fit, with b > 0 (a shift: under 32)."""
    bounds = e.analyzer.const_int_bound(b)
    if not small(e, a) or not small(e, b) or bounds.min_value < (kind != "RShift"):
        return None
    if kind == "RShift":
        fits = bounds.max_value < 32
        return _binary(e, Op.ShiftRightArithmetic, a, b) if fits else None
    if e.analyzer.const_int_bound(a).min_value >= 0:
        divisor = getattr(b, "value", 0)
        if divisor and divisor & (divisor - 1) == 0:
            return _by_power(e, kind, low32(e, a), divisor)
        return _binary(e, Op.UDiv if kind == "Div" else Op.UMod, a, b)
    from .expressions import binary

    return binary(e.body, kind, I32, low32(e, a), low32(e, b))


def _binary(e: Emitter, op: Op, a: Any, b: Any) -> int:
    return e.body.pure(op, U32, low32(e, a), low32(e, b))


def _by_power(e: Emitter, kind: str, value: int, divisor: int) -> int:
    """By a power of two, of what is not negative."""
    if kind == "Mod":
        return e.body.pure(Op.BitwiseAnd, U32, value, e.body.index(divisor - 1))
    shift = e.body.index(divisor.bit_length() - 1)
    return e.body.pure(Op.ShiftRightLogical, U32, value, shift)
