"""Any other reductions and pointwise stages: right first, parallel where that is free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..capability import Capability
from ..emit import Emitter, masked, reducer
from ..group import Group, is_map
from ..plain import reductions_and_maps
from ..rule import Config, Rejection
from .loops import parallel_all


class Fallback:
    """Each stage a plain loop nest, parallel over its kept axes."""

    name = "fallback"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return reductions_and_maps(group)

    def default(self, group: Group, caps: Capability) -> Config:
        return Config()

    def space(self, group: Group, caps: Capability) -> Iterator[Config]:
        yield self.default(group, caps)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: Config) -> Any:
        names = []
        for stage in group.stages:
            made = emitter.pointwise(stage) if is_map(stage) else _reduction(emitter, stage)
            names.append((made.op.name, len(stage.axes)))
            if stage in group.outputs:
                emitter.publish(stage, made)
        sch = emitter.schedule()
        for name, rank in names:
            block = sch.get_sblock(name)
            loops = sch.get_loops(block)
            if rank:
                parallel_all(sch, loops[:rank])
            if len(loops) > rank:
                # Apart from the loop: a reduction over nothing must still be set.
                sch.decompose_reduction(block, loops[rank])
        return sch


def _reduction(emitter: Emitter, stage: Any) -> Any:
    node = stage.expr
    body, fold = masked(node), reducer(node.op, node.dtype)
    axes = [emitter.reduce_axis(a) for a in node.over]
    bound = dict(zip(node.over, axes, strict=True))
    return emitter.define(stage, lambda *i: fold(emitter.at(body, stage.axes, i, bound), axis=axes))
