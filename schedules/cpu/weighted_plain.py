"""Weighted sums row by row, for whatever shape they have: right first, parallel over rows.

parallel row:
    totals[column..] = 0
    for summed..: where kept: weight; for column..: totals += weight · value
    for column..: result
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ...dsl.expr import Axis
from ..emit import Emitter
from ..group import Group, is_map
from ..weighted import Sum, inner_sums, steps, sums
from .tiling import Tiling, index, real


def plain(emitter: Emitter, group: Group) -> Any:
    """The group's function."""
    nest = Tiling(emitter)
    for each in sums(group):
        _Plain(nest, group, each).lower()
    return nest.finish()


class _Plain:
    def __init__(self, nest: Tiling, group: Group, each: Sum) -> None:
        self.nest, self.sum, self.node = nest, each, each.node
        self.readers = nest.emitter.lowering.readers
        self.inner = inner_sums(group)
        self.steps = steps([self.node.weight], nest.emitter.lowering.math)

    def lower(self) -> None:
        nest, rows = self.nest, self.node.row_axes()
        extents = [nest.size(a.extent) for a in rows]
        with nest.loop("row", nest.product(extents), "parallel") as r:
            at = nest.unflatten(r, extents)
            self._row({a: nest.opaque("at", i) for a, i in zip(rows, at, strict=True)})

    def _row(self, env: dict[Axis, Any]) -> None:
        from tvm import tirx

        nest, columns = self.nest, self.node.column_axes()
        count = nest.product([nest.size(a.extent) for a in columns])
        totals = nest.scratch("totals", [tirx.max(count, index(1))])
        with nest.loop("column", count) as c:
            nest.put(totals, [c], real(0.0))
        with self.nest.points(self.node.over, env) as (inside, _), ExitStack() as stack:
            if self.node.where is not None:
                stack.enter_context(nest.when(nest.value(self.node.where, inside)))
            weight = self._weight(inside)
            with self.nest.points(columns, inside) as (here, place):
                term = weight * nest.real(self.node.value, here)
                nest.put(totals, [place], totals[place] + term)
        result = self.sum.result
        with self.nest.points(columns, env) as (here, place):
            total = totals[place]
            self.readers[id(self.sum.stage)] = lambda *_: total
            value = nest.value(result.expr, here) if is_map(result) else total
            nest.write(result, [here[a] for a in result.axes], value)

    def _weight(self, env: dict[Axis, Any]) -> Any:
        """The weight at a point; the sums under it are computed here."""
        nest = self.nest
        nest.add_up(self.inner, env)
        weight: Any = real(0.0)
        for step in self.steps:
            (held,) = nest.registers("step", 1, 1)
            nest.put(held, [0], nest.real(step.node, env))
            weight = held[index(0)]
            self.readers[id(step.proxy)] = lambda *_, w=weight: w
        return weight
