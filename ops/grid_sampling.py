"""Sampling at given points: x [N, C, H, W], grid [N, OH, OW, 2] → [N, C, OH, OW].

A point (gx, gy) in [−1, 1] lies at column (gx + 1)/2 · (W − 1) with aligned corners, else
(gx + 1)/2 · W − ½, and so for rows. Its value is Σᵤ Σᵥ wy[u] · wx[v] · x[row + u, column + v] over
1, 2 or 4 taps a side. Outside, x is 0 (zeros), its nearest edge (border), or x mirrored at the
edges (reflection). As torch's, border and reflection move the point itself, or, bicubic, each tap.
A NaN or infinite coordinate makes weights NaN where it is not moved to the edge; it never decides
what is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..dsl import (
    In,
    Option,
    Out,
    Shared,
    abs,
    axes,
    axis,
    dim,
    f32,
    floor,
    i64,
    maximum,
    minimum,
    op,
    require,
    scatter_add,
    sum,
    where,
)
from ..dsl import tensor as keep
from ..dsl.errors import GridSamplingError
from .interpolation import SHARP, cubic_parts

MODES = ("bilinear", "nearest", "bicubic")
PADDING_MODES = ("zeros", "border", "reflection")
_TAPS = {"bilinear": 2, "nearest": 1, "bicubic": 4}
_FAR = 2.0**30


@dataclass(frozen=True)
class _Side:
    """Rows or columns: `size` elements; how points map to them."""

    name: str
    size: Any
    mode: str
    padding: str
    align: bool

    @property
    def scale(self) -> Any:
        """Elements for one unit of a grid coordinate."""
        return f32(self.size - 1 if self.align else self.size) * 0.5

    def place(self, coordinate: Any) -> Any:
        """A grid coordinate in elements."""
        scaled = (coordinate + 1) * self.scale
        return scaled if self.align else scaled - 0.5

    def moved(self, place: Any) -> tuple[Any, Any]:
        """(place, its slope): the point as padding moves it; the slope is 0 where it is fixed."""
        if self.padding == "zeros" or self.mode == "bicubic":
            return place, f32(1.0)
        sign = f32(1.0)
        if self.padding == "reflection":
            place, sign = self._mirrored(place)
        last = f32(self.size - 1)
        within = where(place > 0, where(place < last, place, last), 0.0)  # NaN becomes 0
        return within, where((place > 0) & (place < last), sign, 0.0)

    def _mirrored(self, place: Any) -> tuple[Any, Any]:
        """(place, ±1) mirrored at elements 0 and size − 1, or at their outer edges."""
        low = 0.0 if self.align else -0.5
        span = f32(maximum(self.size - 1, 1) if self.align else self.size)
        beyond = abs(place - low)
        turns = floor(beyond / span)
        rest = beyond - turns * span
        odd = turns - 2 * floor(turns * 0.5) != 0
        sign = where(odd, -1.0, f32(1.0)) * where(place < low, -1.0, f32(1.0))
        return where(odd, span - rest, rest) + low, sign

    def element(self, tap: Any) -> Any:
        """The element that a tap reads; outside x it is 0."""
        if self.mode != "bicubic" or self.padding == "zeros":
            return tap
        if self.padding == "border":
            return maximum(minimum(tap, self.size - 1), 0)
        last = self.size - 1
        if self.align:
            period = maximum(2 * last, 1)
            folded = tap % period
            return where(self.size == 1, 0, where(folded > last, period - folded, folded))
        folded = tap % (2 * self.size)
        return where(folded > last, 2 * self.size - 1 - folded, folded)

    def taps(self, points: tuple[Any, ...], coordinate: Any, slopes: bool = False) -> Any:
        """(elements, weights), with `slopes` also those of the weights, each [N, taps, OH, OW]."""
        n, i, j = points
        k = axis(f"k{self.name}", _TAPS[self.mode])
        over = (n, k, i, j)
        place, slope = self.moved(self.place(coordinate))
        place = keep(f"place{self.name}", points, place)[n, i, j]
        base = _nearest(place) if self.mode == "nearest" else floor(place)
        known = where(base > -_FAR, where(base < _FAR, base, _FAR), -_FAR)  # NaN becomes −2³⁰
        element = self.element(i64(known) + (k - 1 if self.mode == "bicubic" else k))
        weight, steep = self._weights(place - base, k)
        made = (keep(f"element{self.name}", over, element, i64),
                keep(f"weight{self.name}", over, weight))  # fmt: skip
        if not slopes:
            return made
        slope = keep(f"slope{self.name}", points, slope * self.scale)
        return (*made, keep(f"steep{self.name}", over, steep * slope[n, i, j]))

    def _weights(self, part: Any, k: Any) -> tuple[Any, Any]:
        """(weight, its derivative) of tap k at the distance `part` from the tap before."""
        if self.mode == "nearest":
            return f32(1.0), f32(0.0)
        if self.mode == "bilinear":
            return where(k == 0, 1 - part, part), where(k == 0, -1.0, f32(1.0))
        z = abs(part + 1 - f32(k))
        sign = where(k <= 1, f32(1.0), -1.0)
        a = SHARP
        near, far = cubic_parts(z, a)
        inner = (k == 1) | (k == 2)
        slope = where(inner, (3 * (a + 2) * z - 2 * (a + 3)) * z, (3 * a * z - 10 * a) * z + 8 * a)
        return where(inner, near, far), sign * slope


def _nearest(place: Any) -> Any:
    """The nearest whole number, the even one of two."""
    up = floor(place + 0.5)
    odd = up - 2 * floor(up * 0.5) != 0
    return where((up - place == 0.5) & odd, up - 1, up)


def _sides(how: Any) -> tuple[_Side, _Side]:
    """Rows and columns, and the contract of their sizes. Raises GridSamplingError."""
    require((dim("H") > 0) & (dim("W") > 0), "spatial dims that are not empty",
            H=dim("H"), W=dim("W"))  # fmt: skip
    settings = how.mode, how.padding_mode, how.align_corners
    return _Side("H", dim("H"), *settings), _Side("W", dim("W"), *settings)


_EXAMPLE = {"N": 2, "C": 5, "H": 16, "W": 20, "OH": 12, "OW": 18}
_HOW = Shared(
    mode=Option("bilinear", MODES), padding_mode=Option("zeros", PADDING_MODES),
    align_corners=Option(False, (False, True)),
)  # fmt: skip


@op(out=Out("N", "C", "OH", "OW"), example=_EXAMPLE, error=GridSamplingError)
def grid_sample(
    x: Any = In("N", "C", "H", "W"), grid: Any = In("N", "OH", "OW", "2"), *,
    how: Any = _HOW,
) -> Any:  # fmt: skip
    """x sampled at the points (x, y) of grid, which are in [−1, 1] within x.

    x [N, C, H, W], grid [N, OH, OW, 2] f32, f16 or bf16, both the same → [N, C, OH, OW] alike.
    Raises GridSamplingError.
    """
    n, c, i, j = axes("N", "C", "OH", "OW")
    rows, columns = _sides(how)
    row, above = rows.taps((n, i, j), grid[n, i, j, 1])
    column, beside = columns.taps((n, i, j), grid[n, i, j, 0])
    u, v = axis("u", _TAPS[how.mode]), axis("v", _TAPS[how.mode])
    value = x.at(n, c, row[n, u, i, j], column[n, v, i, j], fill=0.0)
    return sum(value * above[n, u, i, j] * beside[n, v, i, j], over=(u, v))


@op(out=(Out("N", "C", "H", "W", name="dx"), Out("N", "OH", "OW", "2", name="dgrid")),
    example=_EXAMPLE, error=GridSamplingError)  # fmt: skip
def grid_sample_backward(
    grad: Any = In("N", "C", "OH", "OW"), x: Any = In("N", "C", "H", "W"),
    grid: Any = In("N", "OH", "OW", "2"), *,
    how: Any = _HOW,
) -> Any:  # fmt: skip
    """(dx, dgrid) of `grid_sample`.

    dx adds grad · weights to the elements each point reads, point after point; dgrid is
    Σ grad · x · the slopes of the weights, over channels and taps, 0 for "nearest".
    grad [N, C, OH, OW], x [N, C, H, W], grid [N, OH, OW, 2] f32, f16 or bf16, all the same → as x
    and as grid. Raises GridSamplingError.
    """
    n, c, i, j = axes("N", "C", "OH", "OW")
    rows, columns = _sides(how)
    row, above, steep_row = rows.taps((n, i, j), grid[n, i, j, 1], slopes=True)
    column, beside, steep_column = columns.taps((n, i, j), grid[n, i, j, 0], slopes=True)
    u, v = axis("u", _TAPS[how.mode]), axis("v", _TAPS[how.mode])
    at, to = row[n, u, i, j], column[n, v, i, j]
    weight, across = above[n, u, i, j], beside[n, v, i, j]

    h, w, d = axis("H", rows.size), axis("W", columns.size), axis("2", 2)
    inside = (at >= 0) & (at < rows.size) & (to >= 0) & (to < columns.size)
    element = axis("element", rows.size * columns.size)
    spot = where(inside, at * columns.size + to, -1)
    added = scatter_add(grad[n, c, i, j] * weight * across, at={element: spot}, over=(i, j, u, v))
    flat = keep("flat", (n, element, c), added)

    value = grad[n, c, i, j] * x.at(n, c, at, to, fill=0.0)
    slope = where(d == 0, weight * steep_column[n, v, i, j], steep_row[n, u, i, j] * across)
    return flat[n, h * columns.size + w, c], sum(value * slope, over=(c, u, v))


grid_sample.differentiable(grid_sample_backward, "x", "grid")
