"""The rule for softmax_sum by tiles on grids: which products, and how large the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...dsl.expr import Axis
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Rejection, check
from ..softmax import Roles, rejection, roles
from .flash import FlashConfig
from .flash_plain import PlainFlash, columns_of, shared_elements
from .nest import GridNest

_OTHER_REGISTERS = 72  # addresses, counters, elements on their way
# (rows, keys, threads, chunk) for plain arithmetic, the larger first.
_PLAIN = (
    (64, 64, 256, 32), (64, 32, 256, 32), (32, 32, 128, 32), (16, 32, 64, 32), (16, 16, 64, 16),
)  # fmt: skip


class TiledSoftmaxSum:
    """One launch: a block goes over the keys for a tile of rows, its sums in registers.

    Row maxima and sums are carried from block to block of keys, so memory does not grow with
    their number.
    """

    name = "softmax_sum_tiled"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        found = rejection(group)
        if found is not None:
            return found
        if group.form not in ("", "tiled"):
            return Rejection("computes tiles")
        sizes = roles(group, _known)
        if sizes is None:
            return Rejection("needs one key axis, and head sizes known when compiling",
                             group.form != "")  # fmt: skip
        fits = next(self._configs(group, sizes, caps), None)
        head = sizes.column.extent
        return check(fits is not None, f"needs registers for tiles of head size {head}, "
                     f"got {caps.registers or 'an unknown number'}", group.form != "")  # fmt: skip

    def default(self, group: Group, caps: Capability) -> FlashConfig:
        return next(self.space(group, caps))

    def space(self, group: Group, caps: Capability) -> Iterator[FlashConfig]:
        found = roles(group, _known)
        assert found is not None, "the rule matched"
        yield from self._configs(group, found, caps)

    def _configs(self, group: Group, found: Roles, caps: Capability) -> Iterator[FlashConfig]:
        yield from _plain(found, caps)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: FlashConfig) -> Any:
        nest = GridNest(emitter, caps)
        found = roles(group, _known)
        assert found is not None, "the rule matched"
        PlainFlash(nest, group, found, config).lower()
        return nest.finish()


def _known(axis: Axis) -> bool:
    return isinstance(axis.extent, int) and axis.extent > 0


def _plain(found: Roles, caps: Capability) -> Iterator[FlashConfig]:
    """Tiles for plain arithmetic that a device has room for, the larger first."""
    depths = [int(p.depth.extent) for p in found.products]  # type: ignore[arg-type]
    columns = int(found.column.extent)  # type: ignore[arg-type]
    across = min(16, caps.subgroup or 16)
    for rows, keys, threads, chunk in _PLAIN:
        for resident in (True, False):
            config = FlashConfig(rows, keys, threads * across // 16, across, chunk, resident)
            shared = 4 * shared_elements(config, depths, columns)
            fits = config.threads <= caps.max_threads and shared <= caps.shared_bytes
            if fits and _registers(config, len(depths), columns) <= (caps.registers or 128):
                yield config


def _registers(config: FlashConfig, products: int, columns: int) -> int:
    """Registers of a thread, roughly."""
    high, near = config.rows * config.across // config.threads, config.keys // config.across
    wide, _ = columns_of(config, columns)
    return high * (wide + near * (products + 1)) + high + max(near, wide) + _OTHER_REGISTERS
