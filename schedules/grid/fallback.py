"""Any other reductions and pointwise stages: each a launch of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...dsl.expr import Stage
from ..capability import Capability
from ..emit import Emitter
from ..group import Group, is_map
from ..plain import reductions_and_maps
from ..roles import roles
from ..rule import Config, Rejection
from .columns import ColumnsConfig, reduce_columns
from .contraction import Contraction, multiply
from .nest import GridNest, block_size
from .passes import kept_axis
from .pointwise import PointwiseConfig, map_stage
from .rows import RowsConfig, reduce_rows


class Fallback:
    """`stage; stage; …` → a launch each, what lies between them in the workspace."""

    name = "fallback"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return reductions_and_maps(group)

    def default(self, group: Group, caps: Capability) -> Config:
        return Config()

    def space(self, group: Group, caps: Capability) -> Iterator[Config]:
        yield self.default(group, caps)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: Config) -> Any:
        nest = GridNest(emitter, caps)
        threads = block_size(caps, 256)
        for stage in group.stages:
            if stage not in group.outputs:
                nest.keep(stage)
            compute(nest, stage, threads)
        return nest.finish()


def compute(nest: GridNest, stage: Stage, threads: int) -> None:
    """The launches of one reduction or pointwise stage, which from then on is read from memory."""
    alone = Group(stage.name, (stage,), (stage,))
    if is_map(stage):
        map_stage(nest, stage, PointwiseConfig(threads))
    elif roles(alone) is not None:
        multiply(nest, alone, Contraction().default(alone, nest.caps))
    elif kept_axis(stage) is not None:
        reduce_columns(nest, stage, ColumnsConfig(threads))
    else:
        reduce_rows(nest, [stage], [stage], stage.axes, RowsConfig())
    made = nest.sources[id(stage)] = nest.targets[id(stage)]
    nest.reader(stage, made)
