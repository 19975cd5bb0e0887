"""Pointwise stages: every thread some vectors, neighbours side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl.expr import Axis, Stage
from ...dsl.lower import encode
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..nest import static
from ..plain import one_map
from ..rule import Config, Rejection
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
        return one_map(group)

    def default(self, group: Group, caps: Capability) -> PointwiseConfig:
        return PointwiseConfig(min(256, caps.max_threads))

    def space(self, group: Group, caps: Capability) -> Iterator[PointwiseConfig]:
        yield self.default(group, caps)
        for threads in (128, 256, 512):
            for items in (1, 2, 4):
                if threads <= caps.max_threads and (threads, items) != (256, 1):
                    yield PointwiseConfig(threads, items)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: PointwiseConfig
    ) -> Any:
        (stage,) = group.stages
        nest = GridNest(emitter, caps)
        map_stage(nest, stage, config)
        return nest.finish()


def map_stage(nest: GridNest, stage: Stage, config: PointwiseConfig) -> None:
    """A launch that sets every element of a pointwise stage."""
    if not stage.axes:
        with nest.launch(nest.number(1), 1):
            nest.write(stage, [], nest.emitter.lowering.expr(stage.expr, {}))
        return
    *outer, last = stage.axes
    extents = [nest.emitter.size(a.extent) for a in outer]
    length = nest.emitter.size(last.extent)
    vectors = Vectors(nest, last, [stage.expr], [stage])
    steps = nest.ceil_div(length, vectors.lanes)
    total = nest.simple(nest.product(extents) * steps)
    per_block = config.threads * config.items

    def one(item: Any) -> None:
        *rows, step = nest.unflatten(item, [*extents, steps])
        env: dict[Axis, Any] = {a: nest.hidden(a.name, i) for a, i in zip(outer, rows, strict=True)}
        start = nest.opaque("start", step * nest.number(vectors.lanes))

        def body(place: Any, write: Any) -> None:
            value = nest.emitter.lowering.expr(stage.expr, env | {last: place})
            write(stage, encode(value, stage.dtype))

        vectors.cover(start, length, env, body)

    with nest.launch(nest.ceil_div(total, per_block), config.threads) as (block, thread):
        exact = static(total)
        for i in range(config.items):
            offset = nest.number(i * config.threads)
            item = nest.hidden("item", block * nest.number(per_block) + offset + thread)
            if exact is not None and exact % per_block == 0:
                one(item)
            else:
                with nest.when(item < total):
                    one(item)
