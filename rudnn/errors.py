"""The package's errors; every one is a `RudnnError`, which is a `ValueError`."""

from __future__ import annotations

from .dsl.errors import (
    AttentionError,
    CompileError,
    DeclarationError,
    DeviceError,
    LaunchError,
    LoadError,
    NNError,
    NormalizationError,
    OperatorError,
    RudnnError,
    TargetError,
    WorkspaceError,
)

__all__ = [
    "AttentionError", "CompileError", "DeclarationError", "DeviceError", "LaunchError",
    "LoadError", "NNError", "NormalizationError", "OperatorError", "RudnnError", "TargetError",
    "WorkspaceError",
]  # fmt: skip
