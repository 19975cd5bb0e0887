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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl.expr import Axis, Expr
from ..bounds import upper_bounds
from ..emit import Emitter
from ..group import is_map
from ..rule import Config
from ..weighted import Roles, Step, Sum, steps
from .register_tiles import RegisterTile, product
from .tiling import Tiling, ceil_div, index, real

Tir = Any
_INF_BITS = 0x7F800000
_ABS_BITS = 0x7FFFFFFF


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


class Tiles:
    """Emits the nest for one group.

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
        self._prepare()
        self._allocate()
        self._clear_rows()
        total = nest.bind("keys", nest.size(roles.key.extent))
        with nest.loop("block", ceil_div(total, keys)) as block:
            self.start = nest.opaque("first_key", block * index(keys))
            self.length = nest.opaque("length", _least(total - self.start, index(keys)))
            self._load_keys()
            for buffer in self.totals.values():
                self._fill(buffer)
            self._turns(roles.turns)
            for each in roles.by_key:
                self._finish(each)

    def _prepare(self) -> None:
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
        return -(-_extent(axis) // self.lanes) * self.lanes

    def _allocate(self) -> None:
        nest, cfg, roles = self.nest, self.config, self.roles
        spare = cfg.high
        keys = -(-cfg.keys // (cfg.wide * self.lanes)) * cfg.wide * self.lanes
        self.turned = [nest.scratch("keys", [_extent(f.depth), keys]) for f in roles.factors]
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
        if self.keep is not None:
            (self.key_flags,) = nest.registers("key_flags", 1, self.lanes, "int32")
            (self.flags,) = nest.registers("flags", 1, self.lanes, "int32")
            (self.worst,) = nest.registers("worst", 1, 1, "int32")

    def _copy(self, copies: dict[int, _Copy], node: Expr, column: Axis, rows: int) -> None:
        if id(node) not in copies:
            buffer = self.nest.scratch("copy", [rows, self._padded(column)])
            copies[id(node)] = _Copy(node, column, buffer)

    def _fill(self, buffer: Tir) -> None:
        """The scratch matrix = 0."""
        rows, columns = (int(n) for n in buffer.ty.shape)
        with self.nest.loop("row", index(rows)) as r:
            self._strip(columns, lambda at: self.nest.put(buffer, [r, at], real(0.0)))

    def _strip(self, count: int, body: Callable[[Tir], None]) -> None:
        """`body(column)` for columns of a static number, by vectors."""

        def whole(at: Tir, width: int) -> None:
            with self.nest.vector(width) as lane:
                body(at + lane)

        self.nest.strip(count, self.lanes, whole)

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
                self._strip(
                    _extent(column),
                    lambda at, each=each, column=column: self._write(  # type: ignore[misc]
                        each, env | {column: at}, real(0.0)
                    ),
                )

    def _write(self, each: Sum, at: dict[Axis, Tir], value: Tir) -> None:
        self.nest.write(each.result, [at[a] for a in each.result.axes], value)

    def _load_keys(self) -> None:
        """What the keys have: as it is for values, turned for products."""
        nest, key = self.nest, self.roles.key
        if self.keep is not None:
            self._reset(self.key_flags)
        for copy in self.key_copies.values():
            self._load(copy, key, self.start, self.length, self._flags_of_keys())
        for (factor, _, node), buffer in zip(self.factors, self.turned, strict=True):

            def turn(
                j: Tir, d: Tir, node: Expr = node, depth: Axis = factor.depth, to: Tir = buffer
            ) -> None:
                nest.put(to, [d, j], nest.real(node, self.env | {key: self.start + j, depth: d}))

            nest.transposed(self.length, index(_extent(factor.depth)), turn)

    def _flags_of_keys(self) -> Tir:
        return None if self.keep is None else self.key_flags

    def _reset(self, flags: Tir) -> None:
        with self.nest.vector(self.lanes) as lane:
            self.nest.put(flags, [lane], _int(0))

    def _load(self, copy: _Copy, axis: Axis, first: Tir, count: Tir, flags: Tir) -> None:
        """copy[place, column], f32; `flags` collects the greatest magnitude's bits."""
        from tvm import tirx

        nest = self.nest
        with nest.loop("place", count) as i:
            base = self.env | {axis: first + i}

            def move(at: Tir, width: int) -> None:
                with nest.vector(width) as lane:
                    value = nest.real(copy.node, base | {copy.column: at + lane})
                    nest.put(copy.buffer, [i, at + lane], value)
                if flags is not None:
                    with nest.vector(width) as lane:
                        bits = tirx.reinterpret("int32", copy.buffer[i, at + lane])
                        bits = tirx.bitwise_and(bits, _int(_ABS_BITS))
                        nest.put(flags, [lane], tirx.max(flags[lane], bits))

            nest.strip(_extent(copy.column), self.lanes, move)

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
            self.count = nest.opaque("count", _least(total - self.first, index(rows)))
            last = self.env | {row: self.first + self.count - index(1)}
            reached = _true()
            for bound in upper_bounds(self.where, self.roles.key, row, set(self.env)):
                limit = nest.opaque("limit", nest.value(bound, last))
                reached = _both(reached, self.start < limit)
            with nest.when(reached):
                self._tile()

    def _tile(self) -> None:
        nest, row = self.nest, self.roles.row
        flags = None
        if self.keep is not None:
            flags = self.flags
            with nest.vector(self.lanes) as lane:
                nest.put(flags, [lane], self.key_flags[lane])
        for copy in self.row_copies.values():
            self._load(copy, row, self.first, self.count, flags)
        tile = self._registers(self.config.wide)
        strips = ceil_div(self.length, tile.vectors * self.lanes)
        for (factor, node, _), turned, result in zip(
            self.factors, self.turned, self.products, strict=True
        ):
            left = self.row_copies[id(node)].buffer
            product(
                nest, tile, self.count, strips, _extent(factor.depth),
                lambda i, d, left=left: left[i, d],  # type: ignore[misc]
                lambda d, j, turned=turned: turned[d, j], result, add=False,  # type: ignore[misc]
            )  # fmt: skip
        self._weigh()
        if flags is None:
            self._add()
            self._add_parts()
            return
        from tvm import tirx

        nest.put(self.worst, [0], _int(0))
        with nest.loop("lane", index(self.lanes)) as lane:
            nest.put(self.worst, [0], tirx.max(self.worst[index(0)], flags[lane]))
        with nest.when(self.worst[index(0)] < _int(_INF_BITS)):
            self._add()
        with nest.otherwise():
            self._add_kept()
        self._add_parts()

    def _registers(self, vectors: int) -> RegisterTile:
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

    def _weigh(self) -> None:
        """The tile's weights, 0 where masked."""
        from tvm import tirx

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
                        value = tirx.Select(nest.value(self.keep, at), value, real(0.0))
                    nest.put(final, [i, j + lane], value)

        whole = nest.opaque("whole", self.length // lanes)
        with nest.loop("row", self.count) as i:
            with nest.loop("vector", whole) as v:
                weigh(i, v * lanes, self.lanes)
            with nest.loop("rest", self.length - whole * lanes) as j:
                weigh(i, whole * lanes + j, 1)

    def _add(self) -> None:
        """Each sum's part of the tile, by register tiles."""
        nest = self.nest
        for each in self.roles.by_key:
            weights, values, tile, strips = self._operands(each, self.row_copies)
            product(
                nest, tile, self.length, strips, self.count,
                lambda j, i, w=weights: w[i, j],  # type: ignore[misc]
                lambda i, c, v=values: v[i, c],  # type: ignore[misc]
                self.totals[id(each)], add=True,
            )  # fmt: skip
        for each in self.roles.by_row:
            weights, values, tile, strips = self._operands(each, self.key_copies)
            product(
                nest, tile, self.count, strips, self.length,
                lambda i, j, w=weights: w[i, j],  # type: ignore[misc]
                lambda j, c, v=values: v[j, c],  # type: ignore[misc]
                self.parts[id(each)], add=False,
            )  # fmt: skip

    def _operands(self, each: Sum, copies: dict[int, _Copy]) -> tuple[Tir, Tir, RegisterTile, Tir]:
        vectors = self._padded(each.node.column_axes()[0]) // self.lanes
        tile = self._registers(vectors)
        weights = self.weights[id(each.node.weight)]
        values = copies[id(self.values[id(each)])].buffer
        return weights, values, tile, vectors // tile.vectors

    def _add_kept(self) -> None:
        """The same, adding only what the mask keeps: for values with NaN or infinity."""
        nest = self.nest
        assert self.keep is not None
        for each in self.roles.by_row:
            self._fill(self.parts[id(each)])
        with nest.loop("row", self.count) as i, nest.loop("key", self.length) as j:
            with nest.when(nest.value(self.keep, self._at(i, j, index(0)))):
                for each in self.sums:
                    keeps_rows = id(each) in self.parts
                    total = self.parts[id(each)] if keeps_rows else self.totals[id(each)]
                    copies = self.key_copies if keeps_rows else self.row_copies
                    weights, values, _, _ = self._operands(each, copies)
                    kept, summed = (i, j) if keeps_rows else (j, i)
                    self._strip(
                        _extent(each.node.column_axes()[0]),
                        lambda c, t=total, w=weights, v=values, k=kept, s=summed: nest.put(  # type: ignore[misc]
                            t, [k, c], t[k, c] + w[i, j] * v[s, c]
                        ),
                    )

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

                self._strip(_extent(column), add)

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

            self._strip(_extent(column), write)


def _extent(axis: Axis) -> int:
    assert isinstance(axis.extent, int)
    return axis.extent


def _least(a: Tir, b: Tir) -> Tir:
    from tvm import tirx

    return tirx.min(a, b)


def _both(a: Tir, b: Tir) -> Tir:
    from tvm import tirx

    return tirx.all(a, b)


def _true() -> Tir:
    from tvm import tirx

    return tirx.const(True, "bool")


def _int(value: int) -> Tir:
    from tvm import tirx

    return tirx.IntImm("int32", value)
