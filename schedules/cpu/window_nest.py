"""The nest of `WindowSums`."""

from __future__ import annotations

import math
from typing import Any

from ...dsl.expr import Axis
from ...dsl.walk import free_axes
from ..emit import Emitter
from ..group import Group, known
from ..windows import Windows
from .tiling import Tiling, index, real
from .window_reads import image_at, row_env
from .windows import Dim, WindowsConfig

_UNROLLED_TAPS = 8


class WindowNest:
    """Emits the nest for one group."""

    def __init__(
        self, emitter: Emitter, group: Group, found: Windows, lanes: int, config: WindowsConfig
    ) -> None:
        self.nest = Tiling(emitter)
        self.group, self.found, self.lanes, self.config = group, found, lanes, config
        self.outer = found.along[:-2]
        self.high = Dim(found.along[-2], config.lines)
        self.wide = Dim(found.along[-1], config.columns)
        self.phase = self.high.length * self.wide.length
        self.plane = self.high.phases * self.wide.phases * self.phase
        self.rows = found.row_count
        self.tiles = -(-self.rows // config.rows)
        self.groups = found.group_count
        width = (config.lines - 1) * self.wide.length + config.columns
        step = lanes * config.vectors
        self.width = -(-width // step) * step
        self.channels = math.prod(map(known, found.channels))
        self.outer_taps = math.prod(a.taps for a in self.outer)
        last = found.image.index[-1]
        self.transposes = bool(set(free_axes(last)) & set(found.channels)) and self.channels > 1

    def lower(self) -> Any:
        nest, found = self.nest, self.found
        self._pack_kernel()
        blocks = [-(-d.along.windows // d.count) for d in (self.high, self.wide)]
        extents = [
            *(nest.size(a.extent) for a in found.batch), *(index(a.windows) for a in self.outer),
            index(self.groups), *map(index, blocks),
        ]  # fmt: skip
        with nest.loop("task", nest.product(extents), "parallel") as task:
            parts = [nest.bind("part", p) for p in nest.unflatten(task, extents)]
            kept = (*found.batch, *(a.window for a in self.outer))
            self.env: dict[Axis, Any] = dict(zip(kept, parts, strict=False))
            self.group_at, line, column = parts[-3:]
            self.line = nest.bind("line", line * index(self.high.count))
            self.column = nest.bind("column", column * index(self.wide.count))
            spare = self.width  # what a tile reads past its plane
            total = self.channels * self.outer_taps * self.plane + spare
            self.planes = nest.scratch("planes", [total])
            at_once = self.tiles if self.config.strips else 1
            self.sums = nest.scratch("sums", [at_once, self.config.rows, self.width])
            self._pack_image()
            self._results()
        return nest.finish()

    def _results(self) -> None:
        """All tiles of rows and strips of windows, in either order."""
        nest, tiles = self.nest, index(self.tiles)
        strips = index(self.width // (self.lanes * self.config.vectors))
        if self.config.strips:
            with nest.loop("strip", strips) as strip, nest.loop("tile", tiles) as tile:
                self._accumulate(tile, strip, tile)
            with nest.loop("tile", tiles) as tile:
                self._finish(tile, tile)
            return
        with nest.loop("tile", tiles) as tile:
            with nest.loop("strip", strips) as strip:
                self._accumulate(tile, strip, index(0))
            self._finish(tile, index(0))

    # --- the kernel, once: [group, tile, channel, taps.., row] ---

    def _pack_kernel(self) -> None:
        nest, found = self.nest, self.found
        taps = [a.taps for a in found.along]
        depth = self.channels * math.prod(taps)
        shape = (self.groups, self.tiles, depth, self.config.rows)
        self.kernel = nest.workspace("kernel", shape)
        extents = [index(e) for e in (self.groups, self.tiles)]
        inner = [index(self.channels), *map(index, taps)]
        with nest.loop("part", nest.product(extents), "parallel") as part:
            group, tile = nest.unflatten(part, extents)
            with nest.loop("row", index(self.config.rows)) as r:
                env = row_env(nest, found, group, self._row(tile, r))
                with nest.loop("depth", index(depth)) as k:
                    channel, *at = nest.unflatten(k, inner)
                    here = env | self._channel_env(channel)
                    here |= {a.tap: t for a, t in zip(found.along, at, strict=True)}
                    nest.put(self.kernel, [group, tile, k, r], nest.real(found.kernel, here))

    def _row(self, tile: Any, r: Any) -> Any:
        """The row within its group; past the last one, the last again."""
        from tvm import tirx

        row = tile * index(self.config.rows) + r
        if self.rows % self.config.rows == 0:
            return row
        return tirx.min(row, index(self.rows - 1))

    def _channel_env(self, channel: Any) -> dict[Axis, Any]:
        axes = self.found.channels
        extents = [index(known(a)) for a in axes]
        return dict(zip(axes, self.nest.unflatten(channel, extents), strict=False))

    # --- the image ---

    def _pack_image(self) -> None:
        nest, found = self.nest, self.found
        env = dict(self.env)
        if found.shared is not None:
            env[found.shared] = self.group_at * index(found.run)
        if self.transposes:
            self._pack_planes(env, None)
            return
        with nest.loop("channel", index(self.channels)) as channel:
            self._pack_planes(env | self._channel_env(channel), channel)

    def _pack_planes(self, env: dict[Axis, Any], channel: Any) -> None:
        """The planes of one channel; of all where it is None, channels being side by side."""
        from tvm import tirx

        nest, high = self.nest, self.high
        taps = [index(a.taps) for a in self.outer]
        with nest.loop("outer", index(self.outer_taps)) as outer:
            inside: Any = tirx.const(True, "bool")
            places: dict[int, Any] = {}
            for a, tap in zip(self.outer, nest.unflatten(outer, taps), strict=False):
                place = self.env[a.window] * index(a.stride) + tap * index(a.step)
                places[a.position] = place + index(a.offset)
                inside = tirx.all(inside, _within(places[a.position], a.size))
            base = outer * index(self.plane)
            if channel is not None:
                base = base + channel * index(self.outer_taps * self.plane)
            with nest.loop("line", index(high.phases * high.length)) as line:
                phase, at = nest.unflatten(line, [index(high.phases), index(high.length)])
                place = (self.line + at) * index(high.step) + phase + index(high.along.lowest)
                place = nest.bind("place", place)
                places[high.along.position] = place
                start = base + phase * index(self.wide.phases * self.phase)
                start = nest.bind("start", start + at * index(self.wide.length))
                with nest.when(tirx.all(inside, _within(place, high.along.size))):
                    for part in range(self.wide.phases):
                        self._pack_phase(env, places, start, part, channel is None)
                with nest.otherwise():
                    for part in range(self.wide.phases):
                        first = start + index(part * self.phase)
                        length = index(self.wide.length)
                        self._zeros(first, index(0), length, channel is None)

    def _pack_phase(
        self, env: dict[Axis, Any], places: dict[int, Any], start: Any, phase: int, all_: bool
    ) -> None:
        """A phase of one line of the block: what is inside as it is, 0 around it."""
        from tvm import tirx

        nest, wide = self.nest, self.wide
        a = wide.along
        # Element j is at place (column + j) · step + shift.
        shift, first = phase + a.lowest, start + index(phase * self.phase)
        low = max(0, -(shift // wide.step))
        past = max(low, (a.size - 1 - shift) // wide.step + 1)
        length = index(wide.length)
        if wide.count == a.windows:
            begin, end = index(min(low, wide.length)), index(min(past, wide.length))
        else:
            begin, end = (
                nest.bind("bound", tirx.max(tirx.min(index(b) - self.column, length), index(0)))
                for b in (low, past)
            )

        def copy(at: Any, channel: Any) -> None:
            here = env if channel is None else env | self._channel_env(channel)
            place = (self.column + begin + at) * index(wide.step) + index(shift)
            value = image_at(nest, self.found, here, places | {a.position: place})
            to = first if channel is None else first + channel * index(self.outer_taps * self.plane)
            nest.put(self.planes, [to + begin + at], value)

        self._zeros(first, index(0), begin, all_)
        count = nest.simple(end - begin)
        if all_:
            nest.transposed(count, index(self.channels), copy)
        else:
            nest.run(count, self.lanes, lambda at: copy(at, None))
        self._zeros(first, end, length, all_)

    def _zeros(self, first: Any, begin: Any, end: Any, all_: bool) -> None:
        """0 in elements `begin` … `end` − 1 of a line, of every channel with `all_`."""
        nest = self.nest
        with nest.loop("channel", index(self.channels if all_ else 1)) as channel:
            to = first + channel * index(self.outer_taps * self.plane) + begin
            nest.run(nest.simple(end - begin), self.lanes,
                      lambda at: nest.put(self.planes, [to + at], real(0.0)))  # fmt: skip

    # --- sums ---

    def _accumulate(self, tile: Any, strip: Any, kept: Any) -> None:
        """The sums of a tile and a strip, to the tile `kept` of `sums`."""
        nest, cfg, lanes = self.nest, self.config, self.lanes
        cells = [(r, v) for r in range(cfg.rows) for v in range(cfg.vectors)]
        along = self.found.along
        depth = math.prod(a.taps for a in along[-2:])
        first = nest.bind("first", strip * index(lanes * cfg.vectors))
        acc = dict(zip(cells, nest.registers("acc", len(cells), lanes), strict=True))
        for cell in cells:
            with nest.vector(lanes) as lane:
                nest.put(acc[cell], [lane], real(0.0))
        with nest.loop("channel", index(self.channels * self.outer_taps)) as c:
            base = nest.bind("base", c * index(self.plane) + first)
            with nest.loop("tap", index(along[-2].taps)) as tap:
                self._taps(acc, tile, c * index(depth), base, tap)
        for r, v in cells:
            with nest.vector(lanes) as lane:
                nest.put(self.sums, [kept, r, first + index(v * lanes) + lane], acc[r, v][lane])

    def _taps(self, acc: Any, tile: Any, depth: Any, base: Any, tap: Any) -> None:
        """One tap of the next to last dim, and all of the last."""
        from tvm import tirx

        nest, high, wide = self.nest, self.high, self.wide
        count = wide.along.taps
        line = base
        if high.along.taps > 1:
            down = tap if high.along.step > 0 else index(high.along.taps - 1) - tap
            place = down * index(abs(high.along.step))
            phase = tirx.truncmod(place, index(high.step))
            at = tirx.truncdiv(place, index(high.step))
            line = line + phase * index(wide.phases * self.phase) + at * index(wide.length)
        line = nest.bind("from", line)
        k = nest.bind("k", depth + tap * index(count))
        if count <= _UNROLLED_TAPS:
            for t in range(count):
                phase_at, at = wide.displacement(t)
                self._multiply(acc, tile, k + index(t), line + index(phase_at * self.phase + at))
            return
        with nest.loop("tap", index(count)) as t:
            down = t if wide.along.step > 0 else index(count - 1) - t
            place = down * index(abs(wide.along.step))
            at = tirx.truncmod(place, index(wide.step)) * index(self.phase)
            at = nest.bind("at", line + at + tirx.truncdiv(place, index(wide.step)))
            self._multiply(acc, tile, k + t, at)

    def _multiply(self, acc: Any, tile: Any, k: Any, at: Any) -> None:
        """One tap into all sums: a number of each row times vectors of windows."""
        nest, cfg = self.nest, self.config
        for r in range(cfg.rows):
            weight = nest.bind("weight", self.kernel[self.group_at, tile, k, index(r)])
            for v in range(cfg.vectors):
                cell = acc[r, v]
                with nest.vector(self.lanes) as lane:
                    value = self.planes[at + index(v * self.lanes) + lane]
                    nest.put(cell, [lane], cell[lane] + weight * value)

    # --- the result ---

    def _finish(self, tile: Any, kept: Any) -> None:
        from tvm import tirx

        nest, cfg = self.nest, self.config
        left = index(self.rows) - tile * index(cfg.rows)
        exact = self.rows % cfg.rows == 0
        rows = index(cfg.rows) if exact else nest.bind("rows", tirx.min(index(cfg.rows), left))
        lines, columns = self._left(self.high, self.line), self._left(self.wide, self.column)

        def write(r: Any, line: Any, at: Any) -> None:
            env = self.env | row_env(nest, self.found, self.group_at, tile * index(cfg.rows) + r)
            env[self.high.along.window] = self.line + line
            env[self.wide.along.window] = self.column + at
            total = self.sums[kept, r, line * index(self.wide.length) + at]
            nest.results(self.group, env, {id(self.group.stages[0]): total})

        if self.group.stages[-1].axes[-1] is not self.wide.along.window:
            with nest.loop("line", lines) as line:
                nest.transposed(rows, columns, lambda r, at: write(r, line, at))
            return
        with nest.loop("row", rows) as r, nest.loop("line", lines) as line:
            nest.run(columns, self.lanes, lambda at: write(r, line, at))

    def _left(self, dim: Dim, start: Any) -> Any:
        """How many windows of a block there are."""
        from tvm import tirx

        if dim.along.windows % dim.count == 0:
            return index(dim.count)
        return self.nest.bind("left", tirx.min(index(dim.count), index(dim.along.windows) - start))


def _within(place: Any, size: int) -> Any:
    from tvm import tirx

    return tirx.all(place >= index(0), place < index(size))
