"""The tiled nest of `SoftmaxSumRows`.

    parallel (batch.., tile of rows):
        queries[d, row] = transposed rows of each product
        top = −inf; total = 0; sums = 0
        for block of keys:
            copy the block's keys [key, d] and values [key, column] as f32
            scores[key, row] = Σ_d keys · queries            # registers: keys_unroll × vectors
            scores = score expression, −inf where masked; new top; weights = exp(scores − top)
            sums[row, column] = sums · decay + Σ_key weights · values
        out = sums / total

Rows are the lanes up to the weights, so that row statistics are whole vectors and only the rows'
side of a product is transposed; columns are the lanes after that, as they are in the result.
Masks select: a masked score is replaced, and a block whose values are not all finite takes a
path that leaves masked values out instead of multiplying them by 0.
"""

from __future__ import annotations

from typing import Any

from ...dsl.expr import Axis, Stage
from ...dsl.forms import LogSumExp
from ..group import is_map
from ..softmax import key_bounds, row_bounds, split
from ..terms import least, most
from .softmax_block import Block, sums_tile
from .tiling import ceil_div, index, real


class Tiles(Block):
    """Emits the nest for one group."""

    def lower(self) -> Any:
        nest, roles = self.nest, self.roles
        tiles = ceil_div(self.nest.size(roles.row.extent), self.rows)
        tasks = tiles
        for axis in roles.batch:
            tasks = tasks * self.nest.size(axis.extent)
        with nest.loop("task", tasks, "parallel") as task:
            self.env = self._place(task, tiles)
            self._task()
        return nest.finish()

    def _place(self, task: Any, tiles: Any) -> dict[Axis, Any]:
        """The batch axes' values and the tile's first row, from the task number."""
        from tvm import tirx

        nest = self.nest
        tiles = nest.bind("tiles", tiles)
        tile = nest.bind("tile", tirx.truncmod(task, tiles))
        self.first = nest.bind("first_row", tile * index(self.rows))
        rest = nest.bind("rest", tirx.truncdiv(task, tiles))
        env: dict[Axis, Any] = {}
        for axis in reversed(self.roles.batch):
            extent = self.nest.size(axis.extent)
            env[axis] = nest.bind(axis.name.replace(".", "_"), tirx.truncmod(rest, extent))
            rest = nest.bind("rest", tirx.truncdiv(rest, extent))
        left = self.nest.size(self.roles.row.extent) - self.first
        self.stored = nest.bind("rows_stored", least(left, index(self.rows)))
        self.count = nest.bind("rows", self._rows_kept(env))
        return env

    def _rows_kept(self, env: dict[Axis, Any]) -> Any:
        """Rows of the tile up to the last that the mask lets see any key."""
        count = self.stored
        for bound in row_bounds(self.roles):
            count = least(count, most(self.nest.value(bound, env) - self.first, index(0)))
        return count

    def _task(self) -> None:
        nest = self.nest
        self.prepare()
        self.allocate()
        for (row, _, depth), buffer in zip(self.factors, self.queries, strict=True):
            self.load_queries(row, depth, buffer)
        with nest.loop("vector", index(self.rows // self.lanes)) as v:
            for buffer, start in ((self.top, float("-inf")), (self.total, 0.0)):
                with nest.vector(self.lanes) as lane:
                    nest.put(buffer, [v * index(self.lanes) + lane], real(start))
        high, _ = sums_tile(self.rows, self.padded // self.lanes, self.config.registers)
        with nest.loop("row", ceil_div(self.count, high) * index(high)) as r:
            nest.strip(
                self.padded,
                self.lanes,
                lambda at, width: self.vector(
                    width, lambda lane: nest.put(self.sums, [r, at + lane], real(0.0))
                ),
            )
        end = nest.bind("keys", self._last_key())
        keys = index(self.config.keys)
        with nest.loop("block", ceil_div(end, self.config.keys)) as block:
            self.start = nest.bind("first_key", block * keys)
            self.length = nest.bind("length", least(end - self.start, keys))
            self.take()
        self._finish()

    def _last_key(self) -> Any:
        """Keys a tile has to look at: all, or up to the last its mask's comparison lets through."""
        from tvm import tirx

        keys = self.nest.size(self.roles.key.extent)
        last = self.first + self.count - index(1)
        for bound in key_bounds(self.roles):
            limit = self.nest.value(bound, self.env | {self.roles.row: last})
            keys = least(keys, most(limit, index(0)))
        return tirx.Select(self.count > index(0), keys, index(0))

    def _finish(self) -> None:
        """Divide, apply what follows, store."""
        from tvm import tirx

        nest, roles = self.nest, self.roles
        _, heads, _ = split(self.group)
        with nest.loop("row", self.stored) as r:
            total = nest.bind("row_total", self.total[r])
            empty = total == real(0.0)
            scale = nest.bind("row_scale", tirx.Select(empty, real(0.0), real(1.0) / total))
            env = self.env | {roles.row: self.first + r}
            top = self.top[r]
            log = top + self.math["log"](total)
            lse = tirx.Select(empty, real(float("-inf")), log)

            def mean(column: Any) -> Any:
                return tirx.Select(empty, real(0.0), self.sums[r, column] * scale)

            for stage in self.group.outputs:
                if isinstance(stage.expr, LogSumExp):
                    self._write(stage, env, lse)
                    continue
                self._finish_columns(stage, heads, env, mean)

    def _write(self, stage: Stage, env: dict[Axis, Any], value: Any) -> None:
        self.nest.write(stage, [env[a] for a in stage.axes], value)

    def _finish_columns(
        self, stage: Stage, heads: list[Stage], env: dict[Axis, Any], mean: Any
    ) -> None:
        nest, column = self.nest, self.roles.column

        def write(at: Any, width: int) -> None:
            with nest.vector(width) as lane:
                here = env | {column: at + lane}
                value = mean(here[column])
                if is_map(stage):
                    for head in heads:
                        self.readers[id(head)] = lambda *_: value
                    value = self.nest.value(stage.expr, here)
                self._write(stage, here, value)

        nest.strip(self.columns, self.lanes, write)
