"""What rules for top_k ask of a group, whatever the device, and how they compare scores."""

from __future__ import annotations

from typing import Any

from ..dsl import forms
from ..dsl.dtypes import DType
from ..dsl.expr import Form
from ..dsl.walk import walk
from .group import Group
from .rule import Rejection, check, first_rejection

Tir = Any


def rejection(group: Group) -> Rejection | None:
    """Why the group is not the results of one top_k over pointwise scores."""
    head = group.stages[0].expr
    if not isinstance(head, forms.TopK):
        return Rejection("needs a top_k")
    return first_rejection(
        check(all(isinstance(s.expr, forms.TopK) and s.expr.score is head.score
                  and s.expr.along is head.along and s.expr.rank is head.rank
                  for s in group.stages), "needs the results of one top_k only"),
        check(head.score.dtype.name not in ("float64", "uint64"),
              f"needs scores that a signed integer can order, got {head.score.dtype}"),
        check(not any(isinstance(n, Form) for n in walk(head.score)),
              "needs a pointwise score"),
    )  # fmt: skip


class Keys:
    """Integers that order as scores of a dtype do: NaN greatest, −0 equal to 0."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.bits = 64 if dtype.is_int and dtype.bits >= 32 else 32
        self.type = f"int{self.bits}"

    def least(self) -> Tir:
        from tvm import tirx

        return tirx.const(-(2 ** (self.bits - 1)), self.type)

    def greatest(self) -> Tir:
        from tvm import tirx

        return tirx.const(2 ** (self.bits - 1) - 1, self.type)

    def key(self, score: Tir) -> Tir:
        """The key of a score."""
        from tvm import tirx

        if not self.dtype.is_float:
            return score.astype(self.type)
        value = score.astype("float32")
        bits = tirx.reinterpret("int32", value)
        flipped = tirx.bitwise_xor(bits, tirx.const(0x7FFFFFFF, "int32"))
        ordered = tirx.Select(bits < tirx.const(0, "int32"), flipped, bits)
        zero = value == tirx.const(0.0, "float32")
        ordered = tirx.Select(zero, tirx.const(0, "int32"), ordered)
        return tirx.Select(tirx.isnan(value), self.greatest(), ordered)
