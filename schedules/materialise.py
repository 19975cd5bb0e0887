"""softmax_sum written out: scores and weights become tensors between kernels.

scores  = masked score
weights = exp(scores − max), sums rows
result  = Σ weights · value over the kept keys / sum
"""

from __future__ import annotations

from dataclasses import replace

from ..dsl import forms
from ..dsl.canonical import retarget
from ..dsl.dtypes import bool_, f32
from ..dsl.expr import Axis, Binary, Const, Expr, Read, Select, Stage, Tensor, Unary, binary
from ..dsl.graph import Graph, Names
from .softmax import source

_NONE = Const(float("-inf"), f32)
_ZERO = Const(0.0, f32)


def materialise(graph: Graph) -> Graph:
    """The graph with each softmax_sum, and its log-sum-exp, as reductions and pointwise stages."""
    tensors: tuple[Tensor, ...] = (*graph.inputs, *graph.stages)
    numbers = [*(s.name for s in graph.scalars), *(d.name for d in graph.dims)]
    names = Names([*(t.name for t in tensors), *numbers])
    replaced: dict[int, Tensor] = {}
    memo: dict[int, Expr] = {}
    known: dict[tuple[int, ...], _Rows] = {}
    stages: list[Stage] = []
    for stage in graph.stages:
        body = retarget(stage.expr, replaced, memo)
        made = Stage(stage.name, stage.shape, stage.dtype, axes=stage.axes, expr=body)
        node = source(made)
        if node is not None:
            rows = known.get(_key(node))
            if rows is None:
                rows = known[_key(node)] = _Rows(node, names)
                stages += rows.stages
            if isinstance(body, forms.LogSumExp):
                body = rows.log_sum_exp()
            else:
                total = rows.weighted(node, stage.axes)
                stages.append(total)
                body = rows.mean(total)
            made = Stage(stage.name, stage.shape, stage.dtype, axes=stage.axes, expr=body)
        replaced[id(stage)] = made
        stages.append(made)
    outputs = tuple(replaced[id(s)] for s in graph.outputs)
    return replace(graph, stages=tuple(stages), outputs=outputs)  # type: ignore[arg-type]


def _key(node: forms.SoftmaxSum) -> tuple[int, ...]:
    return (id(node.score), id(node.where), *map(id, node.over))


class _Rows:
    """The statistics of a softmax_sum's rows, as stages: scores, maximum, weights, their sum."""

    def __init__(self, node: forms.SoftmaxSum, names: Names) -> None:
        self.names = names
        rows, over = node.row_axes(), node.over
        score = node.score
        if node.where is not None:
            score = Select(node.where, score, _NONE, f32)
        self.scores = self._stage("scores", (*rows, *over), score)
        score = _at(self.scores)
        self.top = self._stage("top", rows, forms.Reduce("max", score, over, None, "ignore", f32))
        weight = Unary("exp", binary("sub", score, self._shift()), f32)
        self.weights = self._stage("weights", (*rows, *over), weight)
        summed = forms.Reduce("sum", _at(self.weights), over, None, "any", f32)
        self.total = self._stage("total", rows, summed)
        self.stages = (self.scores, self.top, self.weights, self.total)

    def _stage(self, name: str, axes: tuple[Axis, ...], expr: Expr) -> Stage:
        shape = tuple(a.extent for a in axes)
        return Stage(self.names.fresh(name), shape, f32, axes=axes, expr=expr)

    def _shift(self) -> Expr:
        """What scores are taken from: their maximum, 0 where that is −inf."""
        top = _at(self.top)
        return Select(Binary("eq", top, _NONE, bool_), _ZERO, top, f32)

    def _unless_empty(self, value: Expr, otherwise: Expr) -> Expr:
        empty = Binary("eq", _at(self.total), _ZERO, bool_)
        return Select(empty, otherwise, value, f32)

    def log_sum_exp(self) -> Expr:
        logarithm = Unary("log", _at(self.total), f32)
        return self._unless_empty(binary("add", self._shift(), logarithm), _NONE)

    def weighted(self, node: forms.SoftmaxSum, axes: tuple[Axis, ...]) -> Stage:
        """Σ weights · value: what is masked is left out, be its value NaN or infinite."""
        terms = binary("mul", _at(self.weights), node.value)
        summed = forms.Reduce("sum", terms, node.over, node.where, "any", f32)
        own = (*node.row_axes(), *node.column_axes())
        order = (*(a for a in axes if a in own), *(a for a in own if a not in axes))
        return self._stage("weighted", order, summed)

    def mean(self, weighted: Stage) -> Expr:
        return self._unless_empty(binary("div", _at(weighted), _at(self.total)), _ZERO)


def _at(stage: Stage) -> Expr:
    """A stage's element at the point in question."""
    return Read(stage, stage.axes, None, f32)
