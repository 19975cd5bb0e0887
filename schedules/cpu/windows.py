"""Sums over windows whose result has the windows innermost: vectors of windows, rows in registers.

    parallel (batch.., outer windows, group, block of windows):
        planes[channel, tap.., phase] = the block's part of the image, 0 outside
        for tile of rows:
            sums[row, window] = Σ_{channel, taps} kernel[row] · planes[.. + tap, window]
            out = epilogue(sums)

The last two windowed dims make up a block. A plane has the padding in it and its lines joined, so
that one displacement of the whole block is a tap, whatever the line a window lies in; what is
between the lines is computed and left out. A stride of s splits a plane in s phases.
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
from ..windows import NEEDS, Along, Windows, group_windows


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
        last = group.stages[-1].axes[-1]
        return first_rejection(
            check(len(found.along) >= 2, "needs two windowed dims"),
            check(last is found.along[-1].window, "needs the windows of the last dim innermost"),
            check(math.prod(a.windows for a in found.along) > 1, "needs more than one window"),
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


def row_count(found: Windows) -> int:
    """Rows that read the same channels."""
    return found.run * math.prod(_extent(a) for a in found.rows)


def _extent(axis: Any) -> int:
    return int(axis.extent)


def _candidates(found: Windows, caps: Capability) -> Iterator[WindowsConfig]:
    lines, columns = (a.windows for a in found.along[-2:])
    most = caps.vector_registers - 4
    heights = sorted({min(h, row_count(found)) for h in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)})
    for width in {-(-columns // n) for n in range(1, max(2, -(-columns // 256) + 1))}:
        if width > 512:
            continue
        for line in {-(-lines // n) for n in range(1, lines + 1)}:
            for rows in heights:
                for vectors in range(1, 9):
                    if rows * vectors + vectors <= most:
                        yield WindowsConfig(rows, vectors, line, width)


def cost(found: Windows, config: WindowsConfig, caps: Capability) -> float:
    """About how many cycles all blocks of one image and group take."""
    lanes = caps.lanes()
    high, wide = (Dim(a, n) for a, n in zip(found.along[-2:], (config.lines, config.columns),
                                            strict=True))  # fmt: skip
    vectors = -(-((config.lines - 1) * wide.length + config.columns) // lanes)
    channels = math.prod(_extent(a) for a in found.channels)
    depth = channels * math.prod(a.taps for a in found.along)
    tiles = -(-row_count(found) // config.rows) * -(-vectors // config.vectors)
    sums = config.rows * config.vectors
    # A sum takes its turn every 4 cycles; a vector from two cache lines 2 loads, a number half one.
    step = max(sums, 4, 2 * config.vectors + 0.5 * config.rows)
    outer = math.prod(a.taps for a in found.along[:-2])
    plane = outer * high.phases * wide.phases * high.length * wide.length
    pack = channels * plane / lanes * (1.5 if wide.phases == 1 else 16)
    finish = 2 * row_count(found) * config.lines * -(-config.columns // lanes)
    size = 4 * channels * plane
    blocks = math.prod(
        -(-a.windows // n) for a, n in zip(found.along[-2:], (config.lines, config.columns),
                                           strict=True)
    )  # fmt: skip
    groups = 1 if found.shared is None else _extent(found.shared) // found.run
    slow = 1.0 if size <= caps.l2_bytes // 2 else 1.3
    idle = 1.2 if blocks * groups < 2 * caps.cores and config.lines > 1 else 1.0
    return (tiles * (depth * step + 8 * sums) + pack + finish + 500) * blocks * slow * idle
