"""softmax_sum row by row, for whatever shape it has: right first, parallel over rows.

parallel row:
    for key..: score = masked score; top = max
    for key..: weight = exp(score − top); total += weight
    for column..: Σ weight · value over the kept keys, / total
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ...dsl.expr import Axis, Stage
from ...dsl.forms import LogSumExp
from ...dsl.lower import select
from ..emit import Emitter
from ..group import Group, is_map
from ..softmax import source, split
from .tiling import Tiling, index, real


def plain(emitter: Emitter, group: Group) -> Any:
    """The group's function."""
    return _Plain(emitter, group).lower()


class _Plain:
    def __init__(self, emitter: Emitter, group: Group) -> None:
        self.nest = Tiling(emitter)
        self.readers = emitter.lowering.readers
        self.math = emitter.lowering.math
        self.group = group
        self.inner, self.heads, _ = split(group)
        node = source(self.heads[0])
        assert node is not None
        self.node = node

    def lower(self) -> Any:
        nest, rows = self.nest, self.node.row_axes()
        extents = [nest.size(a.extent) for a in rows]
        with nest.loop("row", nest.product(extents), "parallel") as r:
            at = nest.unflatten(r, extents)
            env = {a: nest.bind("at", i) for a, i in zip(rows, at, strict=True)}
            self._row(env)
        return nest.finish()

    def _row(self, env: dict[Axis, Any]) -> None:
        from tvm import tirx

        nest, over = self.nest, self.node.over
        count = nest.product([nest.size(a.extent) for a in over])
        weights = nest.scratch("weights", [tirx.max(count, index(1))])
        top, total = nest.registers("top", 2, 1)
        nest.put(top, [0], real(float("-inf")))
        nest.put(total, [0], real(0.0))
        with self.nest.points(over, env) as (inside, place):
            nest.put(weights, [place], self._score(inside))
            new, old = weights[place], top[index(0)]
            nest.put(top, [0], tirx.Select(new > old, new, old))
        best = top[index(0)]
        shift = tirx.Select(best == real(float("-inf")), real(0.0), best)
        with self.nest.points(over, env) as (_, place):
            nest.put(weights, [place], self.math["exp"](weights[place] - shift))
            nest.put(total, [0], total[index(0)] + weights[place])
        self._results(env, weights, total[index(0)], shift)

    def _score(self, env: dict[Axis, Any]) -> Any:
        """The score at a point, −inf where masked; contractions under it are summed here."""

        nest = self.nest
        nest.add_up(self.inner, env)
        score = nest.real(self.node.score, env)
        if self.node.where is None:
            return score
        keep = nest.value(self.node.where, env)
        return select(keep, score, real(float("-inf")), self.node.score)

    def _results(self, env: dict[Axis, Any], weights: Any, total: Any, shift: Any) -> None:
        from tvm import tirx

        nest = self.nest
        empty = total == real(0.0)
        for stage in self.group.outputs:
            if isinstance(stage.expr, LogSumExp):
                lse = shift + self.math["log"](total)
                self._write(stage, env, tirx.Select(empty, real(float("-inf")), lse))
        columns = self.node.column_axes()
        written = [s for s in self.group.outputs if not isinstance(s.expr, LogSumExp)]
        if not written:
            return
        with self.nest.points(columns, env) as (here, _):
            (acc,) = nest.registers("mean", 1, 1)
            nest.put(acc, [0], real(0.0))
            with self.nest.points(self.node.over, here) as (inside, place):
                self._add(acc, weights[place], inside)
            mean = tirx.Select(empty, real(0.0), acc[index(0)] / total)
            for head in self.heads:
                self.readers[id(head)] = lambda *_: mean
            for stage in written:
                value = nest.value(stage.expr, here) if is_map(stage) else mean
                self._write(stage, here, value)

    def _add(self, acc: Any, weight: Any, env: dict[Axis, Any]) -> None:
        nest = self.nest
        with ExitStack() as stack:
            if self.node.where is not None:
                stack.enter_context(nest.when(nest.value(self.node.where, env)))
            nest.put(acc, [0], acc[index(0)] + weight * nest.real(self.node.value, env))

    def _write(self, stage: Stage, env: dict[Axis, Any], value: Any) -> None:
        self.nest.write(stage, [env[a] for a in stage.axes], value)
