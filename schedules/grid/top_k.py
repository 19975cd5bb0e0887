"""The k greatest of a row: rounds in which the threads of the row agree on the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.expr import Axis
from ...dsl.lower import select
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection
from ..selection import Keys, rejection
from ..terms import both, either, least
from .nest import GridNest, block_size

Tir = Any
_FAR = 2**62  # past every place


@dataclass(frozen=True)
class TopKConfig(Config):
    """`threads` a row, `rows` rows a block."""

    threads: int = 256
    rows: int = 1


class TopK:
    """`for rows: for rank: the greatest of the threads' candidates; its thread finds another`.

    The order is total: greater keys first, of equal ones the lower place. What is taken next is
    the first after what was taken last, so nothing is marked or moved, and only the thread that
    gave its candidate away looks through its part of the row again.
    """

    name = "top_k"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return rejection(group)

    def default(self, group: Group, caps: Capability) -> TopKConfig:
        """Short rows share a block, long ones of known length get a larger one."""
        node = group.stages[0].expr
        assert isinstance(node, forms.TopK)
        length = node.along.extent
        most = block_size(caps, 256)
        if not isinstance(length, int):
            return TopKConfig(most)
        if length > 16 * most:
            return TopKConfig(block_size(caps, 1024))
        threads = min(most, max(1, caps.subgroup))
        while threads < most and threads * 4 < length:
            threads *= 2
        return TopKConfig(threads, max(1, block_size(caps, 128) // threads))

    def space(self, group: Group, caps: Capability) -> Iterator[TopKConfig]:
        first = self.default(group, caps)
        yield first
        for threads in (32, 128, 256, 512, 1024):
            if threads <= caps.max_threads and threads != first.threads:
                yield TopKConfig(threads, max(1, 128 // threads))

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: TopKConfig) -> Any:
        return _Selection(emitter, group, caps, config).build()


class _Selection:
    """One lowering of a top_k."""

    def __init__(
        self, emitter: Emitter, group: Group, caps: Capability, config: TopKConfig
    ) -> None:
        node = group.stages[0].expr
        assert isinstance(node, forms.TopK)
        self.nest, self.node, self.stages = GridNest(emitter, caps), node, group.stages
        self.size, self.expr = emitter.size, emitter.lowering.expr
        self.config, self.order = config, Keys(node.score.dtype)
        self.env: dict[Axis, Tir] = {}

    def build(self) -> Any:
        nest, threads = self.nest, self.nest.number(self.config.threads)
        rows = [a for a in self.stages[0].axes if a is not self.node.rank]
        extents = [self.size(a.extent) for a in rows]
        total = nest.simple(nest.product(extents))
        blocks = nest.ceil_div(total, self.config.rows)
        with nest.launch(blocks, self.config.threads * self.config.rows) as (block, thread):
            row = block
            if self.config.rows > 1:
                row = nest.bind("row", block * nest.number(self.config.rows) + thread // threads)
            self.exists = row < total
            self.member = nest.bind("member", thread % threads)
            # A block's last rows may not exist; their threads take part in what all do together.
            row = nest.bind("row", least(row, total - nest.number(1)))
            for axis, value in zip(rows, nest.unflatten(row, extents), strict=True):
                self.env[axis] = nest.opaque(axis.name, value)
            self._row()
        return nest.finish()

    def _row(self) -> None:
        nest, zero = self.nest, self.nest.number(0)
        self.count = nest.opaque("count", self.size(self.node.along.extent))
        self.best = nest.private("best", [], self.order.type)
        self.place = nest.private("place", [], "int64")
        self._look(self.order.greatest(), nest.number(-1))
        with nest.loop("slot", self.size(self.node.rank.extent)) as slot:
            own = self.place[zero]
            key = nest.reduce("max", self.best[zero], self.config.threads)
            mine = self.best[zero].equal(key)
            place = nest.reduce("min", select(mine, own, nest.number(_FAR)), self.config.threads)
            with nest.when(both(mine, own.equal(place))):
                with nest.when(both(self.exists, place < self.count)):
                    self._publish(slot, place)
                self._look(key, place)

    def _look(self, key: Tir, place: Tir) -> None:
        """The thread's first element after (`key`, `place`) becomes its candidate."""
        nest, zero = self.nest, self.nest.number(0)
        step = self.config.threads
        nest.store(self.best, [zero], self.order.least())
        nest.store(self.place, [zero], nest.number(_FAR))
        last = nest.bind("last", key)
        with nest.loop("part", nest.ceil_div(self.count, step)) as i:
            at = nest.bind("at", i * nest.number(step) + self.member)
            with nest.when(at < self.count):
                fresh = nest.bind("fresh", self._key(at))
                after = either(fresh < last, both(fresh.equal(last), at > place))
                # Places ascend: of equal keys the first stays.
                better = either(fresh > self.best[zero], self.place[zero].equal(nest.number(_FAR)))
                with nest.when(both(after, better)):
                    nest.store(self.best, [zero], fresh)
                    nest.store(self.place, [zero], at)

    def _score(self, place: Tir) -> Tir:
        return self.expr(self.node.score, self.env | {self.node.along: place})

    def _key(self, place: Tir) -> Tir:
        return self.order.key(self._score(place))

    def _publish(self, slot: Tir, place: Tir) -> None:
        for stage in self.stages:
            index = [slot if a is self.node.rank else self.env[a] for a in stage.axes]
            taken = stage.expr.take  # type: ignore[attr-defined]
            self.nest.write(stage, index, place if taken == "index" else self._score(place))
