"""A tile of a contraction by ordinary arithmetic: each thread a rectangle of sums in registers."""

from __future__ import annotations

from typing import Any

from .contraction_copy import Factor, Room
from .contraction_finish import Finish
from .contraction_pipeline import through_registers
from .contraction_view import View

Tir = Any
_STAGES = 2
_PIECE = 128  # products of a piece of a tile: loads of one step overlap with the one before's
_RUN = 4  # neighbours that a thread takes: 16 bytes of f32


class Plain:
    """A tile of `tile` = (m, n, k) by threads of `share` = (rows, columns) each.

    A thread takes runs of 4 rows and 4 columns, as far apart as all threads' runs together are
    wide, so that neighbours read neighbouring banks of shared memory.
    """

    def __init__(self, view: View, tile: tuple[int, int, int], share: tuple[int, int]) -> None:
        self.view, self.nest, self.share = view, view.nest, share
        self.tile = tile
        rows, columns, depth = tile
        self.down, self.across = rows // share[0], columns // share[1]
        self.threads = self.down * self.across
        self.steps = min(depth, max(2, _PIECE // (share[0] * share[1])))
        self.run = (min(_RUN, share[0]), min(_RUN, share[1]))
        self.a = Factor(view, view.a, view.m, (rows, depth), self.threads, raw=False)
        self.b = Factor(view, view.b, view.n, (columns, depth), self.threads, raw=False)
        part = (self.down * self.run[0], columns)
        self.finish = Finish(view, (rows, columns), part, self.threads)
        self.elements = max(_STAGES * (self.a.size + self.b.size) + 1, self.finish.size)

    @property
    def shared_bytes(self) -> int:
        return self.elements * self.a.bytes

    def lower(self, first: tuple[Tir, Tir]) -> None:
        """The statements of a block for the tile whose first row and column are `first`."""
        nest = self.nest
        shared = nest.shared("tiles", [nest.number(self.elements)], self.view.dtype)
        self.rooms = (
            Room(shared, 0, self.a.size),
            Room(shared, _STAGES * self.a.size, self.b.size),
        )
        y = nest.bind("y", nest.thread // nest.number(self.across))
        x = nest.bind("x", nest.thread % nest.number(self.across))
        self.corner = (y * nest.number(self.run[0]), x * nest.number(self.run[1]))
        self._clear()
        for factor, start in zip((self.a, self.b), first, strict=True):
            factor.begin(start)
        through_registers(
            self.view, self.tile[2], (self.a, self.b), self.rooms,
            shared[nest.number(_STAGES * (self.a.size + self.b.size))], self._multiply,
            self.tile[2] // self.steps,
        )  # fmt: skip
        self.finish.run(shared, first, lambda i, _: self._put(shared, i))

    def _clear(self) -> None:
        from tvm import tirx

        nest, (rows, columns) = self.nest, self.share
        self.sums = nest.private("sums", [nest.number(rows * columns)], self.view.dtype)
        self.left = nest.private("left", [nest.number(rows)], self.view.dtype)
        self.right = nest.private("right", [nest.number(columns)], self.view.dtype)
        with nest.loop("i", nest.number(rows * columns), "unroll") as i:
            nest.store(self.sums, [i], tirx.const(0, self.view.dtype))

    def _multiply(self, stage: Tir, piece: Tir) -> None:
        """The products of a piece of the tiles at place `stage`."""
        nest, (rows, columns) = self.nest, self.share
        steps = nest.number(self.steps)
        with nest.loop("k", steps, "unroll") as step:
            k = piece * steps + step
            for factor, room, near, count, run, corner, threads in zip(
                (self.a, self.b), self.rooms, (self.left, self.right), self.share, self.run,
                self.corner, (self.down, self.across), strict=True,
            ):  # fmt: skip
                for chunk in range(count // run):
                    own = corner + nest.number(chunk * run * threads)
                    with self.view.lanes(run) as lane:
                        at = factor.at(stage, room, own, k) + lane
                        nest.store(near, [nest.number(chunk * run) + lane], room.buffer[at])
            width = nest.number(columns)
            with (
                nest.loop("i", nest.number(rows), "unroll") as i,
                nest.loop("j", width, "unroll") as j,
            ):
                at = i * width + j
                nest.store(self.sums, [at], self.sums[at] + self.left[i] * self.right[j])

    def _put(self, shared: Tir, part: int) -> None:
        """A thread's sums of one part to shared memory."""
        nest, (_, columns), (down, across) = self.nest, self.share, self.run
        for i in range(down):
            row = (self.corner[0] + nest.number(i)) * nest.number(self.finish.stride)
            for chunk in range(columns // across):
                at = row + self.corner[1] + nest.number(chunk * across * self.across)
                held = (part * down + i) * columns + chunk * across
                with self.view.lanes(across) as lane:
                    nest.store(shared, [at + lane], self.sums[nest.number(held) + lane])
