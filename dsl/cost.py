"""What a graph costs at least: arithmetic operations and bytes moved. The floor of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from . import forms, weighted
from .expr import Axis, Binary, Expr, Form, Size, Stage, Unary
from .graph import Graph
from .host import evaluate, identifier
from .walk import free_axes, walk

_ARITHMETIC = ("add", "sub", "mul", "div", "max", "min")


def flops(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Floating-point operations, each node once for each point of the axes it depends on.

    `sizes` gives the dynamic dims by name. A multiply-add counts two; exp, tanh and the like one.
    """
    names = {identifier(n): v for n, v in sizes.items()}
    scored = {id(s.expr.score) for s in graph.stages if isinstance(s.expr, forms.SoftmaxSum)}
    return sum(_stage_flops(stage, names, scored) for stage in graph.stages)


def minimal_bytes(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Bytes moved if each input is read once and each output written once."""
    names = {identifier(n): v for n, v in sizes.items()}
    return sum(t.dtype.bytes * _count(t.shape, names) for t in (*graph.inputs, *graph.outputs))


def _count(extents: Iterable[Size], names: Mapping[str, int]) -> int:
    return math.prod(int(evaluate(e, names)) for e in extents)


def _points(axes: Iterable[Axis], names: Mapping[str, int]) -> int:
    return _count((a.extent for a in dict.fromkeys(axes)), names)


def _stage_flops(stage: Stage, names: Mapping[str, int], scored: set[int]) -> int:
    """`scored` are the scores that a softmax_sum of the graph has already gone through."""
    node = stage.expr
    if isinstance(node, forms.LogSumExp):
        finish = 2 * _points(node.source.row_axes(), names)
        if id(node.source.score) in scored:
            return finish
        node = node.source
        scores = 4 * _points((*node.row_axes(), *node.over), names)
        return finish + scores + _tree_flops(node.score, (), names)
    return _tree_flops(node, (node.along,) if isinstance(node, forms.Scan) else (), names)


def _tree_flops(node: Expr, repeated: tuple[Axis, ...], names: Mapping[str, int]) -> int:
    total = 0
    for item in walk(node):
        if _is_flop(item):
            total += _points((*free_axes(item), *repeated), names)
        elif isinstance(item, Form):
            total += _form_flops(item, names)
    return total


def _is_flop(node: Expr) -> bool:
    if isinstance(node, Binary):
        return node.op in _ARITHMETIC and node.dtype.is_float
    return isinstance(node, Unary) and node.dtype.is_float


def _form_flops(node: Form, names: Mapping[str, int]) -> int:
    """The combining steps of a form, its operands apart."""
    if isinstance(node, forms.Reduce):
        return _points((*free_axes(node.body), *node.over), names)
    if isinstance(node, forms.SoftmaxSum):
        # maximum, difference, exponential and sum for each score; a multiply-add for each value
        scores = (*node.row_axes(), *node.over)
        return 4 * _points(scores, names) + 2 * _points((*scores, *node.column_axes()), names)
    if isinstance(node, weighted.WeightedSum):
        return 2 * _points((*node.weight_axes(), *node.over, *node.column_axes()), names)
    if isinstance(node, forms.TopK):
        return _points((*free_axes(node.score), node.along), names)
    if isinstance(node, forms.ScatterAdd):
        return _points((*free_axes(node.value), *node.over), names)
    return 0
