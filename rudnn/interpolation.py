"""Interpolation of one or two spatial dims, with its backward."""

from __future__ import annotations

from .ops.interpolation_calls import interpolate, interpolate_backward

__all__ = ["interpolate", "interpolate_backward"]
