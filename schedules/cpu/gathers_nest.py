"""The nests of `GatheredSums`."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Axis, Expr
from ...dsl.lower import constant, convert
from ...dsl.walk import free_axes
from ..emit import Emitter
from ..group import Group, known
from ..nest import static
from .gathers import Gathers, GathersConfig
from .taps import combinations
from .tiling import Tiling, index, real

Tir = Any
Env = dict[Axis, Tir]

_TOGETHER = 4  # channels
_UNROLLED = 4  # taps


class _Gathers:
    """What both share: tables of a row of points, channels a few at a time."""

    def __init__(
        self, emitter: Emitter, group: Group, found: Gathers, lanes: int, config: GathersConfig
    ) -> None:
        self.nest = Tiling(emitter)
        self.group, self.found, self.lanes, self.config = group, found, lanes, config
        self.count = math.prod(map(known, found.taps))
        self.sides = list(combinations(found.sides))
        self.place = found.points[-1]
        channels = set(found.channels)
        source = found.source
        self.moving = [n for n, i in enumerate(source.index) if not set(free_axes(i)) & channels]
        self.strides = emitter.strides(source.tensor)
        unit = self.strides is None or static(self.strides[-1]) == 1
        # Neighbours in memory are one index apart: one index is enough.
        self.flat = unit and len(source.index) - 1 in self.moving

    def lower(self) -> Any:
        nest, found = self.nest, self.found
        self.width = nest.opaque("width", nest.size(self.place.extent))
        self.whole = nest.opaque("whole", self.width // index(self.lanes))
        with nest.row_blocks(found.points, self.config.block) as (outer, first, rows):
            self.prepare()
            with nest.loop("row", rows) as row:
                env = outer | {found.points[-2]: nest.bind("at", first + row)}
                with nest.loop("column", self.width) as at:
                    self._tabulate(env | {self.place: at}, at)
                self.row(env)
        return nest.finish()

    def prepare(self) -> None:
        """Memory of a task."""
        nest, width = self.nest, self.nest.size(self.place.extent)
        shape = [self.count, width]
        indices = 1 if self.flat else len(self.moving)
        self.places = [nest.scratch("places", shape, "int64") for _ in range(indices)]
        self.weights = nest.scratch("weights", [len(self.sides) * self.count, width])
        self.inside = None
        if self.found.source.fill is not None:
            self.inside = nest.scratch("inside", shape, "int32")

    def row(self, env: Env) -> None:
        """A row of points, the tables at hand."""
        raise NotImplementedError

    def sums(self, channels: list[Env], first: Tir, width: int) -> None:
        """`width` points for some channels."""
        raise NotImplementedError

    # --- tables ---

    def _tabulate(self, env: Env, at: Tir) -> None:
        """The tables' column of a point; outside, the place is element 0."""
        from tvm import tirx

        nest, source = self.nest, self.found.source
        lowering = nest.emitter.lowering
        for number, taps in enumerate(combinations(self.found.taps)):
            here = env | dict(zip(self.found.taps, map(index, taps), strict=True))
            places = [nest.bind("place", lowering.place(source, n, here)) for n in self.moving]
            if self.inside is not None:
                extents = [nest.size(source.tensor.shape[n]) for n in self.moving]
                inside = reduce(tirx.all, (
                    tirx.all(p >= index(0), p < e) for p, e in zip(places, extents, strict=True)
                ))  # fmt: skip
                nest.put(self.inside, [number, at], inside.astype("int32"))
                inside = self.inside[index(number), at] != tirx.const(0, "int32")
                places = [tirx.Select(inside, p, index(0)) for p in places]
            if self.flat:
                places = [self._flat(places)]
            for table, place in zip(self.places, places, strict=True):
                nest.put(table, [number, at], place)
            for n, side in enumerate(self.sides):
                whole = here | dict(zip(self.found.sides, map(index, side), strict=True))
                weight = self._product(self.found.weights, whole)
                nest.put(self.weights, [n * self.count + number, at], weight)

    def _product(self, factors: tuple[Expr, ...], env: Env) -> Tir:
        values = [self.nest.real(f, env) for f in factors]
        return reduce(lambda a, b: a * b, values) if values else real(1.0)

    def _flat(self, places: list[Tir]) -> Tir:
        """How many elements away a place is."""
        shape = [self.nest.size(e) for e in self.found.source.tensor.shape]
        total: Tir = index(0)
        for place, dim in zip(places, self.moving, strict=True):
            step = self.nest.product(shape[dim + 1 :])
            total = total + place * (step if self.strides is None else self.strides[dim])
        return total

    # --- channels ---

    def channel(self, env: Env, number: Tir) -> Env:
        """`env` with the axes of a channel."""
        nest, axes = self.nest, self.found.channels
        at = nest.unflatten(number, [nest.size(a.extent) for a in axes])
        return env | dict(zip(axes, (nest.bind("at", a) for a in at), strict=True))

    def each_channel(self, env: Env) -> None:
        """`sums` for all points of a row and all channels."""
        nest = self.nest
        count = nest.product([nest.size(a.extent) for a in self.found.channels])
        count = nest.opaque("channels", count)
        grouped = nest.opaque("grouped", count // index(_TOGETHER))
        done = nest.opaque("done", grouped * index(_TOGETHER))
        with nest.loop("group", grouped) as g:
            first = nest.bind("first", g * index(_TOGETHER))
            self._vectors([self.channel(env, first + index(n)) for n in range(_TOGETHER)])
        with nest.loop("channel", nest.opaque("rest", count - done)) as channel:
            self._vectors([self.channel(env, done + channel)])
        done = nest.opaque("done", self.whole * index(self.lanes))
        rest = nest.opaque("rest", self.width - done)
        with nest.loop("channel", count) as channel:
            here = self.channel(env, channel)
            with nest.loop("single", rest) as at:
                self.sums([here], nest.bind("first", done + at), 1)

    def _vectors(self, channels: list[Env]) -> None:
        with self.nest.loop("vector", self.whole) as v:
            self.sums(channels, self.nest.bind("first", v * index(self.lanes)), self.lanes)

    def each_tap(self, width: int, body: Any) -> None:
        """`body(tap)` for all taps."""
        if width == 1 or self.count > _UNROLLED:
            with self.nest.loop("tap", index(self.count)) as tap:
                body(tap)
        else:
            for t in range(self.count):
                body(index(t))

    def values(self, channels: list[Env], tap: Tir, first: Tir, width: int) -> list[Tir]:
        """Registers of what the source has at a tap, one for each channel.

        Places are taken one by one: an address serves all channels.
        """
        nest = self.nest
        made = nest.registers("value", len(channels), width)
        for lane in range(width):
            at = first + index(lane)
            places = [nest.bind("place", table[tap, at]) for table in self.places]
            for env, value in zip(channels, made, strict=True):
                nest.put(value, [lane], self._element(env, places))
        return made

    def masked(self, value: Tir, tap: Tir, at: Tir) -> Tir:
        """A value where it is inside, else the fill value."""
        from tvm import tirx

        fill = self.found.source.fill
        if self.inside is None or fill is None:
            return value
        inside = self.inside[tap, at] != tirx.const(0, "int32")
        return tirx.Select(inside, value, constant(fill, f32))

    def _element(self, env: Env, places: list[Tir]) -> Tir:
        """What the source has for a channel at a place, as f32."""
        nest, source = self.nest, self.found.source
        left = iter(places)
        at = []
        for n, node in enumerate(source.index):
            if n not in self.moving:
                at.append(nest.value(node, env))
            elif self.flat and n != self.moving[-1]:
                at.append(index(0))
            else:
                at.append(next(left))
        value = nest.emitter.lowering.read(source.tensor, at)
        return convert(value, source.dtype, f32)

    def has_elements(self) -> Tir:
        """Whether there is an element 0."""
        from tvm import tirx

        sizes = [self.nest.size(e) for e in self.found.source.tensor.shape]
        return reduce(tirx.all, (s > index(0) for s in sizes))

    def write(self, env: Env, total: Tir) -> None:
        self.nest.results(self.group, env, {id(self.group.stages[0]): total})


class KeptChannels(_Gathers):
    """A sum for each channel."""

    def row(self, env: Env) -> None:
        nest = self.nest
        with nest.choice(self.has_elements()) as otherwise:
            self.each_channel(env)
            otherwise()
            count = nest.product([nest.size(a.extent) for a in self.found.channels])
            with nest.loop("channel", count) as channel, nest.loop("at", self.width) as at:
                here = self.channel(env, channel) | {self.place: at}
                self.write(here, self._outside(at))

    def _outside(self, at: Tir) -> Tir:
        """The sum where there is no element: of the fill value, else of nothing."""
        fill = self.found.source.fill
        if fill is None:
            return real(0.0)
        terms = (constant(fill, f32) * self.weights[index(t), at] for t in range(self.count))
        return reduce(lambda a, b: a + b, terms)

    def sums(self, channels: list[Env], first: Tir, width: int) -> None:
        nest = self.nest
        totals = nest.registers("total", len(channels), width)
        for total in totals:
            with nest.vector(width) as lane:
                nest.put(total, [lane], real(0.0))

        def add(tap: Tir) -> None:
            values = self.values(channels, tap, first, width)
            for total, value in zip(totals, values, strict=True):
                with nest.vector(width) as lane:
                    term = self.masked(value[lane], tap, first + lane)
                    term = term * self.weights[tap, first + lane]
                    nest.put(total, [lane], total[lane] + term)

        self.each_tap(width, add)
        for env, total in zip(channels, totals, strict=True):
            with nest.vector(width) as lane:
                self.write(env | {self.place: first + lane}, total[lane])


class SummedChannels(_Gathers):
    """One sum over all channels for each of the sides."""

    def prepare(self) -> None:
        super().prepare()
        shape = [len(self.sides), self.nest.size(self.place.extent)]
        self.totals = self.nest.scratch("totals", shape)

    def row(self, env: Env) -> None:
        nest = self.nest
        for n in range(len(self.sides)):
            nest.fill(self.totals, [n, index(0)], self.width, self.lanes, real(0.0))
        with nest.choice(self.has_elements()) as otherwise:
            self.each_channel(env)
            otherwise()
            self._outside(env)
        with nest.loop("column", self.width) as at:
            for n, side in enumerate(self.sides):
                own = dict(zip(self.found.sides, map(index, side), strict=True))
                self.write(env | own | {self.place: at}, self.totals[index(n), at])

    def _outside(self, env: Env) -> None:
        """The sums where there is no element: of the fill value, if there are channels."""
        nest, fill = self.nest, self.found.source.fill
        count = nest.product([nest.size(a.extent) for a in self.found.channels])
        if fill is None:
            return
        with nest.loop("channel", count) as channel, nest.loop("at", self.width) as at:
            scale = self._product(self.found.scales, self.channel(env, channel) | {self.place: at})
            for n in range(len(self.sides)):
                for t in range(self.count):
                    weight = self.weights[index(n * self.count + t), at]
                    term = constant(fill, f32) * scale * weight
                    nest.put(self.totals, [n, at], self.totals[index(n), at] + term)

    def sums(self, channels: list[Env], first: Tir, width: int) -> None:
        nest, sides = self.nest, range(len(self.sides))
        totals = nest.registers("total", len(sides), width)
        scales = nest.registers("scale", len(channels), width)
        for n in sides:
            with nest.vector(width) as lane:
                nest.put(totals[n], [lane], self.totals[index(n), first + lane])
        for env, scale in zip(channels, scales, strict=True):
            with nest.vector(width) as lane:
                here = env | {self.place: first + lane}
                nest.put(scale, [lane], self._product(self.found.scales, here))

        def add(tap: Tir) -> None:
            values = self.values(channels, tap, first, width)
            (part,) = nest.registers("part", 1, width)
            with nest.vector(width) as lane:
                terms = (self.masked(v[lane], tap, first + lane) * s[lane]
                         for v, s in zip(values, scales, strict=True))  # fmt: skip
                nest.put(part, [lane], reduce(lambda a, b: a + b, terms))
            for n in sides:
                with nest.vector(width) as lane:
                    weight = self.weights[index(n * self.count) + tap, first + lane]
                    nest.put(totals[n], [lane], totals[n][lane] + part[lane] * weight)

        self.each_tap(width, add)
        for n in sides:
            with nest.vector(width) as lane:
                nest.put(self.totals, [n, first + lane], totals[n][lane])
