"""Casts between element types, with the roundings and special values of the CPU."""

from __future__ import annotations

import numpy as np

from .body import Body
from .opcodes import Op
from .types import BOOL, F16, F32, I32, I64, U16, U32, Scalar


def cast(body: Body, value: int, source: Scalar, goal: Scalar) -> int:
    """One value of type `source` as `goal`."""
    if source == goal:
        return value
    if goal == BOOL:
        return _truth(body, value, source)
    if source == BOOL:
        return body.select(goal, value, body.constant(goal, 1), body.constant(goal, 0))
    if source.is_float and goal.is_float:
        return to_f32(body, value) if goal == F32 else _to_half(body, value)
    if source.is_float:
        return _to_integer(body, cast(body, value, source, F32), goal)
    if goal.is_float:
        # Through f32: an integer that f32 must round is too large for f16 anyway.
        value, source = _widened(body, value, source)
        op = Op.ConvertSToF if source.kind == "int" else Op.ConvertUToF
        return cast(body, body.pure(op, F32, value), F32, goal)
    return _resized(body, value, source, goal)


def _truth(body: Body, value: int, source: Scalar) -> int:
    if source.is_float:
        value = cast(body, value, source, F32)
        return body.pure(Op.FUnordNotEqual, BOOL, value, body.constant(F32, 0))
    return body.pure(Op.INotEqual, BOOL, value, body.constant(source, 0))


def _resized(body: Body, value: int, source: Scalar, goal: Scalar) -> int:
    if source.bits == goal.bits:
        return value
    if source == I32 and goal.bits == I64.bits:
        return body.sign_extended(value)
    return body.pure(Op.SConvert if source.kind == "int" else Op.UConvert, goal, value)


def _widened(body: Body, value: int, source: Scalar) -> tuple[int, Scalar]:
    """Of at least 32 bits."""
    goal = Scalar(source.kind, max(source.bits, 32))
    return _resized(body, value, source, goal), goal


def to_f32(body: Body, value: int) -> int:
    """f16 → f32, exact."""
    return body.pure(Op.FConvert, F32, value)


def _to_integer(body: Body, value: int, goal: Scalar) -> int:
    """f32 → integer towards zero; what does not fit, which SPIR-V leaves undefined, saturates.

    NaN gives the least integer.
    """
    least = 0 if goal.kind == "uint" else -(2 ** (goal.bits - 1))
    most = 2 ** (goal.bits - (goal.kind == "int")) - 1
    highest = np.float32(most)
    if int(highest) > most:
        highest = np.nextafter(highest, np.float32(0))
    low, high = body.constant(F32, least), body.constant(F32, float(highest))
    value = body.select(F32, body.pure(Op.FOrdGreaterThanEqual, BOOL, value, low), value, low)
    value = body.select(F32, body.pure(Op.FOrdLessThanEqual, BOOL, value, high), value, high)
    wide = Scalar(goal.kind, max(goal.bits, 32))
    op = Op.ConvertFToS if goal.kind == "int" else Op.ConvertFToU
    return _resized(body, body.pure(op, wide, value), wide, goal)


def _to_half(body: Body, value: int) -> int:
    """f32 → f16, to nearest even, denormals and overflow to infinity included."""
    if body.module.features.exact_half:
        return body.pure(Op.FConvert, F16, value)
    return body.pure(Op.Bitcast, F16, _half_bits(body, value))


def _half_bits(body: Body, value: int) -> int:
    """The bits of f32 → f16: integer arithmetic, as drivers' own conversions may truncate."""

    def u32(number: int) -> int:
        return body.constant(U32, number)

    def do(op: Op, *operands: int) -> int:
        return body.pure(op, U32, *operands)

    def pick(op: Op, limit: int, yes: int, no: int) -> int:
        return body.select(U32, body.pure(op, BOOL, magnitude, u32(limit)), yes, no)

    bits = do(Op.Bitcast, value)
    magnitude = do(Op.BitwiseAnd, bits, u32(0x7FFFFFFF))
    sign = do(Op.BitwiseAnd, do(Op.ShiftRightLogical, bits, u32(16)), u32(0x8000))
    # Normal results: 13 bits go, rounded to even; the exponent's bias falls from 127 to 15.
    odd = do(Op.BitwiseAnd, do(Op.ShiftRightLogical, magnitude, u32(13)), u32(1))
    bias = (15 - 127) * 2**23 + 0xFFF
    normal = do(Op.ShiftRightLogical, do(Op.IAdd, do(Op.IAdd, magnitude, u32(bias)), odd), u32(13))
    # Denormal ones: 0.5 is a multiple of 2**-24, their unit, and its sums are rounded to that.
    shifted = body.pure(
        Op.FAdd, F32, body.pure(Op.Bitcast, F32, magnitude), body.constant(F32, 0.5)
    )
    small = do(Op.ISub, do(Op.Bitcast, shifted), u32(0x3F000000))
    finite = pick(Op.ULessThan, 0x38800000, small, normal)  # 2**-14, the least normal f16
    quiet = do(Op.BitwiseAnd, do(Op.ShiftRightLogical, magnitude, u32(13)), u32(0x1FF))
    special = pick(Op.UGreaterThan, 0x7F800000, do(Op.BitwiseOr, quiet, u32(0x7E00)), u32(0x7C00))
    half = pick(Op.UGreaterThanEqual, 0x477FF000, special, finite)  # 65520, halfway to 2**16
    return body.pure(Op.UConvert, U16, do(Op.BitwiseOr, half, sign))
