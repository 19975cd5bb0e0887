"""Tiles of weighted sums by matrix units: the sums stay in fragments from the first tile on.

Which lane holds which element of a fragment is the target's secret, so products go through shared
memory, where threads take them up place by place and leave weights, rounded to the operands' type.

A masked weight is −0.0, and no other is. Where values are not finite, threads note what those add
that are kept, which is ±inf or NaN, in two bits a result; in shared memory they then become ±1: a
finite weight of theirs changes nothing of such a result, one that is infinite keeps its sign.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ...dsl.dtypes import f16
from ...dsl.expr import Axis
from ...dsl.lower import decode, encode, select, storage
from ..capability import MatrixUnit
from ..roles import Product
from ..terms import ABS_BITS, INF_BITS, both, either, float32, int32
from ..weighted import Roles, Sum
from .contraction_copy import Factor, Room
from .contraction_view import Space
from .finite import bits, finite, holds_odd
from .fragments import Fragments, padded
from .nest import GridNest
from .rolled import Rolled
from .weighted_layout import PAD, PRODUCT_PAD, layout_of
from .weighted_tiles import TiledConfig, Tiles

Tir = Any
_MASKED = 0x8000  # the bits of −0.0; what is below 0 has more


@dataclass(eq=False)
class _Pair:
    """A contraction's factors: the kept side's, the summed side's, and where their tiles lie."""

    own: Factor
    other: Factor
    own_room: Room
    room: Room


@dataclass(eq=False)
class _Held:
    """A sum: its fragments, where its value is, the marks of what is not finite."""

    sum: Sum
    fragments: list[Tir]
    value: _Pair
    above: Tir
    below: Tir


class MatrixTiles(Tiles):
    """The kept side's factors stay in shared memory; those of the summed side serve twice."""

    def __init__(
        self, nest: GridNest, roles: Roles, config: TiledConfig, sums: Sequence[Sum], kept: Axis,
        summed: Axis, unit: MatrixUnit,
    ) -> None:  # fmt: skip
        super().__init__(nest, roles, config, sums, kept, summed)
        self.unit, self.fragments = unit, Fragments(nest, unit)
        self.type = self.fragments.type
        self.layout = layout_of(config, unit, nest.caps)

    # --- before the loops ---

    def begin(self) -> None:
        nest, cfg, number = self.nest, self.config, self.nest.number
        own, others = zip(*map(self._factors, self.roles.factors), strict=True)
        rooms = self._rooms("own", own), self._rooms("others", others)
        self.pairs = [_Pair(*each) for each in zip(own, others, *rooms, strict=True)]
        self.stride = cfg.summed + PRODUCT_PAD
        size = number(self.layout.products(len(self.pairs)))
        self.tiles = nest.shared("tiles", [size], "float32")
        self.weight_stride = cfg.summed + PAD
        size = number(cfg.kept * self.weight_stride)
        self.weights = [nest.shared("weights", [size], storage(self.type)) for _ in self.final]
        self._subgroup()
        self.held = [self._sum(s) for s in self.sums]
        self.odd = nest.shared("odd", [number(1)], "int32")
        with nest.when(self.thread.equal(number(0))):
            nest.store(self.odd, [number(0)], int32(0))
        self.rolled = Rolled(nest).loop
        for pair in self.pairs:
            pair.own.begin(self.first)
            pair.own.hold()
            pair.own.fetch(number(0))
            pair.own.put(number(0), pair.own_room)

    def _factors(self, factor: Product) -> tuple[Factor, Factor]:
        """Those of the kept and of the summed side."""
        cfg, row, key = self.config, factor.row, factor.key
        space, width = Space(self.nest, (factor.depth,)), self.layout.width(factor)
        space.env = self.env
        own, other = (
            Factor(space, node, (axis,), (places, width), cfg.threads, raw=True, rowwise=True)
            for node, axis, places in (
                (row if self.by_row else key, self.kept, cfg.kept),
                (key if self.by_row else row, self.summed, cfg.summed),
            )
        )
        return own, other

    def _rooms(self, name: str, factors: Sequence[Factor]) -> list[Room]:
        """Room for a tile [place][depth] of each factor, one after the other."""
        firsts = [sum(f.size for f in factors[:n]) for n in range(len(factors) + 1)]
        buffer = self.nest.shared(name, [self.nest.number(firsts[-1])], storage(self.type))
        return [Room(buffer, first, 0) for first in firsts[:-1]]

    def _subgroup(self) -> None:
        """The first kept place of a subgroup, its number among those beside it, its fragments."""
        nest, number, (m, n, _) = self.nest, self.nest.number, self.unit.shape
        warp = nest.bind("warp", self.thread // number(nest.caps.subgroup))
        self.strip = nest.bind("strip", warp // number(self.layout.across) * number(m))
        self.x = nest.bind("x", warp % number(self.layout.across))
        count = max(1, self.config.summed // (self.layout.across * n))
        self.left, self.right = self.fragments.left(), self.fragments.right()
        self.products = [self.fragments.sums() for _ in range(count)]

    def _sum(self, each: Sum) -> _Held:
        nest = self.nest
        values = [f.key if self.by_row else f.row for f in self.roles.factors]
        value = next(p for v, p in zip(values, self.pairs, strict=True) if v is each.node.value)
        count = value.other.depth // (self.layout.across * self.unit.shape[1])
        fragments = [self.fragments.sums() for _ in range(count)]
        for sums in fragments:
            self.fragments.zero(sums)
        above, below = (nest.private(name, [], "int32") for name in ("above", "below"))
        for marks in (above, below):
            nest.store(marks, [nest.number(0)], int32(0))
        return _Held(each, fragments, value, above, below)

    def _column(self, number: int) -> Tir:
        """The first column of a subgroup's fragment."""
        nest, n = self.nest, self.unit.shape[1]
        return (nest.number(number * self.layout.across) + self.x) * nest.number(n)

    # --- a tile ---

    def tile(self) -> None:
        nest, zero = self.nest, self.nest.number(0)
        for pair in self.pairs:
            pair.other.view.env = self.env
            pair.other.begin(self.start)
            pair.other.hold()
            pair.other.fetch(zero)
        nest.barrier()  # what was there before is read no more
        for pair in self.pairs:
            pair.other.put(zero, pair.room)
        self._seek_odd()
        nest.barrier()
        for number in range(len(self.pairs)):
            self._multiply(number)
        nest.barrier()
        self.weigh()
        nest.barrier()
        if self.where is not None:
            with nest.when(self.odd[zero] > int32(0)):
                self._set_aside()
        self._add()

    def _seek_odd(self) -> None:
        """Leave a mark if a value that the thread brought is not finite."""
        nest = self.nest
        values = {id(h.value): h.value.other for h in self.held}.values()
        for other in values if self.where is not None else ():
            with nest.when(holds_odd(nest, other, self.type)):
                nest.store(self.odd, [nest.number(0)], int32(1))

    def _multiply(self, which: int) -> None:
        """A subgroup's part of a product."""
        nest, number, fragments = self.nest, self.nest.number, self.fragments
        pair, k = self.pairs[which], self.unit.shape[2]
        own, other, zero = pair.own, pair.other, number(0)
        depth = int(self.roles.factors[which].depth.extent)  # type: ignore[arg-type]
        with self._if_any():
            for sums in self.products:
                fragments.zero(sums)
            with self.rolled("k", padded(depth, k) // k) as step:
                at = nest.bind("k", step * number(k))
                tile = pair.own_room.buffer[own.at(zero, pair.own_room, self.strip, at)]
                fragments.load_left(self.left, tile, own.stride, True)
                for j, sums in enumerate(self.products):
                    tile = pair.room.buffer[other.at(zero, pair.room, self._column(j), at)]
                    fragments.load_right(self.right, tile, other.stride, True)
                    fragments.multiply(sums, self.left, self.right)
            for j, sums in enumerate(self.products):
                tile = self.tiles[self._in_tile(which, self.strip, self._column(j))]
                fragments.store(tile, self.stride, sums)

    def _if_any(self) -> Any:
        """Statements of the subgroups that have a column of the products."""
        nest, n, summed = self.nest, self.unit.shape[1], self.config.summed
        if self.layout.across * n <= summed:
            return nullcontext()
        return nest.when(self.x < nest.number(summed // n))

    def _in_tile(self, number: int, i: Tir, j: Tir) -> Tir:
        first, stride = number * self.config.kept * self.stride, self.nest.number(self.stride)
        return self.nest.number(first) + i * stride + j

    def _weight(self, i: Tir, j: Tir) -> Tir:
        return i * self.nest.number(self.weight_stride) + j

    def product(self, number: int, i: Tir, j: Tir) -> Tir:
        return self.tiles[self._in_tile(number, i, j)]

    def leave_out(self, i: Tir, j: Tir) -> None:
        for weights in self.weights:
            self.nest.store(weights, [self._weight(i, j)], self._operand(-0.0))

    def keep(self, number: int, i: Tir, j: Tir, weight: Tir) -> None:
        nest = self.nest
        stored = nest.bind("stored", self._stored(weight))
        kept = select(self._masked(stored), self._operand(0.0), stored)
        nest.store(self.weights[number], [self._weight(i, j)], kept)

    def _masked(self, weight: Tir) -> Tir:
        return bits(weight, self.type).equal(int32(_MASKED))

    def _which(self, held: _Held) -> int:
        """The number of a sum's weight."""
        return self.final[id(held.sum.node.weight)]

    def _stored(self, weight: Tir) -> Tir:
        """A weight as an operand."""
        return encode(weight.astype("float16") if self.type == f16 else weight, self.type)

    def _number_of(self, operand: Tir) -> Tir:
        return decode(operand, self.type).astype("float32")

    def _operand(self, value: float) -> Tir:
        """A number, one that both types hold, as an operand."""
        from tvm import tirx

        if self.type == f16:
            return tirx.const(value, "float16")
        (found,) = struct.unpack("<I", struct.pack("<f", value))
        return tirx.const(found >> 16, storage(self.type))

    def _add(self) -> None:
        """Weights · values, on top of the sums."""
        number, fragments = self.nest.number, self.fragments
        for which in self.final.values():
            for at in map(number, range(0, self.config.summed, self.unit.shape[2])):
                tile = self.weights[which][self._weight(self.strip, at)]
                fragments.load_left(self.left, tile, self.weight_stride, True)
                for held in (h for h in self.held if self._which(h) == which):
                    value, room = held.value.other, held.value.room
                    for j, sums in enumerate(held.fragments):
                        tile = room.buffer[value.at(number(0), room, at, self._column(j))]
                        fragments.load_right(self.right, tile, value.stride, False)
                        fragments.multiply(sums, self.left, self.right)

    # --- values that are not finite ---

    def _set_aside(self) -> None:
        """Note what values that are not finite add, and make them ±1."""
        nest = self.nest
        for parts in dict.fromkeys(map(self._parts, self.held)):
            with self.rolled("result", parts * self._turn_count()) as number:
                self._note([h for h in self.held if self._parts(h) == parts], number)
        nest.barrier()
        with nest.when(self.thread.equal(nest.number(0))):
            nest.store(self.odd, [nest.number(0)], int32(0))
        self._clean(self.pairs[0].room.buffer)
        nest.barrier()

    def _parts(self, held: _Held) -> int:
        """Parts of a sum's columns."""
        return held.value.other.depth // self.layout.part

    def _turn_count(self) -> int:
        """Results of a thread in a part of the columns."""
        return self.config.kept * self.layout.part // self.config.threads

    def _place(self, turn: Tir) -> tuple[Tir, Tir]:
        """The kept place, and the column within a part, of a thread's result."""
        nest, part = self.nest, self.nest.number(self.layout.part)
        flat = nest.bind("flat", turn * nest.number(self.config.threads) + self.thread)
        return nest.bind("i", flat // part), nest.bind("c", flat % part)

    def _note(self, some: Sequence[_Held], number: Tir) -> None:
        """What values that are not finite add to a thread's results of that number."""
        nest, zero, turns = self.nest, self.nest.number(0), self.nest.number(self._turn_count())
        part = nest.bind("part", number // turns)
        i, c = self._place(number % turns)
        column = nest.bind("column", part * nest.number(self.layout.part) + c)
        totals = [nest.private("total", [], "float32") for _ in some]
        for total in totals:
            nest.store(total, [zero], float32(0.0))
        with self.rolled("t", self.config.summed) as t:
            at = nest.bind("at", self._weight(i, t))
            for held, total in zip(some, totals, strict=True):
                stored = nest.bind("stored", self.weights[self._which(held)][at])
                place = held.value.other.at(zero, held.value.room, t, column)
                value = nest.bind("value", held.value.room.buffer[place])
                left_out = either(self._masked(stored), finite(value, self.type))
                term = self._number_of(stored) * self._number_of(value)
                nest.store(total, [zero], total[zero] + select(left_out, float32(0.0), term))
        for held, total in zip(some, totals, strict=True):
            self._set_marks(held, total[zero], number.astype("int32"))

    def _set_marks(self, held: _Held, total: Tir, number: Tir) -> None:
        """Of 0, ±inf or NaN, which is marked as both."""
        from tvm import tirx

        nest, zero = self.nest, self.nest.number(0)
        found = nest.bind("found", tirx.reinterpret("int32", total))
        size = nest.bind("size", found & int32(ABS_BITS))
        infinite = size.equal(int32(INF_BITS))
        for marks, far in (
            (held.above, both(infinite, found > int32(0))),
            (held.below, both(infinite, found < int32(0))),
        ):
            mark = select(either(far, size > int32(INF_BITS)), int32(1), int32(0))
            nest.store(marks, [zero], marks[zero] | mark << number)

    def _clean(self, buffer: Tir) -> None:
        nest = self.nest
        size = int(buffer.ty.shape[0].value)
        with self.rolled("turn", -(-size // self.config.threads)) as turn:
            at = nest.bind("at", turn * nest.number(self.config.threads) + self.thread)
            with nest.when(at < nest.number(size)):
                stored = nest.bind("stored", buffer[at])
                below = bits(stored, self.type) >= int32(_MASKED)
                sign = select(below, self._operand(-1.0), self._operand(1.0))
                nest.store(buffer, [at], select(finite(stored, self.type), stored, sign))

    # --- results ---

    def finish(self) -> None:
        """A part of the columns at a time: fragments to shared memory, results from there."""
        nest, number, layout = self.nest, self.nest.number, self.layout
        stride = layout.part + PRODUCT_PAD
        each = layout.part // (layout.across * self.unit.shape[1])
        for held in self.held:
            for part in range(self._parts(held)):
                nest.barrier()
                for j in range(each):
                    tile = self.tiles[self.strip * number(stride) + self._column(j)]
                    self.fragments.store(tile, stride, held.fragments[part * each + j])
                nest.barrier()
                with self.rolled("turn", self._turn_count()) as turn:
                    self._result(held, number(part), turn, stride)

    def _result(self, held: _Held, part: Tir, turn: Tir, stride: int) -> None:
        nest, zero = self.nest, self.nest.number(0)
        axis = held.sum.node.column_axes()[0]
        i, c = self._place(turn)
        total = self.tiles[i * nest.number(stride) + c]
        if self.where is not None:
            mark = (part * nest.number(self._turn_count()) + turn).astype("int32")
            for marks, far in ((held.above, "inf"), (held.below, "-inf")):
                some = (marks[zero] >> mark & int32(1)) > int32(0)
                total = total + select(some, float32(float(far)), float32(0.0))
        total = nest.bind("total", total)
        column = nest.bind("column", part * nest.number(self.layout.part) + c)
        place = nest.bind("place", self.first + i)
        with nest.when(both(place < self.total, column < self.size(axis.extent))):
            self.write(held.sum, self.env | {self.kept: place, axis: column}, total)
