"""Declare a neural-network operator once; run, check and embed it on every target."""

from __future__ import annotations

import importlib as _importlib
import os as _os
from typing import Any

# In a checkout the subpackages lie beside this folder, not in it, and a Python started at its root
# finds this file before the installed package.
if not _os.path.isdir(_os.path.join(__path__[0], "dsl")):
    __path__.append(_os.path.dirname(_os.path.abspath(__path__[0])))

from .runtime import call as _call  # noqa: E402  makes declarations callable
from .runtime.device import (  # noqa: E402
    Device,
    Event,
    MemoryUsage,
    Queue,
    device,
    devices,
    memory_usage,
)
from .runtime.tensor import Tensor, empty, from_dlpack, tensor  # noqa: E402

__version__ = "0.1.0"

_FAMILIES = (
    "attention", "convolution", "ctc", "dsl", "errors", "grid_sampling", "interpolation", "nn",
    "normalization", "paged_attention", "pooling",
)  # fmt: skip

__all__ = [
    "Device", "Event", "MemoryUsage", "Queue", "Tensor", "device", "devices", "empty",
    "from_dlpack", "memory_usage", "tensor", *_FAMILIES,
]  # fmt: skip

del _call


def __getattr__(name: str) -> Any:
    """The operator families, imported when first used."""
    if name in _FAMILIES:
        return _importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FAMILIES})
