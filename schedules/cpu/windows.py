"""Sums over windows: vectors of windows, rows in registers.

    parallel (batch.., outer windows, group, block of windows):
        planes[channel, tap.., phase] = the block's part of the image, 0 outside
        for tile of rows:
            sums[row, window] = Σ_{channel, taps} kernel[row] · planes[.. + tap, window]
            out = epilogue(sums)

The last two windowed dims make up a block. A plane has the padding in it and its lines joined, so
that one displacement of the whole block is a tap, whatever the line a window lies in; what is
between the lines is computed and left out. A stride of s splits a plane in s phases. Where channels
or rows are innermost in memory, packing and finishing transpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection, check, first_rejection
from ..windows import NEEDS, Along, Windows, group_windows, known


@dataclass(frozen=True)
class WindowsConfig(Config):
    """`rows` × `vectors` sums in registers; a block is `lines` × `columns` windows."""

    rows: int
    vectors: int
    lines: int
    columns: int


@dataclass(frozen=True)
class Dim:
    """A windowed dim within a block of `count` windows."""

    along: Along
    count: int

    @property
    def phases(self) -> int:
        return self.along.stride if self.along.taps > 1 else 1

    @property
    def step(self) -> int:
        """Image places from one element of a phase to the next."""
        return self.along.stride

    @property
    def length(self) -> int:
        """Elements of a phase."""
        return self.count + self.along.reach // self.step

    def displacement(self, tap: int) -> tuple[int, int]:
        """(phase, element) at which the first window has a tap."""
        a = self.along
        place = a.step * tap - min(0, a.step * (a.taps - 1))
        return place % self.step, place // self.step


class WindowSums:
    """Σ over channels and taps for vectors of neighbouring windows."""

    name = "windows"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        found = group_windows(group)
        if found is None:
            return Rejection(NEEDS)
        windows = math.prod(a.windows for a in found.along)
        innermost = group.stages[-1].axes[-1] is found.along[-1].window
        return first_rejection(
            check(found.is_static, "needs a number of channels known"),
            check(len(found.along) >= 2, "needs two windowed dims"),
            check(windows > 1, "needs more than one window"),
            check(
                innermost or windows >= caps.lanes(),
                "needs the windows of the last dim innermost, or a vector of windows",
            ),
        )

    def default(self, group: Group, caps: Capability) -> WindowsConfig:
        return next(self.space(group, caps))

    def space(self, group: Group, caps: Capability) -> Iterator[WindowsConfig]:
        found = group_windows(group)
        assert found is not None
        tried = list(_candidates(found, caps))
        yield from sorted(tried, key=lambda c: cost(found, c, caps))[:16]

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: WindowsConfig) -> Any:
        from .window_nest import WindowNest

        found = group_windows(group)
        assert found is not None
        return WindowNest(emitter, group, found, caps.lanes(), config).lower()


def _candidates(found: Windows, caps: Capability) -> Iterator[WindowsConfig]:
    lines, columns = (a.windows for a in found.along[-2:])
    most = caps.vector_registers - 4
    heights = sorted({min(h, found.row_count) for h in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)})
    for width in {-(-columns // n) for n in range(1, max(2, -(-columns // 256) + 1))}:
        if width > 512:
            continue
        for line in {-(-lines // n) for n in range(1, lines + 1)}:
            for rows in heights:
                for vectors in range(1, 9):
                    if rows * vectors + vectors <= most:
                        yield WindowsConfig(rows, vectors, line, width)


def cost(found: Windows, config: WindowsConfig, caps: Capability) -> float:
    """About how many cycles the blocks of one image take."""
    lanes, rows = caps.lanes(), found.row_count
    counts = (config.lines, config.columns)
    high, wide = (Dim(a, n) for a, n in zip(found.along[-2:], counts, strict=True))
    vectors = -(-((config.lines - 1) * wide.length + config.columns) // lanes)
    channels = math.prod(known(a) for a in found.channels)
    depth = channels * math.prod(a.taps for a in found.along)
    plane = math.prod(a.taps for a in found.along[:-2]) * math.prod(
        d.phases * d.length for d in (high, wide)
    )
    blocks = math.prod(-(-a.windows // n) for a, n in zip(found.along[-2:], counts, strict=True))

    # Of a step: a sum's next turn comes 4 cycles later; a vector from two lines is two loads.
    sums, across = config.rows * config.vectors, config.vectors
    work = max(sums, 4, 2 * across + 0.5 * config.rows) + 0.5
    planes = 4 * channels * plane
    if planes + 4 * config.rows * vectors * lanes > caps.l1_bytes * 5 // 8:
        near = planes <= caps.l2_bytes // 2
        work += (2 if near else 4) * across / wide.along.taps
    if 4 * config.rows * depth > caps.l1_bytes // 2:
        work += config.rows / (8 if 4 * rows * depth <= caps.l2_bytes // 2 else 2)
    tiles = -(-rows // config.rows) * -(-vectors // across)
    pack = channels * plane / lanes * (1.5 if wide.phases == 1 else 16)
    finish = 2 * rows * config.lines * -(-config.columns // lanes)
    idle = 1.2 if blocks * found.group_count < 2 * caps.cores and config.lines > 1 else 1.0
    return (
        (tiles * (depth * work + 8 * sums) + pack + finish + 500)
        * blocks
        * found.group_count
        * idle
    )
