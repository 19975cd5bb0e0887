"""Linear layers, matrix products, embeddings, pointwise and structured operators."""

from __future__ import annotations

from .ops.embedding import embedding, embedding_backward
from .ops.linear import batched_matmul_backward as matmul_backward
from .ops.linear import linear_backward
from .ops.packing import PackedWeight, linear, matmul
from .ops.pointwise import (
    add,
    add_backward,
    gelu,
    gelu_backward,
    mul,
    mul_backward,
    silu,
    silu_backward,
)
from .ops.recurrence import linear_recurrence
from .ops.segments import segment_sum
from .ops.selection import top_k

__all__ = [
    "PackedWeight", "add", "add_backward", "embedding", "embedding_backward", "gelu",
    "gelu_backward", "linear", "linear_backward", "linear_recurrence", "matmul",
    "matmul_backward", "mul", "mul_backward", "segment_sum", "silu", "silu_backward", "top_k",
]  # fmt: skip
