"""softmax_sum with its scores in memory: a product, row statistics, another product.

scores  = masked score            tiles of the products under it, the mask on the way out
weights = exp(scores − max), sums rows
result  = Σ weights · value / sum tiles, with what follows on the way out
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import DType, bool_, f32
from ...dsl.expr import (
    Axis,
    Binary,
    Cast,
    Const,
    Expr,
    Read,
    Select,
    Size,
    Stage,
    Unary,
    binary,
    cast,
)
from ...dsl.walk import rebuild
from ..capability import WIDE_BYTES, Capability
from ..emit import Emitter
from ..group import Group, contraction, is_map
from ..roles import roles
from ..rule import Config, Rejection, check, first_rejection
from ..softmax import rejection, source, split
from .contraction import Contraction, multiply
from .fallback import compute
from .nest import GridNest, block_size
from .rows import RowsConfig, reduce_rows
from .softmax_mend import Mended, mend

Tir = Any
_NONE = Const(float("-inf"), f32)
_ZERO = Const(0.0, f32)


@dataclass(frozen=True)
class MaterialisedConfig(Config):
    """`threads` of a block in launches that are no product."""

    threads: int = 256


class SoftmaxSum:
    """`scores → workspace; rows: max, exp, sum; Σ weights · value`: a launch each, or more.

    What is masked has weight 0 and must have no influence, be its value NaN or infinite: such
    values are taken as 0, and what they do where they count is mended at the end.
    """

    name = "softmax_sum"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return first_rejection(
            rejection(group),
            check(group.form in ("", "materialised"), "keeps scores in memory"),
        )

    def default(self, group: Group, caps: Capability) -> MaterialisedConfig:
        return MaterialisedConfig(block_size(caps, 256))

    def space(self, group: Group, caps: Capability) -> Iterator[MaterialisedConfig]:
        yield self.default(group, caps)
        for threads in (64, 128):
            if threads <= caps.max_threads:
                yield MaterialisedConfig(threads)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: MaterialisedConfig
    ) -> Any:
        nest = GridNest(emitter, caps)
        _Materialised(nest, group, config.threads).launches()
        return nest.finish()


class _Materialised:
    """The launches of one group."""

    def __init__(self, nest: GridNest, group: Group, threads: int) -> None:
        self.nest, self.group, self.threads = nest, group, threads
        self.products, self.heads, _ = split(group)
        node = source(self.heads[0])
        assert node is not None
        self.node = node
        self.means = [s for s in group.outputs if not isinstance(s.expr, forms.LogSumExp)]
        self.sums = [s for s in group.outputs if isinstance(s.expr, forms.LogSumExp)]
        self.rows = self._row_order()
        self.dtype = self._weight_type(nest.caps)

    def _weight_type(self, caps: Capability) -> DType:
        """How weights are kept: as the values are, if a matrix unit takes those."""
        value = self.node.value
        inner = value.a.dtype if isinstance(value, Cast) else value.dtype
        return inner if any(u.operands == inner.name for u in caps.matrix) else f32

    def _row_order(self) -> tuple[Axis, ...]:
        """The row axes as the results have them."""
        rows = self.node.row_axes()
        order = tuple(a for a in (*self.means, *self.sums)[0].axes if a in rows)
        return order if len(order) == len(rows) else rows

    def launches(self) -> None:
        self._scores()
        self._weights()
        for stage in self.means:
            self._mean(stage)

    def _stage(
        self, name: str, axes: Sequence[Axis], expr: Expr, dtype: DType = f32, wide: bool = False
    ) -> Stage:
        """A stage of the nest's own; `wide`: with rows at multiples of 16 bytes."""
        shape: tuple[Size, ...] = tuple(a.extent for a in axes)
        if wide and shape:
            shape = (*shape[:-1], _aligned(shape[-1], WIDE_BYTES // dtype.bytes))
        return Stage(name, shape, dtype, tuple(axes), expr)

    def _at(self, stage: Stage) -> Expr:
        """A stage's element at the point in question, in f32."""
        return cast(Read(stage, stage.axes, None, stage.dtype), f32)

    def _scores(self) -> None:
        """Masked scores → workspace, computed out of the product under them if there is one."""
        node, axes = self.node, (*self.rows, *self.node.over)
        expr = node.score
        if node.where is not None:
            expr = Select(node.where, expr, _NONE, f32)
        self.scores = self._stage("scores", axes, expr, f32, wide=True)
        self.nest.keep(self.scores)
        fused = Group(self.group.name, (*self.products, self.scores), (self.scores,))
        if len(self.products) == 1 and roles(fused) is not None:
            self._multiply(fused)
            return
        for product in self.products:
            self.nest.keep(product)
            compute(self.nest, product, self.threads)
        compute(self.nest, self.scores, self.threads)

    def _multiply(self, group: Group) -> None:
        multiply(self.nest, group, Contraction().default(group, self.nest.caps))

    def _weights(self) -> None:
        """Row maxima, exponentials and their sums → workspace.

        The weights are as narrow as the values where a matrix unit multiplies them then, their
        sums are of what they were before; else they take the place of the scores.
        """
        nest, over, rows, axes = self.nest, self.node.over, self.rows, self.scores.axes
        scores = self._at(self.scores)
        self.top = self._stage("top", rows, forms.Reduce("max", scores, over, None, "ignore", f32))
        exponential = Unary("exp", binary("sub", scores, self._shift()), f32)
        exact = self._stage("exact", axes, exponential)
        weight = self._at(exact)
        self.total = self._stage("total", rows, forms.Reduce("sum", weight, over, None, "any", f32))
        stored = cast(weight, self.dtype)
        self.weights = self._stage("weights", axes, stored, self.dtype, wide=True)
        self.exact = exponential if self.dtype != f32 else self._at(self.weights)
        kept = [self.top, self.total, *([self.weights] if self.means else [])]
        for stage in kept:
            shares = stage is self.weights and self.dtype == f32
            nest.keep(stage, nest.targets[id(self.scores)] if shares else None)
        found = binary("add", self._shift(), Unary("log", self._at(self.total), f32))
        sums = [self._result(s, self._unless_empty(found, _NONE)) for s in self.sums]
        results = [*kept, *(s for s in sums if s.axes == rows)]
        reduce_rows(nest, [self.top, exact, *results[1:]], results, rows, RowsConfig())
        for stage in kept:  # within their launch they had names
            nest.reader(stage, nest.targets[id(stage)])
        for stage in sums:
            if stage.axes != rows:
                compute(nest, stage, self.threads)

    def _shift(self) -> Expr:
        """What scores are taken from: their maximum, 0 where that is −inf."""
        top = self._at(self.top)
        return Select(Binary("eq", top, _NONE, bool_), _ZERO, top, f32)

    def _unless_empty(self, value: Expr, otherwise: Expr) -> Expr:
        empty = Binary("eq", self._at(self.total), _ZERO, bool_)
        return Select(empty, otherwise, value, f32)

    def _mean(self, stage: Stage) -> None:
        """A result: Σ weights · value / sum, and what follows."""
        nest, where = self.nest, self.node.where
        fused = self._summed(stage, self._finite_value(), None)
        product, result = fused.stages
        if contraction(product.expr) is not None and roles(fused) is not None:
            self._multiply(fused)
            if where is not None:
                mend(nest, Mended(self.node, self.exact, product, result), self.threads)
            return
        product, result = self._summed(stage, self.node.value, where).stages
        nest.keep(product)
        compute(nest, product, self.threads)
        compute(nest, result, self.threads)

    def _summed(self, stage: Stage, value: Expr, where: Expr | None) -> Group:
        """Σ weights · value, and a result made of it."""
        node = self.node
        axes = tuple(a for a in stage.axes if a in (*self.rows, *node.column_axes()))
        body = binary("mul", self._at(self.weights), value)
        summed = forms.Reduce("sum", body, node.over, where, "any", f32)
        product = self._stage(f"{stage.name}_sum", axes, summed)
        mean = self._unless_empty(binary("div", self._at(product), self._at(self.total)), _ZERO)
        whole = _replaced(stage.expr, self.heads, mean) if is_map(stage) else mean
        result = self._result(stage, whole)
        return Group(self.group.name, (product, result), (result,))

    def _finite_value(self) -> Expr:
        """The value; where masks are, 0 for what is not finite: see `mend`."""
        value = self.node.value
        if self.node.where is None:
            return value
        inner = value.a if isinstance(value, Cast) and value.dtype == f32 else value
        finite = Unary("finite", value, bool_)
        return cast(Select(finite, inner, Const(0, inner.dtype), inner.dtype), f32)

    def _result(self, stage: Stage, expr: Expr) -> Stage:
        """The group's result `stage` by another expression."""
        result = Stage(stage.name, stage.shape, stage.dtype, stage.axes, expr)
        self.nest.targets[id(result)] = self.nest.targets[id(stage)]
        return result


def _aligned(size: Size, step: int) -> Size:
    """`size` rounded up to a multiple, in a form in which that shows."""
    if isinstance(size, int):
        return -(-size // step) * step
    return binary("mul", binary("floordiv", binary("add", size, step - 1), step), step)


def _replaced(node: Expr, heads: Sequence[Stage], mean: Expr) -> Expr:
    """`node` with `mean` for the element of the softmax_sum."""
    if isinstance(node, Read) and node.tensor in heads:
        return mean
    children = tuple(_replaced(c, heads, mean) for c in node.children())
    return rebuild(node, children) if children else node
