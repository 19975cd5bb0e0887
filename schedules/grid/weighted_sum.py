"""The rule for weighted sums: which launches compute them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl.expr import Axis
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection
from ..weighted import Roles, rejection, roles, sums
from .fragments import no_unit
from .nest import GridNest, block_size
from .weighted_layout import configurations, unit_of
from .weighted_matrix import MatrixTiles
from .weighted_scalar import ScalarTiles, shared_bytes
from .weighted_tiles import TiledConfig

MAX_DEPTH = 256
_STATIC_SHARED = 48 * 1024  # what every block may have, without asking for more
_TILES = (TiledConfig(32, 32), TiledConfig(32, 16), TiledConfig(16, 16), TiledConfig(16, 8))


@dataclass(frozen=True)
class PlainConfig(Config):
    """`threads` of a block that has one row."""

    threads: int = 128


class WeightedSums:
    """Tiles of weights in shared memory, a launch for the sums over keys and one for those over
    rows; what does not have the shape of `Roles`, or does not fit, a row a block.

    Where factors are stored in a matrix unit's type it multiplies, with weights rounded to that.
    """

    name = "weighted_sums"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        found = rejection(group)
        if found is None and next(self.space(group, caps), None) is None:
            return Rejection(_lack(_tiles(group), caps), lacking=True)
        return found

    def default(self, group: Group, caps: Capability) -> Config:
        return next(self.space(group, caps))

    def space(self, group: Group, caps: Capability) -> Iterator[Config]:
        found = _tiles(group)
        room = min(caps.shared_bytes, _STATIC_SHARED)
        if found is not None and group.units != "plain":
            yield from configurations(found, caps, room)
        if group.units == "matrix":
            return
        if found is not None:
            depths = [int(f.depth.extent) for f in found.factors]  # type: ignore[arg-type]
            for config in _TILES:
                fits = shared_bytes(config, depths, len(sums(group))) <= room
                if fits and config.threads <= caps.max_threads:
                    yield config
        yield PlainConfig(block_size(caps, 128))

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: Config) -> Any:
        nest = GridNest(emitter, caps)
        if isinstance(config, TiledConfig):
            found = _tiles(group)
            assert found is not None
            _launch(nest, found, config)
            return nest.finish()
        from .weighted_plain import plain

        assert isinstance(config, PlainConfig)
        plain(nest, group, config.threads)
        return nest.finish()


def _launch(nest: GridNest, found: Roles, config: TiledConfig) -> None:
    """The launches of a group."""
    unit = next((u for u in nest.caps.matrix if u.intrinsic == config.unit), None)
    for kept, summed, each in (
        (found.row, found.key, found.by_row), (found.key, found.row, found.by_key),
    ):  # fmt: skip
        if each and unit is not None:
            MatrixTiles(nest, found, config, each, kept, summed, unit).launch()
        elif each:
            ScalarTiles(nest, found, config, each, kept, summed).launch()


def _tiles(group: Group) -> Roles | None:
    """The roles, if tiles can add the sums up: one mask for all, values that are factors."""
    found = roles(group, _short)
    if found is None:
        return None
    masks = {id(s.node.where) for s in (*found.by_row, *found.by_key)}
    keys, rows = {id(f.key) for f in found.factors}, {id(f.row) for f in found.factors}
    factors = all(id(s.node.value) in keys for s in found.by_row) and all(
        id(s.node.value) in rows for s in found.by_key
    )
    return found if len(masks) == 1 and factors else None


def _lack(found: Roles | None, caps: Capability) -> str:
    """Why there are no tiles for a matrix unit."""
    if found is None:
        return f"needs sums of factors of products, of depth 1 … {MAX_DEPTH}"
    if unit_of(found, caps) is None:
        return no_unit(found.factors[0].row, caps)
    depth = max(int(f.depth.extent) for f in found.factors)  # type: ignore[arg-type]
    return (
        f"needs memory and registers for tiles of head size {depth}, got {caps.shared_bytes} bytes"
    )


def _short(axis: Axis) -> bool:
    return isinstance(axis.extent, int) and 0 < axis.extent <= MAX_DEPTH
