"""Linear layers and matrix products: x·Wᵀ with bias, activation and residual in one pass."""

from __future__ import annotations

from typing import Any

from ..dsl import Expr, Extent, In, Option, Out, axes, dim, f32, op, require, sum, tensor, where
from ..dsl.errors import NNError
from .pointwise import gelu_of, gelu_slope, silu_of, silu_slope

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
_EXAMPLE = {"rows": (128,), "K": 384, "N": 384}
_ACTIVATION = Option(None, ACTIVATIONS)


def activate(x: Expr, activation: str | None) -> Expr:
    """The activation of that name at x; None is x itself."""
    if activation == "relu":
        return where(x < 0, 0.0, x)  # NaN stays
    if activation in ("gelu", "gelu_tanh"):
        return gelu_of(x, "tanh" if activation == "gelu_tanh" else "none")
    return silu_of(x) if activation == "silu" else x


def slope(x: Expr, activation: str) -> Expr:
    """The derivative of `activate`."""
    if activation == "relu":
        return where(x > 0, f32(1.0), f32(0.0))
    if activation in ("gelu", "gelu_tanh"):
        return gelu_slope(x, "tanh" if activation == "gelu_tanh" else "none")
    return silu_slope(x)


def _finish(total: Expr, bias: Any, activation: str | None, residual: Any, r: Any, n: Any) -> Expr:
    if bias is not None:
        total = total + bias[n]
    total = activate(total, activation)
    return total if residual is None else total + residual[r, n]


@op(out=Out("*rows", "N"), static=("K", "N"), example=_EXAMPLE, error=NNError)
def linear(
    x: Any = In("*rows", "K"),
    weight: Any = In("N", "K"),
    bias: Any = In("N", optional=True),
    activation: Any = _ACTIVATION,
    residual: Any = In("*rows", "N", optional=True),
) -> Any:
    """activation(x·weightᵀ + bias) + residual, sums in f32; weight is [out, in] as torch's.

    x [..., K], weight [N, K], bias [N], residual [..., N] f32, f16 or bf16, all the same →
    [..., N] alike. Raises NNError.
    """
    r, n, k = axes("*rows", "N", "K")
    return _finish(sum(x[r, k] * weight[n, k], over=k), bias, activation, residual, r, n)


@op(out=Out("P", "K", "L", dtype=f32), static=("K", "P", "L"),
    example={"N": 384, "K": 384, "P": 8, "L": 48}, error=NNError)  # fmt: skip
def pack_weight(weight: Any = In("N", "K"), *, P: Any = Extent(), L: Any = Extent()) -> Any:
    """weight [N, K] in panels [P, K, L] of L rows each, f32; rows past N hold zeros.

    weight f32, f16 or bf16. Raises NNError.
    """
    p, k, lane = axes("P", "K", "L")
    return weight.at(p * L + lane, k, fill=0.0)


@op(out=Out("*rows", "N"), static=("K", "N", "P", "L"),
    example=_EXAMPLE | {"P": 8, "L": 48}, error=NNError)  # fmt: skip
def linear_packed(
    x: Any = In("*rows", "K"),
    panels: Any = In("P", "K", "L", dtype=f32),
    bias: Any = In("N", optional=True),
    activation: Any = _ACTIVATION,
    residual: Any = In("*rows", "N", optional=True),
    *,
    N: Any = Extent(),
) -> Any:
    """`linear` with a weight that `pack_weight` has laid out.

    x [..., K], bias [N], residual [..., N] f32, f16 or bf16, all the same, panels [P, K, L] f32 →
    [..., N] as x. Raises NNError, also where P · L < N.
    """
    require(dim("P") * dim("L") >= dim("N"), "panels that hold N rows", P=dim("P"), N=dim("N"))
    r, n, k = axes("*rows", "N", "K")
    total = sum(x[r, k] * panels[n // dim("L"), k, n % dim("L")], over=k)
    return _finish(total, bias, activation, residual, r, n)


@op(
    out=(
        Out("*rows", "K", name="dx"),
        Out("N", "K", dtype=f32, name="dweight"),
        Out("N", dtype=f32, name="dbias"),
    ),
    static=("K", "N"),
    example=_EXAMPLE,
    error=NNError,
)
def linear_backward(
    grad: Any = In("*rows", "N"),
    x: Any = In("*rows", "K"),
    weight: Any = In("N", "K"),
    bias: Any = In("N", optional=True),
    activation: Any = _ACTIVATION,
) -> Any:
    """(dx, dweight, dbias) of `linear`; the residual's gradient is `grad` itself.

    With z = x·Wᵀ + b and g = grad · activation′(z): dx = g·W, dW = gᵀ·x, db = Σ g. z is computed
    again. grad [..., N], x [..., K], weight [N, K], bias [N] f32, f16 or bf16, all the same → dx
    alike, dweight and dbias f32. Raises NNError.
    """
    r, n, k = axes("*rows", "N", "K")
    local = grad
    if activation is not None:
        z = sum(x[r, k] * weight[n, k], over=k)
        z = z if bias is None else z + bias[n]
        local = tensor("local", (r, n), grad[r, n] * slope(z, activation))
    dx = sum(local[r, n] * weight[n, k], over=n)
    dweight = sum(local[r, n] * x[r, k], over=r)
    return dx, dweight, sum(f32(local[r, n]), over=r)


@op(out=Out("*batch", "M", "N"), static=("K", "N"),
    example={"batch": (2,), "M": 64, "K": 64, "N": 64}, error=NNError)  # fmt: skip
def batched_matmul(a: Any = In("*batch", "M", "K"), b: Any = In("*batch", "K", "N")) -> Any:
    """a·b for each batch, sums in f32.

    a [..., M, K], b [..., K, N] f32, f16 or bf16, both the same → [..., M, N] alike. Raises
    NNError.
    """
    i, m, n, k = axes("*batch", "M", "N", "K")
    return sum(a[i, m, k] * b[i, k, n], over=k)


@op(
    out=(Out("*batch", "M", "K", name="da"), Out("*batch", "K", "N", name="db")),
    static=("K", "N"),
    example={"batch": (2,), "M": 64, "K": 64, "N": 64},
    error=NNError,
)
def batched_matmul_backward(
    grad: Any = In("*batch", "M", "N"), a: Any = In("*batch", "M", "K"),
    b: Any = In("*batch", "K", "N"),
) -> Any:  # fmt: skip
    """(da, db) of `batched_matmul`: grad·bᵀ and aᵀ·grad.

    grad [..., M, N], a [..., M, K], b [..., K, N] f32, f16 or bf16, all the same → da as a, db as
    b. Raises NNError.
    """
    i, m, n, k = axes("*batch", "M", "N", "K")
    return sum(grad[i, m, n] * b[i, k, n], over=n), sum(a[i, m, k] * grad[i, m, n], over=m)


linear.differentiable(linear_backward, "x", "weight", "bias", passes=("residual",))
batched_matmul.differentiable(batched_matmul_backward, "a", "b")
