"""`weighted_sum`: sums whose weights are computed anew wherever they are needed, never stored.

    Σⱼ weight[i, j] · value[j, e]

A weight that itself holds sums (of products over other axes) would, as a plain `sum` of a product,
be a matrix in memory between two kernels. Here it never is: a kernel computes a tile of weights,
adds what it weighs, and drops it, so that memory does not grow with rows times summed elements.
`softmax_sum` promises the same of its scores. Several sums with the same weights, over different
axes of them, share one kernel where that pays.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import DType, bool_, f32
from .expr import Axis, Expr, Form, Value, cast
from .forms import Over, axes_of
from .walk import free_axes


@dataclass(frozen=True, eq=False)
class WeightedSum(Form):
    """Σ weight · value over the kept elements; what is not kept has no influence.

    The result's free axes are those of the weight and the mask (the *row*) and those only the
    value has (the *columns*). It is 0 where nothing is kept.
    """

    weight: Expr
    value: Expr
    over: tuple[Axis, ...]
    where: Expr | None
    dtype: DType = f32

    def children(self) -> tuple[Expr, ...]:
        kept = () if self.where is None else (self.where,)
        return (self.weight, self.value, *kept)

    def with_children(self, children: tuple[Expr, ...]) -> WeightedSum:
        where = None if self.where is None else children[2]
        return WeightedSum(children[0], children[1], self.over, where)

    def weight_axes(self) -> tuple[Axis, ...]:
        """Free axes of weight and mask."""
        axes = dict.fromkeys(free_axes(self.weight))
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


def weighted_sum(
    weight: Value, value: Value, *, over: Over, where: Value | None = None
) -> WeightedSum:
    """Σ weight · value over the kept elements, the weights never in memory, in f32."""
    keep = None if where is None else cast(where, bool_)
    return WeightedSum(cast(weight, f32), cast(value, f32), axes_of(over), keep)
