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


@register("attention")
def _attention(a: dict[str, Any]) -> Any:
    import torch

    query, key, value = a["query"], a["key"], a["value"]
    group = query.shape[1] // max(key.shape[1], 1)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = a["scale"] * query @ key.transpose(-1, -2)
    if a["capped"]:
        scores = a["softcap"] * torch.tanh(scores / a["softcap"])
    if a["attn_bias"] is not None:
        scores = scores + a["attn_bias"]
    if a["mask"] is not None:
        scores = scores.masked_fill(~a["mask"], -torch.inf)
    if a["causal"] != "none":
        rows, keys = scores.shape[-2:]
        shift = keys - rows if a["causal"] == "bottom_right" else 0
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(shift)
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
    result = weights @ value
    return (result, scores.logsumexp(-1)) if a["return_lse"] else result


@register("linear_recurrence")
def _linear_recurrence(a: dict[str, Any]) -> Any:
    import torch

    x, decay, initial = a["x"], a["decay"], a["initial"]
    state = torch.zeros_like(x[..., 0, :] if x.shape[-2] else x.sum(-2))
    state = state if initial is None else initial
    states = []
    for t in range(x.shape[-2]):
        state = decay[..., t, :] * state + x[..., t, :]
        states.append(state)
    return (torch.stack(states, -2) if states else torch.zeros_like(x)), state


@register("top_k")
def _top_k(a: dict[str, Any]) -> Any:
    values, indices = a["x"].sort(dim=-1, descending=True, stable=True)
    return values[..., : a["k"]], indices[..., : a["k"]]


@register("segment_sum")
def _segment_sum(a: dict[str, Any]) -> Any:
    x = a["x"]
    return x.new_zeros(a["num_segments"], x.shape[1]).index_add(0, a["ids"], x)
