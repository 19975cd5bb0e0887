"""Pooling over windows of the last two dims, [..., H, W] → [..., OH, OW], and its backward.

Window o of a dim takes the places o·S − P + k·D, k < K. What lies outside the input has no part in
a maximum and is 0 in a sum. A backward gathers: an input's gradient is summed over the windows
that cover it, in one order, so it is the same on every run.
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
    axes,
    axis,
    dim,
    f32,
    i64,
    isnan,
    max,
    maximum,
    min,
    minimum,
    op,
    require,
    sum,
    where,
)
from ..dsl import tensor as keep
from ..dsl.errors import PoolingError

_NOTHING = -math.inf
_STATIC = ("KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW")
_EXAMPLE = {
    "planes": (2, 3), "H": 32, "W": 32, "OH": 16, "OW": 16,
    "KH": 3, "KW": 3, "SH": 2, "SW": 2, "PH": 1, "PW": 1, "DH": 1, "DW": 1,
}  # fmt: skip
_AVERAGE_EXAMPLE = {n: s for n, s in _EXAMPLE.items() if n not in ("DH", "DW")}

# Kernel, stride and padding of both dims; a declaration reads them by their names as dims.
_SIZES = Shared(
    KH=Extent(), KW=Extent(), SH=Extent(1), SW=Extent(1), PH=Extent(0), PW=Extent(0)
)  # fmt: skip
_DILATION = Shared(DH=Extent(1), DW=Extent(1))
_COUNTING = Shared(count_include_pad=Option(True, (True, False)), divisor=Param(0, i64))


@dataclass(frozen=True)
class _Windows:
    """The windows along one dim of `size`: `count` of them, each `kernel` places."""

    size: Any
    count: Any
    kernel: Any
    stride: Any
    padding: Any
    dilation: Any

    def place(self, window: Any, tap: Any) -> Any:
        return window * self.stride - self.padding + tap * self.dilation

    def inside(self, place: Any) -> Any:
        return (place >= 0) & (place < self.size)

    def last(self, place: Any) -> Any:
        """The last window that starts at or before a place."""
        return (place + self.padding) // self.stride

    @property
    def reach(self) -> Any:
        """How many windows back one may start and still cover a place, that one included."""
        return (self.kernel - 1) * self.dilation // self.stride + 1


def _windows(letter: str, dilated: bool = True) -> _Windows:
    """The windows of one dim, and the contract of its sizes. Raises PoolingError."""
    kernel, stride, padding = (dim(f"{n}{letter}") for n in "KSP")
    dilation = dim(f"D{letter}") if dilated else 1
    size, count = dim(letter), dim(f"O{letter}")
    require(kernel >= 1, "a kernel ≥ 1", kernel=kernel)
    require(stride >= 1, "a stride ≥ 1", stride=stride)
    require(dilation >= 1, "a dilation ≥ 1", dilation=dilation)
    require(2 * padding <= kernel, "padding of at most half the kernel",
            padding=padding, kernel=kernel)  # fmt: skip
    require(size > 0, "spatial dims that are not empty", size=size)
    require((count - 1) * stride < size + padding, "windows that start within the input",
            windows=count, size=size)  # fmt: skip
    return _Windows(size, count, kernel, stride, padding, dilation)


def _sides(dilated: bool = True) -> tuple[_Windows, _Windows]:
    return _windows("H", dilated), _windows("W", dilated)


# --- maximum ---


@op(out=Out("*planes", "OH", "OW"), static=_STATIC, example=_EXAMPLE, error=PoolingError)
def max_pool(
    x: Any = In("*planes", "H", "W"), *, OH: Any = Extent(), OW: Any = Extent(),
    sizes: Any = _SIZES, dilation: Any = _DILATION,
) -> Any:  # fmt: skip
    """The greatest element of each window; NaN is greatest.

    x [..., H, W] f32, f16 or bf16 → [..., OH, OW] alike. Raises PoolingError.
    """
    rows, columns = _sides()
    p, i, j = axes("*planes", "OH", "OW")
    u, v = axis("u", rows.kernel), axis("v", columns.kernel)
    return max(x.at(p, rows.place(i, u), columns.place(j, v), fill=_NOTHING), over=(u, v))


@op(out=(Out("*planes", "OH", "OW", name="y"), Out("*planes", "OH", "OW", dtype=i64, name="at")),
    static=_STATIC, example=_EXAMPLE, error=PoolingError)  # fmt: skip
def max_pool_with_indices(
    x: Any = In("*planes", "H", "W"), *, OH: Any = Extent(), OW: Any = Extent(),
    sizes: Any = _SIZES, dilation: Any = _DILATION,
) -> Any:  # fmt: skip
    """`max_pool`, and where in its plane the first greatest element is: row · W + column.

    x [..., H, W] f32, f16 or bf16 → [..., OH, OW] alike, and i64. Raises PoolingError.
    """
    return _top(x, *_sides(), axes("*planes", "OH", "OW"))


def _top(x: Any, rows: _Windows, columns: _Windows, windows: tuple[Any, ...]) -> tuple[Any, Any]:
    """(the greatest, its index) of the windows of x."""
    p, i, j = windows
    u, v = axis("u", rows.kernel), axis("v", columns.kernel)
    row, column = rows.place(i, u), columns.place(j, v)
    value = x.at(p, row, column, fill=_NOTHING)
    best = keep("best", (p, i, j), max(value, over=(u, v)))
    inside = rows.inside(row) & columns.inside(column)
    return best[p, i, j], first_index(value, best[p, i, j], row, column, inside, (u, v))


def first_index(value: Any, best: Any, row: Any, column: Any, inside: Any, over: Any) -> Any:
    """The least index among the elements that are the greatest."""
    same = where(isnan(best), isnan(value), value == best)
    return min(row * dim("W") + column, over=over, where=inside & same)


@op(out=Out("*planes", "H", "W", name="dx"), static=_STATIC, example=_EXAMPLE,
    error=PoolingError)  # fmt: skip
def max_pool_backward(
    grad: Any = In("*planes", "OH", "OW"), indices: Any = In("*planes", "OH", "OW", dtype=i64),
    *, H: Any = Extent(), W: Any = Extent(),
    sizes: Any = _SIZES, dilation: Any = _DILATION,
) -> Any:  # fmt: skip
    """The gradient of `max_pool`: each element gets that of the windows whose index it is.

    grad [..., OH, OW] f32, f16 or bf16, indices alike, i64 → [..., H, W] as grad. An index that
    its window does not cover counts nowhere. Raises PoolingError.
    """
    rows, columns = _sides()
    return _picked(grad, indices, rows, columns)


@op(out=Out("*planes", "H", "W", name="dx"), static=_STATIC, example=_EXAMPLE,
    error=PoolingError)  # fmt: skip
def max_pool_backward_from_input(
    grad: Any = In("*planes", "OH", "OW"), x: Any = In("*planes", "H", "W"), *,
    sizes: Any = _SIZES, dilation: Any = _DILATION,
) -> Any:  # fmt: skip
    """`max_pool_backward` where no indices were kept: they are found again.

    grad [..., OH, OW], x [..., H, W] f32, f16 or bf16, both the same → as x. Raises PoolingError.
    """
    rows, columns = _sides()
    windows = axes("*planes", "OH", "OW")
    _, index = _top(x, rows, columns, windows)
    return _picked(grad, keep("at", windows, index), rows, columns)


def _picked(grad: Any, index: Any, rows: _Windows, columns: _Windows) -> Any:
    """Σ grad over the windows near each element whose index is the element's."""
    p, h, w = axes("*planes", "H", "W")
    a, b = axis("a", rows.reach), axis("b", columns.reach)
    window = p, rows.last(h) - a, columns.last(w) - b
    return sum_where_index(grad, index, window, h * dim("W") + w, (a, b))


def sum_where_index(grad: Any, index: Any, window: Any, own: Any, over: Any) -> Any:
    """Σ grad over the windows whose index is `own`; there may be none at `window`."""
    return sum(grad.at(*window, fill=0.0), over=over, where=index.at(*window, fill=-1) == own)


max_pool.differentiable(max_pool_backward_from_input, "x")


# --- average ---


def _elements(windows: _Windows, window: Any, padded: bool) -> Any:
    """How many elements along one dim count; padding may, what overhangs it does not."""
    first = windows.place(window, 0)
    past = first + windows.kernel
    if padded:
        return minimum(past, windows.size + windows.padding) - first
    return minimum(past, windows.size) - maximum(first, 0)


def _divisor(rows: _Windows, columns: _Windows, i: Any, j: Any, counting: Any) -> Any:
    padded, fixed = counting.count_include_pad, counting.divisor
    count = _elements(rows, i, padded) * _elements(columns, j, padded)
    return f32(where(fixed > 0, fixed, count))


@op(out=Out("*planes", "OH", "OW"), static=_STATIC[:6], example=_AVERAGE_EXAMPLE,
    error=PoolingError)  # fmt: skip
def avg_pool(
    x: Any = In("*planes", "H", "W"), *, OH: Any = Extent(), OW: Any = Extent(),
    sizes: Any = _SIZES, counting: Any = _COUNTING,
) -> Any:  # fmt: skip
    """Σ of each window / number of its elements; a divisor > 0 takes the place of the number.

    x [..., H, W] f32, f16 or bf16 → [..., OH, OW] alike. Raises PoolingError.
    """
    rows, columns = _sides(dilated=False)
    p, i, j = axes("*planes", "OH", "OW")
    u, v = axis("u", rows.kernel), axis("v", columns.kernel)
    total = sum(x.at(p, rows.place(i, u), columns.place(j, v), fill=0.0), over=(u, v))
    return total / _divisor(rows, columns, i, j, counting)


@op(out=Out("*planes", "H", "W", name="dx"), static=_STATIC[:6], example=_AVERAGE_EXAMPLE,
    error=PoolingError)  # fmt: skip
def avg_pool_backward(
    grad: Any = In("*planes", "OH", "OW"), *, H: Any = Extent(), W: Any = Extent(),
    sizes: Any = _SIZES, counting: Any = _COUNTING,
) -> Any:  # fmt: skip
    """The gradient of `avg_pool`: Σ grad / number over the windows that cover an element.

    grad [..., OH, OW] f32, f16 or bf16 → [..., H, W] alike. Raises PoolingError.
    """
    rows, columns = _sides(dilated=False)
    p, h, w = axes("*planes", "H", "W")
    a, b = axis("a", rows.reach), axis("b", columns.reach)
    i, j = rows.last(h) - a, columns.last(w) - b
    covers = _covers(rows, i, h) & _covers(columns, j, w)
    share = grad.at(p, i, j, fill=0.0) / _divisor(rows, columns, i, j, counting)
    return sum(share, over=(a, b), where=covers)


def _covers(windows: _Windows, window: Any, place: Any) -> Any:
    """Whether there is such a window, and it ends past the place (it starts at or before it)."""
    there = (window >= 0) & (window < windows.count)
    return there & (windows.place(window, windows.kernel) > place)


avg_pool.differentiable(avg_pool_backward, "x")
