"""What a grid can choose about a contraction, and the heuristic's choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...dsl.expr import Axis
from ..capability import WIDE_BYTES, Capability, MatrixUnit
from ..roles import Roles
from ..rule import Config, Rejection, check, first_rejection
from .fragments import unit_for

SHORT = 8  # rows that are served without tiles
_SUM_BYTES = 4
_OTHER_REGISTERS = 56  # addresses, counters, a tile on its way
_USUAL = 2048  # a size that is not known when compiling is taken to be this one

# (tile, depth, share), the larger first: they read less, the smaller fill more of a device.
_PLAIN = (
    ((128, 128), 16, (8, 8)), ((64, 64), 16, (4, 4)), ((32, 64), 16, (4, 4)),
    ((64, 32), 16, (4, 4)), ((32, 32), 16, (4, 2)), ((16, 64), 16, (2, 4)),
    ((64, 16), 16, (4, 2)), ((16, 16), 16, (2, 2)),
)  # fmt: skip
_MATRIX = (
    ((128, 128), 32, (64, 64)), ((128, 64), 32, (64, 32)), ((64, 128), 32, (32, 64)),
    ((64, 64), 32, (32, 32)), ((32, 64), 32, (16, 32)), ((64, 32), 32, (32, 16)),
    ((32, 32), 32, (16, 16)), ((16, 64), 32, (16, 16)), ((64, 16), 32, (16, 16)),
)  # fmt: skip


@dataclass(frozen=True)
class ContractionConfig(Config):
    """A block computes `tile` = (m, n) sums, `depth` of k at a time.

    `unit` is the matrix unit's id, "" for plain arithmetic. A subgroup (of a matrix unit) or a
    thread computes `share` = (m, n) of the tile. With asynchronous copies `stages` tiles of k are
    in shared memory at once. Up to `short` rows are served by a launch of its own, without tiles.
    """

    tile: tuple[int, int]
    depth: int
    share: tuple[int, int]
    unit: str = ""
    stages: int = 2
    short: int = SHORT

    @property
    def workers(self) -> int:
        """Threads or subgroups of a block."""
        return (self.tile[0] // self.share[0]) * (self.tile[1] // self.share[1])


def default(found: Roles, caps: Capability) -> ContractionConfig:
    """The largest tile that the product fills and of which there is one for every core."""
    fitting = [c for c in configurations(found, caps) if rejection(c, caps) is None]
    unit = any(c.unit for c in fitting)
    fitting = [c for c in fitting if bool(c.unit) == unit]
    assert fitting, "the smallest tile of all fits every device"
    filled = [c for c in fitting if _filled(c, found)] or fitting[-1:]
    return next((c for c in filled if _blocks(c, found) >= caps.cores), filled[-1])


def configurations(found: Roles, caps: Capability) -> Iterator[ContractionConfig]:
    """What is worth a thought, the larger first, matrix units before plain arithmetic."""
    unit = unit_for((found.a, found.b), caps)
    if unit is not None:
        for tile, depth, share in _MATRIX:
            shares = [share]
            if caps.subgroup < 64 and tile == (128, 128):
                shares = [(64, 32), (32, 64)]  # so that a block has 256 threads
            yield from (ContractionConfig(tile, depth, s, unit.intrinsic) for s in shares)
    yield from (ContractionConfig(*sizes) for sizes in _PLAIN)


def variants(base: ContractionConfig, caps: Capability) -> Iterator[ContractionConfig]:
    """A configuration with other depths and numbers of stages."""
    yield base
    if base.unit:
        for depth in (16, 32, 64):
            for stages in (2, 3, 4) if caps.async_copy else (2,):
                yield replace(base, depth=depth, stages=stages)
    else:
        yield replace(base, depth=base.depth // 2)


def rejection(config: ContractionConfig, caps: Capability) -> Rejection | None:
    """Why a device cannot run a configuration."""
    unit = next((u for u in caps.matrix if u.intrinsic == config.unit), None)
    threads = config.workers * (caps.subgroup if unit else 1)
    shared, registers = _shared(config, unit), _registers(config, unit, caps)
    fits = all(s % u == 0 for s, u in zip(config.share, unit.shape, strict=False)) if unit else True
    return first_rejection(
        check(fits and (unit is None or config.depth % unit.shape[2] == 0),
              f"needs shares of whole fragments of {unit.shape if unit else ()}"),
        check(threads <= caps.max_threads,
              f"needs {threads} threads a block, max {caps.max_threads}"),
        check(shared <= caps.shared_bytes,
              f"needs {shared} bytes of shared memory, max {caps.shared_bytes}"),
        check(not caps.registers or registers <= caps.registers,
              f"needs about {registers} registers a thread, max {caps.registers}"),
    )  # fmt: skip


def _shared(config: ContractionConfig, unit: MatrixUnit | None) -> int:
    """Bytes of shared memory, whichever way the factors' tiles lie."""
    size = 2 if unit else _SUM_BYTES
    pad = WIDE_BYTES // size
    tiles = sum(s * config.depth + pad * max(s, config.depth) for s in config.tile)
    down, across = (t // s for t, s in zip(config.tile, config.share, strict=True))
    if unit:
        part = down * unit.shape[0] * across * unit.shape[1]
        return config.stages * tiles * size + part * _SUM_BYTES
    part = down * min(4, config.share[0]) * (config.tile[1] + pad)
    return max(2 * tiles + 1, part) * size


def _registers(config: ContractionConfig, unit: MatrixUnit | None, caps: Capability) -> int:
    """Registers of a thread, roughly: sums, one fragment or element of each row and column."""
    rows, columns = config.share
    if unit is None:
        return rows * columns + rows + columns + _OTHER_REGISTERS
    fragments = rows // unit.shape[0] * unit.a + columns // unit.shape[1] * unit.b
    return rows * columns // caps.subgroup + fragments // 2 + _OTHER_REGISTERS


def _filled(config: ContractionConfig, found: Roles) -> bool:
    """Whether no more than half of a tile along m or n would lie outside."""
    sizes = (known((found.m,)), known((found.n,)))
    return all(size is None or 2 * size > t for t, size in zip(config.tile, sizes, strict=True))


def _blocks(config: ContractionConfig, found: Roles) -> int:
    m, n = known((found.m,)) or _USUAL, known((found.n,)) or _USUAL
    batch = prod(known((a,)) or 1 for a in found.batch)
    return -(-m // config.tile[0]) * -(-n // config.tile[1]) * batch


def known(axes: Sequence[Axis]) -> int | None:
    """How many points axes have together, if that is known when compiling."""
    sizes = [a.extent for a in axes if isinstance(a.extent, int)]
    return prod(sizes) if len(sizes) == len(axes) else None
