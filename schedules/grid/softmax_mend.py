"""Weighted sums that left out what is not finite: its effect where it is not masked.

A tiled product would multiply a masked value by its weight 0, which for NaN or an infinity is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import bool_
from ...dsl.expr import Axis, Expr, Stage, Unary
from ...dsl.lower import encode, select
from ...dsl.walk import free_axes
from ..terms import both, float32, int32
from .nest import GridNest
from .vectors import reading

Tir = Any
_WIDTH = 32  # columns of a block, side by side


@dataclass(frozen=True)
class Mended:
    """A softmax_sum's `result`, which reads Σ `weight` · value of finite values as `product`."""

    node: forms.SoftmaxSum
    weight: Expr
    product: Stage
    result: Stage


def mend(nest: GridNest, what: Mended, threads: int) -> None:
    """A launch that sets the elements again into whose sums a NaN or an infinity goes."""
    _Mending(nest, what, threads).launch()


class _Mending:
    def __init__(self, nest: GridNest, what: Mended, threads: int) -> None:
        self.nest, self.what, self.node, self.result = nest, what, what.node, what.result
        self.threads, self.parts = threads, threads // _WIDTH
        own = free_axes(self.node.value)
        axes = self.result.axes
        self.column = next(a for a in reversed(axes) if a in self.node.column_axes())
        self.fixed = [a for a in axes if a in own and a is not self.column]
        self.rows = [a for a in axes if a not in own]
        self.lower = nest.emitter.lowering.expr
        self.size = nest.emitter.size

    def launch(self) -> None:
        nest, width = self.nest, self.nest.number(_WIDTH)
        columns = self.size(self.column.extent)
        extents = [self.size(a.extent) for a in self.fixed]
        extents.append(nest.ceil_div(columns, _WIDTH))
        with nest.launch(nest.simple(nest.product(extents)), self.threads) as (block, thread):
            *index, tile = nest.unflatten(block, extents)
            env = {a: nest.opaque(a.name, i) for a, i in zip(self.fixed, index, strict=True)}
            lane = nest.bind("lane", thread % width)
            part = nest.bind("part", thread // width)
            env[self.column] = nest.bind("column", tile * width + lane)
            exists = env[self.column] < columns
            with nest.when(both(exists, self._odd(env, lane, part, exists))):
                self._again(env, part)

    def _points(self, axes: Sequence[Axis], part: Tir, body: Any) -> None:
        """`body(indices by axis)` for every `parts`-th point of the axes, from `part` on."""
        nest = self.nest
        extents = [nest.opaque(a.name, self.size(a.extent)) for a in axes]
        total = nest.opaque("total", nest.product(extents))
        with nest.loop("turn", nest.ceil_div(total, self.parts)) as turn:
            point = nest.bind("point", turn * nest.number(self.parts) + part)
            with nest.when(point < total):
                index = nest.unflatten(point, extents)
                body({a: nest.bind(a.name, i) for a, i in zip(axes, index, strict=True)})

    def _odd(self, env: dict[Axis, Tir], lane: Tir, part: Tir, exists: Tir) -> Tir:
        """Whether any value of the thread's column is NaN or infinite."""
        nest, zero = self.nest, self.nest.number(0)
        found = nest.private("found", [], "int32")
        nest.store(found, [zero], int32(0))

        def look(point: dict[Axis, Tir]) -> None:
            finite = self.lower(Unary("finite", self.node.value, bool_), env | point)
            nest.store(found, [zero], select(finite, found[zero], int32(1)))

        with nest.when(exists):
            self._points(self.node.over, part, look)
        cells = nest.shared("odd", [nest.number(self.parts), nest.number(_WIDTH)], "int32")
        nest.store(cells, [part, lane], found[zero])
        nest.barrier()
        total: Tir = int32(0)
        for i in range(self.parts):
            total = total + cells[nest.number(i), lane]
        return nest.bind("any", total) > int32(0)

    def _again(self, env: dict[Axis, Tir], part: Tir) -> None:
        """The rows of one column: each summed as it is meant, and set if that is not finite."""
        nest, zero = self.nest, self.nest.number(0)
        total = nest.private("total", [], "float32")
        hits = nest.private("hits", [], "int32")

        def add(at: dict[Axis, Tir]) -> None:
            weighted = self.lower(self.what.weight, at) * self.lower(self.node.value, at)
            nest.store(total, [zero], total[zero] + weighted)
            finite = self.lower(Unary("finite", self.node.value, bool_), at)
            nest.store(hits, [zero], select(finite, hits[zero], int32(1)))

        def row(index: dict[Axis, Tir]) -> None:
            here = env | index
            nest.store(total, [zero], float32(0.0))
            nest.store(hits, [zero], int32(0))
            self._sum(self.node.over, here, add)
            with nest.when(hits[zero] > int32(0)):
                with reading(nest, {id(self.what.product): lambda *_: total[zero]}):
                    value = self.lower(self.result.expr, here)
                place = [here[a] for a in self.result.axes]
                value = encode(value, self.result.dtype)
                nest.store(nest.targets[id(self.result)], place, value)

        self._points(self.rows, part, row)

    def _sum(self, rest: Sequence[Axis], env: dict[Axis, Tir], add: Any) -> None:
        """`add` at every point of the axes that is not masked."""
        nest = self.nest
        if rest:
            with nest.loop(rest[0].name, self.size(rest[0].extent)) as var:
                self._sum(rest[1:], env | {rest[0]: var}, add)
            return
        with nest.when(self.lower(self.node.where, env)):  # type: ignore[arg-type]
            add(env)
