"""Elementary float32 functions as expressions that vectorise on every LLVM target.

TVM lowers ``exp``, ``tanh``, ``erf`` and ``log`` for CPUs to calls into libm, one lane at a time.
The functions here are made of multiply-adds, selects and integer bit operations only, so a
``vectorize``d loop around them becomes whole-register code on AVX-512, AVX2 and NEON.

Each takes and returns a float32 scalar expression; NaN gives NaN. Intermediates are bound with
``tirx.Let``, which survives vectorisation; written inline the expression would grow exponentially.

The rules the code below keeps, because TVM breaks what does not:

* no ``tirx.max``/``min``: they drop NaN. ``Select(x < low, low, x)`` keeps it and is one ``maxps``;
* no ``v - v``, ``v * 0`` or ``v == v``: TVM folds them, right only for finite ``v``;
* ``a * b + c`` becomes one FMA where the target has it; without, errors grow by up to 0.4 ulp.

The polynomial coefficients are minimax fits (Remez exchange in 120-bit arithmetic, weighted for
the relative error of the function's value), rounded to float32 one at a time from the lowest
degree up, the rest fitted again after each (for sinpi, least squares at Chebyshev points instead).
The bounds in the docstrings were measured against float64 on all 2**32 inputs, with FMA (for
sinpi, on 16 million of them up to 4000).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..dsl.lower import Lets

if TYPE_CHECKING:
    import tvm

_LN2 = math.log(2.0)
# LN2_HIGH has 15 significant bits, so its product with any exponent (8 bits) is exact without FMA.
_LN2_HIGH = round(_LN2 * 2**15) / 2**15
_LN2_LOW = _LN2 - _LN2_HIGH

# Adding 1.5 * 2**23 rounds to an integer, which then stands in the low bits of the sum.
_ROUNDER = 1.5 * 2**23
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23
_SIGN_BIT = -(2**31)
_SMALLEST_NORMAL = 2.0**-126


def _f32(value: float) -> tvm.ir.Expr:
    from tvm import tirx

    return tirx.const(value, "float32")


def _i32(value: int) -> tvm.ir.Expr:
    from tvm import tirx

    return tirx.const(value, "int32")


def _bits(value: tvm.ir.Expr) -> tvm.ir.Expr:
    from tvm import tirx

    return tirx.reinterpret("int32", value)


def _float(bits: tvm.ir.Expr) -> tvm.ir.Expr:
    from tvm import tirx

    return tirx.reinterpret("float32", bits)


def _select(condition: tvm.ir.Expr, yes: tvm.ir.Expr, no: tvm.ir.Expr) -> tvm.ir.Expr:
    from tvm import tirx

    return tirx.Select(condition, yes, no)


def _at_least(x: tvm.ir.Expr, low: float) -> tvm.ir.Expr:
    """max(x, low), NaN kept."""
    return _select(x < _f32(low), _f32(low), x)


def _at_most(x: tvm.ir.Expr, high: float) -> tvm.ir.Expr:
    """min(x, high), NaN kept."""
    return _select(x > _f32(high), _f32(high), x)


def _abs(x: tvm.ir.Expr) -> tvm.ir.Expr:
    return _float(_bits(x) & _i32(~_SIGN_BIT))


def _with_sign_of(magnitude: tvm.ir.Expr, x: tvm.ir.Expr) -> tvm.ir.Expr:
    """``magnitude`` (sign bit clear) with the sign bit of ``x``."""
    return _float(_bits(magnitude) | (_bits(x) & _i32(_SIGN_BIT)))


def _polynomial(x: tvm.ir.Expr, coefficients: Sequence[float]) -> tvm.ir.Expr:
    """sum(coefficients[i] * x**i) by Horner's rule; ``x`` is a variable."""
    *rest, value = [_f32(c) for c in coefficients]
    for coefficient in reversed(rest):
        value = value * x + coefficient
    return value


# exp(r) on |r| <= ln(2) / 2, relative error 3.2e-9.
_EXP = (1.0, 1.0, 0.49999994, 0.166665167, 0.0416681059, 0.00836914033, 0.00138367491)
# Below this the result nears the denormals and the scale 2**n must be applied in two steps.
_EXP_TINY = -86.0
_EXP_TINY_SHIFT = 63
# At this bound the first of the two scales is already exactly 0: masked elements of a softmax
# (-inf) never meet the slow denormal hardware paths.
_EXP_LOW = -131.7
_EXP_HIGH = 89.0


def _exp_clamped(lets: Lets, x: tvm.ir.Expr, ldexp: bool) -> tvm.ir.Expr:
    """exp of a variable within [_EXP_LOW, _EXP_HIGH], or NaN; `ldexp`: see `functions`."""
    if ldexp:
        from tvm import tirx

        sum_ = lets("sum", x * _f32(1.0 / _LN2) + _f32(_ROUNDER))
        n = lets("n", sum_ - _f32(_ROUNDER))
        r = lets("r", n * _f32(-_LN2_LOW) + (n * _f32(-_LN2_HIGH) + x))
        power = tirx.Cast("int32", n)
        return tirx.call_llvm_pure_intrin("float32", "llvm.ldexp", _polynomial(r, _EXP), power)
    # exp(x) = 2**n * exp(r), n = round(x / ln 2). One float cannot hold every 2**n that occurs
    # (n is -150 .. 128), so it is 2**(n - 1) * 2, or near underflow 2**(n + 63) * 2**-63.
    tiny = x < _f32(_EXP_TINY)
    bias = _ROUNDER + _EXPONENT_BIAS
    rounder = lets("rounder", _select(tiny, _f32(bias + _EXP_TINY_SHIFT), _f32(bias - 1)))
    rest = lets("rest", _select(tiny, _f32(2.0**-_EXP_TINY_SHIFT), _f32(2.0)))
    sum_ = lets("sum", x * _f32(1.0 / _LN2) + rounder)
    n = lets("n", sum_ - rounder)
    scale = _float(_bits(sum_) << _i32(_MANTISSA_BITS))
    r = lets("r", n * _f32(-_LN2_LOW) + (n * _f32(-_LN2_HIGH) + x))
    return _polynomial(r, _EXP) * scale * rest


def exp(x: tvm.ir.Expr, ldexp: bool = False) -> tvm.ir.Expr:
    """e**x, float32. At most 0.90 ulp off, denormal results included.

    exp(-inf) = 0, exp(inf) = inf; over 88.72 gives inf, under -103.98 gives 0.
    """
    lets = Lets()
    x = lets("x", x)
    x = lets("x_clamped", _at_most(lets("x_low", _at_least(x, _EXP_LOW)), _EXP_HIGH))
    return lets.close(_exp_clamped(lets, x, ldexp))


def sigmoid(x: tvm.ir.Expr, ldexp: bool = False) -> tvm.ir.Expr:
    """1 / (1 + e**-x), float32. At most 1.65 ulp off, denormal results included.

    sigmoid(-inf) = 0, sigmoid(inf) = 1.
    """
    lets = Lets()
    x = lets("x", x)
    # With e = exp(-|x|) <= 1 nothing overflows. sigmoid is e / (1 + e) for x < 0 and 1 / (1 + e)
    # otherwise; both are y - y * (e / (1 + e)), y = e or 1, whose correction term is small where
    # the roundings of the quotient would weigh most.
    minus_abs = lets("minus_abs", _float(_bits(x) | _i32(_SIGN_BIT)))
    e = lets("e", _exp_clamped(lets, lets("x_low", _at_least(minus_abs, _EXP_LOW)), ldexp))
    y = lets("y", _select(x < _f32(0.0), e, _f32(1.0)))
    return lets.close(y - y * (e / (e + _f32(1.0))))


# (tanh(r) / r - 1) / r**2 as a polynomial in r**2 on |r| <= 0.262, relative error 4.3e-9.
_TANH = (-0.333332092, 0.133223355, -0.0511806011)
_TANH_ONE = 9.25  # from here on tanh rounds to 1


def tanh(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """Hyperbolic tangent, float32. At most 1.75 ulp off; the sign of zero is kept.

    tanh(-inf) = -1, tanh(inf) = 1.
    """
    lets = Lets()
    x = lets("x", x)
    # |x| = n * ln(2) / 2 + r. With s = 2**n and t = tanh(r) the addition theorem reads
    # tanh|x| = u / (u + 2 - 2 * t), u = (s - 1) + (s + 1) * t.
    # For s = 1 t comes out unchanged; for large s the error of u cancels. s = 2 is the worst,
    # for negative r, so n is rounded late: r lies in [-1/4, 3/4] * ln(2) / 2.
    a = lets("a", _at_most(lets("abs", _abs(x)), _TANH_ONE))
    rounder = _f32(_ROUNDER + _EXPONENT_BIAS)
    late = lets("late", a * _f32(2.0 / _LN2) - _f32(0.25))
    sum_ = lets("sum", late + rounder)
    n = sum_ - rounder
    s = lets("s", _float(_bits(sum_) << _i32(_MANTISSA_BITS)))
    r = lets("r", n * _f32(-_LN2 / 2.0) + a)
    r2 = lets("r2", r * r)
    t = lets("t", (r * r2) * _polynomial(r2, _TANH) + r)
    u = lets("u", (s + _f32(1.0)) * t + (s - _f32(1.0)))
    return lets.close(_with_sign_of(u / (u + (t * _f32(-2.0) + _f32(2.0))), x))


# erf(x) / x - 1 as a polynomial in x**2 on |x| <= 1, relative error of erf 4.1e-8.
_ERF_SMALL = (0.128379121, -0.37612319, 0.112801135, -0.0267092176, 0.00491491612, -0.000561997353)
# (1 - erf(x))**(1/4) on 1 <= x <= _ERF_ONE, relative error of erf 3.0e-8, less towards the end.
_ERF_LARGE = (
    1.00413048,
    -0.303286821,
    -0.0726869628,
    -0.0420180261,
    0.061597392,
    -0.0207989309,
    0.00299504702,
    -0.000162642697,
)
_ERF_ONE = 4.1  # from here on erf, of this fit too, rounds to 1


def erf(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """Error function, float32. At most 1.76 ulp off; the sign of zero is kept.

    erf(-inf) = -1, erf(inf) = 1.
    """
    lets = Lets()
    x = lets("x", x)
    a = lets("a", _at_most(lets("abs", _abs(x)), _ERF_ONE))
    a2 = lets("a2", a * a)
    small = a * _polynomial(a2, _ERF_SMALL) + a
    root = lets("root", _polynomial(a, _ERF_LARGE))
    root2 = lets("root2", root * root)
    large = _f32(1.0) - root2 * root2
    return lets.close(_with_sign_of(_select(a < _f32(1.0), small, large), x))


# (log(1 + f) - f) / f**2 on 1 + f in [sqrt(1/2), sqrt(2)], relative error of log 3.1e-8.
_LOG = (
    -0.499999911,
    0.333339542,
    -0.250018269,
    0.199619621,
    -0.165684447,
    0.149168104,
    -0.14323166,
    0.0875894204,
)
_SQRT_HALF_BITS = 0x3F3504F3


def log(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """Natural logarithm, float32. At most 1.15 ulp off, denormal inputs included.

    log(0) = log(-0) = -inf, log(inf) = inf; a negative x gives NaN.
    """
    from tvm import tirx

    lets = Lets()
    x = lets("x", x)
    tiny = x < _f32(_SMALLEST_NORMAL)
    normal = _select(tiny, x * _f32(2.0**_MANTISSA_BITS), x)
    bits = lets("bits", _bits(normal))
    # normal = 2**e * (1 + f) with 1 + f between sqrt(1/2) and sqrt(2).
    e = lets("e", (bits - _i32(_SQRT_HALF_BITS)) >> _i32(_MANTISSA_BITS))
    f = lets("f", _float(bits - (e << _i32(_MANTISSA_BITS))) - _f32(1.0))
    shift = _select(tiny, _f32(-_MANTISSA_BITS), _f32(0.0))
    n = lets("n", tirx.Cast("float32", e) + shift)
    log1p = (f * f) * _polynomial(f, _LOG) + f
    value = n * _f32(_LN2_HIGH) + (n * _f32(_LN2_LOW) + log1p)
    value = _select(x < _f32(math.inf), value, _f32(math.inf))
    otherwise = _select(tirx.EQ(x, _f32(0.0)), _f32(-math.inf), _f32(math.nan))
    return lets.close(_select(x > _f32(0.0), value, otherwise))


# On |m| <= 1/4, in m²: sin(πm)/m - _PI_HIGH, to 4.1e-09 of sin(πm)/m, and (cos(πm) - 1)/m², to
# 5.2e-10 of cos(πm).
_PI_HIGH = 3.140625  # its product with m needs few bits
_SINPI = (0.000967653585, -5.16770887, 2.54979753, -0.589336872)
_COSPI = (-4.93480206, 4.05869865, -1.33483589, 0.229745209)


def sinpi(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """sin(πx), float32. At most 1.65 ulp off, ±0 where x is whole, NaN at the infinities."""
    from tvm import tirx

    lets = Lets()
    x = lets("x", x)
    size = lets("size", _abs(x))
    whole = lets("whole", tirx.floor(size))
    part = lets("part", size - whole)
    # The distances from the nearest zero and from the nearest crest are exact.
    near = lets("near", _select(part > _f32(0.5), _f32(1.0) - part, part))
    crest = lets("crest", _f32(0.5) - near)
    steep = near < _f32(0.25)
    m = lets("m", _select(steep, near, crest))
    square = lets("square", m * m)
    sine = m * _f32(_PI_HIGH) + m * _polynomial(square, _SINPI)
    cosine = square * _polynomial(square, _COSPI) + _f32(1.0)
    value = lets("value", _select(steep, sine, cosine))
    half = lets("half", whole * _f32(0.5))
    odd = tirx.floor(half) < half
    signed = lets("signed", _select(odd, _f32(0.0) - value, value))
    return lets.close(_float(_bits(signed) ^ (_bits(x) & _i32(_SIGN_BIT))))


FUNCTIONS: dict[str, Callable[[tvm.ir.Expr], tvm.ir.Expr]] = {
    "exp": exp,
    "log": log,
    "tanh": tanh,
    "erf": erf,
    "sigmoid": sigmoid,
    "sinpi": sinpi,
}


def functions(ldexp: bool) -> dict[str, Callable[[tvm.ir.Expr], tvm.ir.Expr]]:
    """The table for a device; `ldexp`: it scales vectors by powers of two in one instruction.

    Elsewhere LLVM would call libm for that, one lane at a time.
    """
    if not ldexp:
        return FUNCTIONS
    return FUNCTIONS | {"exp": partial(exp, ldexp=True), "sigmoid": partial(sigmoid, ldexp=True)}
