"""The k greatest of a row: one pass over it with a short sorted list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.expr import Axis
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection, check, first_rejection
from ..selection import Keys, rejection
from .direct import CoreNest

LONGEST = 4096


@dataclass(frozen=True)
class TopKConfig(Config):
    """`block` elements whose greatest is compared with the least of the list at a time."""

    block: int = 64


class TopK:
    """`parallel rows: for blocks of the row: if its greatest belongs in the list: insert each`.

    Elements are compared as integers that order as the scores do, NaN greatest and −0 equal to 0.
    The list holds keys and places only; values are read again at the end. An element enters
    only past strictly smaller keys, hence ties go to the lower index.
    """

    name = "top_k"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        head = group.stages[0].expr
        k = head.rank.extent if isinstance(head, forms.TopK) else 0
        return first_rejection(
            rejection(group),
            check(isinstance(k, int) and k <= LONGEST,
                  f"needs a static k of at most {LONGEST}"),
        )  # fmt: skip

    def default(self, group: Group, caps: Capability) -> TopKConfig:
        return TopKConfig()

    def space(self, group: Group, caps: Capability) -> Iterator[TopKConfig]:
        for block in (64, 32, 128):
            yield TopKConfig(block)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: TopKConfig) -> Any:
        return _Selection(emitter, group, config).build()


class _Selection:
    """One lowering of a top_k."""

    def __init__(self, emitter: Emitter, group: Group, config: TopKConfig) -> None:
        node = group.stages[0].expr
        assert isinstance(node, forms.TopK) and isinstance(node.rank.extent, int)
        self.nest, self.node, self.stages = CoreNest(emitter), node, group.stages
        self.size, self.expr = emitter.size, emitter.lowering.expr
        self.k = self.nest.number(node.rank.extent)
        self.block = self.nest.number(config.block)
        self.order = Keys(node.score.dtype)
        self.env: dict[Axis, Any] = {}

    def build(self) -> Any:
        nest, node = self.nest, self.node
        rows = tuple(a for a in self.stages[0].axes if a is not node.rank)
        extents = [self.size(a.extent) for a in rows]
        with nest.loop("row", nest.product(extents), "parallel") as row:
            for axis, value in zip(rows, nest.unflatten(row, extents), strict=True):
                self.env[axis] = nest.opaque(axis.name, value)
            self._row(rows)
        return nest.finish()

    def _row(self, rows: Sequence[Axis]) -> None:
        from tvm import tirx

        nest, count = self.nest, self.size(self.node.along.extent)
        self.keys = nest.private("keys", [self.k], self.order.type)
        self.places = nest.private("places", [self.k], "int64")
        self.block_keys = nest.private("block_keys", [self.block], self.order.type)
        self.best = nest.private("best", [], self.order.type)
        self.hole = nest.private("hole", [], "int64")
        with nest.loop("slot", self.k) as slot:
            nest.store(self.keys, [slot], self.order.least())
            nest.store(self.places, [slot], nest.number(0))
        first = nest.opaque("first", tirx.min(self.k, count))
        with nest.loop("early", first) as early:
            self._insert(self._key(early), early, early)
        rest = nest.opaque("rest", count - first)
        blocks = nest.opaque("blocks", tirx.floordiv(rest, self.block))
        with nest.loop("chunk", blocks) as chunk:
            self._block(first + chunk * self.block)
        with nest.loop("late", rest - blocks * self.block) as late:
            place = first + blocks * self.block + late
            nest.store(self.best, [nest.number(0)], self._key(place))
            self._offer(self.best[nest.number(0)], place)
        self._publish(rows)

    def _block(self, start: Any) -> None:
        """Most blocks of a long row hold nothing for the list: their greatest tells."""
        from tvm import tirx

        nest, zero = self.nest, self.nest.number(0)
        nest.store(self.best, [zero], self.order.least())
        with nest.loop("j", self.block) as j:
            key = self._key(start + j)
            nest.store(self.block_keys, [j], key)
            nest.store(self.best, [zero], tirx.max(self.best[zero], self.block_keys[j]))
        with (
            nest.when(self.best[zero] > self.keys[self.k - 1]),
            nest.loop("j", self.block) as j,
        ):
            self._offer(self.block_keys[j], start + j)

    def _offer(self, key: Any, place: Any) -> None:
        with self.nest.when(key > self.keys[self.k - 1]):
            self._insert(key, place, self.k - 1)

    def _insert(self, key: Any, place: Any, end: Any) -> None:
        """Move smaller keys down, the one at `end` out, and put `key` above them."""
        from tvm import tirx

        nest, zero = self.nest, self.nest.number(0)
        new = nest.bind("new", key)
        nest.store(self.hole, [zero], end)
        above = self.hole[zero] - 1
        smaller = tirx.if_then_else(
            self.hole[zero] > zero, self.keys[above] < new, tirx.const(False, "bool")
        )
        with nest.repeat(smaller):
            nest.store(self.keys, [self.hole[zero]], self.keys[above])
            nest.store(self.places, [self.hole[zero]], self.places[above])
            nest.store(self.hole, [zero], above)
        nest.store(self.keys, [self.hole[zero]], new)
        nest.store(self.places, [self.hole[zero]], place)

    def _score(self, place: Any) -> Any:
        return self.expr(self.node.score, self.env | {self.node.along: place})

    def _key(self, place: Any) -> Any:
        return self.order.key(self._score(place))

    def _publish(self, rows: Sequence[Axis]) -> None:
        nest, node = self.nest, self.node
        with nest.loop("slot", self.k) as slot:
            place = self.places[slot]
            for stage in self.stages:
                index = [slot if a is node.rank else self.env[a] for a in stage.axes]
                taken = stage.expr.take  # type: ignore[attr-defined]
                nest.write(stage, index, place if taken == "index" else self._score(place))
