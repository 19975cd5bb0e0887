"""The declaration language: dims, dtypes, expressions, operators; the oracle; lowering to TIR."""

from __future__ import annotations

from .arguments import Extent, In, Option, Out, Param, Shared
from .declare import (
    Declaration,
    Spec,
    axes,
    axis,
    constrain,
    dim,
    op,
    require,
    require_indices,
    tensor,
)
from .dtypes import bf16, bool_, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from .expr import Axis, Expr, Input, Stage, Tensor
from .forms import (
    abs,
    any,
    argmax,
    erf,
    exp,
    finite,
    floor,
    isnan,
    log,
    log_sum_exp,
    max,
    maximum,
    mean,
    min,
    minimum,
    prod,
    rsqrt,
    scan,
    scatter_add,
    sigmoid,
    sinpi,
    softmax_sum,
    sqrt,
    sum,
    tanh,
    top_k,
    weighted_sum,
    where,
)

__all__ = [
    "Axis", "Declaration", "Expr", "Extent", "In", "Input", "Option", "Out", "Param", "Shared",
    "Spec", "Stage", "Tensor", "abs", "any", "argmax", "axes", "axis", "bf16", "bool_", "constrain",
    "dim", "erf", "exp", "f16", "f32", "f64", "finite", "floor", "i16", "i32", "i64", "i8", "isnan",
    "log", "log_sum_exp", "max", "maximum", "mean", "min", "minimum", "op", "prod", "require",
    "require_indices", "rsqrt", "scan", "scatter_add", "sigmoid", "sinpi", "softmax_sum", "sqrt",
    "sum", "tanh", "tensor", "top_k", "u16", "u32", "u64", "u8", "weighted_sum", "where",
]  # fmt: skip
