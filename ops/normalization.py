"""Softmax, layer norm and RMS norm over the last axis, with their backward.

Statistics are f32 whatever the storage; gamma and beta are f32.
"""

from __future__ import annotations

from typing import Any

from ..dsl import In, Out, Param, axes, dim, exp, f32, finite, max, mean, op, require, rsqrt, sum
from ..dsl import tensor as keep
from ..dsl.errors import NormalizationError

_EXAMPLE = {"rows": (64,), "H": 1024}


def _positive(epsilon: Any) -> None:
    require(finite(epsilon) & (epsilon > 0), "epsilon finite and > 0", epsilon=epsilon)


def _not_empty() -> None:
    require(dim("H") > 0, "a last axis that is not empty", H=dim("H"))


@op(out=Out("*rows", "H"), static=("H",), example=_EXAMPLE, error=NormalizationError)
def softmax_last_axis(x: Any = In("*rows", "H")) -> Any:
    """exp(x − max x) / Σ exp(x − max x) over the last axis.

    x [..., H] f32, f16 or bf16 → the same. A row with NaN or +inf, or of only −inf, is NaN, as
    torch's. Raises NormalizationError.
    """
    _not_empty()
    r, h = axes("*rows", "H")
    top = max(x[r, h], over=h, nan="any")
    weight = keep("weight", (r, h), exp(x[r, h] - top))
    return weight[r, h] * (1 / sum(weight[r, h], over=h))


@op(out=Out("*rows", "H"), static=("H",), example=_EXAMPLE, error=NormalizationError)
def softmax_last_axis_backward(grad: Any = In("*rows", "H"), y: Any = In("*rows", "H")) -> Any:
    """The gradient of `softmax_last_axis` from its result: y · (grad − Σ grad · y).

    grad, y [..., H] f32, f16 or bf16, both the same → that. Raises NormalizationError.
    """
    _not_empty()
    r, h = axes("*rows", "H")
    inner = sum(grad[r, h] * y[r, h], over=h)
    return y[r, h] * (grad[r, h] - inner)


@op(out=Out("*rows", "H"), static=("H",), example=_EXAMPLE, error=NormalizationError)
def layer_norm(
    x: Any = In("*rows", "H"),
    gamma: Any = In("H", dtype=f32),
    beta: Any = In("H", dtype=f32, optional=True),
    *,
    epsilon: Any = Param(1e-5),
) -> Any:
    """(x − mean) / √(var + ε) · γ + β over the last axis, two passes for the statistics.

    x [..., H] f32, f16 or bf16, gamma and beta [H] f32 → as x. Raises NormalizationError, also
    unless epsilon is finite and > 0.
    """
    _positive(epsilon)
    _not_empty()
    r, h = axes("*rows", "H")
    centre = mean(x[r, h], over=h)
    variance = mean((x[r, h] - centre) ** 2, over=h)
    scaled = (x[r, h] - centre) * rsqrt(variance + epsilon) * gamma[h]
    return scaled if beta is None else scaled + beta[h]


@op(out=Out("*rows", "H"), static=("H",), example=_EXAMPLE, error=NormalizationError)
def rms_norm(
    x: Any = In("*rows", "H"), gamma: Any = In("H", dtype=f32), *, epsilon: Any = Param(1e-6)
) -> Any:
    """x / √(mean x² + ε) · γ over the last axis.

    x [..., H] f32, f16 or bf16, gamma [H] f32 → as x. Raises NormalizationError, also unless
    epsilon is finite and > 0.
    """
    _positive(epsilon)
    _not_empty()
    r, h = axes("*rows", "H")
    square = mean(f32(x[r, h]) ** 2, over=h)
    return x[r, h] * rsqrt(square + epsilon) * gamma[h]


@op(
    out=(
        Out("*rows", "H", name="dx"),
        Out("H", dtype=f32, name="dgamma"),
        Out("H", dtype=f32, name="dbeta"),
    ),
    static=("H",),
    example=_EXAMPLE,
    error=NormalizationError,
)
def layer_norm_backward(
    grad: Any = In("*rows", "H"),
    x: Any = In("*rows", "H"),
    gamma: Any = In("H", dtype=f32),
    *,
    epsilon: Any = Param(1e-5),
) -> Any:
    """(dx, dgamma, dbeta) of `layer_norm`; statistics are computed again from x.

    With x̂ the normalised x and g = grad · γ: dx = (g − mean g − x̂ · mean(g · x̂)) / σ.
    grad, x [..., H] f32, f16 or bf16, gamma [H] f32 → dx as x, dgamma and dbeta [H] f32. Raises
    NormalizationError.
    """
    _positive(epsilon)
    _not_empty()
    r, h = axes("*rows", "H")
    centre = keep("centre", r, mean(x[r, h], over=h))
    variance = mean((x[r, h] - centre[r]) ** 2, over=h)
    scale = keep("scale", r, rsqrt(variance + epsilon))
    unit = (x[r, h] - centre[r]) * scale[r]
    scaled = grad[r, h] * gamma[h]
    along = mean(scaled * unit, over=h)
    dx = (scaled - mean(scaled, over=h) - unit * along) * scale[r]
    return dx, sum(grad[r, h] * unit, over=r), sum(grad[r, h], over=r)


@op(
    out=(Out("*rows", "H", name="dx"), Out("H", dtype=f32, name="dgamma")),
    static=("H",),
    example=_EXAMPLE,
    error=NormalizationError,
)
def rms_norm_backward(
    grad: Any = In("*rows", "H"),
    x: Any = In("*rows", "H"),
    gamma: Any = In("H", dtype=f32),
    *,
    epsilon: Any = Param(1e-6),
) -> Any:
    """(dx, dgamma) of `rms_norm`: with x̂ = x/σ and g = grad · γ, dx = (g − x̂ · mean(g · x̂)) / σ.

    grad, x [..., H] f32, f16 or bf16, gamma [H] f32 → dx as x, dgamma [H] f32. Raises
    NormalizationError.
    """
    _positive(epsilon)
    _not_empty()
    r, h = axes("*rows", "H")
    square = mean(f32(x[r, h]) ** 2, over=h)
    scale = keep("scale", r, rsqrt(square + epsilon))
    unit = x[r, h] * scale[r]
    scaled = grad[r, h] * gamma[h]
    dx = (scaled - unit * mean(scaled * unit, over=h)) * scale[r]
    return dx, sum(grad[r, h] * unit, over=r)


softmax_last_axis.differentiable(softmax_last_axis_backward, "x")
layer_norm.differentiable(layer_norm_backward, "x", "gamma", "beta")
rms_norm.differentiable(rms_norm_backward, "x", "gamma")
