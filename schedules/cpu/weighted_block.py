"""A tile of weights: its buffers and statements, the inner part of `weighted_tiles`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...dsl.expr import Axis, Expr
from ...dsl.lower import select
from ..emit import Emitter
from ..group import known
from ..rule import Config
from ..weighted import Roles, Step, Sum, steps
from .copies import Magnitudes, copy_rows
from .register_tiles import RegisterTile, product
from .tiling import Tiling, index, real

Tir = Any


@dataclass(frozen=True)
class WeightedSumConfig(Config):
    """`rows` × `keys` weights are a tile; `high` × `wide` registers accumulate, `wide` at most."""

    rows: int = 64
    keys: int = 128
    high: int = 4
    wide: int = 4


@dataclass
class _Copy:
    """A factor or a value of a tile in scratch memory as [place, column]."""

    node: Expr
    column: Axis
    buffer: Tir


class Block:
    """A tile of weights in scratch memory, and what it adds to the sums.

    Set on the way: `env` (axes that stand), `first` and `count` of the tile's rows, `start` and
    `length` of its keys.
    """

    env: dict[Axis, Tir]
    first: Tir
    count: Tir
    start: Tir
    length: Tir

    def __init__(
        self, emitter: Emitter, roles: Roles, lanes: int, config: WeightedSumConfig
    ) -> None:
        self.nest = Tiling(emitter)
        self.readers = emitter.lowering.readers
        self.math = emitter.lowering.math
        self.roles, self.lanes, self.config = roles, lanes, config
        self.sums = (*roles.by_row, *roles.by_key)
        self.where = self.sums[0].node.where

    def prepare(self) -> None:
        """Expressions with slow index arithmetic done once and parts that are shared named."""

        def settle(node: Expr) -> Expr:
            return self.nest.settle(node, self.env)

        self.factors = [(f, settle(f.row), settle(f.key)) for f in self.roles.factors]
        self.values = {id(s): settle(s.node.value) for s in self.sums}
        self.keep = None if self.where is None else settle(self.where)
        weights = [s.node.weight for s in self.sums]
        self.steps = steps(weights, self.math)
        self.settled = [settle(s.node) for s in self.steps]
        self.final = {id(w) for w in weights}

    def _padded(self, axis: Axis) -> int:
        """A column's or depth's size in whole vectors."""
        return -(-known(axis) // self.lanes) * self.lanes

    def allocate(self) -> None:
        nest, cfg, roles = self.nest, self.config, self.roles
        spare = cfg.high
        keys = -(-cfg.keys // (cfg.wide * self.lanes)) * cfg.wide * self.lanes
        self.turned = [nest.scratch("keys", [known(f.depth), keys]) for f in roles.factors]
        self.products = [nest.scratch("products", [cfg.rows + spare, keys]) for _ in roles.factors]
        self.weights = {
            id(s.origin): nest.scratch("weights", [cfg.rows + spare, keys])
            for s in self.steps
            if id(s.origin) in self.final
        }
        self.held = {
            id(s.origin): nest.registers("step", 1, self.lanes)[0]
            for s in self.steps
            if id(s.origin) not in self.final
        }
        self.row_copies: dict[int, _Copy] = {}
        self.key_copies: dict[int, _Copy] = {}
        for factor, node, _ in self.factors:
            self._copy(self.row_copies, node, factor.depth, cfg.rows + spare)
        for each in roles.by_key:
            column = each.node.column_axes()[0]
            self._copy(self.row_copies, self.values[id(each)], column, cfg.rows + spare)
        for each in roles.by_row:
            column = each.node.column_axes()[0]
            self._copy(self.key_copies, self.values[id(each)], column, cfg.keys)
        rows = {id(s): cfg.keys + spare for s in roles.by_key}
        rows |= {id(s): cfg.rows + spare for s in roles.by_row}
        made = {
            id(s): nest.scratch("totals", [rows[id(s)], self._padded(s.node.column_axes()[0])])
            for s in self.sums
        }
        self.totals = {id(s): made[id(s)] for s in roles.by_key}
        self.parts = {id(s): made[id(s)] for s in roles.by_row}
        # Values need no look where all of them are added.
        self.seen_keys = None if self.keep is None else Magnitudes(nest, self.lanes, "key_flags")
        self.seen = None if self.keep is None else Magnitudes(nest, self.lanes)

    def _copy(self, copies: dict[int, _Copy], node: Expr, column: Axis, rows: int) -> None:
        if id(node) not in copies:
            buffer = self.nest.scratch("copy", [rows, self._padded(column)])
            copies[id(node)] = _Copy(node, column, buffer)

    def fill(self, buffer: Tir) -> None:
        """The scratch matrix = 0."""
        rows, columns = (int(n) for n in buffer.ty.shape)
        with self.nest.loop("row", index(rows)) as r:
            self.strip(columns, lambda at: self.nest.put(buffer, [r, at], real(0.0)))

    def strip(self, count: int, body: Callable[[Tir], None]) -> None:
        """`body(column)` for columns of a static number, by vectors."""

        def whole(at: Tir, width: int) -> None:
            with self.nest.vector(width) as lane:
                body(at + lane)

        self.nest.strip(count, self.lanes, whole)

    def load(
        self, copy: _Copy, axis: Axis, first: Tir, count: Tir, seen: Magnitudes | None
    ) -> None:
        """copy[place, column], f32."""

        def element(i: Tir, at: Tir) -> Tir:
            return self.nest.real(copy.node, self.env | {axis: first + i, copy.column: at})

        copy_rows(self.nest, copy.buffer, count, known(copy.column), self.lanes, element, seen)

    def registers(self, vectors: int) -> RegisterTile:
        """The register tile for a matrix of so many vectors."""
        wide = next(n for n in range(self.config.wide, 0, -1) if vectors % n == 0)
        most = self.config.high * self.config.wide
        return RegisterTile(max(self.config.high, min(8, most // wide) // 4 * 4), wide, self.lanes)

    def _at(self, i: Tir, j: Tir, lane: Tir) -> dict[Axis, Tir]:
        """Axes at a point of the tile; reads of products and steps go to their buffers."""
        for factor, buffer in zip(self.roles.factors, self.products, strict=True):
            self.readers[id(factor.stage)] = lambda *_, b=buffer: b[i, j + lane]
        for step in self.steps:
            self.readers[id(step.proxy)] = lambda *_, s=step: self._step(s, i, j, lane)
        return self.env | {self.roles.row: self.first + i, self.roles.key: self.start + j + lane}

    def _step(self, step: Step, i: Tir, j: Tir, lane: Tir) -> Tir:
        final = self.weights.get(id(step.origin))
        return self.held[id(step.origin)][lane] if final is None else final[i, j + lane]

    def weigh(self) -> None:
        """The tile's weights, 0 where masked."""

        nest, lanes = self.nest, index(self.lanes)

        def weigh(i: Tir, j: Tir, width: int) -> None:
            for step, node in zip(self.steps, self.settled, strict=True):
                final = self.weights.get(id(step.origin))
                with nest.vector(width) as lane:
                    at = self._at(i, j, lane)
                    value = nest.real(node, at)
                    if final is None:
                        nest.put(self.held[id(step.origin)], [lane], value)
                        continue
                    if self.keep is not None:
                        value = select(nest.value(self.keep, at), value, real(0.0), node)
                    nest.put(final, [i, j + lane], value)

        whole = nest.opaque("whole", self.length // lanes)
        with nest.loop("row", self.count) as i:
            with nest.loop("vector", whole) as v:
                weigh(i, v * lanes, self.lanes)
            with nest.loop("rest", self.length - whole * lanes) as j:
                weigh(i, whole * lanes + j, 1)

    def add(self) -> None:
        """Each sum's part of the tile, by register tiles."""
        for each in (*self.roles.by_key, *self.roles.by_row):
            self._add(each)

    def _add(self, each: Sum) -> None:
        weights, values, result = self._operands(each)
        vectors = self._padded(each.node.column_axes()[0]) // self.lanes
        tile = self.registers(vectors)
        strips = vectors // tile.vectors
        if id(each) in self.parts:
            product(
                self.nest, tile, self.count, strips, self.length, lambda i, j: weights[i, j],
                lambda j, c: values[j, c], result,
            )  # fmt: skip
        else:
            product(
                self.nest, tile, self.length, strips, self.count, lambda j, i: weights[i, j],
                lambda i, c: values[i, c], result, start=lambda j, c: result[j, c],
            )  # fmt: skip

    def _operands(self, each: Sum) -> tuple[Tir, Tir, Tir]:
        """The weights, what they weigh, and where that is added up: a part, or a total."""
        keeps_rows = id(each) in self.parts
        copies = self.key_copies if keeps_rows else self.row_copies
        result = (self.parts if keeps_rows else self.totals)[id(each)]
        return self.weights[id(each.node.weight)], copies[id(self.values[id(each)])].buffer, result

    def add_kept(self) -> None:
        """The same, adding only what the mask keeps: for values with NaN or infinity."""
        nest = self.nest
        assert self.keep is not None
        for each in self.roles.by_row:
            self.fill(self.parts[id(each)])
        with nest.loop("row", self.count) as i, nest.loop("key", self.length) as j:
            kept_here = nest.value(self.keep, self._at(i, j, index(0)))
            with nest.when(kept_here):
                for each in self.sums:
                    self._add_one(each, i, j)

    def _add_one(self, each: Sum, i: Tir, j: Tir) -> None:
        """What the weight of a row and a key adds to a sum."""
        weights, values, result = self._operands(each)
        kept, summed = (i, j) if id(each) in self.parts else (j, i)

        def add(c: Tir) -> None:
            term = weights[i, j] * values[summed, c]
            self.nest.put(result, [kept, c], result[kept, c] + term)

        self.strip(known(each.node.column_axes()[0]), add)
