"""The tiled nest of `WeightedSums`: each tile of weights is computed once, for all sums.

    parallel batch..:
        sums that keep rows = 0                                   # in the result's memory
        for tile of keys:
            copy what the keys have; sums that keep keys = 0
            for turns.., tile of rows (those that no mask rules out):
                copy what the rows have
                products[row, key] = Σ_d row · key                # by register tiles, keys as lanes
                weights[row, key] = weight expressions, 0 where masked
                keys' sums[key, column] += Σ_row weights · values
                rows' sums[row, column] += Σ_key weights · values
            results of the keys' sums

Every sum is added up in one order whatever the number of threads. Masks select: a tile with values
that are not all finite takes a path that leaves out what is masked instead of multiplying it by 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...dsl.expr import Axis, Expr
from ..bounds import upper_bounds
from ..group import is_map, known
from ..terms import both, least
from ..weighted import Sum
from .register_tiles import product
from .tiling import ceil_div, index, real
from .weighted_block import Block

Tir = Any


class Tiles(Block):
    """Emits the nest for one group."""

    def lower(self) -> Any:
        nest, roles = self.nest, self.roles
        extents = [nest.size(a.extent) for a in roles.batch]
        with nest.loop("task", nest.product(extents), "parallel") as task:
            places = nest.unflatten(task, extents)
            self.env = {
                a: nest.opaque(a.name.replace(".", "_"), i)
                for a, i in zip(roles.batch, places, strict=True)
            }
            self._task()
        return nest.finish()

    def _task(self) -> None:
        nest, roles, keys = self.nest, self.roles, self.config.keys
        self.prepare()
        self.allocate()
        self._clear_rows()
        total = nest.bind("keys", nest.size(roles.key.extent))
        with nest.loop("block", ceil_div(total, keys)) as block:
            self.start = nest.opaque("first_key", block * index(keys))
            self.length = nest.opaque("length", least(total - self.start, index(keys)))
            self._load_keys()
            for buffer in self.totals.values():
                self.fill(buffer)
            self._turns(roles.turns)
            for each in roles.by_key:
                self._finish(each)

    def _clear_rows(self) -> None:
        """The sums that keep rows = 0, in the memory of their results."""
        nest, roles = self.nest, self.roles
        axes = (*roles.turns, roles.row)
        extents = [nest.size(a.extent) for a in axes]
        with nest.loop("row", nest.product(extents)) as r:
            places = nest.unflatten(r, extents)
            env = self.env | dict(zip(axes, places, strict=True))
            for each in roles.by_row:
                column = each.node.column_axes()[0]
                self.strip(
                    known(column),
                    lambda at, each=each, column=column: self._write(  # type: ignore[misc]
                        each, env | {column: at}, real(0.0)
                    ),
                )

    def _write(self, each: Sum, at: dict[Axis, Tir], value: Tir) -> None:
        self.nest.write(each.result, [at[a] for a in each.result.axes], value)

    def _load_keys(self) -> None:
        """What the keys have: as it is for values, turned for products."""
        nest, key = self.nest, self.roles.key
        if self.seen_keys is not None:
            self.seen_keys.clear()
        for copy in self.key_copies.values():
            self.load(copy, key, self.start, self.length, self.seen_keys)
        for (factor, _, node), buffer in zip(self.factors, self.turned, strict=True):

            def turn(
                j: Tir, d: Tir, node: Expr = node, depth: Axis = factor.depth, to: Tir = buffer
            ) -> None:
                nest.put(to, [d, j], nest.real(node, self.env | {key: self.start + j, depth: d}))

            nest.transposed(self.length, index(known(factor.depth)), turn)

    def _turns(self, rest: Sequence[Axis]) -> None:
        """The tiles of rows, for each point of the turns."""
        nest, row, rows = self.nest, self.roles.row, self.config.rows
        if rest:
            with nest.loop(rest[0].name, nest.size(rest[0].extent)) as turn:
                self.env = self.env | {rest[0]: turn}
                self._turns(rest[1:])
                self.env = {a: v for a, v in self.env.items() if a is not rest[0]}
            return
        total = nest.bind("rows", nest.size(row.extent))
        with nest.loop("tile", ceil_div(total, rows)) as tile:
            self.first = nest.opaque("first_row", tile * index(rows))
            self.count = nest.opaque("count", least(total - self.first, index(rows)))
            last = self.env | {row: self.first + self.count - index(1)}
            reached = _true()
            for bound in upper_bounds(self.where, self.roles.key, row, set(self.env)):
                limit = nest.opaque("limit", nest.value(bound, last))
                reached = both(reached, self.start < limit)
            with nest.when(reached):
                self._tile()

    def _tile(self) -> None:
        nest, row = self.nest, self.roles.row
        if self.seen is not None and self.seen_keys is not None:
            self.seen.take_over(self.seen_keys)
        for copy in self.row_copies.values():
            self.load(copy, row, self.first, self.count, self.seen)
        tile = self.registers(self.config.wide)
        strips = ceil_div(self.length, tile.vectors * self.lanes)
        for (factor, node, _), turned, result in zip(
            self.factors, self.turned, self.products, strict=True
        ):
            left = self.row_copies[id(node)].buffer
            product(
                nest, tile, self.count, strips, known(factor.depth),
                lambda i, d, left=left: left[i, d],  # type: ignore[misc]
                lambda d, j, turned=turned: turned[d, j], result,  # type: ignore[misc]
            )  # fmt: skip
        self.weigh()
        if self.seen is None:
            self.add()
        else:
            with nest.when(self.seen.finite()):
                self.add()
            with nest.otherwise():
                self.add_kept()
        self._add_parts()

    def _add_parts(self) -> None:
        """The tile's part of the sums that keep rows, added to their results."""
        nest = self.nest
        with nest.loop("row", self.count) as i:
            env = self.env | {self.roles.row: self.first + i}
            for each in self.roles.by_row:
                column = each.node.column_axes()[0]
                part, target = self.parts[id(each)], nest.targets[id(each.result)]

                def add(c: Tir, each: Sum = each, column: Axis = column, part: Tir = part,
                        target: Tir = target) -> None:  # fmt: skip
                    at = env | {column: c}
                    before = target[tuple(at[a] for a in each.result.axes)]
                    self._write(each, at, before + part[i, c])

                self.strip(known(column), add)

    def _finish(self, each: Sum) -> None:
        """The results of a sum that keeps keys, for the tile's."""
        nest, total = self.nest, self.totals[id(each)]
        column = each.node.column_axes()[0]
        with nest.loop("key", self.length) as j:
            env = self.env | {self.roles.key: self.start + j}

            def write(c: Tir) -> None:
                at = env | {column: c}
                value = total[j, c]
                if is_map(each.result):
                    self.readers[id(each.stage)] = lambda *_: value
                    value = nest.value(each.result.expr, at)
                self._write(each, at, value)

            self.strip(known(column), write)


def _true() -> Tir:
    from tvm import tirx

    return tirx.const(True, "bool")
