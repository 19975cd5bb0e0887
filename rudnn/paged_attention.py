"""Attention over paged caches, and multi-head latent attention: plans, workspaces, append."""

from __future__ import annotations

from .ops.paged_calls import DevicePlan, SplitWorkspace
from .ops.paged_plan import HostPlan

__all__ = ["DevicePlan", "HostPlan", "SplitWorkspace"]
