"""Pointwise stages: one pass, vectorised along the last axis, parallel over the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..plain import one_map
from ..rule import Config, Rejection
from .loops import fuse_all, vectorize


@dataclass(frozen=True)
class PointwiseConfig(Config):
    """`chunk` elements a task when there is one axis; `unroll` vectors a step."""

    chunk: int = 8192
    unroll: int = 2


class Pointwise:
    """`for rows, last` → `parallel rows: for last by vectors`; a single axis is cut in chunks."""

    name = "pointwise"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return one_map(group)

    def default(self, group: Group, caps: Capability) -> PointwiseConfig:
        return PointwiseConfig()

    def space(self, group: Group, caps: Capability) -> Iterator[PointwiseConfig]:
        yield self.default(group, caps)
        for chunk in (2048, 32768):
            for unroll in (1, 4):
                yield PointwiseConfig(chunk, unroll)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: PointwiseConfig
    ) -> Any:
        (stage,) = group.stages
        made = emitter.pointwise(stage)
        emitter.publish(stage, made)
        sch = emitter.schedule()
        if not stage.axes:
            return sch
        loops = sch.get_loops(sch.get_sblock(made.op.name))
        lanes = caps.lanes()
        if len(loops) == 1:
            outer, inner = sch.split(loops[0], [None, config.chunk])
            sch.parallel(outer)
            vectorize(sch, inner, lanes, config.unroll)
        else:
            sch.parallel(fuse_all(sch, loops[:-1]))
            vectorize(sch, loops[-1], lanes, config.unroll)
        return sch
