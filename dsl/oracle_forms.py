"""The oracle's rules for the forms: reductions, softmax_sum, scan, top_k, scatter_add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import forms, weighted
from .expr import Axis, Binary, Expr, Read, Tensor
from .oracle import Array, Evaluator, Labelled, union
from .walk import free_axes


def _product_factors(node: Expr) -> list[Expr]:
    """The factors of a product of floats, casts between floats looked through."""
    if isinstance(node, Binary) and node.op == "mul":
        return _product_factors(node.a) + _product_factors(node.b)
    return [node]


def _reduce(ev: Evaluator, node: forms.Reduce) -> Labelled:
    factors = _product_factors(node.body)
    if node.op == "sum" and node.where is None and 1 < len(factors) < 8:
        return _einsum(ev, factors, node.over)
    # A read of a scan's state also depends on the batch, which no index of it names.
    axes = tuple(dict.fromkeys((*ev.eval(node.body).axes, *node.over)))
    if node.where is not None:
        axes = tuple(dict.fromkeys((*axes, *ev.eval(node.where).axes)))
    body = ev.full(node.body, axes)
    positions = tuple(axes.index(a) for a in node.over)
    kept = tuple(a for a in axes if a not in node.over)
    if node.op == "argmax":
        return Labelled(_argmax(body, positions[0]), kept)
    low, high = _limits(body.dtype)
    identity = {"sum": 0, "prod": 1, "max": low, "min": high, "any": False}[node.op]
    if node.where is not None:
        body = np.where(ev.full(node.where, axes), body, np.asarray(identity, body.dtype))
    name = node.op
    if node.nan == "ignore" and name in ("max", "min"):
        body = np.where(np.isnan(body), np.asarray(identity, body.dtype), body)
    fn: Any = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "any": np.any}[name]
    if name == "any":
        return Labelled(fn(body, axis=positions), kept)
    wide = body.astype(np.float64) if body.dtype.kind == "f" and name in ("sum", "prod") else body
    result = fn(wide, axis=positions, initial=identity)
    return Labelled(np.asarray(result).astype(body.dtype), kept)


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return info.min, info.max
    return -np.inf, np.inf


def _argmax(body: Array, axis: int) -> Array:
    return np.argmax(body, axis=axis).astype(np.int64)  # NumPy: first index, NaN greatest


def _einsum(ev: Evaluator, factors: list[Expr], over: tuple[Axis, ...]) -> Labelled:
    """Σ of a product, without forming it: one labelled operand per factor."""
    values = [ev.eval(f) for f in factors]
    missing = [a for a in over if not any(a in v.axes for v in values)]
    values += [Labelled(np.ones(ev.extent(a.extent), values[0].array.dtype), (a,)) for a in missing]
    axes = union(values)
    ids = {a: i for i, a in enumerate(axes)}
    kept = tuple(a for a in axes if a not in over)
    dtype = np.result_type(*(v.array.dtype for v in values))
    operands: list[Any] = []
    for value in values:
        wide = value.array.astype(np.float64) if value.array.dtype.kind == "f" else value.array
        operands += [wide, [ids[a] for a in value.axes]]
    result = np.einsum(*operands, [ids[a] for a in kept], optimize=len(values) > 1)
    return Labelled(np.asarray(result).astype(dtype), kept)


def _softmax_parts(ev: Evaluator, node: forms.SoftmaxSum) -> tuple[Array, Array, Array]:
    """(weights, row sums, row maxima) with the reduced axes last; dead rows have weight 0."""
    axes = (*node.row_axes(), *node.over)
    last = tuple(range(len(node.row_axes()), len(axes)))
    score = ev.full(node.score, axes)
    if node.where is not None:
        score = np.where(ev.full(node.where, axes), score, -np.inf)
    top = np.max(score, axis=last, keepdims=True, initial=-np.inf)
    safe = np.where(np.isneginf(top), 0, top)
    weights = np.exp(score - safe)
    return weights, np.sum(weights, axis=last, keepdims=True), top


def _softmax_sum(ev: Evaluator, node: forms.SoftmaxSum) -> Labelled:
    weights, total, _ = _softmax_parts(ev, node)
    rows = node.row_axes()
    mean = _weighed(ev, node, weights)
    total = total.reshape(total.shape[: len(rows)] + (1,) * len(node.column_axes()))
    dead = total == 0
    return Labelled(np.where(dead, 0, mean.array / np.where(dead, 1, total)), mean.axes)


def _weighted_sum(ev: Evaluator, node: weighted.WeightedSum) -> Labelled:
    axes = (*node.row_axes(), *node.over)
    weights = ev.full(node.weight, axes)
    if node.where is not None:
        weights = np.where(ev.full(node.where, axes), weights, np.zeros((), weights.dtype))
    made = _weighed(ev, node, weights)
    return Labelled(made.array.astype(weights.dtype), made.axes)


def _weighed(
    ev: Evaluator, node: forms.SoftmaxSum | weighted.WeightedSum, weights: Array
) -> Labelled:
    """Σ weights · value, the weights over the row and then the summed axes."""
    rows = node.row_axes()
    value = ev.eval(node.value)
    array = value.array
    axes = tuple(dict.fromkeys((*rows, *node.over, *value.axes)))
    ids = {a: i for i, a in enumerate(axes)}
    out = (*rows, *node.column_axes())
    if not np.isfinite(array).all():
        return Labelled(_selected_sum(ev, node, weights, value, out), out)
    weighed, valued = [ids[a] for a in (*rows, *node.over)], [ids[a] for a in value.axes]
    wanted = [ids[a] for a in out]
    return Labelled(np.einsum(weights, weighed, array, valued, wanted, optimize=True), out)


def _selected_sum(
    ev: Evaluator,
    node: forms.SoftmaxSum | weighted.WeightedSum,
    weights: Array,
    value: Labelled,
    out: tuple[Axis, ...],
) -> Array:
    """Σ weight · value with masked elements left out, not multiplied: they may hold NaN."""
    axes = (*out, *node.over)
    product = Labelled(weights, (*node.row_axes(), *node.over)).over(axes) * value.over(axes)
    if node.where is not None:
        product = np.where(ev.full(node.where, axes), product, 0)
    return np.asarray(product.sum(axis=tuple(range(len(out), len(axes)))))


def _log_sum_exp(ev: Evaluator, node: forms.LogSumExp) -> Labelled:
    _, total, top = _softmax_parts(ev, node.source)
    with np.errstate(divide="ignore"):
        safe = np.where(np.isneginf(top), 0, top)
        lse = np.log(total) + safe
    rows = node.source.row_axes()
    return Labelled(lse.reshape(lse.shape[: len(rows)]), rows)


def _scan(ev: Evaluator, node: forms.Scan) -> Labelled:
    steps = ev.extent(node.along.extent)
    batch = tuple(
        a
        for a in dict.fromkeys(
            (*free_axes(node.init), *free_axes(node.step), *free_axes(node.emit))
        )
        if a not in node.axes and a is not node.along
    )
    hidden = (*batch, *node.axes)
    state = ev.full(node.init, hidden).astype(ev.type(node.dtype))
    out_axes = free_axes(node)
    results = []
    for t in range(steps):
        at = _At(ev, node.along, t)
        state = at.full(node.step, hidden, node.state, state, batch)
        if not node.final:
            kept = tuple(a for a in out_axes if a is not node.along)
            results.append(at.full(node.emit, kept, node.after, state, batch))
    if node.final:
        return Labelled(state, hidden)
    kept = tuple(a for a in out_axes if a is not node.along)
    shape = tuple(ev.extent(a.extent) for a in kept)
    stacked = np.stack(results) if results else np.zeros((0, *shape), ev.type(node.dtype))
    return Labelled(stacked, (node.along, *kept))


class _At:
    """Evaluation at one step of a scan: the scanned axis is fixed, the state a batched read."""

    def __init__(self, outer: Evaluator, along: Axis, step: int) -> None:
        self.outer, self.along, self.step = outer, along, step

    def full(
        self, node: Expr, axes: tuple[Axis, ...], state: Tensor, value: Array,
        batch: tuple[Axis, ...],
    ) -> Array:  # fmt: skip
        inner = _StepEvaluator(
            self.outer.values, self.outer.numbers, self.outer.double,
            along=self.along, step=self.step, state=state, value=value, batch=batch,
        )  # fmt: skip
        return inner.full(node, axes)


@dataclass
class _StepEvaluator(Evaluator):
    along: Axis | None = None
    step: int = 0
    state: Tensor | None = None
    value: Array | None = None
    batch: tuple[Axis, ...] = ()

    def _eval(self, node: Expr) -> Labelled:
        if node is self.along:
            return Labelled(np.asarray(self.step, np.int64), ())
        return super()._eval(node)

    def _read(self, node: Read) -> Labelled:
        if node.tensor is not self.state:
            index = [self.eval(i) for i in node.index]
            return self._gather(node, self.values[id(node.tensor)], index)
        assert self.value is not None
        return self._gather(node, self.value, [self.eval(i) for i in (*self.batch, *node.index)])


def _top_k(ev: Evaluator, node: forms.TopK) -> Labelled:
    axes = tuple(dict.fromkeys((*(a for a in free_axes(node.score) if a is not node.along),
                                node.along)))  # fmt: skip
    score = ev.full(node.score, axes)
    k = ev.extent(node.rank.extent)
    key = np.where(np.isnan(score), np.inf, score.astype(np.float64))
    nan_first = np.lexsort((np.arange(score.shape[-1]) + 0 * key, -key, ~np.isnan(score)), axis=-1)
    order = nan_first[..., :k]
    values = np.take_along_axis(score, order, axis=-1)
    taken = values if node.take == "value" else order.astype(np.int64)
    return Labelled(taken, (*axes[:-1], node.rank))


def _scatter_add(ev: Evaluator, node: forms.ScatterAdd) -> Labelled:
    points = tuple(
        dict.fromkeys((*node.over, *(a for a in free_axes(node.at) if a not in node.over)))
    )
    rest = tuple(a for a in free_axes(node.value) if a not in points)
    value = ev.full(node.value, (*points, *rest))
    at = ev.full(node.at, points)
    kept = tuple(a for a in points if a not in node.over)
    extent = ev.extent(node.target.extent)
    shape = tuple(ev.extent(a.extent) for a in (*kept, *rest))
    out = np.zeros((extent, *shape), np.float64)
    inside = (at >= 0) & (at < extent)
    where = np.nonzero(inside)
    index = (at[inside], *(where[points.index(a)] for a in kept))
    np.add.at(out, index, value[inside])
    return Labelled(out.astype(value.dtype), (node.target, *kept, *rest))


RULES: dict[type, Any] = {
    forms.Reduce: _reduce,
    forms.SoftmaxSum: _softmax_sum,
    forms.LogSumExp: _log_sum_exp,
    forms.Scan: _scan,
    forms.TopK: _top_k,
    forms.ScatterAdd: _scatter_add,
    weighted.WeightedSum: _weighted_sum,
}
