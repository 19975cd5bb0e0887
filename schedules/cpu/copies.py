"""Copies of rows in scratch memory, and whether all that was copied is finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..terms import ABS_BITS, INF_BITS, int32
from .tiling import Tiling, index

Tir = Any


class Magnitudes:
    """The greatest magnitudes of what was looked at, a lane each, as the bits of an f32.

    The bits of magnitudes are in the order of these, a NaN's after infinity's.
    """

    def __init__(self, nest: Tiling, lanes: int, name: str = "flags") -> None:
        self.nest, self.lanes = nest, lanes
        (self.bits,) = nest.registers(name, 1, lanes, "int32")

    def clear(self) -> None:
        with self.nest.vector(self.lanes) as lane:
            self.nest.put(self.bits, [lane], int32(0))

    def take_over(self, other: Magnitudes) -> None:
        """Become those of `other`."""
        with self.nest.vector(self.lanes) as lane:
            self.nest.put(self.bits, [lane], other.bits[lane])

    def look(self, width: int, element: Callable[[Tir], Tir]) -> None:
        """Take in `element(lane)`, an f32 in memory, for `width` lanes."""
        from tvm import tirx

        with self.nest.vector(width) as lane:
            bits = tirx.reinterpret("int32", element(lane))
            bits = tirx.bitwise_and(bits, int32(ABS_BITS))
            self.nest.put(self.bits, [lane], tirx.max(self.bits[lane], bits))

    def finite(self) -> Tir:
        """Whether all is."""
        return self.greatest() < int32(INF_BITS)

    def greatest(self) -> Tir:
        """The greatest of all lanes."""
        from tvm import tirx

        nest = self.nest
        (worst,) = nest.registers("worst", 1, 1, "int32")
        nest.put(worst, [0], int32(0))
        with nest.loop("lane", index(self.lanes)) as lane:
            nest.put(worst, [0], tirx.max(worst[index(0)], self.bits[lane]))
        return worst[index(0)]


def copy_rows(
    nest: Tiling, to: Tir, rows: Tir, columns: int, lanes: int,
    element: Callable[[Tir, Tir], Tir], seen: Magnitudes | None = None,
) -> None:  # fmt: skip
    """to[row, column] = element(row, column), f32; `seen` looks at them."""
    with nest.loop("row", rows) as row:

        def copy(at: Tir, width: int) -> None:
            with nest.vector(width) as lane:
                nest.put(to, [row, at + lane], element(row, at + lane))
            if seen is not None:
                seen.look(width, lambda lane: to[row, at + lane])

        nest.strip(columns, lanes, copy)
