"""Convolution over one to three spatial dims, and the strategies that compute it."""

from __future__ import annotations

from .ops.convolution_calls import (
    conv_bias_backward,
    conv_data_backward,
    conv_forward,
    conv_forward_nhwc,
    conv_plan,
    conv_weight_backward,
)
from .ops.convolution_options import (
    Autotune,
    ConvOptions,
    ConvPlan,
    Direct,
    ImplicitGemm,
    Strategy,
)

__all__ = [
    "Autotune", "ConvOptions", "ConvPlan", "Direct", "ImplicitGemm", "Strategy",
    "conv_bias_backward", "conv_data_backward", "conv_forward", "conv_forward_nhwc", "conv_plan",
    "conv_weight_backward",
]  # fmt: skip
