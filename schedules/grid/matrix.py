"""A tile of a contraction by matrix units: each subgroup a rectangle of fragments."""

from __future__ import annotations

from typing import Any

from ..capability import MatrixUnit
from .contraction_copy import Factor, Room
from .contraction_finish import Finish
from .contraction_pipeline import through_memory, through_registers
from .contraction_view import View
from .fragments import Fragments

Tir = Any
_SUM_BYTES = 4


class Matrix:
    """A tile of `tile` = (m, n, k) by subgroups of `share` = (rows, columns) each.

    A subgroup's fragments are as far apart as all subgroups' together are wide, so that the parts
    in which the sums leave the registers are whole rectangles of the tile.
    """

    def __init__(self, view: View, unit: MatrixUnit, tile: tuple[int, int, int],
                 share: tuple[int, int], stages: int) -> None:  # fmt: skip
        self.view, self.nest, self.unit = view, view.nest, unit
        self.fragments = Fragments(view.nest, unit)
        self.tile, self.share = tile, share
        caps = view.nest.caps
        rows, columns, depth = tile
        self.down, self.across = rows // share[0], columns // share[1]
        self.threads = self.down * self.across * caps.subgroup
        self.a = Factor(view, view.a, view.m, (rows, depth), self.threads, raw=True)
        self.b = Factor(view, view.b, view.n, (columns, depth), self.threads, raw=True)
        self.flying = caps.async_copy and self.a.sendable and self.b.sendable
        self.stages = stages if self.flying else 2
        self.run, pad = self._handed(caps.shared_bytes)
        part = (self.down * unit.shape[0], self.across * self.run * unit.shape[1])
        self.finish = Finish(view, (rows, columns), part, self.threads, pad)
        self.counts = (share[0] // unit.shape[0], share[1] // unit.shape[1])

    @property
    def shared_bytes(self) -> int:
        return self._operands() + self.finish.size * _SUM_BYTES

    def _operands(self) -> int:
        """Shared memory that the tiles of both factors take, in bytes."""
        return self.stages * (self.a.size * self.a.bytes + self.b.size * self.b.bytes)

    def _handed(self, limit: int) -> tuple[int, int]:
        """How many fragments side by side a subgroup hands over at a time, and unused columns.

        As many as memory has room for.
        """
        most = self.share[1] // self.unit.shape[1]
        for run in (r for r in range(most, 0, -1) if most % r == 0):
            for pad in (4, 0):
                columns = self.across * run * self.unit.shape[1] + pad
                size = self.down * self.unit.shape[0] * columns * _SUM_BYTES
                if self._operands() + size <= limit:
                    return run, pad
        return 1, 0

    def lower(self, first: tuple[Tir, Tir]) -> None:
        """The statements of a block for the tile whose first row and column are `first`."""
        nest, view = self.nest, self.view
        self.rooms = tuple(
            Room(nest.shared(name, [nest.number(self.stages * f.size)], f.dtype), 0, f.size)
            for name, f in (("a_tiles", self.a), ("b_tiles", self.b))
        )
        shared = nest.shared("sums", [nest.number(self.finish.size)], view.dtype)
        warp = nest.bind("warp", nest.thread // nest.number(nest.caps.subgroup))
        self.place = (nest.bind("y", warp // nest.number(self.across)),
                      nest.bind("x", warp % nest.number(self.across)))  # fmt: skip
        self._allocate()
        factors = (self.a, self.b)
        for factor, start in zip(factors, first, strict=True):
            factor.begin(start)
        if self.flying:
            through_memory(view, self.tile[2], factors, self.rooms, self.stages, self._multiply)
        else:
            spare = shared[nest.number(0)]
            through_registers(view, self.tile[2], factors, self.rooms, spare, self._multiply)
        self.finish.run(shared, first, lambda i, j: self._put(shared, i, j))

    def _allocate(self) -> None:
        rows, columns = self.counts
        self.left = [self.fragments.left() for _ in range(rows)]
        self.right = [self.fragments.right() for _ in range(columns)]
        self.sums = [[self.fragments.sums() for _ in range(columns)] for _ in range(rows)]
        for held in (f for row in self.sums for f in row):
            self.fragments.zero(held)

    def _multiply(self, stage: Tir, _: Tir) -> None:
        """The products of the tiles at place `stage`."""
        a, b = self.a, self.b
        for k in map(self.nest.number, range(0, self.tile[2], self.unit.shape[2])):
            for i, held in enumerate(self.left):
                tile = self.rooms[0].buffer[a.at(stage, self.rooms[0], self._row(i), k)]
                self.fragments.load_left(held, tile, a.stride, a.rowwise)
            for j, held in enumerate(self.right):
                tile = self.rooms[1].buffer[b.at(stage, self.rooms[1], self._column(j), k)]
                self.fragments.load_right(held, tile, b.stride, b.rowwise)
            for i, left in enumerate(self.left):
                for j, right in enumerate(self.right):
                    self.fragments.multiply(self.sums[i][j], left, right)

    def _row(self, i: int) -> Tir:
        """The first row in the tile of a subgroup's i-th fragments."""
        height = self.nest.number(self.unit.shape[0])
        return (self.nest.number(i * self.down) + self.place[0]) * height

    def _column(self, j: int) -> Tir:
        """The first column in the tile of a subgroup's j-th fragments."""
        nest, width = self.nest, self.unit.shape[1]
        group, inside = divmod(j, self.run)
        first = (nest.number(group * self.across) + self.place[1]) * nest.number(self.run * width)
        return first + nest.number(inside * width)

    def _put(self, shared: Tir, i: int, j: int) -> None:
        """A subgroup's sums of one part to shared memory."""
        nest, (height, width, _) = self.nest, self.unit.shape
        row = self.place[0] * nest.number(height * self.finish.stride)
        for f in range(self.run):
            at = row + self.place[1] * nest.number(self.run * width) + nest.number(f * width)
            held = self.sums[i][j * self.run + f]
            self.fragments.store(shared[at], self.finish.stride, held)
