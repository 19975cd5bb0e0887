"""The nest of `TapSums`."""

from __future__ import annotations

import math
from typing import Any

from ...dsl.expr import Axis
from ..emit import Emitter
from ..group import Group, innermost, known
from ..windows import Windows
from .tap_sums import TapConfig, column_count
from .tiling import Tiling, index, real
from .window_reads import image_at, row_env


class TapNest:
    """Emits the nest for one group."""

    def __init__(
        self, emitter: Emitter, group: Group, found: Windows, lanes: int, config: TapConfig
    ) -> None:
        self.nest = Tiling(emitter)
        self.group, self.found, self.lanes, self.config = group, found, lanes, config
        self.width = config.vectors * lanes
        self.columns, self.rows = column_count(found), found.row_count
        self.outer, self.high, self.last = found.along[:-2], found.along[-2], found.along[-1]
        self.outer_windows = math.prod(a.windows for a in self.outer)
        chunks = -(-self.last.windows // config.wide)
        self.padded = chunks * config.wide
        tall = config.tall
        self.column_slots = -(-config.columns // tall) * tall
        self.lines = (
            self.high.step * (config.lines - 1) + 1 + (self.high.windows - 1) * self.high.stride
        )
        self.line = self.last.step * (config.taps - 1) + 1
        self.line += (self.padded - 1) * self.last.stride
        self.unit = self.width if config.grouped else 1
        self.panels = config.rows if config.grouped else -(-config.rows // self.width)

    def lower(self) -> Any:
        nest, found, cfg = self.nest, self.found, self.config
        groups = -(-found.group_count // self.width) if cfg.grouped else found.group_count
        extents = [index(groups), index(-(-self.rows // cfg.rows)),
                   index(-(-self.columns // cfg.columns))]  # fmt: skip
        with nest.loop("task", nest.product(extents), "parallel") as task:
            group, row, column = (nest.bind("part", p) for p in nest.unflatten(task, extents))
            self.first_group = nest.bind("group", group * index(self.width)) if cfg.grouped \
                else group  # fmt: skip
            self.first_row = nest.bind("row", row * index(cfg.rows))
            self.first_column = nest.bind("column", column * index(cfg.columns))
            plane = self.lines * self.line * self.unit
            slots = self.column_slots * self.outer_windows
            self.planes = nest.scratch("planes", [slots * plane])
            self.kernels = nest.scratch("kernels", [self.panels, cfg.lines * cfg.taps, self.width])
            windows = self.outer_windows * self.high.windows
            self.sums = nest.scratch(
                "sums", [self.panels, self.column_slots, windows * self.padded, self.width]
            )
            self._clear()
            self._blocks()
            self._finish()
        return nest.finish()

    def _clear(self) -> None:
        nest = self.nest
        panels, columns, windows, _ = (int(e) for e in self.sums.ty.shape)
        with nest.loop("sum", index(panels * columns * windows)) as at:
            p, c, w = nest.unflatten(at, [index(panels), index(columns), index(windows)])
            self._each_vector(lambda lane: nest.put(self.sums, [p, c, w, lane], real(0.0)))

    def _each_vector(self, body: Any) -> None:
        nest = self.nest
        for v in range(self.config.vectors):
            with nest.vector(self.lanes) as lane:
                body(index(v * self.lanes) + lane)

    def _blocks(self) -> None:
        """All channels, outer taps, lines and taps, in order, a block of each at a time."""
        from tvm import tirx

        nest, found, cfg = self.nest, self.found, self.config
        channels = [nest.size(a.extent) for a in found.channels]
        with nest.loop("channel", nest.product(channels)) as channel:
            env = dict(zip(found.channels, nest.unflatten(channel, channels), strict=False))
            taps = [index(a.taps) for a in self.outer]
            with nest.loop("outer", nest.product(taps)) as outer:
                at = [nest.bind("tap", t) for t in nest.unflatten(outer, taps)]
                env = env | {a.tap: t for a, t in zip(self.outer, at, strict=False)}
                counts = (cfg.lines, cfg.taps)
                blocks = [index(-(-a.taps // n)) for a, n in zip(found.along[-2:], counts,
                                                                 strict=True)]  # fmt: skip
                with nest.loop("block", nest.product(blocks)) as block:
                    starts, lefts = [], []
                    for a, n, b in zip(found.along[-2:], counts, nest.unflatten(block, blocks),
                                       strict=True):  # fmt: skip
                        start = nest.bind("start", b * index(n))
                        left = tirx.min(index(n), index(a.taps) - start)
                        starts.append(start)
                        lefts.append(index(n) if a.taps % n == 0 else nest.bind("left", left))
                    self._pack_kernels(env, starts, lefts)
                    self._pack_planes(env, starts)
                    self._accumulate(lefts)

    # --- packing ---

    def _lane_env(self, panel: Any, lane: Any) -> dict[Axis, Any]:
        """Axes of a lane of a panel."""
        if self.config.grouped:
            group, row = self.first_group + lane, self.first_row + panel
        else:
            group, row = self.first_group, self.first_row + panel * index(self.width) + lane
        return row_env(self.nest, self.found, group, row)

    def _lanes_of(self, panel: Any) -> Any:
        """How many lanes of a panel there are."""
        from tvm import tirx

        nest, width = self.nest, index(self.width)
        if self.config.grouped:
            if self.found.group_count % self.width == 0:
                return width
            left = index(self.found.group_count) - self.first_group
        else:
            if self.rows % self.width == 0:
                return width
            left = index(self.rows) - self.first_row - panel * width
        return nest.bind("lanes", tirx.min(width, left))

    def _panels_here(self) -> Any:
        """How many panels of the task there are."""
        from tvm import tirx

        if self.rows % self.config.rows == 0:
            return index(self.panels)
        each = 1 if self.config.grouped else self.width
        left = index(self.rows + each - 1) - self.first_row
        return self.nest.bind(
            "panels", tirx.min(index(self.panels), tirx.truncdiv(left, index(each)))
        )

    def _columns_here(self) -> Any:
        from tvm import tirx

        count = index(self.config.columns)
        if self.columns % self.config.columns == 0:
            return count
        return self.nest.bind("columns", tirx.min(count, index(self.columns) - self.first_column))

    def _column_env(self, column: Any) -> dict[Axis, Any]:
        axes = self.found.batch
        extents = [index(known(a)) for a in axes]
        return dict(zip(axes, self.nest.unflatten(self.first_column + column, extents),
                        strict=False))  # fmt: skip

    def _pack_kernels(self, env: dict[Axis, Any], starts: list[Any], lefts: list[Any]) -> None:
        nest, cfg = self.nest, self.config
        kernel = self.found.kernel
        along_lanes = self.last.tap not in innermost(kernel)
        with nest.loop("panel", self._panels_here()) as panel:
            lanes = self._lanes_of(panel)
            with nest.loop("line", lefts[0]) as line:

                def copy(lane: Any, tap: Any) -> None:
                    here = env | self._lane_env(panel, lane) | {
                        self.high.tap: starts[0] + line, self.last.tap: starts[1] + tap,
                    }  # fmt: skip
                    at = line * index(cfg.taps) + tap
                    nest.put(self.kernels, [panel, at, lane], nest.real(kernel, here))

                if along_lanes:
                    with nest.loop("tap", lefts[1]) as tap:
                        nest.run(lanes, self.lanes, lambda lane: copy(lane, tap))
                else:
                    nest.transposed(lanes, lefts[1], copy)

    def _pack_planes(self, env: dict[Axis, Any], starts: list[Any]) -> None:
        from tvm import tirx

        nest = self.nest
        lane_env = {} if self.config.grouped else self._lane_env(index(0), index(0))
        with nest.loop("column", self._columns_here()) as column:
            here = env | lane_env | self._column_env(column)
            extents = [index(a.windows) for a in self.outer]
            with nest.loop("window", nest.product(extents)) as window:
                inside: Any = tirx.const(True, "bool")
                places: dict[int, Any] = {}
                for a, w in zip(self.outer, nest.unflatten(window, extents), strict=False):
                    place = env[a.tap] * index(a.step) + w * index(a.stride) + index(a.offset)
                    places[a.position] = place
                    inside = tirx.all(inside, place >= index(0), place < index(a.size))
                base = (column * index(self.outer_windows) + window) * index(self.lines)
                with nest.loop("line", index(self.lines)) as line:
                    high = self.high
                    place = starts[0] * index(high.step) + line + index(high.offset)
                    places[high.position] = nest.bind("place", place)
                    known_line = tirx.all(inside, place >= index(0), place < index(high.size))
                    first = nest.bind("first", (base + line) * index(self.line))
                    with nest.when(known_line):
                        self._pack_line(here, places, first, starts[1])
                    with nest.otherwise():
                        self._put(first, index(0), index(self.line), None)

    def _pack_line(
        self, env: dict[Axis, Any], places: dict[int, Any], first: Any, start: Any
    ) -> None:
        from tvm import tirx

        nest, last = self.nest, self.last
        shift = nest.simple(start * index(last.step) + index(last.offset))
        length = index(self.line)
        low = nest.bind("low", tirx.min(tirx.max(-shift, index(0)), length))
        past = nest.bind("past", tirx.max(tirx.min(index(last.size) - shift, length), low))
        self._put(first, index(0), low, None)

        def image(at: Any, lane: Any) -> Any:
            here = env | (self._lane_env(index(0), lane) if self.config.grouped else {})
            return image_at(nest, self.found, here, places | {last.position: shift + at})

        self._put(first, low, past, image)
        self._put(first, past, length, None)

    def _put(self, first: Any, begin: Any, end: Any, image: Any) -> None:
        """Elements `begin` … `end` − 1 of a line: of the image, or 0."""
        nest = self.nest
        count = nest.bind("count", end - begin)

        def one(at: Any, lane: Any) -> None:
            value = real(0.0) if image is None else image(begin + at, lane)
            nest.put(self.planes, [(first + begin + at) * index(self.unit) + lane], value)

        if not self.config.grouped:
            nest.run(count, self.lanes, lambda at: one(at, index(0)))
        elif image is None:
            with nest.loop("at", count) as at:
                self._each_vector(lambda lane: one(at, lane))
        elif self.last.position == len(self.found.image.index) - 1:
            nest.transposed(self._lanes_of(index(0)), count, lambda lane, at: one(at, lane))
        else:
            with nest.loop("at", count) as at:
                nest.run(self._lanes_of(index(0)), self.lanes, lambda lane: one(at, lane))

    # --- sums ---

    def _accumulate(self, lefts: list[Any]) -> None:
        nest, cfg = self.nest, self.config
        high, chunks = self.high.windows, self.padded // cfg.wide
        extents = [
            self._panels_here(), index(self.column_slots // cfg.tall), index(self.outer_windows),
            index(high), index(chunks),
        ]  # fmt: skip
        with nest.loop("tile", nest.product(extents)) as tile:
            panel, c, outer, window, chunk = (
                nest.bind("at", p) for p in nest.unflatten(tile, extents)
            )
            cells = [(m, w, v) for m in range(cfg.tall) for w in range(cfg.wide)
                     for v in range(cfg.vectors)]  # fmt: skip
            acc = dict(zip(cells, nest.registers("acc", len(cells), self.lanes), strict=True))
            first = (outer * index(high) + window) * index(self.padded) + chunk * index(cfg.wide)

            def place(cell: tuple[int, int, int], lane: Any) -> list[Any]:
                m, w, v = cell
                return [panel, c * index(cfg.tall) + index(m), first + index(w),
                        index(v * self.lanes) + lane]  # fmt: skip

            for cell in cells:
                with nest.vector(self.lanes) as lane:
                    nest.put(acc[cell], [lane], self.sums[tuple(place(cell, lane))])
            base = c * index(cfg.tall * self.outer_windows) + outer
            down = window * index(self.high.stride)
            across = nest.bind("across", chunk * index(cfg.wide * self.last.stride))
            with nest.loop("line", lefts[0]) as line:
                row = nest.bind("row", line * index(self.high.step) + down)
                with nest.loop("tap", lefts[1]) as tap:
                    self._step(acc, panel, line * index(cfg.taps) + tap, base, row,
                               across + tap * index(self.last.step))  # fmt: skip
            for cell in cells:
                with nest.vector(self.lanes) as lane:
                    nest.put(self.sums, place(cell, lane), acc[cell][lane])

    def _step(self, acc: Any, panel: Any, tap: Any, base: Any, row: Any, at: Any) -> None:
        """One tap into all sums: a number, or a vector of groups, times vectors of lanes."""
        nest, cfg = self.nest, self.config
        plane = self.lines * self.line
        first = base * index(plane) + row * index(self.line) + at
        first = nest.bind("first", first * index(self.unit))
        for m in range(cfg.tall):
            for w in range(cfg.wide):
                # A constant away from one place: one address in a register serves all sums.
                away = m * self.outer_windows * plane + w * self.last.stride
                here = first + index(away * self.unit)
                value = None if cfg.grouped else nest.bind("value", self.planes[here])
                for v in range(cfg.vectors):
                    cell = acc[m, w, v]
                    with nest.vector(self.lanes) as lane:
                        along = index(v * self.lanes) + lane
                        term = self.planes[here + along] if value is None else value
                        total = cell[lane] + term * self.kernels[panel, tap, along]
                        nest.put(cell, [lane], total)

    def _finish(self) -> None:
        nest, found = self.nest, self.found
        windows = [index(a.windows) for a in found.along]
        with nest.loop("panel", self._panels_here()) as panel:
            lanes = self._lanes_of(panel)
            with nest.loop("lane", lanes) as lane, nest.loop("column", self._columns_here()) as c:
                env = self._lane_env(panel, lane) | self._column_env(c)
                with nest.loop("window", nest.product(windows)) as window:
                    at = nest.unflatten(window, windows)
                    env = env | {a.window: w for a, w in zip(found.along, at, strict=True)}
                    line = self._flat(at[:-1], windows[:-1])
                    total = self.sums[panel, c, line * index(self.padded) + at[-1], lane]
                    nest.results(self.group, env, {id(self.group.stages[0]): total})

    def _flat(self, at: list[Any], extents: list[Any]) -> Any:
        total: Any = index(0)
        for i, extent in zip(at, extents, strict=True):
            total = total * extent + i
        return total
