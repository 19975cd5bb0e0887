"""Tiles of softmax_sum by matrix units: a subgroup has fragments of the scores and of the sums.

Which lane holds which element of a fragment is the target's secret, so scores and products with
values go through shared memory, where threads take them up row by row.
"""

from __future__ import annotations

from typing import Any

from ...dsl.expr import Expr
from ...dsl.lower import decode, select, storage
from ..capability import WIDE_BYTES, Capability, MatrixUnit
from ..group import Group
from ..softmax import Roles
from ..terms import float32
from .contraction_copy import Factor, Room
from .flash import Flash, FlashConfig
from .fragments import Fragments, padded, unit_for
from .nest import GridNest

Tir = Any
_BYTES = 2  # of an operand
_PAD = WIDE_BYTES // _BYTES  # elements after a row: threads down a column find different banks
_SCORE_PAD = 4


def unit_of(found: Roles, caps: Capability) -> MatrixUnit | None:
    """The unit that multiplies both products' factors as they are stored."""
    if len(found.products) != 1:
        return None
    (product,) = found.products
    return unit_for((product.row, product.key, found.node.value), caps)


def shared_bytes(config: FlashConfig, unit: MatrixUnit, depth: int, columns: int) -> int:
    """Shared memory of a block."""
    m, n, k = unit.shape
    depth, columns = padded(depth, k), padded(columns, config.chunk)
    # A tile may lie either way round: count the one with more padding.
    queries = config.rows * depth + _PAD * max(config.rows, depth)
    keys = config.keys * depth + _PAD * max(config.keys, depth)
    values = config.keys * columns + _PAD * max(config.keys, columns)
    scores = config.rows * (max(config.keys, config.chunk) + _SCORE_PAD)
    weights = config.rows * (config.keys + _PAD)
    return _BYTES * (queries + max(keys, values) + weights) + 4 * scores + 8


class MatrixFlash(Flash):
    """The rows' factors stay in shared memory; keys and values take turns in one place there."""

    def __init__(self, nest: GridNest, group: Group, found: Roles, config: FlashConfig,
                 unit: MatrixUnit) -> None:  # fmt: skip
        super().__init__(nest, group, found, config)
        self.unit, self.fragments = unit, Fragments(nest, unit)
        self.weight_type = self.fragments.type
        columns = int(found.column.extent)  # type: ignore[arg-type]
        self.columns = padded(columns, config.chunk)
        self.wide = self.columns // config.across

    def key(self, c: Tir) -> Tir:
        return self.x + c * self.nest.number(self.config.across)

    def column(self, c: int) -> Tir:
        return self.x + self.nest.number(c * self.config.across)

    def begin(self) -> None:
        nest, cfg, number = self.nest, self.config, self.nest.number
        ((row, key, axis),) = self.factors
        self.depth = padded(int(axis.extent), self.unit.shape[2])  # type: ignore[arg-type]
        space, threads = self.space(axis), cfg.threads
        queries = Factor(space, row, (self.roles.row,), (cfg.rows, self.depth), threads, raw=True)
        self.keys = Factor(space, key, (self.roles.key,), (cfg.keys, self.depth), threads,
                           raw=True)  # fmt: skip
        value: Expr = self.value
        self.values = Factor(self.space(self.roles.key), value, (self.roles.column,),
                             (self.columns, cfg.keys), threads, raw=True)  # fmt: skip
        kind = storage(self.weight_type)
        self.queries, size = queries, max(self.keys.size, self.values.size)
        self.rows_room = Room(nest.shared("rows", [number(queries.size)], kind), 0, 0)
        self.stage = Room(nest.shared("stage", [number(size)], kind), 0, 0)
        self.score_stride = max(cfg.keys, cfg.chunk) + _SCORE_PAD
        self.scores = nest.shared("scores", [number(cfg.rows * self.score_stride)], "float32")
        self.weight_stride = cfg.keys + _PAD
        self.weights = nest.shared("weights", [number(cfg.rows * self.weight_stride)], kind)
        self._subgroup()
        queries.begin(self.first)
        queries.hold()
        queries.fetch(number(0))
        queries.put(number(0), self.rows_room)
        self.values.begin(number(0))
        self.values.hold()

    def _subgroup(self) -> None:
        """The first row of a subgroup, which has as many as a fragment, and its fragments."""
        nest, number, unit = self.nest, self.nest.number, self.unit
        warp = nest.bind("warp", nest.thread // number(nest.caps.subgroup))
        self.strip = nest.bind("strip", warp * number(unit.shape[0]))
        count = max(self.config.keys, self.config.chunk) // unit.shape[1]
        self.left, self.right = self.fragments.left(), self.fragments.right()
        self.held = [self.fragments.sums() for _ in range(count)]

    def multiply(self) -> None:
        nest, number = self.nest, self.nest.number
        self.keys.begin(self.start)
        self.keys.hold()
        self.keys.fetch(number(0))
        nest.barrier()  # the values before are read no more
        self.keys.put(number(0), self.stage)
        nest.barrier()
        self._product(
            lambda row, k: self.queries.at(number(0), self.rows_room, row, k),
            (self.rows_room.buffer, self.queries.stride, self.queries.rowwise),
            lambda key, k: self.keys.at(number(0), self.stage, key, k),
            (self.keys.stride, self.keys.rowwise), self.config.keys, self.depth,
        )  # fmt: skip
        nest.barrier()

    def _product(self, left_at: Any, left: tuple[Tir, int, bool], right_at: Any,
                 right: tuple[int, bool], width: int, depth: int) -> None:  # fmt: skip
        """`width` columns of the product of two tiles in shared memory → the scores' place."""
        number, fragments, (_, n, k) = self.nest.number, self.fragments, self.unit.shape
        held = self.held[: width // n]
        columns = [number(j * n) for j in range(len(held))]
        buffer, stride, rowwise = left
        for sums in held:
            fragments.zero(sums)
        with self.rolled("k", depth // k) as step:
            at = self.nest.bind("k", step * number(k))
            fragments.load_left(self.left, buffer[left_at(self.strip, at)], stride, rowwise)
            for column, sums in zip(columns, held, strict=True):
                tile = self.stage.buffer[right_at(column, at)]
                fragments.load_right(self.right, tile, *right)
                fragments.multiply(sums, self.left, self.right)
        for column, sums in zip(columns, held, strict=True):
            tile = self.scores[self.strip * number(self.score_stride) + column]
            fragments.store(tile, self.score_stride, sums)

    def product(self, number: int, i: int, c: Tir) -> Tir:
        stride = self.nest.number(self.score_stride)
        return self.scores[self.inner_row(i) * stride + self.key(c)]

    def weigh(self, i: int, c: Tir, weight: Tir) -> None:
        at = self.inner_row(i) * self.nest.number(self.weight_stride) + self.key(c)
        self.nest.store(self.weights, [at], weight)

    def accumulate(self) -> None:
        nest, number = self.nest, self.nest.number
        self.values.fetch(self.start)
        self.values.put(number(0), self.stage)  # the keys there are read no more
        mark = nest.bind("mark", self.block.astype("int32"))
        self.note_odd(self.values, mark)
        nest.barrier()
        if self.masked:
            with nest.choice(self.odd[number(0)].equal(mark)) as otherwise:
                self._add_kept()
                otherwise()
                self._add()
        else:
            self._add()

    def _add(self) -> None:
        """Weights · values, a part of the columns at a time."""
        nest, number, part = self.nest, self.nest.number, self.config.chunk
        for first in range(0, self.columns, part):
            self._product(
                lambda row, k: row * number(self.weight_stride) + k,
                (self.weights, self.weight_stride, True),
                lambda column, k, first=first: self.values.at(
                    number(0), self.stage, column + number(first), k),
                (self.values.stride, self.values.rowwise), part, self.config.keys,
            )  # fmt: skip
            nest.barrier()
            self._take_up(first)
            nest.barrier()

    def _take_up(self, first: int) -> None:
        """A thread's share of a part of the products, added to its sums."""
        nest, number, across = self.nest, self.nest.number, self.config.across
        for i in range(self.high):
            row = self.inner_row(i) * number(self.score_stride)
            with nest.loop("c", number(self.config.chunk // across), "unroll") as c:
                at = number(i * self.wide + first // across) + c
                found = self.scores[row + self.x + c * number(across)]
                nest.store(self.sums, [at], self.sums[at] * self.decay[number(i)] + found)

    def _add_kept(self) -> None:
        """The same by plain arithmetic, of the keys that are not masked."""
        nest, number = self.nest, self.nest.number
        for i in range(self.high):
            with nest.loop("c", number(self.wide), "unroll") as c:
                at = number(i * self.wide) + c
                nest.store(self.sums, [at], self.sums[at] * self.decay[number(i)])
            with self.rolled("key", self.config.keys) as key:
                near = self.inner_row(i) * number(self.weight_stride) + key
                stored = nest.bind("stored", self.weights[near])
                weight = decode(stored, self.weight_type).astype("float32")
                for c in range(self.wide):
                    place = self.values.at(number(0), self.stage, self.column(c), key)
                    value = decode(self.stage.buffer[place], self.weight_type).astype("float32")
                    term = select(self.masked_weight(stored), float32(0.0), weight * value)
                    at = number(i * self.wide + c)
                    nest.store(self.sums, [at], self.sums[at] + term)
