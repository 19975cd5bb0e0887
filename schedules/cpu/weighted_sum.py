"""The rule for weighted sums: which nest computes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Axis
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection
from ..weighted import Roles, rejection, roles
from .weighted_block import WeightedSumConfig
from .weighted_tiles import Tiles

TILE_BYTES = 512 * 1024
MAX_DEPTH = 1024


class WeightedSums:
    """Tiles of weights, each computed once and added to all the sums; memory for tiles only.

    What does not have the shape of `Roles` is computed row by row, plainly.
    """

    name = "weighted_sums"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return rejection(group)

    def default(self, group: Group, caps: Capability) -> Config:
        found = tiled(group)
        if found is None:
            return Config()
        keys, rows = 128, 64
        depth = sum(f.depth.extent for f in found.factors if isinstance(f.depth.extent, int))
        while keys > 32 and 4 * (4 * keys + 2 * rows) * depth > TILE_BYTES:
            keys //= 2
        return WeightedSumConfig(rows, keys, 4, 4 if caps.vector_registers >= 32 else 2)

    def space(self, group: Group, caps: Capability) -> Iterator[Config]:
        first = self.default(group, caps)
        yield first
        if isinstance(first, WeightedSumConfig):
            for rows in (32, 64, 128):
                for keys in (64, 128, 256):
                    config = WeightedSumConfig(rows, keys, first.high, first.wide)
                    if config != first:
                        yield config

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: Config) -> Any:
        found = tiled(group)
        if found is None or not isinstance(config, WeightedSumConfig):
            from .weighted_plain import plain

            return plain(emitter, group)
        return Tiles(emitter, found, caps.lanes(), config).lower()


def tiled(group: Group) -> Roles | None:
    """The roles, if tiles can add the sums up.

    One mask serves all of them, and those over keys are added up in the memory of their results.
    """
    found = roles(group, _short)
    if found is None:
        return None
    masks = {id(s.node.where) for s in (*found.by_row, *found.by_key)}
    in_place = all(s.result is s.stage and s.stage.dtype == f32 for s in found.by_row)
    return found if len(masks) == 1 and in_place else None


def _short(axis: Axis) -> bool:
    return isinstance(axis.extent, int) and 0 < axis.extent <= MAX_DEPTH
