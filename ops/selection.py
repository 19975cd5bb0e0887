"""Selecting the greatest elements of a row."""

from __future__ import annotations

from typing import Any

from ..dsl import Extent, In, Out, axes, dim, i64, op, require
from ..dsl import top_k as greatest


@op(
    out=(Out("*rows", "k", name="values"), Out("*rows", "k", dtype=i64, name="indices")),
    static=("k",),
    example={"rows": (64,), "N": 1024, "k": 8},
)
def top_k(x: Any = In("*rows", "N"), k: Any = Extent()) -> Any:
    """The k greatest of the last axis, greatest first, with their indices in i64.

    x [..., N] f32, f16 or bf16 → values [..., k] alike, indices [..., k]. Ties go to the lower
    index. NaN is greatest, as torch's. Raises OperatorError, also unless 1 ≤ k ≤ N.
    """
    require(dim("k") >= 1, "k ≥ 1", k=k)
    require(dim("N") >= k, "k at most the size of the last axis", k=k, N=dim("N"))
    r, n, rank = axes("*rows", "N", "k")
    return greatest(x[r, n], along=n, rank=rank)
