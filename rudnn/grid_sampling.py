"""Sampling of images at given points, with its backward."""

from __future__ import annotations

from .ops.grid_sampling import grid_sample
from .ops.grid_sampling_calls import grid_sample_backward

__all__ = ["grid_sample", "grid_sample_backward"]
