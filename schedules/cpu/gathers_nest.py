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
                extents = [nest.size(a.extent) for a in found.channels]
                with nest.loop("channel", nest.product(extents)) as channel:
                    chosen = [nest.bind("at", p) for p in nest.unflatten(channel, extents)]
                    self._channel(env | dict(zip(found.channels, chosen, strict=True)))
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

    def _channel(self, env: dict[Axis, Tir]) -> None:
        from tvm import tirx

        nest, source = self.nest, self.found.source
        sizes = [nest.size(e) for e in source.tensor.shape]
        with nest.choice(reduce(tirx.all, (s > index(0) for s in sizes))) as otherwise:
            nest.run(self.width, self.lanes, lambda at: self._sum(env, at, self._element))
            otherwise()
            if source.fill is not None:
                fill = constant(source.fill, f32)
                with nest.loop("column", self.width) as at:
                    self._sum(env, at, lambda *_: fill)

    def _element(self, env: dict[Axis, Tir], tap: int, at: Tir) -> Tir:
        """What the source has at a tap of a point, the fill value where that is outside."""
        from tvm import tirx

        nest, source = self.nest, self.found.source
        where = iter(table[index(tap), at] for table in self.places)
        places = []
        for n, node in enumerate(source.index):
            if n not in self.moving:
                places.append(nest.value(node, env))
            elif self.flat:
                places.append(next(where) if n == self.moving[-1] else index(0))
            else:
                places.append(next(where))
        value = nest.emitter.lowering.read(source.tensor, places)
        value = convert(value, source.dtype, f32)
        if self.inside is None:
            return value
        inside = self.inside[index(tap), at] != tirx.const(0, "int32")
        return tirx.Select(inside, value, constant(source.fill, f32))

    def _sum(self, env: dict[Axis, Tir], at: Tir, element: Any) -> None:
        terms = (element(env, t, at) * self.weights[index(t), at] for t in range(self.count))
        total = reduce(lambda a, b: a + b, terms)
        here = env | {self.found.points[-1]: at}
        self.nest.results(self.group, here, {id(self.group.stages[0]): total})
