"""What torch computes for our operators: a second opinion for `check`, the peer of `bench`.

A reference takes the arguments by name, as torch tensors, numbers and options (an absent input is
None), and returns a tensor or a tuple of them. Any float dtype goes; `check` asks for float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Reference = Callable[[dict[str, Any]], Any]
_REFERENCES: dict[str, Reference] = {}


def reference(name: str) -> Reference | None:
    """The reference of an operator, if it has one."""
    return _REFERENCES.get(name)


def register(name: str) -> Callable[[Reference], Reference]:
    """Make a function the reference of an operator."""

    def keep(fn: Reference) -> Reference:
        _REFERENCES[name] = fn
        return fn

    return keep


def _functional() -> Any:
    import torch.nn.functional as functional

    return functional


@register("softmax_last_axis")
def _softmax(a: dict[str, Any]) -> Any:
    return _functional().softmax(a["x"], dim=-1)


@register("layer_norm")
def _layer_norm(a: dict[str, Any]) -> Any:
    x, gamma, beta = a["x"], a["gamma"], a["beta"]
    return _functional().layer_norm(x, x.shape[-1:], gamma, beta, a["epsilon"])


@register("rms_norm")
def _rms_norm(a: dict[str, Any]) -> Any:
    return _functional().rms_norm(a["x"], a["x"].shape[-1:], a["gamma"], a["epsilon"])


@register("gelu")
def _gelu(a: dict[str, Any]) -> Any:
    return _functional().gelu(a["x"], approximate=a.get("approximate", "none"))


@register("silu")
def _silu(a: dict[str, Any]) -> Any:
    return _functional().silu(a["x"])


@register("add")
def _add(a: dict[str, Any]) -> Any:
    return a["a"] + a["b"]


@register("mul")
def _mul(a: dict[str, Any]) -> Any:
    return a["a"] * a["b"]


@register("batched_matmul")
def _matmul(a: dict[str, Any]) -> Any:
    return a["a"] @ a["b"]


@register("embedding")
def _embedding(a: dict[str, Any]) -> Any:
    return _functional().embedding(a["indices"], a["table"])


@register("linear")
def _linear(a: dict[str, Any]) -> Any:
    functional = _functional()
    y = functional.linear(a["x"], a["weight"], a.get("bias"))
    activations = {
        "relu": functional.relu,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
    }
    activation = a.get("activation")
    if activation not in (None, "none"):
        y = activations[activation](y)
    residual = a.get("residual")
    return y if residual is None else y + residual
