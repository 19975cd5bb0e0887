"""Pooling in one and two dims: maximum, average, adaptive; with their backward."""

from __future__ import annotations

from .ops.pooling_calls import (
    adaptive_avg_pool,
    adaptive_avg_pool_backward,
    adaptive_max_pool,
    adaptive_max_pool_backward,
    avg_pool,
    avg_pool_backward,
    max_pool,
    max_pool_backward,
)

__all__ = [
    "adaptive_avg_pool", "adaptive_avg_pool_backward", "adaptive_max_pool",
    "adaptive_max_pool_backward", "avg_pool", "avg_pool_backward", "max_pool", "max_pool_backward",
]  # fmt: skip
