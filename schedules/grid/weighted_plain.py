"""Weighted sums a row at a time, for whatever shape they have: a launch for each sum.

    block (row, columns): for run of summed points:
        each thread one weight → shared; barrier; each thread its column's part; barrier
A sum without columns: a few threads a row, each a part of the points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Axis, cast
from ...dsl.forms import Reduce
from ...dsl.lower import select
from ..group import Group, is_map
from ..terms import both, float32, int32
from ..weighted import Sum, inner_sums, steps, sums
from .nest import GridNest

Tir = Any
_SHARERS = 8  # threads of a row that has no columns


def plain(nest: GridNest, group: Group, threads: int) -> None:
    """The launches of a group."""
    for each in sums(group):
        _Plain(nest, group, each, threads).launch()


class _Plain:
    def __init__(self, nest: GridNest, group: Group, each: Sum, threads: int) -> None:
        self.nest, self.sum, self.node, self.threads = nest, each, each.node, threads
        self.readers = nest.emitter.lowering.readers
        self.lower = nest.emitter.lowering.expr
        self.size = nest.emitter.size
        self.inner = inner_sums(group)
        self.steps = steps([self.node.weight], nest.emitter.lowering.math)

    def launch(self) -> None:
        if self.node.column_axes():
            self._with_columns()
        else:
            self._alone()

    def _extents(self, axes: Sequence[Axis]) -> list[Tir]:
        return [self.nest.opaque("extent", self.size(a.extent)) for a in axes]

    def _at(self, axes: Sequence[Axis], place: Tir, extents: Sequence[Tir]) -> dict[Axis, Tir]:
        index = self.nest.unflatten(place, extents)
        return {a: self.nest.bind("at", i) for a, i in zip(axes, index, strict=True)}

    def _with_columns(self) -> None:
        nest, threads = self.nest, self.threads
        rows, columns = self.node.row_axes(), self.node.column_axes()
        width = nest.product([self.size(a.extent) for a in columns])
        parts = nest.ceil_div(width, threads)
        blocks = nest.product([self.size(a.extent) for a in rows]) * parts
        with nest.launch(nest.simple(blocks), threads) as (block, thread):
            parts = nest.opaque("parts", parts)
            row, part = nest.unflatten(block, [nest.number(1), parts])
            row = nest.bind("row", row)
            env = self._at(rows, row, self._extents(rows))
            column = nest.bind("column", part * nest.number(threads) + thread)
            exists = nest.bind("exists", column < width)
            here = env | self._at(columns, column, self._extents(columns))
            total = self._total(env, here, exists, thread)
            with nest.when(exists):
                self._write(here, total[nest.number(0)])

    def _total(self, env: dict[Axis, Tir], here: dict[Axis, Tir], exists: Tir, thread: Tir) -> Tir:
        """The thread's sum, for its column; the weights are shared by the block."""
        nest, zero, count = self.nest, self.nest.number(0), self.nest.number(self.threads)
        weights = nest.shared("weights", [count], "float32")
        keeps = nest.shared("keeps", [count], "int32")
        total = nest.private("total", [], "float32")
        nest.store(total, [zero], float32(0.0))
        over = self.node.over
        extents = self._extents(over)
        points = nest.bind("points", nest.product(extents))
        with nest.loop("run", nest.ceil_div(points, self.threads)) as run:
            first = nest.bind("first", run * count)
            nest.barrier()
            nest.store(keeps, [thread], int32(0))
            with nest.when(first + thread < points):

                def keep(weight: Tir) -> None:
                    nest.store(weights, [thread], weight)
                    nest.store(keeps, [thread], int32(1))

                self._weigh(env | self._at(over, first + thread, extents), keep)
            nest.barrier()
            with nest.when(exists), nest.loop("point", count) as t:
                kept = keeps[t] > int32(0)
                with nest.when(kept):
                    at = here | self._at(over, first + t, extents)
                    term = weights[t] * self.lower(cast(self.node.value, f32), at)
                    nest.store(total, [zero], total[zero] + term)
        return total

    def _alone(self) -> None:
        nest, zero = self.nest, self.nest.number(0)
        rows, over = self.node.row_axes(), self.node.over
        each, sharers = self.threads // _SHARERS, nest.number(_SHARERS)
        count = nest.product([self.size(a.extent) for a in rows])
        with nest.launch(nest.ceil_div(count, each), self.threads) as (block, thread):
            row = nest.bind("row", block * nest.number(each) + thread // sharers)
            mine = nest.bind("mine", thread % sharers)
            total = nest.private("total", [], "float32")
            nest.store(total, [zero], float32(0.0))
            env = self._at(rows, row, self._extents(rows))
            with nest.when(row < count):
                extents = self._extents(over)
                points = nest.bind("points", nest.product(extents))
                with nest.loop("turn", nest.ceil_div(points, _SHARERS)) as turn:
                    point = nest.bind("point", turn * sharers + mine)
                    with nest.when(point < points):
                        at = env | self._at(over, point, extents)

                        def add(weight: Tir) -> None:
                            term = weight * self.lower(cast(self.node.value, f32), at)
                            nest.store(total, [zero], total[zero] + term)

                        self._weigh(at, add)
            whole = nest.reduce("sum", total[zero], _SHARERS)
            with nest.when(both(row < count, mine.equal(zero))):
                self._write(env, whole)

    def _weigh(self, env: dict[Axis, Tir], then: Callable[[Tir], None]) -> None:
        """`then(weight)` at a point that is kept; the sums under the weight are computed here."""
        nest, zero = self.nest, self.nest.number(0)
        with ExitStack() as stack:
            if self.node.where is not None:
                stack.enter_context(nest.when(self.lower(self.node.where, env)))
            for stage in self.inner:
                node = stage.expr
                assert isinstance(node, Reduce)
                held = nest.private("sum", [], "float32")
                nest.store(held, [zero], float32(0.0))
                self._add(held, node, node.over, env)
                self.readers[id(stage)] = lambda *_, held=held: held[zero]
            weight: Tir = float32(0.0)
            for step in self.steps:
                weight = nest.bind("step", self.lower(step.node, env))
                self.readers[id(step.proxy)] = lambda *_, w=weight: w
            then(weight)

    def _add(self, held: Tir, node: Reduce, rest: Sequence[Axis], env: dict[Axis, Tir]) -> None:
        nest, zero = self.nest, self.nest.number(0)
        if rest:
            with nest.loop(rest[0].name, self.size(rest[0].extent)) as var:
                self._add(held, node, rest[1:], env | {rest[0]: var})
            return
        term = self.lower(cast(node.body, f32), env)
        if node.where is not None:
            term = select(self.lower(node.where, env), term, float32(0.0), node.body)
        nest.store(held, [zero], held[zero] + term)

    def _write(self, at: dict[Axis, Tir], total: Tir) -> None:
        nest, result = self.nest, self.sum.result
        value = total
        if is_map(result):
            self.readers[id(self.sum.stage)] = lambda *_: total
            value = self.lower(result.expr, at)
        nest.write(result, [at[a] for a in result.axes], value)
