"""TVM's element types as the emitter sees them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .....dsl.errors import CompileError

_DTYPE = re.compile(r"(bool|int|uint|float)(\d*)(?:x(\d+))?")
_WIDTHS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32)}


@dataclass(frozen=True)
class Scalar:
    """`kind` is "bool", "int", "uint" or "float"; a bool has no width."""

    kind: str
    bits: int = 0

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def nbytes(self) -> int:
        return self.bits // 8

    def __str__(self) -> str:
        return f"{self.kind}{self.bits or ''}"


BOOL = Scalar("bool")
U8, U16, U32, U64 = (Scalar("uint", bits) for bits in (8, 16, 32, 64))
I32, I64 = Scalar("int", 32), Scalar("int", 64)
F16, F32 = Scalar("float", 16), Scalar("float", 32)


@lru_cache(maxsize=256)
def parse(dtype: str) -> tuple[Scalar, int]:
    """`float16x4` → (f16, 4). Raises CompileError for a type that shaders do not have."""
    match = _DTYPE.fullmatch(dtype)
    if match is None:
        raise CompileError(f"needs numbers of 8 to 64 bits or bool, got {dtype}")
    kind, bits, lanes = match.groups()
    if kind == "bool":
        return BOOL, int(lanes or 1)
    if int(bits or 0) not in _WIDTHS[kind]:
        raise CompileError(f"needs a type that SPIR-V kernels have, got {dtype}")
    return Scalar(kind, int(bits)), int(lanes or 1)


def type_of(node: Any) -> tuple[Scalar, int]:
    """Element type and lanes of a TIR expression's value."""
    return parse(str(node.ty.dtype))
