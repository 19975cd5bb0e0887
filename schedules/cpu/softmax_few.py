"""The nest of `SoftmaxSumRows` for so few rows that reading keys and values is what takes time.

    parallel (batch..):
        queries[row, d] = rows of each product
        top = −inf; total = 0; sums = 0
        for block of keys:
            parts[key] = what indices of keys and values have in them that the key alone tells
            scores[row, key] = Σ_d keys · queries, straight from where the keys are
            scores = score expression, −inf where masked; new top; weights = exp(scores − top)
            sums[row, column] = sums · decay + Σ_key weights · values, straight from there too
        out = sums / total

The depth, then the keys, then the columns are the lanes; nothing is copied. Masks select: where a
block has a masked key, its values are looked through first, as in `softmax_tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Axis, Const, DimRef, Expr, Read, ScalarRef, Tensor
from ...dsl.lower import select
from ...dsl.walk import free_axes, rebuild
from ..emit import Emitter
from ..group import Group
from ..softmax import Roles, inner_axis
from ..terms import int32, least
from .copies import Magnitudes
from .softmax_sum import SoftmaxSumConfig
from .softmax_tiles import Tiles
from .tiling import ceil_div, index, real

KEYS_AT_ONCE = 4  # whose values are gone through a strip of columns at a time


@dataclass(frozen=True)
class _Key:
    """A key's place in the block, and its parts by the proxies that read them."""

    place: Any
    parts: dict[int, Any]


class Few(Tiles):
    """Emits the nest for one group; all rows are one tile."""

    def __init__(
        self, emitter: Emitter, group: Group, roles: Roles, lanes: int, config: SoftmaxSumConfig
    ) -> None:
        self.inner = inner_axis(roles)
        outer = tuple(a for a in roles.batch if a is not self.inner)
        super().__init__(emitter, group, replace(roles, batch=outer), lanes, config)
        self.rows = int(roles.row.extent)  # type: ignore[arg-type]
        self.heads = index(1) if self.inner is None else self.nest.size(self.inner.extent)
        self.parts: dict[int, tuple[Expr, Any, Tensor]] = {}

    def prepare(self) -> None:
        """The expressions of the nest: slow index arithmetic done once, or once a key."""

        def settle(part: Expr) -> Expr:
            return self.nest.settle(part, self.env)

        node = self.roles.node
        inside = {*self.env, self.roles.key}
        self.factors = [
            (settle(p.row), self._parted(settle(p.key), inside), p.depth)
            for p in self.roles.products
        ]
        self.value = self._parted(settle(node.value), inside)
        self.score = settle(node.score)
        self.keep = None if node.where is None else settle(node.where)

    def _parted(self, node: Expr, inside: set[Axis]) -> Expr:
        """`node` with what the key tells alone, plain axes apart, as reads of buffers."""
        found = self.parts.get(id(node))
        if found is None:
            axes = free_axes(node)
            leaf = isinstance(node, (Axis, Const, DimRef, ScalarRef))
            whole = node.dtype == f32 or node.dtype.is_int  # what a buffer holds as it is
            if leaf or not whole or self.roles.key not in axes or not inside.issuperset(axes):
                children = tuple(self._parted(c, inside) for c in node.children())
                return rebuild(node, children) if children else node
            name = f"part_{len(self.parts)}"
            buffer = self.nest.scratch(name, [self.config.keys], node.dtype.name)
            found = self.parts[id(node)] = node, buffer, Tensor(name, (), node.dtype)
        return Read(found[2], (), None, node.dtype)

    def allocate(self) -> None:
        nest, rows, heads = self.nest, self.rows, self.heads
        # Keys are taken some at a time, the last ones past the block.
        spare = self.config.keys + max(2 * self.lanes, self.config.registers)
        depths = [int(p.depth.extent) for p in self.roles.products]  # type: ignore[arg-type]
        self.queries = [nest.scratch("queries", [heads, rows, d]) for d in depths]
        self.products = [nest.scratch("products", [heads, rows, spare]) for _ in depths]
        self.scores = nest.scratch("scores", [heads, rows, spare])
        self.sums = nest.scratch("sums", [heads, rows, self.padded])
        self.totals = nest.scratch("totals", [heads, rows, self.lanes])
        self.top, self.decay = (nest.scratch(n, [heads, rows]) for n in ("top", "decay"))
        self.seen = Magnitudes(nest, self.lanes)  # of values; before, whether a key is masked

    @contextmanager
    def _each_head(self) -> Iterator[Any]:
        """A loop over the inner axis, if there is one; yields its index."""
        with self.nest.loop("head", self.heads) as h:
            outside = self.env
            if self.inner is not None:
                self.env = outside | {self.inner: h}
            yield h
            self.env = outside

    def _task(self) -> None:
        nest = self.nest
        self.prepare()
        self.allocate()
        with self._each_head() as h, nest.loop("row", index(self.rows)) as r:
            self._start_row(h, r)
        end = nest.bind("keys", self._last_key())
        keys = index(self.config.keys)
        with nest.loop("block", ceil_div(end, self.config.keys)) as block:
            self.start = nest.bind("first_key", block * keys)
            self.length = nest.bind("length", least(end - self.start, keys))
            self._take()
        with self._each_head() as h:
            (self.total,) = nest.registers("total", 1, self.rows)
            with nest.loop("row", index(self.rows)) as r:
                nest.put(self.total, [r], real(0.0))
                with nest.loop("lane", index(self.lanes)) as lane:
                    nest.put(self.total, [r], self.total[r] + self.totals[h, r, lane])
            state = self.top, self.sums
            self.top, self.sums = _OfHead(self.top, h), _OfHead(self.sums, h)
            self._finish()
            self.top, self.sums = state

    def _start_row(self, h: Any, r: Any) -> None:
        nest = self.nest
        env = self.env | {self.roles.row: least(r, self.stored - index(1))}
        for (row, _, depth), buffer in zip(self.factors, self.queries, strict=True):
            self._along(int(depth.extent), lambda at, row=row, depth=depth, buffer=buffer: nest.put(  # type: ignore[arg-type,misc]
                buffer, [h, r, at], nest.real(row, env | {depth: at})))  # fmt: skip
        self._along(self.padded, lambda at: nest.put(self.sums, [h, r, at], real(0.0)))
        self._along(self.lanes, lambda at: nest.put(self.totals, [h, r, at], real(0.0)))
        nest.put(self.top, [h, r], real(float("-inf")))

    def _along(self, count: int, body: Callable[[Any], None]) -> None:
        """`body(index)` over 0 … count − 1, in vectors."""
        self.nest.strip(
            count, self.lanes, lambda at, width: self.vector(width, lambda lane: body(at + lane))
        )

    def _take(self) -> None:
        nest = self.nest
        with nest.loop("key", self.length) as j:
            env = self.env | {self.roles.key: self.start + j}
            for node, buffer, _ in self.parts.values():
                nest.put(buffer, [j], nest.value(node, env))
        for product in zip(self.factors, self.queries, self.products, strict=True):
            self._products(*product)
        self.seen.clear()
        with self._each_head() as h, nest.loop("row", index(self.rows)) as r:
            self._weigh(h, r)
            self._fade(h, r)
        if self.keep is None:
            self._add()
            return
        with nest.when(self.seen.greatest() > int32(0)):
            self.seen.clear()
            self._look_through()
        with nest.choice(self.seen.finite()) as otherwise:
            self._add()
            otherwise()
            self._add_kept()

    def _held(self, j: Any) -> _Key:
        """A key of the block, its parts in variables."""
        nest = self.nest
        parts = {id(p): nest.bind("part", buffer[j]) for _, buffer, p in self.parts.values()}
        return _Key(j, parts)

    def _at_key(self, key: _Key) -> dict[Axis, Any]:
        """The axes at a key of the block; parts are read for it."""
        for proxy, part in key.parts.items():
            self.readers[proxy] = lambda *_, p=part: p
        return self.env | {self.roles.key: self.start + key.place}

    def _products(self, factor: Any, queries: Any, result: Any) -> None:
        """result[head, row, key] = Σ_d keys[key, d] · queries[row, d], some keys at a time."""
        nest = self.nest
        at_once = self._at_once(1)
        with nest.loop("tile", ceil_div(self.length, at_once)) as t:
            places = [t * index(at_once) + index(u) for u in range(at_once)]
            places = [nest.bind("at", p) for p in places]
            held = [self._held(least(p, self.length - index(1))) for p in places]
            with self._each_head() as h:
                found = self._dots(factor, queries, h, held)
                for (u, r), acc in found.items():
                    self._fold(acc)
                    nest.put(result, [h, index(r), places[u]], acc[index(0)])

    def _dots(self, factor: Any, queries: Any, h: Any, held: list[_Key]) -> dict[Any, Any]:
        """Registers whose lanes sum up to the product of a key and a row, by their numbers."""
        nest = self.nest
        _, key, depth = factor
        pairs = [(u, r) for r in range(self.rows) for u in range(len(held))]
        acc = dict(zip(pairs, nest.registers("acc", len(pairs), self.lanes), strict=True))
        loaded = nest.registers("key_part", len(held), self.lanes)
        for p in pairs:
            self.vector(self.lanes, lambda lane, p=p: nest.put(acc[p], [lane], real(0.0)))

        def term(at: Any, width: int) -> None:
            for u, j in enumerate(held):
                env = self._at_key(j)
                with nest.vector(width) as lane:
                    nest.put(loaded[u], [lane], nest.real(key, env | {depth: at + lane}))
            for u, r in pairs:
                with nest.vector(width) as lane:
                    product = loaded[u][lane] * queries[h, index(r), at + lane]
                    nest.put(acc[u, r], [lane], acc[u, r][lane] + product)

        nest.strip(int(depth.extent), self.lanes, term)
        return acc

    def _at_once(self, others: int) -> int:
        """How many vectors fit registers with an accumulator for each row and `others`."""
        return max(1, (self.config.registers - others) // (self.rows + 1))

    def _fold(self, acc: Any) -> None:
        """acc[0] = the sum of its lanes, halves onto halves."""
        nest, width = self.nest, self.lanes
        while width > 1:
            width //= 2
            with nest.vector(width) as lane:
                nest.put(acc, [lane], acc[lane] + acc[lane + index(width)])

    def _weigh(self, h: Any, r: Any) -> None:
        """A row's scores of the block, −inf where masked; its new maximum; its weights."""
        from tvm import tirx

        nest, infinity, lanes = self.nest, real(float("-inf")), index(self.lanes)
        whole = nest.bind("whole", self.length // lanes)
        with nest.loop("vector", whole) as v, nest.vector(self.lanes) as lane:
            self._score(h, r, v * lanes + lane, lane)
        with nest.loop("key", self.length - whole * lanes) as j:
            self._score(h, r, whole * lanes + j, index(0))
        with nest.loop("lane", lanes) as j:
            nest.put(self.scores, [h, r, self.length + j], infinity)
        vectors = nest.bind("vectors", ceil_div(self.length, self.lanes))
        (best,) = nest.registers("best", 1, self.lanes)
        self.vector(self.lanes, lambda lane: nest.put(best, [lane], infinity))
        with nest.loop("vector", vectors) as v, nest.vector(self.lanes) as lane:
            new, old = self.scores[h, r, v * lanes + lane], best[lane]
            nest.put(best, [lane], tirx.Select(new > old, new, old))
        before = nest.bind("before", self.top[h, r])
        with nest.loop("lane", lanes) as j:
            new, old = best[j], self.top[h, r]
            nest.put(self.top, [h, r], tirx.Select(new > old, new, old))
        top = self.top[h, r]
        shift = nest.bind("shift", tirx.Select(top == infinity, real(0.0), top))
        decay = nest.bind("fade", self.math["exp"](before - shift))
        nest.put(self.decay, [h, r], decay)
        (total,) = nest.registers("total", 1, self.lanes)
        with nest.vector(self.lanes) as lane:
            nest.put(total, [lane], self.totals[h, r, lane] * decay)
        with nest.loop("vector", vectors) as v:
            with nest.vector(self.lanes) as lane:
                at = v * lanes + lane
                nest.put(self.scores, [h, r, at], self.math["exp"](self.scores[h, r, at] - shift))
            with nest.vector(self.lanes) as lane:
                nest.put(total, [lane], total[lane] + self.scores[h, r, v * lanes + lane])
        self.vector(self.lanes, lambda lane: nest.put(self.totals, [h, r, lane], total[lane]))

    def _score(self, h: Any, r: Any, j: Any, lane: Any) -> None:
        from tvm import tirx

        nest = self.nest
        for product, buffer in zip(self.roles.products, self.products, strict=True):
            self.readers[id(product.stage)] = lambda *_, b=buffer: b[h, r, j]
        env = self.env | {self.roles.row: r, self.roles.key: self.start + j}
        value = nest.real(self.score, env)
        if self.keep is not None:
            kept = nest.value(self.keep, env)
            value = select(kept, value, real(float("-inf")), self.score)
            mark = self.seen.bits[lane]
            nest.put(self.seen.bits, [lane], tirx.Select(kept, mark, int32(1)))
        nest.put(self.scores, [h, r, j], value)

    def _fade(self, h: Any, r: Any) -> None:
        """A row's sums, after its maximum has grown."""
        with self.nest.when(self.decay[h, r] != real(1.0)):
            self._along(self.padded, lambda at: self.nest.put(
                self.sums, [h, r, at], self.sums[h, r, at] * self.decay[h, r]))  # fmt: skip

    def _look_through(self) -> None:
        """What magnitudes the block's values have."""
        nest = self.nest
        (loaded,) = nest.registers("value", 1, self.lanes)
        with nest.loop("key", self.length) as j:
            key = self._held(j)
            with self._each_head():
                env = self._at_key(key)

                def look(at: Any, width: int) -> None:
                    with nest.vector(width) as lane:
                        value = nest.real(self.value, env | {self.roles.column: at + lane})
                        nest.put(loaded, [lane], value)
                    self.seen.look(width, lambda lane: loaded[lane])

                nest.strip(self.columns, self.lanes, look)

    def _add_kept(self) -> None:
        """sums += weights · values where the mask keeps them: for values with NaN or infinity."""
        nest = self.nest
        assert self.keep is not None
        with nest.loop("key", self.length) as j:
            key = self._held(j)
            with self._each_head() as h, nest.loop("row", index(self.rows)) as r:
                env = self._at_key(key) | {self.roles.row: r}
                with nest.when(nest.value(self.keep, env)):
                    self._along(self.columns, lambda at: nest.put(
                        self.sums, [h, r, at], self.sums[h, r, at] + self.scores[h, r, j]
                        * nest.real(self.value, env | {self.roles.column: at})))  # fmt: skip

    def _add(self) -> None:
        """sums += Σ_key weights · values."""
        nest = self.nest
        # The weights of all rows are the same for every strip: they stay in registers.
        wide = self._at_once(self.rows) * self.lanes
        strips, rest = divmod(self.columns, wide)
        with nest.loop("group", ceil_div(self.length, KEYS_AT_ONCE)) as g:
            places = [nest.bind("at", g * index(KEYS_AT_ONCE) + index(u))
                      for u in range(KEYS_AT_ONCE)]  # fmt: skip
            # Past the block's last key are weights of 0, to go with any value that counts.
            keys = [(p, self._held(least(p, self.length - index(1)))) for p in places]
            with self._each_head() as h:
                if strips:
                    with nest.loop("strip", index(strips)) as s:
                        self._add_strip(h, keys, s * index(wide), wide)
                if rest:
                    self._add_strip(h, keys, index(strips * wide), rest)

    def _add_strip(self, h: Any, keys: list[tuple[Any, _Key]], at: Any, width: int) -> None:
        """The columns from `at` on, `width` of them, for some keys."""
        nest = self.nest
        starts = range(0, width, self.lanes)
        tile = [(r, c) for r in range(self.rows) for c in starts]
        acc = dict(zip(tile, nest.registers("acc", len(tile), self.lanes), strict=True))
        loaded = dict(zip(starts, nest.registers("value", len(starts), self.lanes), strict=True))

        def each(body: Callable[[int, int, Any, Any], None]) -> None:
            for r, c in tile:
                with nest.vector(min(self.lanes, width - c)) as lane:
                    body(r, c, lane, at + index(c) + lane)

        each(lambda r, c, lane, e: nest.put(acc[r, c], [lane], self.sums[h, index(r), e]))
        for place, key in keys:
            env = self._at_key(key)
            for c in starts:
                with nest.vector(min(self.lanes, width - c)) as lane:
                    value = nest.real(self.value, env | {self.roles.column: at + index(c) + lane})
                    nest.put(loaded[c], [lane], value)
            each(lambda r, c, lane, _, j=place: nest.put(acc[r, c], [lane],  # type: ignore[misc]
                acc[r, c][lane] + self.scores[h, index(r), j] * loaded[c][lane]))  # fmt: skip
        each(lambda r, c, lane, e: nest.put(self.sums, [h, index(r), e], acc[r, c][lane]))


class _OfHead:
    """A buffer's elements of one head."""

    def __init__(self, buffer: Any, head: Any) -> None:
        self.buffer, self.head = buffer, head

    def __getitem__(self, at: Any) -> Any:
        return self.buffer[(self.head, *(at if isinstance(at, tuple) else (at,)))]
