"""Element types: names, sizes, NumPy counterparts. Calling one casts: `f32(x[r, h])`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from .expr import Expr


@dataclass(frozen=True)
class DType:
    """An element type.

    `name` is NumPy's (and TVM's) spelling; `kind` is one of "float", "int", "uint", "bool".
    """

    name: str
    short: str
    bits: int
    kind: str

    def __call__(self, value: Expr | float | int) -> Expr:
        """The cast of `value` to this type, as an expression."""
        from .expr import cast

        return cast(value, self)

    def __repr__(self) -> str:
        return self.short

    @property
    def bytes(self) -> int:
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_narrow_float(self) -> bool:
        """Stored narrow, computed in f32."""
        return self.is_float and self.bits == 16

    @property
    def numpy(self) -> np.dtype[Any]:
        return _numpy_dtype(self.name)


f32 = DType("float32", "f32", 32, "float")
f16 = DType("float16", "f16", 16, "float")
bf16 = DType("bfloat16", "bf16", 16, "float")
f64 = DType("float64", "f64", 64, "float")
bool_ = DType("bool", "bool", 8, "bool")
i8 = DType("int8", "i8", 8, "int")
i16 = DType("int16", "i16", 16, "int")
i32 = DType("int32", "i32", 32, "int")
i64 = DType("int64", "i64", 64, "int")
u8 = DType("uint8", "u8", 8, "uint")
u16 = DType("uint16", "u16", 16, "uint")
u32 = DType("uint32", "u32", 32, "uint")
u64 = DType("uint64", "u64", 64, "uint")

ALL = (f32, f16, bf16, f64, bool_, i8, i16, i32, i64, u8, u16, u32, u64)
FLOATS = (f32, f16, bf16)
INDICES = (i32, i64, u32)
BY_NAME = {t.name: t for t in ALL} | {t.short: t for t in ALL}


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def dtype_of(name: str) -> DType | None:
    """The type called `name` ("f16", "float16", …), or None."""
    return BY_NAME.get(name)
