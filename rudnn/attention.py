"""Scaled dot-product attention and the strategies that compute it."""

from __future__ import annotations

from .ops.attention import (
    AttentionGradients,
    AttentionOptions,
    Autotune,
    Fallback,
    FlashAccelerated,
    FlashUnit,
    Strategy,
    attention,
    attention_backward,
)

__all__ = [
    "AttentionGradients", "AttentionOptions", "Autotune", "Fallback", "FlashAccelerated",
    "FlashUnit", "Strategy", "attention", "attention_backward",
]  # fmt: skip
