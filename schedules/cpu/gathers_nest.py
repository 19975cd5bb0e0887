"""The nest of `GatheredSums`."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Axis
from ...dsl.lower import constant, convert
from ...dsl.walk import free_axes
from ..emit import Emitter
from ..group import Group
from ..nest import static
from .gathers import Gathers, GathersConfig
from .taps import combinations
from .tiling import Tiling, index, real

Tir = Any

_TOGETHER = 4  # channels
_UNROLLED = 4  # taps


class GathersNest:
    """Emits the nest for one group."""

    def __init__(
        self, emitter: Emitter, group: Group, found: Gathers, lanes: int, config: GathersConfig
    ) -> None:
        self.nest = Tiling(emitter)
        self.group, self.found, self.lanes, self.config = group, found, lanes, config
        self.count = math.prod(int(a.extent) for a in found.taps)  # type: ignore[arg-type]
        channels = set(found.channels)
        source = found.source
        self.moving = [n for n, i in enumerate(source.index) if not set(free_axes(i)) & channels]
        self.strides = emitter.strides(source.tensor)
        unit = self.strides is None or static(self.strides[-1]) == 1
        # Neighbours in memory are one index apart: one index is enough.
        self.flat = unit and len(source.index) - 1 in self.moving

    def lower(self) -> Any:
        nest, found = self.nest, self.found
        place = found.points[-1]
        self.width = nest.opaque("width", nest.size(place.extent))
        with nest.row_blocks(found.points, self.config.block) as (outer, first, rows):
            self._prepare()
            with nest.loop("row", rows) as row:
                env = outer | {found.points[-2]: nest.bind("at", first + row)}
                with nest.loop("column", self.width) as at:
                    self._tabulate(env | {place: at}, at)
                self._channels(env)
        return nest.finish()

    def _prepare(self) -> None:
        nest = self.nest
        shape = [self.count, nest.size(self.found.points[-1].extent)]
        indices = 1 if self.flat else len(self.moving)
        self.places = [nest.scratch("places", shape, "int64") for _ in range(indices)]
        self.weights = nest.scratch("weights", shape)
        self.inside = None
        if self.found.source.fill is not None:
            self.inside = nest.scratch("inside", shape, "int32")

    def _tabulate(self, env: dict[Axis, Tir], at: Tir) -> None:
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
            factors = (nest.real(f, here) for f in self.found.factors)
            weight = reduce(lambda a, b: a * b, factors, real(1.0))
            nest.put(self.weights, [number, at], weight)

    def _flat(self, places: list[Tir]) -> Tir:
        """How many elements away a place is."""
        shape = [self.nest.size(e) for e in self.found.source.tensor.shape]
        total: Tir = index(0)
        for place, dim in zip(places, self.moving, strict=True):
            step = self.nest.product(shape[dim + 1 :])
            total = total + place * (step if self.strides is None else self.strides[dim])
        return total

    def _channels(self, env: dict[Axis, Tir]) -> None:
        """A row of points for every channel."""
        from tvm import tirx

        nest, source = self.nest, self.found.source
        sizes = [nest.size(e) for e in source.tensor.shape]
        extents = [nest.size(a.extent) for a in self.found.channels]
        count = nest.opaque("channels", nest.product(extents))

        def chosen(channel: Tir) -> dict[Axis, Tir]:
            at = [nest.bind("at", p) for p in nest.unflatten(channel, extents)]
            return env | dict(zip(self.found.channels, at, strict=True))

        with nest.choice(reduce(tirx.all, (s > index(0) for s in sizes))) as otherwise:
            whole = nest.opaque("whole", self.width // index(self.lanes))
            grouped = nest.opaque("grouped", count // index(_TOGETHER))
            done = nest.opaque("done", grouped * index(_TOGETHER))
            with nest.loop("group", grouped) as g:
                first = nest.bind("first", g * index(_TOGETHER))
                self._vectors([chosen(first + index(n)) for n in range(_TOGETHER)], whole)
            with nest.loop("channel", nest.opaque("rest", count - done)) as channel:
                self._vectors([chosen(done + channel)], whole)
            done = nest.opaque("done", whole * index(self.lanes))
            rest = nest.opaque("rest", self.width - done)
            with nest.loop("channel", count) as channel:
                here = chosen(channel)
                with nest.loop("single", rest) as at:
                    self._sums([here], nest.bind("first", done + at), 1)
            otherwise()
            if source.fill is not None:
                fill = constant(source.fill, f32)
                with nest.loop("channel", count) as channel:
                    here = chosen(channel)
                    with nest.loop("column", self.width) as at:
                        terms = (fill * self.weights[index(t), at] for t in range(self.count))
                        self._write(here, at, reduce(lambda a, b: a + b, terms))

    def _vectors(self, channels: list[dict[Axis, Tir]], whole: Tir) -> None:
        """`whole` vectors of points for some channels."""
        with self.nest.loop("vector", whole) as v:
            first = self.nest.bind("first", v * index(self.lanes))
            self._sums(channels, first, self.lanes)

    def _sums(self, channels: list[dict[Axis, Tir]], first: Tir, width: int) -> None:
        """`width` neighbouring points for some channels."""
        nest, count = self.nest, len(channels)
        totals = nest.registers("total", count, width)
        for total in totals:
            with nest.vector(width) as lane:
                nest.put(total, [lane], real(0.0))
        if width == 1 or self.count > _UNROLLED:
            with nest.loop("tap", index(self.count)) as tap:
                self._tap(channels, totals, tap, first, width)
        else:
            for t in range(self.count):
                self._tap(channels, totals, index(t), first, width)
        for env, total in zip(channels, totals, strict=True):
            with nest.vector(width) as lane:
                self._write(env, first + lane, total[lane])

    def _tap(
        self, channels: list[dict[Axis, Tir]], totals: list[Tir], tap: Tir, first: Tir, width: int
    ) -> None:
        """One tap into all sums. Places are taken one by one: an address serves all channels."""
        from tvm import tirx

        nest, source = self.nest, self.found.source
        values = nest.registers("value", len(channels), width)
        for lane in range(width):
            at = first + index(lane)
            places = [nest.bind("place", table[tap, at]) for table in self.places]
            for env, value in zip(channels, values, strict=True):
                nest.put(value, [lane], self._element(env, places))
        for total, value in zip(totals, values, strict=True):
            with nest.vector(width) as lane:
                found = value[lane]
                if self.inside is not None:
                    inside = self.inside[tap, first + lane] != tirx.const(0, "int32")
                    found = tirx.Select(inside, found, constant(source.fill, f32))
                nest.put(total, [lane], total[lane] + found * self.weights[tap, first + lane])

    def _element(self, env: dict[Axis, Tir], places: list[Tir]) -> Tir:
        """What the source has for a channel at a place, as f32."""
        nest, source = self.nest, self.found.source
        left = iter(places)
        index_ = []
        for n, node in enumerate(source.index):
            if n not in self.moving:
                index_.append(nest.value(node, env))
            elif self.flat and n != self.moving[-1]:
                index_.append(index(0))
            else:
                index_.append(next(left))
        value = nest.emitter.lowering.read(source.tensor, index_)
        return convert(value, source.dtype, f32)

    def _write(self, env: dict[Axis, Tir], at: Tir, total: Tir) -> None:
        here = env | {self.found.points[-1]: at}
        self.nest.results(self.group, here, {id(self.group.stages[0]): total})
