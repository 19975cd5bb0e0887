"""How subgroups share a tile of weighted sums by matrix units, and which tiles fit a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..capability import WIDE_BYTES, Capability, MatrixUnit
from ..group import known
from ..roles import Product
from ..weighted import Roles, Sum
from .fragments import padded, unit_for
from .weighted_tiles import TiledConfig

_BYTES = 2  # of an operand
PAD = WIDE_BYTES // _BYTES  # elements after a row: threads down a column find different banks
PRODUCT_PAD = 4
_MARKS = 32  # results of a thread, whose marks are the bits of a number
_OTHER_REGISTERS = 88  # addresses, counters, elements on their way
_USUAL_REGISTERS = 192  # of a thread of a device that does not say
# (kept, summed, subgroups) of a tile, the larger first.
_TILES = ((32, 32, 4), (32, 16, 4), (16, 16, 4))


def unit_of(found: Roles, caps: Capability) -> MatrixUnit | None:
    """The unit that multiplies all factors as they are stored; the values are among them."""
    return unit_for([n for f in found.factors for n in (f.row, f.key)], caps)


@dataclass(frozen=True)
class Layout:
    """How subgroups share a tile: `down` × `across` of them, each with a strip of kept places.

    Sums leave the registers a `part` of the columns at a time.
    """

    config: TiledConfig
    unit: MatrixUnit
    down: int
    across: int

    @property
    def part(self) -> int:
        return max(self.config.summed, self.across * self.unit.shape[1])

    def width(self, factor: Product) -> int:
        """The depth of a factor, filled up with zeros."""
        return padded(known(factor.depth), self.part)

    def shared_bytes(self, found: Roles) -> int:
        """Shared memory of a block, in either launch."""
        kept, summed = self.config.kept, self.config.summed
        tiles = (kept + summed) * sum(self.width(f) + PAD for f in found.factors)
        weights = max(len(weights_of(s)) for s in (found.by_row, found.by_key))
        tiles += weights * kept * (summed + PAD)
        return _BYTES * tiles + 4 * self.products(len(found.factors)) + WIDE_BYTES

    def products(self, count: int) -> int:
        """f32 numbers of the room for the products, or for a part of the sums."""
        products = count * (self.config.summed + PRODUCT_PAD)
        return self.config.kept * max(products, self.part + PRODUCT_PAD)

    def registers(self, found: Roles) -> int:
        """Registers of a thread, roughly."""
        widths = {id(n): self.width(f) for f in found.factors for n in (f.row, f.key)}
        columns = max(sum(widths[id(s.node.value)] for s in each)
                      for each in (found.by_row, found.by_key))  # fmt: skip
        held = columns // (self.across * self.unit.shape[1]) * self.unit.c
        return held + self.unit.a + self.unit.b + _OTHER_REGISTERS

    def marks(self, found: Roles) -> int:
        """Results of a thread."""
        return self.config.kept * max(map(self.width, found.factors)) // self.config.threads


def weights_of(sums: Sequence[Sum]) -> dict[int, None]:
    """The weights of sums, by identity: some may share one."""
    return dict.fromkeys(id(s.node.weight) for s in sums)


def layout_of(config: TiledConfig, unit: MatrixUnit, caps: Capability) -> Layout:
    down = config.kept // unit.shape[0]
    return Layout(config, unit, down, config.threads // caps.subgroup // down)


def configurations(found: Roles, caps: Capability, room: int) -> Iterator[TiledConfig]:
    """Tiles for a matrix unit that `room` bytes of shared memory hold, the larger first."""
    unit = unit_of(found, caps)
    if unit is None:
        return
    m, n, k = unit.shape
    for kept, summed, subgroups in _TILES:
        if kept % m or summed % n or summed % k or subgroups % (kept // m):
            continue
        config = TiledConfig(kept, summed, subgroups * caps.subgroup, unit.intrinsic)
        layout = layout_of(config, unit, caps)
        if layout.part % (layout.across * n) or layout.part % k:
            continue
        fits = config.threads <= caps.max_threads and layout.marks(found) <= _MARKS
        fits = fits and layout.registers(found) <= (caps.registers or _USUAL_REGISTERS)
        if fits and layout.shared_bytes(found) <= room:
            yield config
