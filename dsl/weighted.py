"""Sums whose weights are computed anew wherever they are needed, never stored.

    Σⱼ weight[i, j] · value[j, e]

A weight that itself holds sums (of products over other axes) would, as a plain `sum` of a product,
be a matrix in memory between two kernels. Here it never is: a kernel computes a tile of weights,
adds what it weighs, and drops it, so that memory does not grow with rows times summed elements.
Several sums with the same weights, over different axes of them, share one kernel where that pays.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import DType, f32
from .errors import DeclarationError
from .expr import Axis, Expr, Form
from .walk import free_axes


@dataclass(frozen=True, eq=False)
class Weighing(Form):
    """Σ over the kept elements of value, each weighed as `weigher` says; the others do not count.

    The result's free axes are those of the weigher and the mask (the *row*) and those only the
    value has (the *columns*).
    """

    weigher: Expr
    value: Expr
    over: tuple[Axis, ...]
    where: Expr | None
    dtype: DType = f32

    def children(self) -> tuple[Expr, ...]:
        kept = () if self.where is None else (self.where,)
        return (self.weigher, self.value, *kept)

    def with_children(self, children: tuple[Expr, ...]) -> Weighing:
        where = None if self.where is None else children[2]
        return type(self)(children[0], children[1], self.over, where)

    def weight_axes(self) -> tuple[Axis, ...]:
        """Free axes of weigher and mask."""
        axes = dict.fromkeys(free_axes(self.weigher))
        if self.where is not None:
            axes |= dict.fromkeys(free_axes(self.where))
        return tuple(axes)

    def row_axes(self) -> tuple[Axis, ...]:
        """Those of the weights' axes that are not summed."""
        return tuple(a for a in self.weight_axes() if a not in self.over)

    def column_axes(self) -> tuple[Axis, ...]:
        """Axes that only the value has."""
        weights = self.weight_axes()
        return tuple(a for a in free_axes(self.value) if a not in self.over and a not in weights)


@dataclass(frozen=True, eq=False)
class WeightedSum(Weighing):
    """Σ weight · value over the kept elements, 0 where nothing is kept."""

    @property
    def weight(self) -> Expr:
        return self.weigher


@dataclass(frozen=True, eq=False)
class SoftmaxSum(Weighing):
    """Σⱼ softmax(score)ⱼ · valueⱼ over the kept j; row statistics come with it.

    A row that keeps nothing, or whose kept scores are all −inf, is 0 with a log-sum-exp of −inf.
    """

    @property
    def score(self) -> Expr:
        return self.weigher


@dataclass(frozen=True, eq=False)
class LogSumExp(Form):
    """The log-sum-exp of a `SoftmaxSum`'s rows, computed along with it."""

    source: SoftmaxSum
    dtype: DType = f32

    @property
    def over(self) -> tuple[Axis, ...]:  # type: ignore[override]
        return self.source.over

    def children(self) -> tuple[Expr, ...]:
        return (self.source,)

    def bound(self) -> tuple[Axis, ...]:
        return self.source.column_axes()

    def with_children(self, children: tuple[Expr, ...]) -> LogSumExp:
        if not isinstance(children[0], SoftmaxSum):
            raise DeclarationError("needs a softmax_sum under log_sum_exp")
        return LogSumExp(children[0])
