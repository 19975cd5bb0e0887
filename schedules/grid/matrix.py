"""A tile of a contraction by matrix units: each subgroup a rectangle of fragments."""

from __future__ import annotations

from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Cast, Expr
from ..capability import Capability, MatrixUnit
from ..roles import Roles
from .contraction_copy import Factor, Room
from .contraction_finish import Finish
from .contraction_pipeline import through_memory, through_registers
from .contraction_view import View
from .intrinsics import address, call

Tir = Any
_SUM_BYTES = 4


def unit_for(found: Roles, caps: Capability) -> MatrixUnit | None:
    """The unit that multiplies both factors as they are stored, and sums in f32."""
    kinds = {stored_type(found.a), stored_type(found.b)}
    return next((u for u in caps.matrix if kinds == {u.operands}), None)


def stored_type(node: Expr) -> str:
    """The type of a factor that is widened to f32, else ""."""
    if not isinstance(node, Cast) or isinstance(node.a, Cast) or node.dtype != f32:
        return ""
    return node.a.dtype.name


class Matrix:
    """A tile of `tile` = (m, n, k) by subgroups of `share` = (rows, columns) each.

    A subgroup's fragments are as far apart as all subgroups' together are wide, so that the parts
    in which the sums leave the registers are whole rectangles of the tile.
    """

    def __init__(self, view: View, unit: MatrixUnit, tile: tuple[int, int, int],
                 share: tuple[int, int], stages: int) -> None:  # fmt: skip
        self.view, self.nest, self.unit = view, view.nest, unit
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
        self._fragments()
        factors = (self.a, self.b)
        for factor, start in zip(factors, first, strict=True):
            factor.begin(start)
        if self.flying:
            through_memory(view, self.tile[2], factors, self.rooms, self.stages, self._multiply)
        else:
            spare = shared[nest.number(0)]
            through_registers(view, self.tile[2], factors, self.rooms, spare, self._multiply)
        self.finish.run(shared, first, lambda i, j: self._put(shared, i, j))

    def _fragments(self) -> None:
        nest, unit, (rows, columns) = self.nest, self.unit, self.counts
        self.left = [nest.private("left", [nest.number(unit.a)], self.a.dtype)
                     for _ in range(rows)]  # fmt: skip
        self.right = [nest.private("right", [nest.number(unit.b)], self.b.dtype)
                      for _ in range(columns)]  # fmt: skip
        self.sums = [[nest.private("sum", [nest.number(unit.c)], self.view.dtype)
                      for _ in range(columns)] for _ in range(rows)]  # fmt: skip
        for held in (f for row in self.sums for f in row):
            self._call("zero", self._at(held))

    def _multiply(self, stage: Tir, _: Tir) -> None:
        """The products of the tiles at place `stage`."""
        nest, unit = self.nest, self.unit
        for k in range(0, self.tile[2], unit.shape[2]):
            for i, held in enumerate(self.left):
                self._load("a", self.a, self.rooms[0], held, stage, self._row(i), nest.number(k))
            for j, held in enumerate(self.right):
                self._load("b", self.b, self.rooms[1], held, stage, self._column(j), nest.number(k))
            for i, left in enumerate(self.left):
                for j, right in enumerate(self.right):
                    self._call("mma", *map(self._at, (self.sums[i][j], left, right)))

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
        from tvm import tirx

        nest, (height, width, _) = self.nest, self.unit.shape
        row = self.place[0] * nest.number(height * self.finish.stride)
        for f in range(self.run):
            at = row + self.place[1] * nest.number(self.run * width) + nest.number(f * width)
            held = self.sums[i][j * self.run + f]
            stride = tirx.IntImm("int32", self.finish.stride)
            self._call("store", address(shared[at]), stride, self._at(held))

    def _load(self, side: str, factor: Factor, room: Room, held: Tir, stage: Tir, own: Tir,
              k: Tir) -> None:  # fmt: skip
        from tvm import tirx

        name = f"load_{side}" if factor.rowwise else f"load_{side}_t"
        tile = address(room.buffer[factor.at(stage, room, own, k)])
        self._call(name, self._at(held), tile, tirx.IntImm("int32", factor.stride))

    def _at(self, held: Tir) -> Tir:
        return address(held[self.nest.number(0)])

    def _call(self, name: str, *arguments: Tir) -> None:
        call(self.nest, f"{self.unit.intrinsic}_{name}", *arguments)
