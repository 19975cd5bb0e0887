"""Connectionist temporal classification: the loss and its gradient."""

from __future__ import annotations

from .ops.ctc_calls import ctc_loss, ctc_loss_backward

__all__ = ["ctc_loss", "ctc_loss_backward"]
