"""Sums over segments given by an index for each row."""

from __future__ import annotations

from typing import Any

from ..dsl import Extent, In, Out, axes, i32, i64, op, require_indices, scatter_add


@op(
    out=Out("num_segments", "H"),
    example={"N": 512, "H": 256, "num_segments": 64},
)
def segment_sum(
    x: Any = In("N", "H"), ids: Any = In("N", dtype=(i32, i64)), num_segments: Any = Extent()
) -> Any:
    """out_s = Σ x_n over the rows n whose ids_n is s, added in order in f32; 0 where none is.

    x [N, H] f32, f16 or bf16, ids [N] i32 or i64 → [num_segments, H] as x. Raises OperatorError,
    also for an id outside 0 … num_segments − 1.
    """
    require_indices(ids, num_segments)
    n, h, s = axes("N", "H", "num_segments")
    return scatter_add(x[n, h], at={s: ids[n]}, over=n)
