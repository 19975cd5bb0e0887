"""SPIR-V from lowered device functions."""

from .features import BASELINE, SpirvFeatures
from .function import emit
from .matrix import matrix_unit
from .shader import Shader, pack, unpack

__all__ = ["BASELINE", "Shader", "SpirvFeatures", "emit", "matrix_unit", "pack", "unpack"]
