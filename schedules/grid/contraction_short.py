"""Contractions with a few rows: the other factor streams through once, without tiles.

Two nests: where memory is contiguous along k a subgroup sums one element's products, its threads
side by side along k; where it is contiguous along the other factor's own axis threads take
neighbours there, and groups of them share k.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...dsl.expr import Axis, Expr
from ..nest import static
from ..roles import steps_through
from .contraction_view import View, limited
from .vectors import MOST_LANES, Vectors

Tir = Any
Side = tuple[Expr, tuple[Axis, ...]]
THREADS = 256
_SUM_BYTES, _MOST_COLUMNS = 4, 4
SIDE = 32  # threads side by side along memory; also a subgroup, where that is not known


def lower(view: View, short: Side, long: Side, most: int, runs: Tir) -> None:
    """A launch for up to `most` indices of `short`'s axes; it takes place if `runs` is 1, not 0."""
    across = steps_through(long[0], long[1], view.k)
    nest = (_Columns if across else _Rows)(view, short, long, most)
    nest.lower(runs)


class _Short:
    """What both nests share: `short` and `long` are the factors and their own axes."""

    def __init__(self, view: View, short: Side, long: Side, most: int) -> None:
        self.view, self.nest, self.most = view, view.nest, most
        self.short, self.short_axes = short
        self.long, self.long_axes = long
        self.count, self.length = view.size(self.short_axes), view.size(self.long_axes)
        self.threads = min(THREADS, self.nest.caps.max_threads)

    def clear(self, per_row: int) -> None:
        from tvm import tirx

        nest, count = self.nest, self.nest.number(self.most * per_row)
        self.sums = nest.private("sums", [count], self.view.dtype)
        with nest.loop("i", count, "unroll") as i:
            nest.store(self.sums, [i], tirx.const(0, self.view.dtype))

    def rows(self) -> Iterable[tuple[int, Tir | None]]:
        """Rows that may be, and the condition that they are (None where that is known)."""
        exact = static(self.count)
        for row in range(self.most if exact is None else min(self.most, exact)):
            yield row, None if exact is not None else self.nest.number(row) < self.count

    def value(self, node: Expr, env: dict[Axis, Tir]) -> Tir:
        return self.nest.emitter.lowering.expr(node, self.view.env | env)

    def add(self, at: int, product: Tir) -> None:
        place = self.nest.number(at)
        self.nest.store(self.sums, [place], self.sums[place] + product)


class _Rows(_Short):
    """A subgroup for each index of the long factor, its lanes side by side along k."""

    def lower(self, runs: Tir) -> None:
        nest, view = self.nest, self.view
        width = min(nest.caps.subgroup or SIDE, self.threads)
        per_block = self.threads // width
        parts = nest.ceil_div(self.length, per_block)
        blocks = nest.simple(view.size(view.batch) * parts) * runs
        with nest.launch(blocks, self.threads) as (block, thread):
            first = view.enter(block, parts) * nest.number(per_block)
            index = first + nest.bind("group", thread // nest.number(width))
            lane = nest.bind("lane", thread % nest.number(width))
            self._sum(index, lane, width)
            self._finish(index, lane, width)

    def _sum(self, index: Tir, lane: Tir, width: int) -> None:
        from tvm import tirx

        nest, view, axis = self.nest, self.view, self.view.k[-1]
        # Past the end the last one is computed again: nothing to guard, and nothing is written.
        env = view.place(self.long_axes, tirx.min(index, self.length - nest.number(1)))
        self.clear(1)
        far = limited(Vectors(nest, axis, [self.long], []), MOST_LANES)
        near = Vectors(nest, axis, [self.short], [])
        near.lanes = lanes = far.lanes
        limited(near, lanes)
        length = view.size((axis,))
        held = nest.private("held", [nest.number(lanes)], view.dtype)
        with nest.loop("outer", view.size(view.k[:-1])) as outer:
            env = env | (view.place(view.k[:-1], outer) if view.k[:-1] else {})
            with nest.loop("step", nest.ceil_div(length, width * lanes)) as step:
                start = (step * nest.number(width) + lane) * nest.number(lanes)
                with nest.choice(start + nest.number(lanes) <= length) as otherwise:
                    self._whole((far, near), held, start, env)
                    otherwise()
                    with nest.loop("rest", tirx.max(length - start, nest.number(0))) as i:
                        self._single(env | {axis: start + i})

    def _whole(self, vectors: tuple[Vectors, Vectors], held: Tir, start: Tir,
               env: dict[Axis, Tir]) -> None:  # fmt: skip
        """A vector of the long factor times the same of every row."""
        nest, axis, (far, near) = self.nest, self.view.k[-1], vectors
        lane = iter(range(far.lanes))

        def keep(here: Tir, _: Any) -> None:
            value = self.value(self.long, env | {axis: here})
            nest.store(held, [nest.number(next(lane))], value)

        far.run(start, self.view.env | env, keep)
        for row, exists in self.rows():
            with self.view.maybe(exists):
                here = env | self.view.place(self.short_axes, nest.number(row))
                of = iter(range(far.lanes))

                def add(at: Tir, _: Any, row: int = row, here: Any = here, of: Any = of) -> None:
                    other = held[nest.number(next(of))]
                    self.add(row, other * self.value(self.short, here | {axis: at}))

                near.run(start, self.view.env | here, add)

    def _single(self, env: dict[Axis, Tir]) -> None:
        far = self.nest.bind("far", self.value(self.long, env))
        for row, exists in self.rows():
            with self.view.maybe(exists):
                here = env | self.view.place(self.short_axes, self.nest.number(row))
                self.add(row, far * self.value(self.short, here))

    def _finish(self, index: Tir, lane: Tir, width: int) -> None:
        """The lanes' sums added up; each row's is written by a lane of its own."""
        from tvm import tirx

        nest, view, zero = self.nest, self.view, self.nest.number(0)
        mine = nest.private("mine", [], view.dtype)
        rows = list(self.rows())
        per_lane = -(-len(rows) // width)
        for turn in range(per_lane):
            for row, _ in rows[turn * width : (turn + 1) * width]:
                total = nest.reduce("sum", self.sums[nest.number(row)], width)
                with nest.when(lane.equal(nest.number(row - turn * width))):
                    nest.store(mine, [zero], total)
            row = lane + nest.number(turn * width)
            with nest.when(tirx.all(index < self.length, row < self.count)):
                place = view.place(self.long_axes, index) | view.place(self.short_axes, row)
                view.write(mine[zero], place)


class _Columns(_Short):
    """Threads take neighbours of the long factor's last axis; groups of threads share k."""

    def lower(self, runs: Tir) -> None:
        nest, view = self.nest, self.view
        self.side = min(SIDE, self.threads)
        self.groups = self.threads // self.side
        self.vectors = Vectors(nest, self.long_axes[-1], [self.long], [])
        self.lanes = self._lanes()
        limited(self.vectors, self.lanes)
        self.columns = self.side * self.lanes
        parts = nest.ceil_div(self.length, self.columns)
        blocks = nest.simple(view.size(view.batch) * parts) * runs
        with nest.launch(blocks, self.threads) as (block, thread):
            first = view.enter(block, parts) * nest.number(self.columns)
            column = nest.bind("column", thread % nest.number(self.side)) * nest.number(self.lanes)
            group = nest.bind("group", thread // nest.number(self.side))
            self._sum(first + column, group)
            self._finish(first, column, group)

    def _lanes(self) -> int:
        """Neighbours a thread: as many as memory is moved by, and shared memory has room for."""
        last = static(self.view.size(self.long_axes[-1:]))
        if len(self.long_axes) > 1 and (last is None or last % MOST_LANES):
            return 1  # a vector would go on in the next of several outer axes
        room = self.nest.caps.shared_bytes // (self.threads * self.most * _SUM_BYTES)
        return 1 << (max(1, min(self.vectors.lanes, _MOST_COLUMNS, room)).bit_length() - 1)

    def _sum(self, start: Tir, group: Tir) -> None:
        nest, view, lanes = self.nest, self.view, self.lanes
        self.clear(lanes)
        depth = view.size(view.k)
        with nest.loop("step", nest.ceil_div(depth, self.groups)) as step:
            k = step * nest.number(self.groups) + group
            with nest.when(k < depth):
                env = view.place(view.k, k)
                with nest.choice(start + nest.number(lanes) <= self.length) as otherwise:
                    self._whole(start, env)
                    otherwise()
                    for i in range(lanes):
                        here = start + nest.number(i)
                        with nest.when(here < self.length):
                            place = env | view.place(self.long_axes, here)
                            self._multiply({i: nest.bind("far", self.value(self.long, place))}, env)

    def _whole(self, start: Tir, env: dict[Axis, Tir]) -> None:
        nest, view, axis = self.nest, self.view, self.long_axes[-1]
        place = env | view.place(self.long_axes, start)
        held = nest.private("held", [nest.number(self.lanes)], view.dtype)
        lane = iter(range(self.lanes))

        def keep(here: Tir, _: Any) -> None:
            value = self.value(self.long, place | {axis: here})
            nest.store(held, [nest.number(next(lane))], value)

        self.vectors.run(place[axis], view.env | place, keep)
        self._multiply({i: held[nest.number(i)] for i in range(self.lanes)}, env)

    def _multiply(self, far: dict[int, Tir], env: dict[Axis, Tir]) -> None:
        """Every row's element times the long factor's, by lane."""
        nest, view = self.nest, self.view
        for row, exists in self.rows():
            with view.maybe(exists):
                here = env | view.place(self.short_axes, nest.number(row))
                near = nest.bind("near", self.value(self.short, here))
                for i, value in far.items():
                    self.add(row * self.lanes + i, value * near)

    def _finish(self, first: Tir, column: Tir, group: Tir) -> None:
        """The groups' sums added up in their order."""
        from tvm import tirx

        nest, view, zero = self.nest, self.view, self.nest.number(0)
        rows, columns = self.most, nest.number(self.columns)
        cells = nest.shared("parts", [nest.number(self.groups * rows * self.columns)], view.dtype)
        for row, _ in self.rows():
            for i in range(self.lanes):
                at = (group * nest.number(rows) + nest.number(row)) * columns + column
                nest.store(
                    cells, [at + nest.number(i)], self.sums[nest.number(row * self.lanes + i)]
                )
        nest.barrier()
        total = nest.private("total", [], view.dtype)
        with nest.loop("turn", nest.ceil_div(self.count * columns, self.threads)) as turn:
            item = nest.bind("item", turn * nest.number(self.threads) + nest.thread)
            row = tirx.truncdiv(item, columns)
            index = first + tirx.truncmod(item, columns)
            with nest.when(tirx.all(row < self.count, index < self.length)):
                nest.store(total, [zero], cells[item])
                with nest.loop("g", nest.number(self.groups - 1)) as g:
                    further = item + (g + nest.number(1)) * nest.number(rows) * columns
                    nest.store(total, [zero], total[zero] + cells[further])
                place = view.place(self.long_axes, index) | view.place(self.short_axes, row)
                view.write(total[zero], place)
