"""Mean pooling, an operator that rudnn does not have: one declaration, and it is a kernel."""

from __future__ import annotations

from typing import Any

from rudnn import dsl
from rudnn.dsl import In, Out


@dsl.op(out=Out("B", "H"), static=("H",), example={"B": 4, "T": 16, "H": 384})
def mean_pool(
    hidden: Any = In("B", "T", "H"),
    keep: Any = In("B", "T", dtype=dsl.bool_),
) -> Any:
    """The mean over the kept tokens of each sentence, scaled to length 1; nothing kept gives 0."""
    b, t, h = dsl.axes("B", "T", "H")
    kept = dsl.sum(dsl.f32(keep[b, t]), over=t)
    total = dsl.sum(hidden[b, t, h], over=t, where=keep[b, t])
    mean = dsl.tensor("mean", (b, h), total / dsl.maximum(kept, 1.0))
    length = dsl.sqrt(dsl.sum(mean[b, h] ** 2, over=h))
    return mean[b, h] / dsl.maximum(length, 1e-12)
