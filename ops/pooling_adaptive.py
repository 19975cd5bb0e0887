"""Adaptive pooling: OH × OW windows that share out the last two dims, [..., H, W] → [..., OH, OW].

Window o of a dim of `size` places is ⌊o·size/count⌋ … ⌈(o+1)·size/count⌉ − 1. A backward gathers,
as in `pooling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..dsl import Extent, In, Out, axes, axis, dim, f32, i64, max, maximum, op, require, sum
from ..dsl import tensor as keep
from ..dsl.errors import PoolingError
from .pooling import first_index, sum_where_index

_EXAMPLE = {"planes": (2, 3), "H": 32, "W": 24, "OH": 7, "OW": 5}


@dataclass(frozen=True)
class _Shares:
    """`count` windows that share out a dim of `size`."""

    size: Any
    count: Any

    def start(self, window: Any) -> Any:
        return window * self.size // self._count

    def end(self, window: Any) -> Any:
        return ((window + 1) * self.size + self._count - 1) // self._count

    def first(self, place: Any) -> Any:
        """The first window that covers a place."""
        return place * self.count // self._size

    @property
    def longest(self) -> Any:
        """At least the length of the longest window."""
        return (self.size + self._count - 1) // self._count + 1

    @property
    def reach(self) -> Any:
        """At least the number of windows that cover one place."""
        return (self.count + self._size - 1) // self._size + 1

    @property
    def _count(self) -> Any:
        return maximum(self.count, 1)  # there may be no windows

    @property
    def _size(self) -> Any:
        return maximum(self.size, 1)


def _shares(letter: str) -> _Shares:
    """The windows of one dim, and the contract of its size. Raises PoolingError."""
    size, count = dim(letter), dim(f"O{letter}")
    require(size > 0, "spatial dims that are not empty", size=size)
    return _Shares(size, count)


class _Window:
    """The elements of each window: `taps` go over them, those past its ends are not its `own`."""

    def __init__(self, windows: tuple[Any, ...]) -> None:
        self.windows = windows
        _, i, j = windows
        rows, columns = self.sides = _shares("H"), _shares("W")
        self.taps = axis("u", rows.longest), axis("v", columns.longest)
        self.row, self.column = rows.start(i) + self.taps[0], columns.start(j) + self.taps[1]
        self.own = (self.row < rows.end(i)) & (self.column < columns.end(j))

    def read(self, x: Any, fill: float) -> Any:
        return x.at(self.windows[0], self.row, self.column, fill=fill)


@op(out=Out("*planes", "OH", "OW"), example=_EXAMPLE, error=PoolingError)
def adaptive_max_pool(
    x: Any = In("*planes", "H", "W"), *, OH: Any = Extent(), OW: Any = Extent()
) -> Any:
    """The greatest element of each of OH × OW windows that share x out; NaN is greatest.

    x [..., H, W] f32, f16 or bf16 → [..., OH, OW] alike. Raises PoolingError.
    """
    window = _Window(axes("*planes", "OH", "OW"))
    return max(window.read(x, -math.inf), over=window.taps, where=window.own)


@op(out=(Out("*planes", "OH", "OW", name="y"), Out("*planes", "OH", "OW", dtype=i64, name="at")),
    example=_EXAMPLE, error=PoolingError)  # fmt: skip
def adaptive_max_pool_with_indices(
    x: Any = In("*planes", "H", "W"), *, OH: Any = Extent(), OW: Any = Extent()
) -> Any:
    """`adaptive_max_pool`, and where in its plane the first greatest element is.

    x [..., H, W] f32, f16 or bf16 → [..., OH, OW] alike, and i64. Raises PoolingError.
    """
    return _top(x, _Window(axes("*planes", "OH", "OW")))


def _top(x: Any, window: _Window) -> tuple[Any, Any]:
    value, windows = window.read(x, -math.inf), window.windows
    best = keep("best", windows, max(value, over=window.taps, where=window.own))[windows]
    index = first_index(value, best, window.row, window.column, window.own, window.taps)
    return best, index


@op(out=Out("*planes", "H", "W", name="dx"), example=_EXAMPLE, error=PoolingError)
def adaptive_max_pool_backward(
    grad: Any = In("*planes", "OH", "OW"), indices: Any = In("*planes", "OH", "OW", dtype=i64),
    *, H: Any = Extent(), W: Any = Extent(),
) -> Any:  # fmt: skip
    """The gradient of `adaptive_max_pool`: each element gets that of the windows whose index it is.

    grad [..., OH, OW] f32, f16 or bf16, indices alike, i64 → [..., H, W] as grad. An index that
    its window does not cover counts nowhere. Raises PoolingError.
    """
    return _picked(grad, indices, _shares("H"), _shares("W"))


@op(out=Out("*planes", "H", "W", name="dx"), example=_EXAMPLE, error=PoolingError)
def adaptive_max_pool_backward_from_input(
    grad: Any = In("*planes", "OH", "OW"), x: Any = In("*planes", "H", "W")
) -> Any:
    """`adaptive_max_pool_backward` where no indices were kept: they are found again.

    grad [..., OH, OW], x [..., H, W] f32, f16 or bf16, both the same → as x. Raises PoolingError.
    """
    window = _Window(axes("*planes", "OH", "OW"))
    _, index = _top(x, window)
    return _picked(grad, keep("at", window.windows, index), *window.sides)


def _picked(grad: Any, index: Any, rows: _Shares, columns: _Shares) -> Any:
    p, h, w = axes("*planes", "H", "W")
    a, b = axis("a", rows.reach), axis("b", columns.reach)
    window = p, rows.first(h) + a, columns.first(w) + b
    return sum_where_index(grad, index, window, h * dim("W") + w, (a, b))


@op(out=Out("*planes", "OH", "OW"), example=_EXAMPLE, error=PoolingError)
def adaptive_avg_pool(
    x: Any = In("*planes", "H", "W"), *, OH: Any = Extent(), OW: Any = Extent()
) -> Any:
    """The mean of each of OH × OW windows that share x out.

    x [..., H, W] f32, f16 or bf16 → [..., OH, OW] alike. Raises PoolingError.
    """
    p, i, j = axes("*planes", "OH", "OW")
    window = _Window((p, i, j))
    total = sum(window.read(x, 0.0), over=window.taps, where=window.own)
    return total / f32(_area(*window.sides, i, j))


def _area(rows: _Shares, columns: _Shares, i: Any, j: Any) -> Any:
    return (rows.end(i) - rows.start(i)) * (columns.end(j) - columns.start(j))


@op(out=Out("*planes", "H", "W", name="dx"), example=_EXAMPLE, error=PoolingError)
def adaptive_avg_pool_backward(
    grad: Any = In("*planes", "OH", "OW"), *, H: Any = Extent(), W: Any = Extent()
) -> Any:
    """The gradient of `adaptive_avg_pool`: Σ grad / number over the windows that cover an element.

    grad [..., OH, OW] f32, f16 or bf16 → [..., H, W] alike. Raises PoolingError.
    """
    rows, columns = _shares("H"), _shares("W")
    p, h, w = axes("*planes", "H", "W")
    a, b = axis("a", rows.reach), axis("b", columns.reach)
    i, j = rows.first(h) + a, columns.first(w) + b
    own = (i < rows.count) & (rows.start(i) <= h) & (h < rows.end(i))
    own = own & (j < columns.count) & (columns.start(j) <= w) & (w < columns.end(j))
    share = grad.at(p, i, j, fill=0.0) / f32(_area(rows, columns, i, j))
    return sum(share, over=(a, b), where=own)


adaptive_max_pool.differentiable(adaptive_max_pool_backward_from_input, "x")
adaptive_avg_pool.differentiable(adaptive_avg_pool_backward, "x")
