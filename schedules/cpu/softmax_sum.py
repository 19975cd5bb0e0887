"""The rule for softmax_sum: which nest computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...dsl.expr import Axis
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection, check
from ..softmax import Roles, rejection, roles

TILE_BYTES = 128 * 1024
MAX_DEPTH = 1024
FEW_ROWS, FEW_KEYS = 8, 64


@dataclass(frozen=True)
class SoftmaxSumConfig(Config):
    """The tile and the block.

    `groups` of `vectors` of rows are a tile, `keys` a block; `keys_unroll` × `vectors` accumulators
    make the scores; sums, values and a weight fill `registers`.
    """

    vectors: int = 4
    keys: int = 128
    keys_unroll: int = 4
    registers: int = 32
    groups: int = 1


def _short(axis: Axis) -> bool:
    return isinstance(axis.extent, int) and 0 < axis.extent <= MAX_DEPTH


def _few(found: Roles) -> bool:
    """Whether there are never more rows than a key can be taken for straight from memory."""
    rows = found.row.extent
    return isinstance(rows, int) and 0 < rows <= FEW_ROWS


class SoftmaxSumRows:
    """Tiles of rows run in parallel; each goes over the keys in blocks that stay in cache.

    Row maxima and sums are carried from block to block (the sums so far are rescaled when a
    maximum grows), so memory does not depend on the number of keys. Where rows are known to be few,
    keys and values are not copied. What does not have the shape of `Roles` is computed row by row,
    plainly.
    """

    name = "softmax_sum_rows"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        found = rejection(group)
        if found is not None or not group.form:
            return found
        tiled = group.form == "tiled" and roles(group, _short) is not None
        return check(tiled, f"needs one key axis, head sizes of at most {MAX_DEPTH}", lacking=True)

    def default(self, group: Group, caps: Capability) -> SoftmaxSumConfig:
        wide = caps.vector_registers >= 32
        found = roles(group, _short)
        keys = 128
        if found is not None:
            axes = (found.column, *(p.depth for p in found.products))
            depth = sum(a.extent for a in axes if isinstance(a.extent, int))
            while keys > 16 and keys * depth * 4 > TILE_BYTES:
                keys //= 2
            if _few(found):
                keys = FEW_KEYS
        # A register beside the accumulators for a key, three for the rows.
        return SoftmaxSumConfig(4, keys) if wide else SoftmaxSumConfig(3, keys, 4, 16, 4)

    def space(self, group: Group, caps: Capability) -> Iterator[SoftmaxSumConfig]:
        first = self.default(group, caps)
        yield first
        for vectors in (1, 2, 4):
            for keys in (16, 64, 128, 256):
                config = replace(first, vectors=vectors, keys=keys)
                if config != first:
                    yield config

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: SoftmaxSumConfig
    ) -> Any:
        found = roles(group, _short)
        if found is None:
            from .softmax_plain import plain

            return plain(emitter, group)
        if _few(found):
            from .softmax_few import Few

            return Few(emitter, group, found, caps.lanes(), config).lower()
        from .softmax_tiles import Tiles

        return Tiles(emitter, group, found, caps.lanes(), config).lower()
