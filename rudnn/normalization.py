"""Softmax, layer norm and RMS norm over the last axis, with their backward."""

from __future__ import annotations

from .ops.normalization import (
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    softmax_last_axis,
    softmax_last_axis_backward,
)

__all__ = [
    "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward", "softmax_last_axis",
    "softmax_last_axis_backward",
]  # fmt: skip
