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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...dsl.expr import Axis, Binary, Expr, Read, Stage, Tensor, free_axes, rebuild, walk
from ...dsl.forms import LogSumExp
from ...dsl.lower import encode, storage
from ..emit import Emitter
from ..group import Group, is_map
from .softmax_sum import Roles, SoftmaxSumConfig, split
from .tiling import Tiling, ceil_div, index, real

_INF_BITS = 0x7F800000
_ABS_BITS = 0x7FFFFFFF


@dataclass
class _Side:
    """A tensor element that depends on the row, copied so that rows are adjacent."""

    read: Read
    proxy: Tensor
    buffer: Any = None


class Tiles:
    """Emits the nest for one group."""

    def __init__(
        self, emitter: Emitter, group: Group, roles: Roles, lanes: int, config: SoftmaxSumConfig
    ) -> None:
        self.nest = Tiling(emitter)
        self.readers = emitter.lowering.readers
        self.math = emitter.lowering.math
        self.group, self.roles, self.lanes, self.config = group, roles, lanes, config
        self.rows = config.vectors * lanes
        self.columns = int(roles.column.extent)  # type: ignore[arg-type]
        self.padded = -(-self.columns // lanes) * lanes
        self.sides: dict[int, _Side] = {}

    def _prepare(self) -> None:
        """The expressions of the nest: slow index arithmetic done once, row reads from sides."""
        roles, node = self.roles, self.roles.node

        def settle(part: Expr) -> Expr:
            return self.nest.settle(part, self.env)

        self.factors = [(settle(p.row), settle(p.key), p.depth) for p in roles.products]
        self.value = settle(node.value)
        products = {id(p.stage) for p in roles.products}
        self.score = self._with_sides(settle(node.score), products)
        self.keep = None
        if node.where is not None:
            self.keep = self._with_sides(settle(node.where), products)

    def _with_sides(self, node: Expr, products: set[int]) -> Expr:
        """`node` with reads that depend on the row replaced by reads of a side buffer."""
        if isinstance(node, Read):
            if id(node.tensor) in products or self.roles.row not in free_axes(node):
                return node
            side = self.sides.get(id(node))
            if side is None:
                proxy = Tensor(f"side_{node.tensor.name}", (), node.dtype)
                side = self.sides[id(node)] = _Side(node, proxy)
            return Read(side.proxy, (), None, node.dtype)
        children = tuple(self._with_sides(c, products) for c in node.children())
        return rebuild(node, children) if children else node

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
        self.count = nest.bind("rows", _least(left, index(self.rows)))
        return env

    def _task(self) -> None:
        nest = self.nest
        self._prepare()
        self._allocate()
        for (row, _, depth), buffer in zip(self.factors, self.queries, strict=True):
            self._load_queries(row, depth, buffer)
        with self._vectors() as first:
            for buffer, start in ((self.top, float("-inf")), (self.total, 0.0)):
                with nest.vector(self.lanes) as lane:
                    nest.put(buffer, [first + lane], real(start))
        with nest.loop("row", index(self.rows)) as r:
            nest.strip(self.padded, self.lanes, lambda at, width: self._vector(
                width, lambda lane: nest.put(self.sums, [r, at + lane], real(0.0))))
        end = nest.bind("keys", self._last_key())
        keys = index(self.config.keys)
        with nest.loop("block", ceil_div(end, self.config.keys)) as block:
            self.start = nest.bind("first_key", block * keys)
            self.length = nest.bind("length", _least(end - self.start, keys))
            self._block()
        self._finish()

    def _allocate(self) -> None:
        nest, keys, cfg = self.nest, self.config.keys, self.config
        spare = keys + 2 * cfg.keys_unroll
        depths = [int(p.depth.extent) for p in self.roles.products]  # type: ignore[arg-type]
        self.queries = [nest.scratch("queries", [d, self.rows]) for d in depths]
        self.keys = [nest.scratch("keys", [spare, d]) for d in depths]
        self.products = [nest.scratch("scores", [spare, self.rows]) for _ in depths]
        if not depths:
            self.scores = nest.scratch("scores", [spare, self.rows])
        else:
            self.scores = self.products[0]
        self.values = nest.scratch("values", [keys, self.padded])
        self.sums = nest.scratch("sums", [self.rows, self.padded])
        self.top, self.total, self.decay = (
            nest.scratch(n, [self.rows]) for n in ("top", "total", "decay")
        )
        for side in self.sides.values():
            kind = storage(side.read.dtype)
            side.buffer = nest.scratch(side.proxy.name, [keys, self.rows], kind)

    def _vector(self, width: int, body: Any) -> None:
        with self.nest.vector(width) as lane:
            body(lane)

    @contextmanager
    def _vectors(self) -> Iterator[Any]:
        """A loop over the tile's rows by vectors, those past the last row left out."""
        with self.nest.loop("vector", ceil_div(self.count, self.lanes)) as v:
            yield v * index(self.lanes)

    def _load_queries(self, node: Expr, depth: Axis, buffer: Any) -> None:
        def copy(row: Any, d: Any) -> None:
            env = self.env | {self.roles.row: self.first + row, depth: d}
            self.nest.put(buffer, [d, row], self.nest.real(node, env))

        self.nest.transposed(self.count, index(int(depth.extent)), copy)  # type: ignore[arg-type]

    def _last_key(self) -> Any:
        """Keys a tile has to look at: all, or up to the last its mask's comparison lets through."""
        keys = self.nest.size(self.roles.key.extent)
        if self.roles.node.where is None:
            return keys
        last = self.first + self.count - index(1)
        for part in _conjuncts(self.roles.node.where):
            bound = _upper_bound(part, self.roles.key, self.roles.row, set(self.env))
            if bound is not None:
                limit = self.nest.value(bound, self.env | {self.roles.row: last})
                keys = _least(keys, _most(limit, index(0)))
        return keys

    def _block(self) -> None:
        nest = self.nest
        for (_, key, depth), buffer in zip(self.factors, self.keys, strict=True):
            self._load_rows(key, depth, buffer)
        flags = None
        if self.keep is not None:
            (flags,) = nest.registers("flags", 1, self.lanes, "int32")
            self._vector(self.lanes, lambda lane: nest.put(flags, [lane], _int(0)))
        self._load_rows(self.value, self.roles.column, self.values, flags)
        for side in self.sides.values():
            self._load_side(side)
        vectors, unroll = self.config.vectors, self.config.keys_unroll
        if vectors == 1:
            self._multiply(1, 2 * unroll)
        else:
            with nest.when(self.count > index(self.lanes)):
                self._multiply(vectors, unroll)
            with nest.otherwise():
                # Few rows, as when decoding: one vector of them.
                self._multiply(1, 2 * unroll)
        self._rescale()
        self._exponentiate()
        self._accumulate(flags)

    def _load_rows(self, node: Expr, along: Axis, buffer: Any, flags: Any = None) -> None:
        """buffer[key, along] = node, f32; `flags` collects the greatest magnitude's bits."""
        from tvm import tirx

        nest = self.nest
        with nest.loop("key", self.length) as j:
            base = self.env | {self.roles.key: self.start + j}

            def copy(at: Any, width: int) -> None:
                with nest.vector(width) as lane:
                    value = nest.real(node, base | {along: at + lane})
                    nest.put(buffer, [j, at + lane], value)
                if flags is not None:
                    with nest.vector(width) as lane:
                        bits = tirx.reinterpret("int32", buffer[j, at + lane])
                        bits = tirx.bitwise_and(bits, _int(_ABS_BITS))
                        nest.put(flags, [lane], tirx.max(flags[lane], bits))

            nest.strip(int(along.extent), self.lanes, copy)  # type: ignore[arg-type]

    def _load_side(self, side: _Side) -> None:
        """side[key, row] = the element's stored form; one value a key where its stride is 0."""
        nest, read = self.nest, side.read

        def element(row: Any, j: Any) -> Any:
            env = self.env | {self.roles.row: self.first + row, self.roles.key: self.start + j}
            if read.fill is not None:
                return encode(nest.value(read, env), read.dtype)
            return self.readers[id(read.tensor)](*(nest.value(i, env) for i in read.index))

        def general() -> None:
            nest.transposed(self.count, self.length, lambda row, j: nest.put(
                side.buffer, [j, row], element(row, j)))  # fmt: skip

        stride = self._row_stride(read)
        if stride is None:
            general()
            return
        with nest.when(stride == index(0)), nest.loop("key", self.length) as j:
            value = nest.bind("shared", element(index(0), j))
            with self._vectors() as first, nest.vector(self.lanes) as lane:
                nest.put(side.buffer, [j, first + lane], value)
        with nest.otherwise():
            general()

    def _row_stride(self, read: Read) -> Any:
        """The tensor's stride along the row where the row is an index of its own."""
        row = self.roles.row
        uses = [p for p, i in enumerate(read.index) if row in free_axes(i)]
        strides = self.nest.emitter.strides(read.tensor)
        if len(uses) != 1 or read.index[uses[0]] is not row or strides is None:
            return None
        return strides[uses[0]]

    def _multiply(self, vectors: int, unroll: int) -> None:
        """Each product's [key, row] = Σ_d keys[key, d] · queries[d, row], by register tiles."""
        for queries, keys, result in zip(self.queries, self.keys, self.products, strict=True):
            self._multiply_one(queries, keys, result, vectors, unroll)

    def _multiply_one(
        self, queries: Any, keys: Any, result: Any, vectors: int, unroll: int
    ) -> None:
        nest = self.nest
        depth = int(queries.ty.shape[0])
        tile = [(u, v) for u in range(unroll) for v in range(vectors)]
        with nest.loop("tile", ceil_div(self.length, unroll)) as t:
            acc = dict(zip(tile, nest.registers("acc", len(tile), self.lanes), strict=True))

            def at(p: tuple[int, int], lane: Any) -> list[Any]:
                return [t * index(unroll) + index(p[0]), index(p[1] * self.lanes) + lane]

            for p in tile:
                with nest.vector(self.lanes) as lane:
                    nest.put(acc[p], [lane], real(0.0))
            with nest.loop("d", index(depth)) as d:
                for p in tile:
                    with nest.vector(self.lanes) as lane:
                        key, row = at(p, lane)
                        term = keys[key, d] * queries[d, row]
                        nest.put(acc[p], [lane], acc[p][lane] + term)
            for p in tile:
                with nest.vector(self.lanes) as lane:
                    nest.put(result, at(p, lane), acc[p][lane])

    def _env(self, row: Any, j: Any) -> dict[Axis, Any]:
        """Axes at a point of the block; reads of products and sides go to their buffers."""
        readers = self.readers
        for product, buffer in zip(self.roles.products, self.products, strict=True):
            readers[id(product.stage)] = lambda *_, b=buffer: b[j, row]
        for side in self.sides.values():
            readers[id(side.proxy)] = lambda *_, b=side.buffer: b[j, row]
        return self.env | {self.roles.row: self.first + row, self.roles.key: self.start + j}

    def _rescale(self) -> None:
        """Scores of the block, masked ones −inf, and the new row maxima; sums so far decay."""
        from tvm import tirx

        nest, infinity = self.nest, real(float("-inf"))
        (best,) = nest.registers("best", 1, self.lanes)
        with self._vectors() as first:
            with nest.vector(self.lanes) as lane:
                nest.put(best, [lane], self.top[first + lane])
            with nest.loop("key", self.length) as j:
                with nest.vector(self.lanes) as lane:
                    env = self._env(first + lane, j)
                    value = nest.real(self.score, env)
                    if self.keep is not None:
                        value = tirx.Select(nest.value(self.keep, env), value, infinity)
                    nest.put(self.scores, [j, first + lane], value)
                with nest.vector(self.lanes) as lane:
                    new, old = self.scores[j, first + lane], best[lane]
                    nest.put(best, [lane], tirx.Select(new > old, new, old))
            with nest.vector(self.lanes) as lane:
                shift = tirx.Select(best[lane] == infinity, real(0.0), best[lane])
                decay = self.math["exp"](self.top[first + lane] - shift)
                nest.put(self.decay, [first + lane], decay)
            with nest.vector(self.lanes) as lane:
                nest.put(self.top, [first + lane], best[lane])

    def _exponentiate(self) -> None:
        """Scores become weights; row totals follow."""
        from tvm import tirx

        nest, infinity = self.nest, real(float("-inf"))
        shift, total = nest.registers("shift", 2, self.lanes)
        with self._vectors() as first:
            with nest.vector(self.lanes) as lane:
                top = self.top[first + lane]
                nest.put(shift, [lane], tirx.Select(top == infinity, real(0.0), top))
            with nest.vector(self.lanes) as lane:
                row = first + lane
                nest.put(total, [lane], self.total[row] * self.decay[row])
            with nest.loop("key", self.length) as j:
                with nest.vector(self.lanes) as lane:
                    weight = self.math["exp"](self.scores[j, first + lane] - shift[lane])
                    nest.put(self.scores, [j, first + lane], weight)
                with nest.vector(self.lanes) as lane:
                    nest.put(total, [lane], total[lane] + self.scores[j, first + lane])
            with nest.vector(self.lanes) as lane:
                nest.put(self.total, [first + lane], total[lane])

    def _accumulate(self, flags: Any) -> None:
        from tvm import tirx

        nest = self.nest
        if flags is None:
            self._accumulate_tiles()
            return
        (worst,) = nest.registers("worst", 1, 1, "int32")
        nest.put(worst, [0], _int(0))
        with nest.loop("lane", index(self.lanes)) as lane:
            nest.put(worst, [0], tirx.max(worst[index(0)], flags[lane]))
        with nest.when(worst[index(0)] < _int(_INF_BITS)):
            self._accumulate_tiles()
        with nest.otherwise():
            self._accumulate_kept()

    def _accumulate_tiles(self) -> None:
        """sums = sums · decay + Σ_key weights · values, by register tiles."""
        nest = self.nest
        vectors = self.padded // self.lanes
        wide = next(n for n in (4, 3, 2, 5, 1) if vectors % n == 0)
        high = max(n for n in (8, 4, 2, 1) if n * wide <= max(self.config.registers, wide))
        tile = [(u, v) for u in range(high) for v in range(wide)]
        with (
            nest.loop("tile", ceil_div(self.count, high)) as t,
            nest.loop("strip", index(vectors // wide)) as strip,
        ):
            acc = dict(zip(tile, nest.registers("acc", len(tile), self.lanes), strict=True))

            def row(p: tuple[int, int]) -> Any:
                return t * index(high) + index(p[0])

            def column(p: tuple[int, int], lane: Any) -> Any:
                return strip * index(wide * self.lanes) + index(p[1] * self.lanes) + lane

            for p in tile:
                with nest.vector(self.lanes) as lane:
                    before = self.sums[row(p), column(p, lane)] * self.decay[row(p)]
                    nest.put(acc[p], [lane], before)
            with nest.loop("key", self.length) as j:
                for p in tile:
                    with nest.vector(self.lanes) as lane:
                        term = self.scores[j, row(p)] * self.values[j, column(p, lane)]
                        nest.put(acc[p], [lane], acc[p][lane] + term)
            for p in tile:
                with nest.vector(self.lanes) as lane:
                    nest.put(self.sums, [row(p), column(p, lane)], acc[p][lane])

    def _accumulate_kept(self) -> None:
        """The same, adding only what the mask keeps: for values with NaN or infinity."""
        nest = self.nest
        assert self.keep is not None
        with nest.loop("row", self.count) as r:
            nest.strip(self.columns, self.lanes, lambda at, width: self._vector(
                width, lambda lane: nest.put(
                    self.sums, [r, at + lane], self.sums[r, at + lane] * self.decay[r])))
            with nest.loop("key", self.length) as j:
                kept = self.nest.value(self.keep, self._env(r, j))
                with nest.when(kept):
                    nest.strip(self.columns, self.lanes, lambda at, width: self._vector(
                        width, lambda lane: nest.put(
                            self.sums, [r, at + lane], self.sums[r, at + lane]
                            + self.scores[j, r] * self.values[j, at + lane])))

    def _finish(self) -> None:
        """Divide, apply what follows, store."""
        from tvm import tirx

        nest, roles = self.nest, self.roles
        _, heads, _ = split(self.group)
        with nest.loop("row", self.count) as r:
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


def _int(value: int) -> Any:
    from tvm import tirx

    return tirx.IntImm("int32", value)


def _least(a: Any, b: Any) -> Any:
    from tvm import tirx

    return tirx.min(a, b)


def _most(a: Any, b: Any) -> Any:
    from tvm import tirx

    return tirx.max(a, b)


def _conjuncts(node: Expr) -> list[Expr]:
    if isinstance(node, Binary) and node.op == "and":
        return _conjuncts(node.a) + _conjuncts(node.b)
    return [node]


def _upper_bound(node: Expr, key: Axis, row: Axis, batch: set[Axis]) -> Expr | None:
    """An exclusive bound of `key` from `key ≤ f` or `key < f`, f = row plus what rows share."""
    if not isinstance(node, Binary) or node.op not in ("le", "lt") or node.a is not key:
        return None
    if any(isinstance(n, Read) for n in walk(node.b)) or not _steps_with(node.b, row, batch):
        return None
    return node.b + 1 if node.op == "le" else node.b


def _steps_with(node: Expr, row: Axis, batch: set[Axis]) -> bool:
    """Whether `node` never falls as the row grows."""
    if node is row or row not in free_axes(node):
        return all(a is row or a in batch for a in free_axes(node))
    if isinstance(node, Binary) and node.op == "add":
        return _steps_with(node.a, row, batch) and _steps_with(node.b, row, batch)
    if isinstance(node, Binary) and node.op == "sub":
        return _steps_with(node.a, row, batch) and row not in free_axes(node.b)
    return False
