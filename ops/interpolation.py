"""Resampling of the last two dims, [..., H, W] → [..., OH, OW], one dim after the other.

Place o of the result lies at s(o) in the source, counted in elements: o·(size − 1)/(count − 1)
with aligned corners, else (o + ½)·step − ½ with step = size/count or the step given. Its value is

    y[o] = Σₜ w(o, t) · x[t],   w(o, t) = φ((t − s(o)) / width)

over the taps t nearest to s(o), with φ the hat (linear), Keys' cubic convolution (bicubic) or
sinc(z)·sinc(z/3) (lanczos3). Antialiased, φ is as wide as a step > 1. Then, and for lanczos3, taps
outside have no part and the weights are divided by their sum; else the edge is repeated outside.
Steps are fractions of whole numbers, so which elements are read does not depend on rounding.

R. Keys, Cubic convolution interpolation for digital image processing, 1981.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..dsl import (
    Extent,
    In,
    Option,
    Out,
    Param,
    Shared,
    abs,
    axes,
    axis,
    dim,
    f32,
    i64,
    maximum,
    minimum,
    op,
    require,
    sinpi,
    sum,
    where,
)
from ..dsl import tensor as keep
from ..dsl.errors import InterpolationError

MODES = ("linear", "nearest", "nearest-exact", "bicubic", "lanczos3")
_NEAREST = ("nearest", "nearest-exact")
_SUPPORT = {"linear": 1, "bicubic": 2, "lanczos3": 3}  # φ is 0 from there on
SHARP, _SMOOTH = -0.75, -0.5  # Keys' parameter: torch's choice, and its choice for antialias


def _hat(z: Any) -> Any:
    return maximum(1 - abs(z), 0.0)


def cubic_parts(z: Any, a: float) -> tuple[Any, Any]:
    """Keys' kernel with the slope a at ±1, for z in 0 … 1 and in 1 … 2."""
    near = ((a + 2) * z - (a + 3)) * z * z + 1
    far = ((a * z - 5 * a) * z + 8 * a) * z - 4 * a
    return near, far


def _cubic(z: Any, a: float) -> Any:
    """Keys' kernel."""
    z = abs(z)
    near, far = cubic_parts(z, a)
    return where(z <= 1, near, where(z < 2, far, 0.0))


def _lanczos(z: Any) -> Any:
    """sinc(z) · sinc(z/3) with sinc(z) = sin(πz)/(πz)."""
    window = 3 * sinpi(z) * sinpi(z * (1 / 3)) / (math.pi**2 * z * z)
    return where(z == 0, 1.0, where(abs(z) < 3, window, 0.0))


@dataclass(frozen=True)
class _Side:
    """One dim: `count` places among `size` elements, `num`/`den` elements apart."""

    name: str
    size: Any
    count: Any
    num: Any
    den: Any
    mode: str
    align: bool
    antialias: bool

    def source(self, o: Any) -> tuple[Any, Any]:
        """s(o) as a fraction of whole numbers."""
        if self.align and not self.antialias:
            return o * self.num, self.den
        return (2 * o + 1) * self.num - self.den, 2 * self.den

    @property
    def reach(self) -> Any:
        """Taps on either side of a place."""
        support = _SUPPORT[self.mode]
        if not self.antialias:
            return support
        # A step is below (size + 1)/count, and aligned ones are (size − 1)/(count − 1).
        less = 1 if self.align else 0
        places = maximum(self.count - less, 1)
        return (support * maximum(self.size + 1 - 2 * less, places) + places - 1) // places

    def taps(self) -> tuple[Any, Any]:
        """(elements, weights): the taps of each place, [count, taps]."""
        o = axis(f"o{self.name}", self.count)
        if self.mode in _NEAREST:
            return self._nearest(o)
        k = axis(f"k{self.name}", 2 * self.reach)
        top, bottom = self.source(o)
        # The division is of a number ≥ 0: a place is more than one element before the first only
        # where none is read.
        tap = keep(f"tap{self.name}", (o, k), (top + bottom) // bottom - self.reach + k, i64)
        width = bottom
        if self.antialias:
            width = 2 * maximum(self.num, self.den)
        weight = self._phi(f32(tap[o, k] * bottom - top) / f32(width))
        if self.antialias or self.mode == "lanczos3":
            weight = self._normalised(o, k, tap, weight)
        else:
            weight = keep(f"weight{self.name}", (o, k), weight)
        element = maximum(minimum(tap[o, k], self.size - 1), 0)
        return keep(f"element{self.name}", (o, k), element, i64), weight

    def _nearest(self, o: Any) -> tuple[Any, Any]:
        k = axis(f"k{self.name}", 1)
        if self.mode == "nearest":
            element = o * self.num // self.den
        else:
            element = (2 * o + 1) * self.num // (2 * self.den)
        element = minimum(element, self.size - 1) + k
        return (keep(f"element{self.name}", (o, k), element, i64),
                keep(f"weight{self.name}", (o, k), f32(1.0)))  # fmt: skip

    def _phi(self, z: Any) -> Any:
        if self.mode == "linear":
            return _hat(z)
        if self.mode == "bicubic":
            return _cubic(z, _SMOOTH if self.antialias else SHARP)
        return _lanczos(z)

    def _normalised(self, o: Any, k: Any, tap: Any, weight: Any) -> Any:
        inside = (tap[o, k] >= 0) & (tap[o, k] < self.size)
        if self.align:  # one place takes element 0
            weight = where(self.count == 1, f32(tap[o, k] == 0), weight)
        raw = keep(f"raw{self.name}", (o, k), where(inside, weight, 0.0))
        total = keep(f"total{self.name}", (o,), sum(raw[o, k], over=k))
        return keep(f"weight{self.name}", (o, k), raw[o, k] / total[o])

    @property
    def most_users(self) -> Any:
        """At least the number of places that read one element."""
        taps = 1 if self.mode in _NEAREST else 2 * self.reach
        if self.align:  # of one element, all places: the bound is above their number
            between = maximum(self.size - 1, 1)
            bound = (taps * maximum(self.count - 1, 1) + between - 1) // between + 2
        else:
            bound = (taps * (self.count + 1) + self.size - 1) // self.size + 2
        return minimum(bound, self.count)

    def users(self) -> tuple[Any, Any]:
        """(places, weights): who reads each element, [size, most users]."""
        element, weight = self.taps()
        taps = element.shape[1]
        t, o, k = axis(f"t{self.name}", self.size), axis("o", self.count), axis("k", taps)
        user = axis(f"user{self.name}", self.most_users)
        # Taps grow with the place: the first place with a tap at t or later is the first user.
        first = keep(f"first{self.name}", (t,), sum(i64(element[o, taps - 1] < t), over=o))
        place = first[t] + user
        mine = element.at(place, k, fill=-1) == t
        weight = sum(weight.at(place, k, fill=0.0), over=k, where=mine)
        return (keep(f"place{self.name}", (t, user), minimum(place, self.count - 1), i64),
                keep(f"share{self.name}", (t, user), weight))  # fmt: skip


def _side(letter: str, step: tuple[Any, Any], mode: str, align: bool, antialias: bool) -> _Side:
    """One dim, and the contract of its sizes, its step and its mode. Raises InterpolationError."""
    size, count = dim(letter), dim(f"O{letter}")
    num, den = step
    require(size > 0, "spatial dims that are not empty", size=size)
    require(count > 0, "a result that is not empty", size=count)
    require(not align or mode not in _NEAREST, "align_corners False for nearest modes", mode=mode)
    require(not antialias or mode in _SUPPORT, "antialias False for nearest modes", mode=mode)
    given = num > 0
    require((num >= 0) & (den >= 0) & ((num == 0) | (den > 0)), "steps > 0", num=num, den=den)
    fits = (num * count <= (size + 1) * den) & (size * den <= (count + 1) * num)
    require((num == 0) | fits, "a step that takes the places over the input",
            step=f32(num) / f32(den), size=size, count=count)  # fmt: skip
    if align:
        num, den = where(count > 1, size - 1, 0), maximum(count - 1, 1)
    else:
        num, den = where(given, num, size), where(given, den, count)
    return _Side(letter, size, count, num, den, mode, align, antialias)


_EXAMPLE = {"planes": (2, 3), "H": 24, "W": 20, "OH": 31, "OW": 33}
_SWITCH = Option(False, (False, True))
# The steps between places as fractions, 0 for size / count, and the weights.
_HOW = Shared(
    row_num=Param(0, i64), row_den=Param(0, i64),
    column_num=Param(0, i64), column_den=Param(0, i64),
    mode=Option("linear", MODES), align_corners=_SWITCH, antialias=_SWITCH,
)  # fmt: skip


def _sides(how: Any) -> tuple[_Side, _Side]:
    weights = how.mode, how.align_corners, how.antialias
    return (_side("H", (how.row_num, how.row_den), *weights),
            _side("W", (how.column_num, how.column_den), *weights))  # fmt: skip


@op(out=Out("*planes", "OH", "OW"), example=_EXAMPLE, error=InterpolationError, name="interpolate")
def interpolate_op(
    x: Any = In("*planes", "H", "W"), *, OH: Any = Extent(), OW: Any = Extent(),
    how: Any = _HOW,
) -> Any:  # fmt: skip
    """Σᵤ Σᵥ row weight · column weight · x over the taps of each place; a step of 0 is size/count.

    x [..., H, W] f32, f16 or bf16 → [..., OH, OW] alike. A tap of weight 0 has no influence. Raises
    InterpolationError.
    """
    rows, columns = _sides(how)
    p, i, j = axes("*planes", "OH", "OW")
    return _weighted(x, p, i, j, rows.taps(), columns.taps())


def _weighted(x: Any, p: Any, i: Any, j: Any, rows: Any, columns: Any) -> Any:
    """Σ x · weights at the elements that the tables of rows and columns name."""
    (row, above), (column, beside) = rows, columns
    u, v = axis("u", row.shape[1]), axis("v", column.shape[1])
    value = x[p, row[i, u], column[j, v]] * above[i, u] * beside[j, v]
    return sum(value, over=(u, v), where=(above[i, u] != 0) & (beside[j, v] != 0))


@op(out=Out("*planes", "H", "W", name="dx"), example=_EXAMPLE, error=InterpolationError)
def interpolate_backward(
    grad: Any = In("*planes", "OH", "OW"), *, H: Any = Extent(), W: Any = Extent(),
    how: Any = _HOW,
) -> Any:  # fmt: skip
    """The gradient of `interpolate`: Σ weight · grad over the places that read an element.

    grad [..., OH, OW] f32, f16 or bf16 → [..., H, W] alike, summed in one order. Raises
    InterpolationError.
    """
    rows, columns = _sides(how)
    p, h, w = axes("*planes", "H", "W")
    return _weighted(grad, p, h, w, rows.users(), columns.users())


interpolate_op.differentiable(interpolate_backward, "x")
