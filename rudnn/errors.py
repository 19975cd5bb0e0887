"""The package's errors; every one is a `RudnnError`, which is a `ValueError`."""

from __future__ import annotations

from .dsl.errors import (
    AttentionError,
    CompileError,
    ConvError,
    CtcError,
    DeclarationError,
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    GridSamplingError,
    InterpolationError,
    LaunchError,
    LoadError,
    NNError,
    NormalizationError,
    OperatorError,
    OutOfMemoryError,
    PagedAttentionError,
    PoolingError,
    RudnnError,
    ServiceError,
    TargetError,
    WorkspaceError,
)

__all__ = [
    "AttentionError", "CompileError", "ConvError", "CtcError", "DeclarationError", "DeviceError",
    "DeviceLostError", "DeviceTimeoutError", "GridSamplingError", "InterpolationError",
    "LaunchError", "LoadError", "NNError", "NormalizationError", "OperatorError",
    "OutOfMemoryError", "PagedAttentionError", "PoolingError", "RudnnError", "ServiceError",
    "TargetError", "WorkspaceError",
]  # fmt: skip
