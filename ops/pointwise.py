"""Pointwise operators with broadcasting, and their backward."""

from __future__ import annotations

import math
from typing import Any

from ..dsl import In, Option, Out, axes, erf, exp, f32, op, sigmoid, tanh
from ..dsl.errors import NNError

_EXAMPLE = {"shape": (256, 1024)}
_ROOT_2 = math.sqrt(2.0)
_ROOT_2_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


@op(out=Out("*shape"), example=_EXAMPLE, error=NNError)
def add(a: Any = In("*shape", broadcast=True), b: Any = In("*shape", broadcast=True)) -> Any:
    """a + b, shapes broadcast.

    a, b [...] f32, f16 or bf16, both the same → that. Raises NNError.
    """
    i = axes("*shape")
    return a[i] + b[i]


@op(out=Out("*shape"), example=_EXAMPLE, error=NNError)
def mul(a: Any = In("*shape", broadcast=True), b: Any = In("*shape", broadcast=True)) -> Any:
    """a · b, shapes broadcast.

    a, b [...] f32, f16 or bf16, both the same → that. Raises NNError.
    """
    i = axes("*shape")
    return a[i] * b[i]


_GRADS = (Out("*shape", name="da"), Out("*shape", name="db"))


@op(out=_GRADS, example=_EXAMPLE, error=NNError)
def add_backward(grad: Any = In("*shape")) -> Any:
    """(da, db) of `add` in the broadcast shape: both are grad. Sum them over what was broadcast.

    grad [...] f32, f16 or bf16 → twice the same. Raises NNError.
    """
    i = axes("*shape")
    return grad[i], grad[i]


@op(out=_GRADS, example=_EXAMPLE, error=NNError)
def mul_backward(
    grad: Any = In("*shape"), a: Any = In("*shape", broadcast=True),
    b: Any = In("*shape", broadcast=True),
) -> Any:  # fmt: skip
    """(da, db) = (grad · b, grad · a) of `mul`, to be summed over what was broadcast.

    grad [...] f32, f16 or bf16, a and b alike or smaller → twice as grad. Raises NNError.
    """
    i = axes("*shape")
    return grad[i] * b[i], grad[i] * a[i]


def gelu_of(x: Any, approximate: str) -> Any:
    """The GELU of an expression: x Φ(x), or its tanh approximation."""
    x = f32(x)
    if approximate == "tanh":
        return 0.5 * x * (1 + tanh(_ROOT_2_PI * (x + _CUBIC * x * x * x)))
    return 0.5 * x * (1 + erf(x * (1 / _ROOT_2)))


def gelu_slope(x: Any, approximate: str) -> Any:
    """d gelu / dx."""
    x = f32(x)
    if approximate == "tanh":
        t = tanh(_ROOT_2_PI * (x + _CUBIC * x * x * x))
        inner = _ROOT_2_PI * (1 + 3 * _CUBIC * x * x)
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner
    density = exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return 0.5 * (1 + erf(x * (1 / _ROOT_2))) + x * density


def silu_of(x: Any) -> Any:
    """The SiLU (swish) of an expression: x σ(x)."""
    return f32(x) * sigmoid(x)


def silu_slope(x: Any) -> Any:
    """d silu / dx."""
    s = sigmoid(x)
    return s * (1 + f32(x) * (1 - s))


_APPROXIMATE = Option("none", ("none", "tanh"))


@op(out=Out("*shape"), example=_EXAMPLE, error=NNError)
def gelu(x: Any = In("*shape"), *, approximate: Any = _APPROXIMATE) -> Any:
    """x Φ(x) with the normal distribution's Φ; `approximate="tanh"` as torch's.

    x [...] f32, f16 or bf16 → the same. Raises NNError.
    """
    i = axes("*shape")
    return gelu_of(x[i], approximate)


@op(out=Out("*shape"), example=_EXAMPLE, error=NNError)
def gelu_backward(
    grad: Any = In("*shape"), x: Any = In("*shape"), *, approximate: Any = _APPROXIMATE
) -> Any:
    """grad · gelu′(x).

    grad, x [...] f32, f16 or bf16, both the same → that. Raises NNError.
    """
    i = axes("*shape")
    return grad[i] * gelu_slope(x[i], approximate)


@op(out=Out("*shape"), example=_EXAMPLE, error=NNError)
def silu(x: Any = In("*shape")) -> Any:
    """x σ(x).

    x [...] f32, f16 or bf16 → the same. Raises NNError.
    """
    i = axes("*shape")
    return silu_of(x[i])


@op(out=Out("*shape"), example=_EXAMPLE, error=NNError)
def silu_backward(grad: Any = In("*shape"), x: Any = In("*shape")) -> Any:
    """grad · silu′(x).

    grad, x [...] f32, f16 or bf16, both the same → that. Raises NNError.
    """
    i = axes("*shape")
    return grad[i] * silu_slope(x[i])


add.differentiable(add_backward, "a", "b")
mul.differentiable(mul_backward, "a", "b")
gelu.differentiable(gelu_backward, "x")
silu.differentiable(silu_backward, "x")
