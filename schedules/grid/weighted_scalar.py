"""Tiles of weighted sums by plain arithmetic: a thread has a small rectangle of the products.

A thread's sums are those of a few kept places and every sixteenth column.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Axis, Expr, cast
from ..terms import ABS_BITS, INF_BITS, float32, int32, least, most
from .weighted_tiles import TiledConfig, Tiles

Tir = Any
_ACROSS = 16  # threads side by side along the columns


def rectangle(config: TiledConfig) -> tuple[int, int]:
    """Kept and summed places of a thread's weights."""
    share = config.kept * config.summed // config.threads
    high = min(share, 4 if share >= 8 else 2)
    return high, share // high


def shared_bytes(config: TiledConfig, depths: Sequence[int], weights: int) -> int:
    """Bytes of a block's tiles; a few more serve to combine flags."""
    rows = sum((config.kept + config.summed) * _stride(d) + 2 * _ACROSS for d in depths)
    tiles = 1 + max(weights, len(depths))
    return 4 * (rows + tiles * config.kept * (config.summed + 1)) + 1024


@dataclass
class _Side:
    """A factor on one side of the tile, in shared memory as [place, depth]."""

    node: Expr
    depth: Axis
    stride: int
    buffer: Tir


class ScalarTiles(Tiles):
    """All is f32 in shared memory; a weight takes the place of a product."""

    def begin(self) -> None:
        self._allocate()
        self._load(self.own, self.kept, self.first, self.here)

    def _allocate(self) -> None:
        nest, cfg = self.nest, self.config
        self.own: list[_Side] = []
        self.others: list[_Side] = []
        for factor in self.roles.factors:
            row, key = (factor.row, factor.key) if self.by_row else (factor.key, factor.row)
            for sides, node, places in ((self.own, row, cfg.kept), (self.others, key, cfg.summed)):
                stride = _stride(int(factor.depth.extent))  # type: ignore[arg-type]
                # Columns past the last are read, and of no effect.
                count = nest.number(places * stride + _ACROSS)
                buffer = nest.shared("side", [count], "float32")
                sides.append(_Side(node, factor.depth, stride, buffer))
        size = nest.number(cfg.kept * (cfg.summed + 1))
        tiles = max(len(self.final), len(self.own))
        self.tiles = [nest.shared("tile", [size], "float32") for _ in range(tiles)]
        self.keeps: Tir = None if self.where is None else nest.shared("keeps", [size], "int32")
        self.high, self.wide = rectangle(cfg)
        cells = nest.number(self.high * self.wide)
        self.products = [nest.private("product", [cells], "float32") for _ in self.own]
        self.down = cfg.threads // _ACROSS
        self.rows = cfg.kept // self.down
        self.sums_held = []
        for each in self.sums:
            vectors = -(-int(each.node.column_axes()[0].extent) // _ACROSS)  # type: ignore[arg-type]
            held = nest.private("sums", [nest.number(self.rows * vectors)], "float32")
            for i in range(self.rows * vectors):
                nest.store(held, [nest.number(i)], float32(0.0))
            self.sums_held.append((each, held, vectors))
        self.x = nest.bind("x", self.thread % nest.number(_ACROSS))
        self.y = nest.bind("y", self.thread // nest.number(_ACROSS))

    def _load(self, sides: Sequence[_Side], axis: Axis, first: Tir, places: Tir) -> Tir:
        """Shared copies of the `places` from `first` on; gives the thread's greatest magnitude."""
        nest, threads = self.nest, self.nest.number(self.config.threads)
        odd = nest.private("odd", [], "int32")
        nest.store(odd, [nest.number(0)], int32(0))
        for side in sides:
            depth = nest.number(int(side.depth.extent))  # type: ignore[arg-type]
            count = nest.bind("count", places * depth)
            with nest.loop("turn", nest.ceil_div(count, self.config.threads)) as turn:
                flat = nest.bind("flat", turn * threads + self.thread)
                with nest.when(flat < count):
                    place, d = nest.unflatten(flat, [places, depth])
                    place, d = nest.bind("place", place), nest.bind("d", d)
                    env = self.env | {axis: first + place, side.depth: d}
                    value = nest.bind("value", self.lower(cast(side.node, f32), env))
                    at = place * nest.number(side.stride) + d
                    nest.store(side.buffer, [at], value)
                    seen = most(odd[nest.number(0)], _magnitude(value))
                    nest.store(odd, [nest.number(0)], seen)
        return odd[nest.number(0)]

    def tile(self) -> None:
        nest, cfg = self.nest, self.config
        left = least(self.end - self.start, nest.number(cfg.summed))
        self.count = nest.opaque("count", left)
        nest.barrier()
        odd = self._load(self.others, self.summed, self.start, self.count)
        strange = None if self.where is None else nest.reduce("max", odd, cfg.threads)
        nest.barrier()
        self._multiply()
        nest.barrier()
        self.weigh()
        nest.barrier()
        if strange is None:
            self._add(masked=False)
            return
        with nest.choice(strange < int32(INF_BITS)) as otherwise:
            self._add(masked=False)
            otherwise()
            self._add(masked=True)

    def _place(self, a: Tir, b: Tir) -> tuple[Tir, Tir]:
        """Where in the tile the thread's weight (a, b) is."""
        nest, cfg = self.nest, self.config
        across = nest.number(cfg.summed // self.wide)
        up, along = self.thread // across, self.thread % across
        return up + a * nest.number(cfg.kept // self.high), along + b * across

    def _cells(self) -> list[tuple[int, int]]:
        return [(a, b) for a in range(self.high) for b in range(self.wide)]

    def _multiply(self) -> None:
        """The products under the weights, for the thread's rectangle.

        Those of one depth share a loop: compilers unroll short ones whole, and hold it all.
        """
        nest = self.nest
        for made in self.products:
            for a, b in self._cells():
                nest.store(made, [self._cell(a, b)], float32(0.0))
        operands = list(zip(self.own, self.others, self.products, strict=True))
        for depth in dict.fromkeys(int(side.depth.extent) for side in self.own):  # type: ignore[arg-type]
            stride = nest.number(_stride(depth))
            near = [nest.bind("near", self._place(nest.number(a), nest.number(0))[0] * stride)
                    for a in range(self.high)]  # fmt: skip
            far = [nest.bind("far", self._place(nest.number(0), nest.number(b))[1] * stride)
                   for b in range(self.wide)]  # fmt: skip
            with nest.loop("d", nest.number(depth)) as d:
                for own, other, made in operands:
                    if own.depth.extent != depth:
                        continue
                    left = [nest.bind("left", own.buffer[n + d]) for n in near]
                    right = [nest.bind("right", other.buffer[f + d]) for f in far]
                    for a, b in self._cells():
                        at = self._cell(a, b)
                        nest.store(made, [at], made[at] + left[a] * right[b])
        for tile, made in zip(self.tiles, self.products, strict=False):
            for a, b in self._cells():
                i, j = self._place(nest.number(a), nest.number(b))
                nest.store(tile, [self._in_tile(i, j)], made[self._cell(a, b)])

    def _in_tile(self, i: Tir, j: Tir) -> Tir:
        return i * self.nest.number(self.config.summed + 1) + j

    def _cell(self, a: int, b: int) -> Tir:
        return self.nest.number(a * self.wide + b)

    def product(self, number: int, i: Tir, j: Tir) -> Tir:
        return self.tiles[number][self._in_tile(i, j)]

    def leave_out(self, i: Tir, j: Tir) -> None:
        at = self.nest.bind("at", self._in_tile(i, j))
        for number in self.final.values():
            self.nest.store(self.tiles[number], [at], float32(0.0))
        if self.keeps is not None:
            self.nest.store(self.keeps, [at], int32(0))

    def keep(self, number: int, i: Tir, j: Tir, weight: Tir) -> None:
        at = self.nest.bind("at", self._in_tile(i, j))
        self.nest.store(self.tiles[number], [at], weight)
        if self.keeps is not None and number == 0:
            self.nest.store(self.keeps, [at], int32(-1))

    def _add(self, masked: bool) -> None:
        """Each sum's part of the tile, in registers."""
        nest = self.nest
        with nest.loop("summed", self.count) as c:
            for each, held, vectors in self.sums_held:
                weights = self.tiles[self.final[id(each.node.weight)]]
                side = next(s for s in self.others if s.node is each.node.value)
                base = nest.bind("base", c * nest.number(side.stride) + self.x)
                values = [nest.bind("value", side.buffer[base + nest.number(v * _ACROSS)])
                          for v in range(vectors)]  # fmt: skip
                for r in range(self.rows):
                    i = self.y + nest.number(r * self.down)
                    at = nest.bind("at", self._in_tile(i, c))
                    weight = nest.bind("weight", weights[at])
                    for v, value in enumerate(values):
                        place, term = nest.number(r * vectors + v), weight * value
                        if masked:
                            term = _masked(term, self.keeps[at])
                        nest.store(held, [place], held[place] + term)

    def finish(self) -> None:
        nest = self.nest
        for each, held, vectors in self.sums_held:
            column = each.node.column_axes()[0]
            extent = int(column.extent)  # type: ignore[arg-type]
            for r in range(self.rows):
                i = nest.bind("i", self.first + self.y + nest.number(r * self.down))
                with nest.when(i < self.total):
                    for v in range(vectors):
                        c = nest.bind("c", self.x + nest.number(v * _ACROSS))
                        with ExitStack() as stack:
                            if (v + 1) * _ACROSS > extent:
                                stack.enter_context(nest.when(c < nest.number(extent)))
                            at = self.env | {self.kept: i, column: c}
                            self.write(each, at, held[nest.number(r * vectors + v)])


def _stride(depth: int) -> int:
    """Elements from one place to the next: odd, so that places lie in different banks."""
    return depth | 1


def _magnitude(value: Tir) -> Tir:
    """The bits of |value|: ordered as it is, NaN last. (Conditions would take scalar registers.)"""
    from tvm import tirx

    return tirx.bitwise_and(tirx.reinterpret("int32", value), int32(ABS_BITS))


def _masked(value: Tir, mask: Tir) -> Tir:
    """`value` where the mask has all bits, 0 where it has none."""
    from tvm import tirx

    bits = tirx.bitwise_and(tirx.reinterpret("int32", value), mask)
    return tirx.reinterpret("float32", bits)
