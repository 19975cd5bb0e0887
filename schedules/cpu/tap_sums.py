"""Sums over many windows for few taps, the gradient of a kernel: vectors of rows or of groups.

    parallel (block of groups, of rows, of columns):
        for channel, outer tap, block of lines:
            kernels[panel, tap, lane] = the block's part of the kernel, transposed
            planes[column, window.., place] = the block's part of the image, 0 outside
            for panel, tile of columns and windows:
                sums[column, window, lane] += Σ_tap kernels[tap, lane] · planes[tap + window]
        out = epilogue(sums)

In the words of `Windows`: the taps are the many, the windows the few, and a *column* is a batch
index. A sum runs through the taps in order, one task to the end: the bits depend on the sizes
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..capability import Capability
from ..emit import Emitter
from ..group import Group, known
from ..rule import Config, Rejection, check, first_rejection
from ..windows import NEEDS, Windows, group_windows

_MOST_WINDOWS = 1024


@dataclass(frozen=True)
class TapConfig(Config):
    """`tall` columns × `wide` windows × `vectors` sums in registers.

    A task has `rows` and `columns`, a block `lines` × `taps`. `grouped`: groups are the lanes.
    """

    vectors: int
    tall: int
    wide: int
    rows: int
    columns: int
    lines: int
    taps: int
    grouped: bool


class TapSums:
    """Σ over windows, a vector of rows at a time."""

    name = "tap_sums"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        found = group_windows(group)
        if found is None:
            return Rejection(NEEDS)
        windows = math.prod(a.windows for a in found.along)
        taps = math.prod(a.taps for a in found.along)
        return first_rejection(
            check(len(found.along) >= 2, "needs two windowed dims"),
            check(all(a.step > 0 for a in found.along), "needs taps in the order of places"),
            check(all(isinstance(a.extent, int) for a in found.batch), "needs columns known"),
            check(not found.is_static or 4 * windows <= taps, "needs far more taps than windows"),
            check(windows <= _MOST_WINDOWS, f"needs at most {_MOST_WINDOWS} windows"),
        )

    def default(self, group: Group, caps: Capability) -> TapConfig:
        return next(self.space(group, caps))

    def space(self, group: Group, caps: Capability) -> Iterator[TapConfig]:
        found = group_windows(group)
        assert found is not None
        lanes = caps.lanes()
        grouped = found.row_count < lanes and found.group_count > lanes // 2
        for tile in sorted(_tiles(found, caps, grouped))[:8]:
            yield _config(found, caps, tile, grouped)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: TapConfig) -> Any:
        from .tap_nest import TapNest

        found = group_windows(group)
        assert found is not None
        return TapNest(emitter, group, found, caps.lanes(), config).lower()


def column_count(found: Windows) -> int:
    return math.prod(map(known, found.batch))


@dataclass(frozen=True, order=True)
class _Tile:
    """Sums in registers, by what the whole costs in them."""

    cost: float
    vectors: int
    tall: int
    wide: int


def _tiles(found: Windows, caps: Capability, grouped: bool) -> Iterator[_Tile]:
    """Tiles that the registers hold, with one to spare beside that of a number."""
    lanes, columns, last = caps.lanes(), column_count(found), found.along[-1].windows
    folds = caps.folds_numbers
    most = caps.vector_registers - (4 if folds else 2)
    panels = 1 if grouped else -(-found.row_count // lanes)
    for vectors in range(1, 2 if grouped else min(3, panels) + 1):
        for wide in {-(-last // n) for n in range(1, last + 1)}:
            for tall in {-(-columns // -(-columns // n)) for n in range(1, min(columns, most) + 1)}:
                sums = vectors * wide * tall
                if sums + vectors > most:
                    continue
                # Of a step; a sum's next turn comes 4 cycles later, of one or two sums each.
                loads = vectors + wide * tall * (1 if grouped else min(1, 8 / lanes))
                work = max(sums, 4 if folds else 8, loads) + 0.5 + loads / 32
                shares = -(-panels // vectors) * -(-columns // tall) * found.group_count
                most_of_core = -(-shares // caps.cores)
                yield _Tile(work * most_of_core * -(-last // wide), vectors, tall, wide)


def _config(found: Windows, caps: Capability, tile: _Tile, grouped: bool) -> TapConfig:
    lanes, high, last = caps.lanes(), found.along[-2], found.along[-1]
    columns, rows = column_count(found), found.row_count
    vectors, tall, wide = tile.vectors, tile.tall, tile.wide
    width = vectors * lanes
    row_block, column_block = rows, columns
    if not grouped:
        row_block, column_block = _shares(found, caps, width, tall)
    taps = last.taps if last.taps <= 512 else 256
    lines = high.taps
    across = width if grouped else 1
    wide_row = (row_block if grouped else 1) * width if grouped else -(-row_block // width) * width

    def size(lines: int) -> int:
        places = (high.step * (lines - 1) + 1) + (high.windows - 1) * high.stride
        line = last.step * (taps - 1) + 1 + (last.windows - 1) * last.stride
        outer = math.prod(a.windows for a in found.along[:-2])
        return 4 * (column_block * outer * places * line * across + lines * taps * wide_row)

    while lines > 1 and size(lines) > caps.l2_bytes // 2:
        lines = -(-lines // 2)
    return TapConfig(vectors, tall, wide, row_block, column_block, lines, taps, grouped)


def _shares(found: Windows, caps: Capability, width: int, tall: int) -> tuple[int, int]:
    """Rows and columns of a task: enough tasks for the cores, little packed twice."""
    rows, columns = found.row_count, column_count(found)
    panels, tiles = -(-rows // width), -(-columns // tall)
    best: tuple[float, int, int] | None = None
    for p in range(1, panels + 1):
        for t in {-(-tiles // n) for n in range(1, 2 * caps.cores + 1)}:
            tasks = -(-panels // p) * -(-tiles // t) * found.group_count
            if tasks < caps.cores and p * t > 1:
                continue
            rounds = -(-tasks // caps.cores) * caps.cores / tasks
            step = math.prod(a.windows for a in found.along) * rows * columns / 16
            twice = -(-tiles // t) * rows * 1.5 + -(-panels // p) * columns * 0.5
            cost = (step + twice) * rounds
            if best is None or cost < best[0]:
                best = (cost, p * width, t * tall)
    assert best is not None
    return min(best[1], rows), min(best[2], columns)
