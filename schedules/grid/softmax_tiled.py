"""The rule for softmax_sum by tiles on grids: which products, and how large the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...dsl.expr import Axis
from ..capability import Capability, MatrixUnit
from ..emit import Emitter
from ..group import Group, known
from ..rule import Rejection
from ..softmax import Roles, rejection, roles
from .flash import FlashConfig
from .flash_matrix import MatrixFlash, shared_bytes, unit_of
from .flash_plain import PlainFlash, columns_of, shared_elements
from .fragments import no_unit, padded
from .nest import GridNest

_OTHER_REGISTERS = 88  # addresses, counters, elements on their way
_USUAL_REGISTERS = 192  # of a thread of a device that does not say
_MARKS = 32  # keys of a thread, whose masks are the bits of a number
# (rows, keys, columns of a part) for matrix units, the larger first.
_MATRIX = ((64, 64, 64), (64, 32, 32), (32, 32, 32), (16, 32, 32))
# (rows, keys, threads, chunk) for plain arithmetic, the larger first.
_PLAIN = (
    (64, 64, 256, 32), (32, 64, 256, 32), (16, 64, 256, 32), (32, 32, 128, 32), (16, 32, 64, 32),
    (16, 16, 64, 16),
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
        lacking = group.form != ""
        unit = unit_of(sizes, caps)
        if group.units == "matrix" and unit is None:
            return Rejection(no_unit(sizes.node.value, caps), lacking)
        if next(self._configs(group, sizes, caps), None) is None:
            head = max(_sizes(sizes))
            return Rejection(
                f"needs memory and registers for tiles of head size {head}, got "
                f"{caps.shared_bytes} bytes and {_limit(caps)} registers",
                lacking,
            )
        return None

    def default(self, group: Group, caps: Capability) -> FlashConfig:
        return next(self.space(group, caps))

    def space(self, group: Group, caps: Capability) -> Iterator[FlashConfig]:
        found = roles(group, _known)
        assert found is not None, "the rule matched"
        yield from self._configs(group, found, caps)

    def _configs(self, group: Group, found: Roles, caps: Capability) -> Iterator[FlashConfig]:
        unit = unit_of(found, caps)
        if unit is not None and group.units != "plain":
            yield from _matrix(found, unit, caps)
        else:
            yield from _plain(found, caps)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: FlashConfig) -> Any:
        nest = GridNest(emitter, caps)
        found = roles(group, _known)
        assert found is not None, "the rule matched"
        unit = next((u for u in caps.matrix if u.intrinsic == config.unit), None)
        if unit is not None:
            MatrixFlash(nest, group, found, config, unit).lower()
        else:
            PlainFlash(nest, group, found, config).lower()
        return nest.finish()


def _known(axis: Axis) -> bool:
    return isinstance(axis.extent, int) and axis.extent > 0


def _sizes(found: Roles) -> list[int]:
    """The number of columns, then the depth of each product."""
    return [known(a) for a in (found.column, *(p.depth for p in found.products))]


def _plain(found: Roles, caps: Capability) -> Iterator[FlashConfig]:
    """Tiles for plain arithmetic that a device has room for, the larger first."""
    columns, *depths = _sizes(found)
    across = min(16, caps.subgroup or 16)
    for rows, keys, threads, chunk in _PLAIN:
        for resident in (True, False):
            config = FlashConfig(rows, keys, threads * across // 16, across, chunk, resident)
            shared = 4 * shared_elements(config, depths, columns)
            if not caps.shuffle:  # a tree for each row's maximum and sum
                shared += 4 * 2 * rows * across
            fits = config.threads <= caps.max_threads and shared <= caps.shared_bytes
            fits = fits and keys // across <= _MARKS
            if fits and _registers(config, len(depths), columns) <= _limit(caps):
                yield config


def _matrix(found: Roles, unit: MatrixUnit, caps: Capability) -> Iterator[FlashConfig]:
    """Tiles for a matrix unit that a device has room for, the larger first.

    A subgroup has as many rows as a fragment.
    """
    columns, depth = _sizes(found)
    m, n, k = unit.shape
    for rows, keys, part in _MATRIX:
        threads = caps.subgroup * rows // m
        if rows % m or keys % n or keys % k or part % n or not rows <= threads <= caps.max_threads:
            continue
        config = FlashConfig(rows, keys, threads, threads // rows, part, unit=unit.intrinsic)
        if keys // config.across > _MARKS:
            continue
        wide = padded(columns, part) // config.across
        registers = wide + max(keys, part) // n * unit.c + unit.a + _OTHER_REGISTERS
        if registers <= _limit(caps) and (
            shared_bytes(config, unit, depth, columns) <= caps.shared_bytes
        ):
            yield config


def _limit(caps: Capability) -> int:
    """Registers that a thread may have."""
    return caps.registers or _USUAL_REGISTERS


def _registers(config: FlashConfig, products: int, columns: int) -> int:
    """Registers of a thread, roughly."""
    high, near = config.rows * config.across // config.threads, config.keys // config.across
    wide, _ = columns_of(config, columns)
    # As many as there are sums are moved to and fro.
    return 2 * high * (wide + near * max(products, 1)) + wide + _OTHER_REGISTERS
