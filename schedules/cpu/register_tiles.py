"""Products of matrices in scratch memory, by tiles of accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .tiling import Tiling, ceil_div, index, real

Tir = Any


@dataclass(frozen=True)
class RegisterTile:
    """`rows` × `vectors` accumulators of `lanes` elements each."""

    rows: int
    vectors: int
    lanes: int


def product(
    nest: Tiling, tile: RegisterTile, rows: Tir, strips: Tir, depth: Tir,
    left: Callable[[Tir, Tir], Tir], right: Callable[[Tir, Tir], Tir], result: Tir,
    start: Callable[[Tir, Tir], Tir] | None = None, first: Tir = 0,
) -> None:  # fmt: skip
    """result[row, column] = start(row, column), or 0, + Σ_k left(row, k) · right(k, column).

    Over `strips` of `vectors` · `lanes` columns from `first` on, and rows up to the next multiple
    of the tile's: the scratch memory has room for those, whatever they hold.
    """
    cells = [(u, v) for u in range(tile.rows) for v in range(tile.vectors)]
    with (
        nest.loop("strip", index(strips)) as strip,
        nest.loop("tile", ceil_div(rows, tile.rows)) as t,
    ):
        acc = dict(zip(cells, nest.registers("acc", len(cells), tile.lanes), strict=True))

        def row(cell: tuple[int, int]) -> Tir:
            return t * index(tile.rows) + index(cell[0])

        def column(cell: tuple[int, int], lane: Tir) -> Tir:
            at = index(first) + strip * index(tile.vectors * tile.lanes)
            return at + index(cell[1] * tile.lanes) + lane

        for cell in cells:
            with nest.vector(tile.lanes) as lane:
                value = real(0.0) if start is None else start(row(cell), column(cell, lane))
                nest.put(acc[cell], [lane], value)
        with nest.loop("k", index(depth)) as k:
            for cell in cells:
                with nest.vector(tile.lanes) as lane:
                    term = left(row(cell), k) * right(k, column(cell, lane))
                    nest.put(acc[cell], [lane], acc[cell][lane] + term)
        for cell in cells:
            with nest.vector(tile.lanes) as lane:
                nest.put(result, [row(cell), column(cell, lane)], acc[cell][lane])
