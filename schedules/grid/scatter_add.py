"""Sums grouped by an index: each block owns a rectangle of the result and looks for its points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.expr import Axis
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection
from ..scatter import column as column_of
from ..scatter import rejection
from ..terms import both, float32, int32
from .nest import GridNest, block_size

Tir = Any


@dataclass(frozen=True)
class ScatterAddConfig(Config):
    """A block owns `targets` × `width` elements; each of its `threads` looks at `points` at a time.

    Values of `ahead` points are fetched before they are added.
    """

    threads: int = 128
    width: int = 32
    targets: int = 64
    points: int = 4
    ahead: int = 4


class ScatterAdd:
    """`for blocks of targets × columns: for pieces of the points: list those of the block; add`.

    The sums of a block stay in shared memory. An element is summed by one thread in the order of
    the points: no atomics, and the bits do not depend on the grid. An index outside the result
    is on no list.
    """

    name = "scatter_add"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return rejection(group)

    def default(self, group: Group, caps: Capability) -> ScatterAddConfig:
        (stage,) = group.stages
        node = stage.expr
        assert isinstance(node, forms.ScatterAdd)
        column = column_of(stage.axes, node)
        width = _least_power(column, 32)
        threads = block_size(caps, 128)
        return ScatterAddConfig(threads, width, max(64, threads // width))

    def space(self, group: Group, caps: Capability) -> Iterator[ScatterAddConfig]:
        first = self.default(group, caps)
        yield first
        for threads in (128, 256):
            for targets in (16, 32, 128):
                if threads <= caps.max_threads and targets * first.width * 4 <= 16 * 1024:
                    yield ScatterAddConfig(threads, first.width, targets)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: ScatterAddConfig
    ) -> Any:
        return _Sums(emitter, group, caps, config).build()


def _least_power(axis: Axis | None, most: int) -> int:
    """The least power of two that covers an axis, at most `most`; 1 without an axis."""
    if axis is None:
        return 1
    width = 1
    while width < most and (not isinstance(axis.extent, int) or width < axis.extent):
        width *= 2
    return width


class _Sums:
    """One lowering of a scatter_add."""

    def __init__(
        self, emitter: Emitter, group: Group, caps: Capability, config: ScatterAddConfig
    ) -> None:
        (stage,) = group.stages
        node = stage.expr
        assert isinstance(node, forms.ScatterAdd)
        self.nest, self.stage, self.node, self.config = GridNest(emitter, caps), stage, node, config
        self.size, self.at = emitter.size, emitter.lowering.expr
        self.column = column_of(stage.axes, node)
        self.kept = [a for a in stage.axes if a is not node.target and a is not self.column]
        self.env: dict[Axis, Tir] = {}

    def build(self) -> Any:
        nest, config = self.nest, self.config
        extents = [self.size(a.extent) for a in self.kept]
        columns = nest.number(1) if self.column is None else self.size(self.column.extent)
        targets = self.size(self.node.target.extent)
        tiles = nest.ceil_div(columns, config.width)
        ranges = nest.ceil_div(targets, config.targets)
        extents += [ranges, tiles]
        with nest.launch(nest.simple(nest.product(extents)), config.threads) as (block, thread):
            *index, span, tile = nest.unflatten(block, extents)
            for axis, value in zip(self.kept, index, strict=True):
                self.env[axis] = nest.opaque(axis.name, value)
            self.lane = nest.bind("lane", thread % nest.number(config.width))
            self.team = nest.bind("team", thread // nest.number(config.width))
            self.first = nest.opaque("first", span * nest.number(config.targets))
            self.limit = nest.opaque("limit", targets)
            if self.column is not None:
                place = nest.opaque("column", tile * nest.number(config.width) + self.lane)
                self.env[self.column] = place
                self.inside = nest.bind("inside", place < columns)
            self._sums()
        return nest.finish()

    def _sums(self) -> None:
        nest, config = self.nest, self.config
        teams = config.threads // config.width
        self.teams = nest.number(teams)
        self.sums = nest.shared(
            "sums", [nest.number(config.targets), nest.number(config.width)], "float32"
        )
        self._mine(lambda local: nest.store(self.sums, [local, self.lane], float32(0.0)))
        self._points()

        def publish(local: Tir) -> None:
            env = self.env | {self.node.target: self.first + local}
            with nest.when(self._within(self.first + local < self.limit)):
                nest.write(self.stage, [env[a] for a in self.stage.axes],
                           self.sums[local, self.lane])  # fmt: skip

        self._mine(publish)

    def _within(self, condition: Tir) -> Tir:
        """`condition`, and that the thread has a column."""
        return condition if self.column is None else both(condition, self.inside)

    def _mine(self, body: Any) -> None:
        """`body(target within the block)` for those of this thread."""
        nest = self.nest
        steps = -(-self.config.targets // (self.config.threads // self.config.width))
        with nest.loop("own", nest.number(steps)) as i:
            local = nest.bind("local", i * self.teams + self.team)
            if self.config.targets % (self.config.threads // self.config.width):
                with nest.when(local < nest.number(self.config.targets)):
                    body(local)
            else:
                body(local)

    def _points(self) -> None:
        """Every point in order, a piece at a time: list the block's, then add their values."""
        nest, config = self.nest, self.config
        extents = [nest.opaque(a.name, self.size(a.extent)) for a in self.node.over]
        total = nest.opaque("points", nest.product(extents))
        piece = config.threads * config.points
        self.listed = nest.shared("listed", [nest.number(piece)], "int32")
        self.goals = nest.shared("goals", [nest.number(piece)], "int32")
        self.ends = nest.shared("ends", [nest.number(2), nest.number(config.threads)], "int32")
        with nest.loop("piece", nest.ceil_div(total, piece)) as number:
            start = nest.bind("start", number * nest.number(piece))
            count = self._list(start, total, extents)
            nest.barrier()
            self._add(start, count, extents)
            nest.barrier()

    def _over(self, point: Tir, extents: Sequence[Tir]) -> dict[Axis, Tir]:
        return dict(zip(self.node.over, self.nest.unflatten(point, extents), strict=True))

    def _list(self, start: Tir, total: Tir, extents: Sequence[Tir]) -> Tir:
        """The points of the block in a piece, in order, to shared memory; how many these are."""
        nest, config, zero = self.nest, self.config, self.nest.number(0)
        locals_ = nest.private("locals", [nest.number(config.points)], "int32")
        found = nest.private("found", [], "int32")
        nest.store(found, [zero], int32(0))
        mine = nest.bind("mine", nest.thread * nest.number(config.points))
        for u in range(config.points):
            offset = nest.number(u)
            nest.store(locals_, [offset], int32(-1))
            point = nest.bind("point", start + mine + offset)
            with nest.when(point < total):
                env = self.env | self._over(point, extents)
                goal = nest.bind("goal", self.at(self.node.at, env))
                local = nest.bind("local", goal - self.first)
                fits = both(local >= zero, local < nest.number(config.targets),
                                goal >= zero, goal < self.limit)  # fmt: skip
                with nest.when(fits):
                    nest.store(locals_, [offset], local.astype("int32"))
                    nest.store(found, [zero], found[zero] + int32(1))
        end, count = self._ends(found[zero])
        place = nest.private("place", [], "int32")
        nest.store(place, [zero], end - found[zero])
        for u in range(config.points):
            offset = nest.number(u)
            with nest.when(locals_[offset] >= int32(0)):
                slot = nest.bind("slot", place[zero].astype("int64"))
                nest.store(self.listed, [slot], (mine + offset).astype("int32"))
                nest.store(self.goals, [slot], locals_[offset])
                nest.store(place, [zero], place[zero] + int32(1))
        return count

    def _ends(self, count: Tir) -> tuple[Tir, Tir]:
        """Sums of `count` over the threads up to this one, and over all."""
        nest, zero = self.nest, self.nest.number(0)
        side, step = 0, 1
        nest.store(self.ends, [zero, nest.thread], count)
        nest.barrier()
        while step < self.config.threads:
            here, there = nest.number(side), nest.number(1 - side)
            have = self.ends[here, nest.thread]
            with nest.choice(nest.thread >= nest.number(step)) as otherwise:
                before = self.ends[here, nest.thread - nest.number(step)]
                nest.store(self.ends, [there, nest.thread], have + before)
                otherwise()
                nest.store(self.ends, [there, nest.thread], have)
            nest.barrier()
            side, step = 1 - side, step * 2
        last = self.ends[nest.number(side), nest.number(self.config.threads - 1)]
        end = nest.bind("end", self.ends[nest.number(side), nest.thread])
        return end, nest.bind("count", last.astype("int64"))

    def _add(self, start: Tir, count: Tir, extents: Sequence[Tir]) -> None:
        """The listed values, in order, to the sums that this thread owns."""
        from tvm import tirx

        nest, ahead = self.nest, self.config.ahead
        values = nest.private("values", [nest.number(ahead)], "float32")
        places = nest.private("places", [nest.number(ahead)], "int32")
        with nest.loop("batch", nest.ceil_div(count, ahead)) as batch:
            for u in range(ahead):
                cell = [nest.number(u)]
                entry = nest.bind("entry", batch * nest.number(ahead) + nest.number(u))
                nest.store(places, cell, int32(-1))
                with nest.when(self._within(entry < count)):
                    local = nest.bind("local", self.goals[entry])
                    own = tirx.truncmod(local.astype("int64"), self.teams).equal(self.team)
                    with nest.when(own):
                        point = start + self.listed[entry].astype("int64")
                        env = self.env | self._over(nest.bind("point", point), extents)
                        env[self.node.target] = self.first + local.astype("int64")
                        nest.store(values, cell, self.at(self.node.value, env))
                        nest.store(places, cell, local)
            for u in range(ahead):
                place = places[nest.number(u)]
                with nest.when(place >= int32(0)):
                    at = [place.astype("int64"), self.lane]
                    nest.store(self.sums, at, self.sums[tuple(at)] + values[nest.number(u)])
