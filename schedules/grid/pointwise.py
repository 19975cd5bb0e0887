"""Pointwise stages: every thread some vectors, neighbours side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl.expr import Axis, Stage
from ..capability import Capability
from ..emit import Emitter
from ..group import Group, is_map
from ..nest import static
from ..rule import Config, Rejection, check, first_rejection
from .nest import GridNest
from .vectors import Vectors


@dataclass(frozen=True)
class PointwiseConfig(Config):
    """`threads` a block, each with `items` vectors, a block's width apart."""

    threads: int = 256
    items: int = 1


class Pointwise:
    """`for rows, last` → blocks of threads over rows × vectors of the last axis."""

    name = "pointwise"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return first_rejection(
            check(len(group.stages) == 1, "needs one stage"),
            check(is_map(group.stages[0]), "needs a pointwise stage"),
        )

    def default(self, group: Group, caps: Capability) -> PointwiseConfig:
        return PointwiseConfig(min(256, caps.max_threads))

    def space(self, group: Group, caps: Capability) -> Iterator[PointwiseConfig]:
        yield self.default(group, caps)
        for threads in (128, 512):
            for items in (1, 2, 4):
                if threads <= caps.max_threads:
                    yield PointwiseConfig(threads, items)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: PointwiseConfig
    ) -> Any:
        (stage,) = group.stages
        nest = GridNest(emitter, caps)
        if stage.axes:
            _map(nest, stage, config)
        else:
            with nest.launch(nest.number(1), 1):
                nest.write(stage, [], emitter.lowering.expr(stage.expr, {}))
        return nest.finish()


def _map(nest: GridNest, stage: Stage, config: PointwiseConfig) -> None:
    from tvm import tirx

    *outer, last = stage.axes
    extents = [nest.emitter.size(a.extent) for a in outer]
    length = nest.emitter.size(last.extent)
    vectors = Vectors(nest, last, [stage.expr], [stage])
    lanes = nest.number(vectors.lanes)
    steps = nest.simple(tirx.truncdiv(length + lanes - nest.number(1), lanes))
    total = nest.simple(nest.product(extents) * steps)
    block_items = nest.number(config.threads * config.items)
    blocks = nest.simple(tirx.truncdiv(total + block_items - nest.number(1), block_items))

    def one(item: Any) -> None:
        *rows, step = nest.unflatten(item, [*extents, steps])
        env: dict[Axis, Any] = {a: nest.opaque(a.name, i) for a, i in zip(outer, rows, strict=True)}
        start = nest.opaque("start", step * lanes)

        def body(place: Any, write: Any) -> None:
            write(stage, nest.emitter.lowering.expr(stage.expr, env | {last: place}))

        vectors.cover(start, length, env, body)

    with nest.launch(blocks, config.threads) as (block, thread):
        for i in range(config.items):
            offset = nest.number(i * config.threads)
            item = nest.opaque("item", block * block_items + offset + thread)
            exact = static(total)
            if exact is not None and exact % int(block_items.value) == 0:
                one(item)
            else:
                with nest.when(item < total):
                    one(item)
