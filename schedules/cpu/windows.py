"""Sums over windows: vectors of windows, rows in registers.

    parallel (batch.., outer windows, group, block of windows):
        planes[channel, tap.., phase] = the block's part of the image, 0 outside
        for tile of rows, for strip of windows:
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
from ..group import Group, known
from ..rule import Config, Rejection, check, first_rejection
from ..windows import NEEDS, Along, Windows, group_windows


@dataclass(frozen=True)
class WindowsConfig(Config):
    """`rows` × `vectors` sums in registers; a block is `lines` × `columns` windows.

    `strips`: all rows of a strip of windows before the next strip, rather than all strips of a tile
    of rows: the image's part stays in the first cache, and the kernel passes by.
    """

    rows: int
    vectors: int
    lines: int
    columns: int
    strips: bool


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
    # One register of few is left for a number of the kernel; where there are many, numbers are
    # operands in memory.
    most = caps.vector_registers - (4 if caps.folds_numbers else 1)
    heights = sorted({min(h, found.row_count) for h in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)})
    for width in {-(-columns // n) for n in range(1, max(2, -(-columns // 256) + 1))}:
        if width > 512:
            continue
        for line in {-(-lines // n) for n in range(1, lines + 1)}:
            for rows in heights:
                for vectors in range(1, 9):
                    if rows * vectors + vectors > most:
                        continue
                    yield WindowsConfig(rows, vectors, line, width, False)
                    if rows < found.row_count:
                        yield WindowsConfig(rows, vectors, line, width, True)


def cost(found: Windows, config: WindowsConfig, caps: Capability) -> float:
    """About how long the blocks of one image take, in multiply-adds of a vector."""
    lanes, rows = caps.lanes(), found.row_count
    counts = (config.lines, config.columns)
    high, wide = (Dim(a, n) for a, n in zip(found.along[-2:], counts, strict=True))
    vectors = -(-((config.lines - 1) * wide.length + config.columns) // lanes)
    channels = math.prod(known(a) for a in found.channels)
    depth = channels * math.prod(a.taps for a in found.along)
    outer = math.prod(a.taps for a in found.along[:-2])
    plane = outer * math.prod(d.phases * d.length for d in (high, wide))
    blocks = math.prod(-(-a.windows // n) for a, n in zip(found.along[-2:], counts, strict=True))

    # Of a step: a sum's next turn comes 4 cycles later, of one or two sums each; a vector that
    # starts anywhere often is of two lines, and then two loads.
    sums, across = config.rows * config.vectors, config.vectors
    loads = (1 + lanes / 16) * across + config.rows * min(1, 8 / lanes)
    work = max(sums, 4 if caps.folds_numbers else 8, loads) + 0.5
    if not caps.folds_numbers:
        work += config.rows / 8
    planes, kernel = 4 * channels * plane, 4 * rows * depth
    read = planes + 4 * config.rows * vectors * lanes
    if config.strips:
        lines = outer * high.along.taps * min(wide.phases, wide.along.taps)
        read = 4 * channels * lines * (across * lanes + 16)
    if read > caps.l1_bytes * 5 // 8:
        near = planes <= caps.l2_bytes // 2
        work += (2 if near else 4) * across / wide.along.taps
    if (kernel if config.strips else 4 * config.rows * depth) > caps.l1_bytes * 3 // 8:
        work += config.rows / (8 if kernel <= caps.l2_bytes // 2 else 2)
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
