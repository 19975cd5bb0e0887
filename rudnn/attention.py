"""Scaled dot-product attention and the strategies that compute it."""

from __future__ import annotations

from .ops.attention import (
    AttentionOptions,
    Autotune,
    Fallback,
    FlashAccelerated,
    FlashUnit,
    Strategy,
    attention,
)

__all__ = [
    "AttentionOptions", "Autotune", "Fallback", "FlashAccelerated", "FlashUnit", "Strategy",
    "attention",
]  # fmt: skip
