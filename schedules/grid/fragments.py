"""Fragments of matrices: what the lanes of a subgroup hold of operands and sums, and their calls.

Which lane holds which element is the target's secret: fragments are only loaded from shared
memory, multiplied, and stored there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...dsl.dtypes import DType, bf16, f16, f32
from ...dsl.expr import Cast, Expr
from ...dsl.lower import storage
from ..capability import Capability, MatrixUnit
from .intrinsics import address, call
from .nest import GridNest

Tir = Any
_TYPES: dict[str, DType] = {t.name: t for t in (f16, bf16)}


def unit_for(factors: Sequence[Expr], caps: Capability) -> MatrixUnit | None:
    """The unit that multiplies factors as they are stored, and sums in f32."""
    kinds = {stored_type(f) for f in factors}
    return next((u for u in caps.matrix if kinds == {u.operands}), None)


def stored_type(node: Expr) -> str:
    """The type of a factor that is widened to f32, else ""."""
    if not isinstance(node, Cast) or isinstance(node.a, Cast) or node.dtype != f32:
        return ""
    return node.a.dtype.name


def no_unit(factor: Expr, caps: Capability) -> str:
    """Why there is no unit for a factor."""
    kinds = ", ".join(u.operands for u in caps.matrix) or "none"
    wanted = stored_type(factor) or factor.dtype.name
    return f"needs a matrix unit for {wanted} operands, got {kinds}"


def padded(size: int, step: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // step) * step


class Fragments:
    """The functions of a matrix unit, as statements of a nest."""

    def __init__(self, nest: GridNest, unit: MatrixUnit) -> None:
        self.nest, self.unit = nest, unit
        self.type = _TYPES[unit.operands]

    def left(self) -> Tir:
        """Room for a fragment [m, k] of a first operand."""
        return self._room("left", self.unit.a, storage(self.type))

    def right(self) -> Tir:
        """Room for a fragment [k, n] of a second operand."""
        return self._room("right", self.unit.b, storage(self.type))

    def sums(self) -> Tir:
        """Room for a fragment [m, n] of sums."""
        return self._room("sums", self.unit.c, "float32")

    def _room(self, name: str, count: int, kind: str) -> Tir:
        return self.nest.private(name, [self.nest.number(count)], kind)

    def zero(self, sums: Tir) -> None:
        self._call("zero", self._at(sums))

    def load_left(self, held: Tir, tile: Tir, stride: int, rowwise: bool) -> None:
        """The fragment whose first element is `tile`; `rowwise`: it lies as [m][k]."""
        self._load("load_a" if rowwise else "load_a_t", held, tile, stride)

    def load_right(self, held: Tir, tile: Tir, stride: int, rowwise: bool) -> None:
        """The fragment whose first element is `tile`; `rowwise`: it lies as [n][k]."""
        self._load("load_b" if rowwise else "load_b_t", held, tile, stride)

    def _load(self, name: str, held: Tir, tile: Tir, stride: int) -> None:
        self._call(name, self._at(held), address(tile), _int32(stride))

    def multiply(self, sums: Tir, left: Tir, right: Tir) -> None:
        """sums += left · right."""
        self._call("mma", *map(self._at, (sums, left, right)))

    def store(self, tile: Tir, stride: int, sums: Tir) -> None:
        """The sums to shared memory, where `tile` is the first of them."""
        self._call("store", address(tile), _int32(stride), self._at(sums))

    def _at(self, held: Tir) -> Tir:
        return address(held[self.nest.number(0)])

    def _call(self, name: str, *arguments: Tir) -> None:
        call(self.nest, f"{self.unit.intrinsic}_{name}", *arguments)


def _int32(value: int) -> Tir:
    from tvm import tirx

    return tirx.IntImm("int32", value)
