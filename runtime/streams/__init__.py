"""Devices driven through streams: what drivers of the CUDA kind share, whoever made them.

A target gives a `Library` of the driver's functions under the names here and a `Context`.
"""

from __future__ import annotations

from pathlib import Path

from .context import Block, Context, Stream
from .driver import StreamDriver
from .kernel import Kernel
from .library import Library

NATIVE = Path(__file__).parent / "native"  # C for exported operators

__all__ = ["NATIVE", "Block", "Context", "Kernel", "Library", "Stream", "StreamDriver"]
