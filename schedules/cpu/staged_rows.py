"""Rows of a tensor as windows read them: split by stride, what is outside filled in."""

from __future__ import annotations

from functools import reduce
from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Axis, Binary, Expr
from ...dsl.lower import constant, convert, storage
from ...dsl.walk import free_axes
from ..affine import Line, line
from .taps import View, combinations
from .tiling import Tiling, index

Tir = Any

_MOST_SLOTS = 16


class StagedRows:
    """The lines of one view that a task has at hand, `length` places and what windows add.

    A line has a part for each remainder of the stride. It stays in its slot until another row
    needs that; the last slot is a line outside the tensor.
    """

    def __init__(
        self, nest: Tiling, view: View, length: Tir, lanes: int, moving: Axis
    ) -> None:  # fmt: skip
        self.nest, self.view, self.lanes = nest, view, lanes
        read = view.read
        self.kind = f32 if read.dtype.is_narrow_float else read.dtype
        self.order = {t: n for n, t in enumerate(combinations(view.rows))}
        self.slots = len(self.order)
        self.turning = _turning(view, moving)
        if self.turning is not None:
            slots = _slots(read.index[self.turning], view)
            self.slots, self.turning = (slots, self.turning) if slots else (self.slots, None)
        extra = -(-view.extra // lanes) * lanes
        self.part = nest.opaque("part", length + index(extra))
        self.size = nest.opaque("line", self.part * index(view.slope))
        total = (length + index(extra)) * index(view.slope * (self.slots + 1))
        self.lines = nest.scratch("lines", [total], self.kind.name)
        self.fill = constant(0 if read.fill is None else read.fill, self.kind)
        self._clear(self._outside, self.size)
        if self.turning is not None:
            self.held = nest.scratch("held", [self.slots], "int64")
            for slot in range(self.slots):
                nest.put(self.held, [slot], index(-1))

    @property
    def _outside(self) -> Tir:
        return self.size * index(self.slots)

    def _put(self, at: Tir, value: Tir) -> None:
        self.nest.put(self.lines, [at], value)

    def _clear(self, first: Tir, count: Tir) -> None:
        """`count` elements as outside."""
        self.nest.fill(self.lines, [first], count, self.lanes, self.fill)

    def element(self, row: Tir, part: int, first: Tir, lane: Tir) -> Tir:
        return self.lines[row + self.part * index(part) + first + lane]

    def stage(self, env: dict[Axis, Tir], taps: tuple[int, ...]) -> Tir:
        """Where the line of a row starts, made now if it is not there."""
        from tvm import tirx

        nest, read = self.nest, self.view.read
        places = [nest.opaque("place", nest.value(i, env)) for i in read.index[:-1]]
        inside: Tir = tirx.const(True, "bool")
        if read.fill is not None:
            for place, extent in zip(places, read.tensor.shape, strict=False):
                inside = tirx.all(inside, place >= index(0), place < nest.size(extent))
        slot: Tir = index(self.order[taps])
        missing = inside
        if self.turning is not None:
            row = places[self.turning]
            # Whatever the row, no slot but one of ours.
            slot = tirx.bitwise_and(row, index(self.slots - 1))
            missing = tirx.all(inside, self.held[slot] != row)
        start = nest.opaque("start", tirx.Select(inside, slot * self.size, self._outside))
        with nest.when(missing):
            if self.turning is not None:
                nest.put(self.held, [slot], places[self.turning])
            self._copy(places, start)
        return start

    def _copy(self, places: list[Tir], start: Tir) -> None:
        """A row into its slot."""
        from tvm import tirx

        nest, view, slope = self.nest, self.view, self.view.slope
        extent = nest.size(view.read.tensor.shape[-1])
        bounds = []
        for part in range(slope):
            base = start + self.part * index(part)
            shift = part + view.low
            low = nest.opaque("low", tirx.min(index(max(0, -(shift // slope))), self.part))
            past = tirx.truncdiv(extent - index(shift) + index(slope - 1), index(slope))
            past = nest.opaque("past", tirx.max(tirx.min(past, self.part), low))
            bounds.append((low, past))
            self._clear(base, low)
            rest = nest.opaque("rest", self.part - past)
            self._clear(base + past, rest)
        if slope == 1:
            self._whole(places, start, *bounds[0])
        else:
            self._split(places, start, bounds)

    def _whole(self, places: list[Tir], start: Tir, low: Tir, past: Tir) -> None:
        """A row as it is."""
        nest = self.nest
        nest.run(nest.opaque("count", past - low), self.lanes, lambda at: self._put(
            start + low + at, self._read(places, low + at, 0)
        ))  # fmt: skip

    def _split(self, places: list[Tir], start: Tir, bounds: list[tuple[Tir, Tir]]) -> None:
        """A row by the remainders of its elements."""
        from tvm import tirx

        nest, slope, lanes = self.nest, self.view.slope, self.lanes

        def singles(part: int, begin: Tir, end: Tir) -> None:
            with nest.loop("at", nest.opaque("count", end - begin)) as at:
                to = start + self.part * index(part) + begin + at
                self._put(to, self._read(places, begin + at, part))

        if storage(self.view.read.dtype) != self.kind.name:
            for part, (begin, end) in enumerate(bounds):
                singles(part, begin, end)
            return
        low = nest.opaque("low", reduce(tirx.max, (b for b, _ in bounds)))
        past = nest.opaque("past", tirx.max(low, reduce(tirx.min, (p for _, p in bounds))))
        vectors = nest.opaque("vectors", tirx.truncdiv(past - low, index(lanes)))
        with nest.loop("vector", vectors) as vector:
            first = nest.bind("first", low + vector * index(lanes))
            from_ = first * index(slope) + index(self.view.low)
            whole = [self._vector(places, from_ + index(n * lanes)) for n in range(slope)]
            for part in range(slope):
                order = [index(part + slope * lane) for lane in range(lanes)]
                to = tirx.Ramp(start + self.part * index(part) + first, index(1), lanes)
                nest.put(self.lines, [to], tirx.Shuffle(whole, order))
        done = nest.opaque("done", low + vectors * index(lanes))
        for part, (begin, end) in enumerate(bounds):
            singles(part, begin, tirx.min(low, end))
            singles(part, done, end)

    def _vector(self, places: list[Tir], first: Tir) -> Tir:
        """Neighbouring elements of a row."""
        from tvm import tirx

        tensor = self.view.read.tensor
        at = tirx.Ramp(first, index(1), self.lanes)
        return self.nest.sources[id(tensor)][(*places, at)]

    def _read(self, places: list[Tir], at: Tir, part: int) -> Tir:
        """Element `at` of a part of a row."""
        place = at * index(self.view.slope) + index(part + self.view.low)
        return self._element(places, place)

    def _element(self, places: list[Tir], place: Tir) -> Tir:
        read = self.view.read
        value = self.nest.emitter.lowering.read(read.tensor, [*places, place])
        return convert(value, read.dtype, self.kind)


def _turning(view: View, moving: Axis) -> int | None:
    """The one dim along which the rows of a window lie, if others stay as the task moves on."""
    leading = view.read.index[:-1]
    wide = [n for n, i in enumerate(leading) if set(free_axes(i)) & set(view.rows)]
    others = [i for n, i in enumerate(leading) if n not in wide]
    apart = all(moving not in free_axes(i) for i in others)
    return wide[0] if len(wide) == 1 and apart else None


def _slots(index_: Expr, view: View) -> int | None:
    """A power of two such that no two rows of a window share a slot; None if that is not small."""
    offsets = [_offset(index_, dict(zip(view.rows, t, strict=True)))
               for t in combinations(view.rows)]  # fmt: skip
    known = [o for o in offsets if o is not None]
    if len(known) < len(offsets):
        return None
    slots = 1 << (max(known) - min(known)).bit_length()
    return slots if slots <= _MOST_SLOTS else None


def _offset(node: Expr, taps: dict[Axis, int]) -> int | None:
    """What taps add to an index; None if that depends on other axes."""
    if not set(free_axes(node)) & set(taps):
        return 0
    if isinstance(node, Binary) and node.op in ("add", "sub"):
        a, b = _offset(node.a, taps), _offset(node.b, taps)
        if a is None or b is None:
            return None
        return a + b if node.op == "add" else a - b
    found = line(node, {a: Line(0, t) for a, t in taps.items()})
    return None if found is None else found.start
