"""Tiles of softmax_sum by ordinary arithmetic: a thread has a rectangle of scores and of sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Expr, cast
from ...dsl.lower import select
from ..group import Group
from ..softmax import Roles
from ..terms import float32
from .contraction_copy import Factor, Room
from .flash import Flash, FlashConfig
from .nest import GridNest

Tir = Any
_PAD = 4  # elements after a row in shared memory: neighbours in a column are in other banks
_RUN = 4  # neighbours that a thread takes: 16 bytes of f32


def columns_of(config: FlashConfig, columns: int) -> tuple[int, int]:
    """Columns of the sums that a thread has, and how many of them are side by side."""
    wide = -(-columns // config.across)
    return wide, next(n for n in (_RUN, 2, 1) if wide % n == 0)


def rows_of(config: FlashConfig, columns: int) -> int:
    """Keys whose values are in shared memory at once: as many elements as a chunk of keys."""
    wide, _ = columns_of(config, columns)
    keys = config.keys
    while keys > 4 and keys * (wide * config.across + _PAD) > config.chunk * (config.keys + _PAD):
        keys //= 2
    return keys


def shared_elements(config: FlashConfig, depths: list[int], columns: int) -> int:
    """Elements of shared memory of a block, 4 bytes each."""
    wide, _ = columns_of(config, columns)
    chunks = sum(-(-d // config.chunk) for d in depths) if config.resident else min(1, len(depths))
    queries = chunks * config.chunk * (config.rows + _PAD)
    values = rows_of(config, columns) * (wide * config.across + _PAD)
    keys = config.chunk * (config.keys + _PAD) if depths else 0
    scores = max(1, len(depths)) * config.keys * (config.rows + _PAD)
    return queries + max(keys, values) + scores + 2


class PlainFlash(Flash):
    """Depths go through shared memory by chunks, and values by as many keys as take that room."""

    def __init__(self, nest: GridNest, group: Group, found: Roles, config: FlashConfig) -> None:
        super().__init__(nest, group, found, config)
        self.columns = int(found.column.extent)  # type: ignore[arg-type]
        self.wide, self.run = columns_of(config, self.columns)
        self.number, self.lanes = nest.number, self.space(found.key).lanes

    def key(self, c: Tir) -> Tir:
        return self.x * self.nest.number(self.near) + c

    def column(self, c: int) -> Tir:
        nest, (group, lane) = self.nest, divmod(c, self.run)
        first = nest.number(group * self.run * self.config.across + lane)
        return first + self.x * nest.number(self.run)

    def begin(self) -> None:
        nest, cfg, threads = self.nest, self.config, self.config.threads
        number = nest.number
        self.spaces = [self.space(depth) for _, _, depth in self.factors]
        self.queries, self.keys = (
            [Factor(space, cast(pair[side], f32), (axis,), (width, cfg.chunk), threads, raw=False)
             for space, pair in zip(self.spaces, self.factors, strict=True)]
            for side, axis, width in (
                (0, self.roles.row, cfg.rows), (1, self.roles.key, cfg.keys))
        )  # fmt: skip
        along_keys = self.space(self.roles.key)
        self.step = rows_of(cfg, self.columns)
        tile = (self.wide * cfg.across, self.step)
        value: Expr = cast(self.value, f32)
        self.values = Factor(along_keys, value, (self.roles.column,), tile, threads, raw=False)
        staged = max([self.values.size, *(k.size for k in self.keys)])
        self.stage = Room(nest.shared("stage", [number(staged)], "float32"), 0, 0)
        self.stride = cfg.rows + _PAD
        self.scores = [
            nest.shared("scores", [number(cfg.keys * self.stride)], "float32")
            for _ in range(max(1, len(self.factors)))
        ]
        self.chunks = [-(-int(d.extent) // cfg.chunk) for _, _, d in self.factors]  # type: ignore[arg-type]
        self._queries()
        self.values.begin(number(0))
        self.values.hold()

    def _queries(self) -> None:
        """Room for the rows' own factors, and the whole of them if they stay."""
        nest, number = self.nest, self.nest.number
        if not self.queries:
            return
        size = self.queries[0].size
        count = sum(self.chunks) if self.config.resident else 1
        room = nest.shared("rows", [number(count * size)], "float32")
        self.rooms = []
        for n, (factor, chunks) in enumerate(zip(self.queries, self.chunks, strict=True)):
            first = sum(self.chunks[:n]) if self.config.resident else 0
            self.rooms.append(Room(room, first * size, size))
            factor.begin(self.first)
            if not self.config.resident:
                continue
            factor.hold()
            with self.rolled("chunk", chunks) as chunk:
                factor.fetch(chunk * number(self.config.chunk))
                factor.put(chunk, self.rooms[n])

    def multiply(self) -> None:
        nest, cfg, number = self.nest, self.config, self.nest.number
        count = self.high * self.near
        self.found = [nest.private("found", [number(count)], "float32") for _ in self.factors]
        self.left = nest.private("left", [number(self.high)], "float32")
        self.right = nest.private("right", [number(max(self.near, self.wide))], "float32")
        if not self.found:
            nest.barrier()  # the weights before are read no more
        for n, sums in enumerate(self.found):
            self._fill(sums, count, 0.0)
            keys, queries = self.keys[n], self.queries[n]
            keys.begin(self.start)
            keys.hold()
            if not cfg.resident:
                queries.hold()
            with self.rolled("chunk", self.chunks[n]) as chunk:
                keys.fetch(chunk * number(cfg.chunk))
                if not cfg.resident:
                    queries.fetch(chunk * number(cfg.chunk))
                nest.barrier()
                keys.put(number(0), self.stage)
                if not cfg.resident:
                    queries.put(number(0), self.rooms[n])
                nest.barrier()
                self._multiply(n, chunk if cfg.resident else number(0))
            self._hand(n)

    def _hand(self, n: int) -> None:
        """A thread's sums of a product to shared memory, where it goes on with them."""
        nest, number = self.nest, self.nest.number
        with (
            nest.loop("i", number(self.high), "unroll") as i,
            nest.loop("c", number(self.near), "unroll") as c,
        ):
            at = self.key(c) * number(self.stride) + self.inner_row(0) + i
            nest.store(self.scores[n], [at], self.found[n][i * number(self.near) + c])

    def _multiply(self, n: int, chunk: Tir) -> None:
        """The products of a chunk of the depth."""
        room, keys, queries, zero = self.rooms[n], self.keys[n], self.queries[n], self.number(0)
        with self._steps("depth", self.config.chunk) as d:
            first = queries.at(chunk, room, self.inner_row(0), d)
            self._take(self.left, self.high, room.buffer, first)
            first = keys.at(zero, self.stage, self.key(zero), d)
            self._take(self.right, self.near, self.stage.buffer, first)
            self._outer(self.found[n], self.near, lambda i, c: self.left[i] * self.right[c])

    @contextmanager
    def _steps(self, name: str, count: int) -> Iterator[Tir]:
        """A loop, a few of its rounds written out."""
        few = next(n for n in (4, 2, 1) if count % n == 0)
        with (
            self.rolled(name, count // few) as outer,
            self.nest.loop(name, self.nest.number(few), "unroll") as inner,
        ):
            yield outer * self.nest.number(few) + inner

    def _take(self, held: Tir, count: int, source: Tir, place: Tir, start: int = 0) -> None:
        """`count` neighbours from shared memory to registers from `start` on."""
        width = next(n for n in (_RUN, 2, 1) if count % n == 0)
        for first in range(0, count, width):
            with self.lanes(width) as lane:
                there = source[place + self.number(first) + lane]
                self.nest.store(held, [self.number(start + first) + lane], there)

    def _outer(self, sums: Tir, across: int, term: Any) -> None:
        """sums[i, c] += term(i, c), all in registers."""
        nest, number = self.nest, self.nest.number
        with (
            nest.loop("i", number(self.high), "unroll") as i,
            nest.loop("c", number(across), "unroll") as c,
        ):
            at = i * number(across) + c
            nest.store(sums, [at], sums[at] + term(i, c))

    def product(self, number: int, i: int, c: Tir) -> Tir:
        at = self.key(c) * self.nest.number(self.stride) + self.inner_row(i)
        return self.scores[number][at]

    def weigh(self, i: int, c: Tir, weight: Tir) -> None:
        place = self.product(0, i, c)
        self.nest.store(place.source, place.indices, weight)

    def accumulate(self) -> None:
        nest, number = self.nest, self.nest.number
        with (
            nest.loop("i", number(self.high), "unroll") as i,
            nest.loop("c", number(self.wide), "unroll") as c,
        ):
            at = i * number(self.wide) + c
            nest.store(self.sums, [at], self.sums[at] * self.decay[i])
        steps = self.config.keys // self.step
        with self.rolled("step", steps) as step:
            first = nest.bind("first", step * number(self.step))
            self.values.fetch(self.start + first)
            nest.barrier()
            self.values.put(number(0), self.stage)
            mark = nest.bind("mark", (self.block * number(steps) + step).astype("int32"))
            self.note_odd(self.values, mark)
            nest.barrier()
            if self.masked:
                with nest.choice(self.odd[number(0)].equal(mark)) as otherwise:
                    self._add(first, True)
                    otherwise()
                    self._add(first, False)
            else:
                self._add(first, False)

    def _add(self, first: Tir, odd: bool) -> None:
        """Weights · values of the keys that are in shared memory; `odd`: but the masked ones."""
        with self._steps("key", self.step) as key:
            near = (first + key) * self.number(self.stride)
            self._take(self.left, self.high, self.scores[0], near + self.inner_row(0))
            for start in range(0, self.wide, self.run):
                place = self.values.at(self.number(0), self.stage, self.column(start), key)
                self._take(self.right, self.run, self.stage.buffer, place, start)

            def term(i: Tir, c: Tir) -> Tir:
                found = self.left[i] * self.right[c]
                masked = self.masked_weight(self.left[i])
                return select(masked, float32(0.0), found) if odd else found

            self._outer(self.sums, self.wide, term)
