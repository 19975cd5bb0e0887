"""The end of a tile of sums: through shared memory to the result, the epilogue on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ...dsl.expr import Axis
from ..nest import static
from .contraction_view import View, limited
from .vectors import Vectors

Tir = Any


class Finish:
    """Sums leave the registers a part of the tile at a time, so that threads write side by side.

    A tile of `tile` rows and columns has parts of `part`. Each lies in shared memory, `pad` more
    columns wide, while all threads run the epilogue over it.
    """

    def __init__(self, view: View, tile: tuple[int, int], part: tuple[int, int],
                 threads: int, pad: int = 4) -> None:  # fmt: skip
        self.view, self.nest = view, view.nest
        self.part, self.threads = part, threads
        self.steps = (tile[0] // part[0], tile[1] // part[1])
        self.stride = part[1] + pad
        self.size = part[0] * self.stride
        out = view.out
        nodes = [] if out is view.head else [out.expr]
        self.vectors = None
        if out.axes[-1] is view.n[-1]:
            self.vectors = limited(Vectors(self.nest, view.n[-1], nodes, [out]), part[1])

    def run(self, shared: Tir, first: tuple[Tir, Tir], put: Callable[[int, int], None]) -> None:
        """Finish the tile whose first row and column are `first`.

        `put(i, j)` stores part (i, j) of the sums, every thread its share.
        """
        nest = self.nest
        down, across = self.steps
        with nest.loop("part", nest.number(down * across)) as step:
            nest.barrier()  # whoever still reads what lay there before has done so
            for number in range(down * across):
                single = down * across == 1
                here = nullcontext() if single else nest.when(step.equal(nest.number(number)))
                with here:
                    put(number // across, number % across)
            nest.barrier()
            i, j = nest.unflatten(step, [nest.number(down), nest.number(across)])
            self._part(shared, first[0] + i * nest.number(self.part[0]),
                       first[1] + j * nest.number(self.part[1]))  # fmt: skip

    def _part(self, shared: Tir, row: Tir, column: Tir) -> None:
        """The epilogue of one part, whose first row and column in the product are given."""
        from tvm import tirx

        nest, view = self.nest, self.view
        lanes = self.vectors.lanes if self.vectors is not None else 1
        run = self.part[1] // lanes
        count = self.part[0] * run
        with nest.loop("item", nest.number(-(-count // self.threads))) as round_:
            item = nest.bind("item", round_ * nest.number(self.threads) + nest.thread)
            near = nest.bind("near", tirx.truncdiv(item, nest.number(run)))
            offset = tirx.truncmod(item, nest.number(run)) * nest.number(lanes)
            guards = [] if count % self.threads == 0 else [item < nest.number(count)]
            m, n = row + near, column + offset
            guards += self._guards(view.m, m, self.part[0]) + self._guards(view.n, n, self.part[1])
            with nest.when(tirx.all(*guards)) if guards else nullcontext():
                self._vector(shared, near * nest.number(self.stride) + offset, m, n)

    def _guards(self, axes: tuple[Axis, ...], index: Tir, step: int) -> list[Tir]:
        length = self.view.size(axes)
        exact = static(length)
        return [] if exact is not None and exact % step == 0 else [index < length]

    def _vector(self, shared: Tir, at: Tir, m: Tir, n: Tir) -> None:
        """Elements of row m from column n on: as many as a vector has, or as there are."""
        nest, view, vectors = self.nest, self.view, self.vectors
        env = view.place(view.m, m)
        if vectors is None or vectors.lanes == 1:
            view.write(shared[at], env | view.place(view.n, n))
            return
        where, (axis,) = view.env | env, view.n
        length = view.size(view.n)
        exact = static(length)

        def whole() -> None:
            sums = nest.private("sums", [nest.number(vectors.lanes)], view.dtype)
            step = min(4, vectors.lanes)
            for chunk in range(0, vectors.lanes, step):
                with self.view.lanes(step) as lane:
                    place = nest.number(chunk) + lane
                    nest.store(sums, [place], shared[at + place])
            lane_of = iter(range(vectors.lanes))

            def body(here: Tir, write: Any) -> None:
                total = sums[nest.number(next(lane_of))]
                write(view.out, view.result(total, env | {axis: here}))

            vectors.run(n, where, body)

        if exact is not None and exact % vectors.lanes == 0:
            whole()
            return
        with nest.choice(n + nest.number(vectors.lanes) <= length) as otherwise:
            whole()
            otherwise()
            with nest.loop("rest", length - n) as i:
                view.write(shared[at + i], env | {axis: n + i})
