"""Rows of a table by index."""

from __future__ import annotations

from typing import Any

from ..dsl import In, Out, axes, dim, f32, i64, op, require_indices, scatter_add
from ..dsl.dtypes import INDICES
from ..dsl.errors import NNError

_EXAMPLE = {"tokens": (128,), "V": 1000, "H": 384}


@op(out=Out("*tokens", "H"), static=("H",), example=_EXAMPLE, error=NNError)
def embedding(indices: Any = In("*tokens", dtype=INDICES), table: Any = In("V", "H")) -> Any:
    """table[indices]; an index outside 0 … V − 1 is refused before anything is read.

    indices [...] i32, i64 or u32, table [V, H] f32, f16 or bf16 → [..., H] as table. Raises
    NNError.
    """
    require_indices(indices, dim("V"))
    t, h = axes("*tokens", "H")
    return table[i64(indices[t]), h]


@op(out=Out("V", "H", dtype=f32, name="dtable"), example=_EXAMPLE, error=NNError)
def embedding_backward(
    grad: Any = In("*tokens", "H"),
    indices: Any = In("*tokens", dtype=INDICES),
    table: Any = In("V", "H"),
) -> Any:
    """The gradient of `embedding` for its table, f32: rows of grad added in order by index.

    grad [..., H] and table [V, H] f32, f16 or bf16, both the same, indices [...] i32, i64 or u32
    → [V, H] f32. Raises NNError.
    """
    require_indices(indices, dim("V"))
    t, v, h = axes("*tokens", "V", "H")
    return scatter_add(grad[t, h], at={v: i64(indices[t])}, over=t)


embedding.differentiable(embedding_backward, "table")
