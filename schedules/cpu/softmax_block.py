"""One block of keys of a tile of rows: the inner part of the nest in `softmax_tiles`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...dsl.expr import Axis, Expr, Read, Tensor
from ...dsl.lower import encode, select, storage
from ...dsl.walk import free_axes, rebuild
from ..emit import Emitter
from ..group import Group, known
from ..softmax import Roles
from .copies import Magnitudes, copy_rows
from .register_tiles import RegisterTile, product
from .softmax_sum import SoftmaxSumConfig
from .tiling import Tiling, ceil_div, index, real


@dataclass
class _Side:
    """A tensor element that depends on the row, copied so that rows are adjacent."""

    read: Read
    proxy: Tensor
    buffer: Any = None


class Block:
    """Buffers of a tile and the statements that take one block of keys into its sums.

    Set by the nest around it: `env` (batch axes), `first` and `count` of the tile's rows, `start`
    and `length` of the block's keys.
    """

    env: dict[Axis, Any]
    first: Any
    count: Any
    start: Any
    length: Any

    def __init__(
        self, emitter: Emitter, group: Group, roles: Roles, lanes: int, config: SoftmaxSumConfig
    ) -> None:
        self.nest = Tiling(emitter)
        self.readers = emitter.lowering.readers
        self.math = emitter.lowering.math
        self.group, self.roles, self.lanes, self.config = group, roles, lanes, config
        self.rows = config.groups * config.vectors * lanes
        self.columns = known(roles.column)
        self.padded = -(-self.columns // lanes) * lanes
        self.sides: dict[int, _Side] = {}

    def prepare(self) -> None:
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

    def allocate(self) -> None:
        nest, keys, cfg = self.nest, self.config.keys, self.config
        spare = keys + 2 * cfg.keys_unroll
        depths = [known(p.depth) for p in self.roles.products]
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

    def vector(self, width: int, body: Any) -> None:
        with self.nest.vector(width) as lane:
            body(lane)

    @contextmanager
    def vectors(self) -> Iterator[Any]:
        """A loop over the tile's rows by vectors, those past the last row left out."""
        with self.nest.loop("vector", ceil_div(self.count, self.lanes)) as v:
            yield v * index(self.lanes)

    def load_queries(self, node: Expr, depth: Axis, buffer: Any) -> None:
        def copy(row: Any, d: Any) -> None:
            env = self.env | {self.roles.row: self.first + row, depth: d}
            self.nest.put(buffer, [d, row], self.nest.real(node, env))

        self.nest.transposed(self.count, index(known(depth)), copy)

    def take(self) -> None:
        nest = self.nest
        for (_, key, depth), buffer in zip(self.factors, self.keys, strict=True):
            self._load_rows(key, depth, buffer)
        seen = None
        if self.keep is not None:
            seen = Magnitudes(nest, self.lanes)
            seen.clear()
        self._load_rows(self.value, self.roles.column, self.values, seen)
        for side in self.sides.values():
            self._load_side(side)
        step = self.config.vectors * self.lanes
        with nest.loop("group", ceil_div(self.count, step)) as group:
            self._multiply_group(nest.bind("first_row", group * index(step)))
        self._rescale()
        self._exponentiate()
        self._accumulate(seen)

    def _load_rows(
        self, node: Expr, along: Axis, buffer: Any, seen: Magnitudes | None = None
    ) -> None:
        """buffer[key, along] = node, f32."""

        def element(j: Any, at: Any) -> Any:
            return self.nest.real(node, self.env | {self.roles.key: self.start + j, along: at})

        copy_rows(self.nest, buffer, self.length, known(along), self.lanes, element, seen)

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
            with self.vectors() as first, nest.vector(self.lanes) as lane:
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

    def _multiply_group(self, first: Any) -> None:
        """The products for a group of rows, or one vector where there are few, as when decoding."""
        nest, unroll = self.nest, self.config.keys_unroll
        if self.config.vectors == 1:
            self._multiply(first, 1, 2 * unroll)
            return
        with nest.when(self.count - first > index(self.lanes)):
            self._multiply(first, self.config.vectors, unroll)
        with nest.otherwise():
            self._multiply(first, 1, 2 * unroll)

    def _multiply(self, first: Any, vectors: int, unroll: int) -> None:
        """Each product's [key, row] = Σ_d keys[key, d] · queries[d, row], from row `first` on."""
        tile = RegisterTile(unroll, vectors, self.lanes)
        for (_, _, depth), queries, keys, result in zip(
            self.factors, self.queries, self.keys, self.products, strict=True
        ):
            product(
                self.nest, tile, self.length, 1, known(depth),
                lambda j, d, keys=keys: keys[j, d],  # type: ignore[misc]
                lambda d, row, queries=queries: queries[d, row], result, first=first,  # type: ignore[misc]
            )  # fmt: skip

    def _env(self, row: Any, j: Any) -> dict[Axis, Any]:
        """Axes at a point of the block; reads of products and sides go to their buffers."""
        readers = self.readers
        for each, buffer in zip(self.roles.products, self.products, strict=True):
            readers[id(each.stage)] = lambda *_, b=buffer: b[j, row]
        for side in self.sides.values():
            readers[id(side.proxy)] = lambda *_, b=side.buffer: b[j, row]
        return self.env | {self.roles.row: self.first + row, self.roles.key: self.start + j}

    def _rescale(self) -> None:
        """Scores of the block, masked ones −inf, and the new row maxima; sums so far decay."""
        from tvm import tirx

        nest, infinity = self.nest, real(float("-inf"))
        (best,) = nest.registers("best", 1, self.lanes)
        with self.vectors() as first:
            with nest.vector(self.lanes) as lane:
                nest.put(best, [lane], self.top[first + lane])
            with nest.loop("key", self.length) as j:
                with nest.vector(self.lanes) as lane:
                    env = self._env(first + lane, j)
                    value = nest.real(self.score, env)
                    if self.keep is not None:
                        value = select(nest.value(self.keep, env), value, infinity, self.score)
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
        with self.vectors() as first:
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

    def _accumulate(self, seen: Magnitudes | None) -> None:
        if seen is None:
            self._accumulate_tiles()
            return
        with self.nest.when(seen.finite()):
            self._accumulate_tiles()
        with self.nest.otherwise():
            self._accumulate_kept()

    def _accumulate_tiles(self) -> None:
        """sums = sums · decay + Σ_key weights · values, by register tiles."""
        vectors = self.padded // self.lanes
        high, wide = sums_tile(self.rows, vectors, self.config.registers)
        product(
            self.nest, RegisterTile(high, wide, self.lanes), self.count, vectors // wide,
            self.length, lambda r, j: self.scores[j, r], lambda j, c: self.values[j, c], self.sums,
            start=lambda r, c: self.sums[r, c] * self.decay[r],
        )  # fmt: skip

    def _accumulate_kept(self) -> None:
        """The same, adding only what the mask keeps: for values with NaN or infinity."""
        nest = self.nest
        assert self.keep is not None

        def update(r: Any, change: Callable[[Any, Any], Any]) -> None:
            """sums[r, column] = change(sums[r, column], column) for each column."""

            def body(at: Any, width: int) -> None:
                with nest.vector(width) as lane:
                    column = at + lane
                    nest.put(self.sums, [r, column], change(self.sums[r, column], column))

            nest.strip(self.columns, self.lanes, body)

        with nest.loop("row", self.count) as r:
            update(r, lambda total, _: total * self.decay[r])
            with nest.loop("key", self.length) as j:
                kept = self.nest.value(self.keep, self._env(r, j))
                with nest.when(kept):
                    update(r, lambda total, c: total + self.scores[j, r] * self.values[j, c])


def sums_tile(rows: int, vectors: int, registers: int) -> tuple[int, int]:
    """Rows and vectors of a register tile of the sums; whole tiles make up the `rows`.

    Most products for an element loaded, where sums, a row's values and a weight have registers.
    """
    tiles = (
        (high, wide) for high in (8, 6, 4, 3, 2, 1) for wide in (5, 4, 3, 2, 1)
        if rows % high == 0 and vectors % wide == 0 and high * wide + wide < registers
    )  # fmt: skip
    return max(tiles, key=lambda t: t[0] * t[1] / (t[0] + t[1]))
