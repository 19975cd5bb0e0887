"""The CPU target: object code by LLVM, run in process through a plain C call."""

from __future__ import annotations

from .target import Llvm

__all__ = ["Llvm"]
