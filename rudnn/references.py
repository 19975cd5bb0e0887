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


def _activated(y: Any, activation: str | None) -> Any:
    functional = _functional()
    activations = {
        "relu": functional.relu,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
    }
    return y if activation in (None, "none") else activations[activation](y)


@register("linear")
def _linear(a: dict[str, Any]) -> Any:
    y = _functional().linear(a["x"], a["weight"], a.get("bias"))
    y = _activated(y, a.get("activation"))
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


def _windows(a: dict[str, Any], x: Any, fill: float, letters: str = "HW") -> Any:
    """x [..., H, W] with `fill` around it, cut so that a pooling without padding has OH × OW."""
    margins: list[int] = []
    for letter in reversed(letters):
        count, kernel, stride, padding = (a[f"{n}{letter}"] for n in "OKSP")
        needed = (count - 1) * stride + (kernel - 1) * a.get(f"D{letter}", 1) + 1
        margins += [padding, needed - padding - x.shape[letters.index(letter) - 2]]
    return _functional().pad(x, margins, value=fill)


def _pairs(a: dict[str, Any], *names: str) -> list[tuple[int, int]]:
    return [(a[f"{n}H"], a[f"{n}W"]) for n in names]


@register("max_pool")
def _max_pool(a: dict[str, Any]) -> Any:
    return _max_pool_with_indices(a)[0]


@register("max_pool_with_indices")
def _max_pool_with_indices(a: dict[str, Any]) -> Any:
    x = a["x"]
    kernel, stride, dilation = _pairs(a, "K", "S", "D")
    pool = _functional().max_pool2d

    def padded(planes: Any, size: Any) -> Any:
        around = _windows(a, planes, float("-inf"))
        y, at = pool(around, kernel, stride, 0, dilation, return_indices=True)
        width = around.shape[-1]
        return y, (at // width - a["PH"]) * x.shape[-1] + at % width - a["PW"]

    return _in_planes(a, padded)


@register("avg_pool")
def _avg_pool(a: dict[str, Any]) -> Any:
    import torch

    sums = _functional().avg_pool2d
    kernel, stride = _pairs(a, "K", "S")
    bare = a | {"PH": 0, "PW": 0}

    def padded(planes: Any, size: Any) -> Any:
        total = sums(_windows(a, planes, 0.0), kernel, stride, divisor_override=1)
        ones = torch.ones_like(planes[:1])
        if a["count_include_pad"]:
            margins = (a["PW"], a["PW"], a["PH"], a["PH"])
            ones = _windows(bare, _functional().pad(ones, margins, value=1.0), 0.0)
        else:
            ones = _windows(a, ones, 0.0)
        return (total / (a["divisor"] or sums(ones, kernel, stride, divisor_override=1)),)

    return _in_planes(a, padded)[0]


@register("adaptive_max_pool")
def _adaptive_max_pool(a: dict[str, Any]) -> Any:
    return _adaptive_max_pool_with_indices(a)[0]


@register("adaptive_max_pool_with_indices")
def _adaptive_max_pool_with_indices(a: dict[str, Any]) -> Any:
    pool = _functional().adaptive_max_pool2d
    return _in_planes(a, lambda x, size: pool(x, size, return_indices=True))


@register("adaptive_avg_pool")
def _adaptive_avg_pool(a: dict[str, Any]) -> Any:
    pool = _functional().adaptive_avg_pool2d
    return _in_planes(a, lambda x, size: (pool(x, size),))[0]


def _in_planes(a: dict[str, Any], pool: Callable[[Any, Any], Any]) -> Any:
    """`pool` of x [..., H, W] seen as planes, its results [..., OH, OW]."""
    x, size = a["x"], (a["OH"], a["OW"])
    shape = (*x.shape[:-2], *size)
    if 0 in shape:
        return x.new_zeros(shape), x.new_zeros(shape).long()
    made = pool(x.reshape(-1, 1, *x.shape[-2:]), size)
    return tuple(y.reshape(shape) for y in made)


@register("interpolate")
def _interpolate(a: dict[str, Any]) -> Any:
    mode, align, antialias = a["mode"], a["align_corners"], a["antialias"]
    names = {"linear": "bilinear", "lanczos3": "lanczos"}
    settings: dict[str, Any] = {"mode": names.get(mode, mode)}
    if mode in ("linear", "bicubic"):
        settings |= {"align_corners": align, "antialias": antialias}
    elif mode == "lanczos3":  # torch has it antialiased only: no difference where places are dense
        settings |= {"antialias": True}
    resample = _functional().interpolate
    return _in_planes(a, lambda x, size: (resample(x, size, **settings),))[0]


@register("grid_sample")
def _grid_sample(a: dict[str, Any]) -> Any:
    x, grid = a["x"], a["grid"]
    shape = (*x.shape[:2], *grid.shape[1:3])
    if 0 in shape:
        return x.new_zeros(shape)
    names = ("mode", "padding_mode", "align_corners")
    return _functional().grid_sample(x, grid, **{n: a[n] for n in names})


def _convolution(a: dict[str, Any], channels_last: bool) -> Any:
    """torch's convolution of an image padded, or cut, so that the result has the wanted size."""
    functional = _functional()
    x, weight = a["x"], a["weight"]
    if channels_last:
        x, weight = x.movedim(-1, 1), weight.movedim(-1, 1)
    margins: list[int] = []
    for letter, size, kernel in zip("WHD", reversed(x.shape), reversed(weight.shape), strict=False):
        before = a[f"P{letter}"]
        needed = (a[f"O{letter}"] - 1) * a[f"S{letter}"] + (kernel - 1) * a[f"D{letter}"] + 1
        margins += [before, needed - before - size]
    stride, dilation = ([a[f"{n}{d}"] for d in "DHW"] for n in "SD")
    y = functional.conv3d(functional.pad(x, margins), weight, a["bias"], stride, 0, dilation,
                          a["groups"])  # fmt: skip
    y = _activated(y, a["activation"])
    return y.movedim(1, -1) if channels_last else y


@register("conv_forward")
def _conv_forward(a: dict[str, Any]) -> Any:
    return _convolution(a, channels_last=False)


@register("conv_forward_nhwc")
def _conv_forward_nhwc(a: dict[str, Any]) -> Any:
    return _convolution(a, channels_last=True)


@register("ctc_loss")
def _ctc_loss(a: dict[str, Any]) -> Any:
    import torch

    x, frames, lengths = a["log_probs"], a["input_lengths"], a["target_lengths"]
    if not x.numel():  # refused by torch
        hopeless = 0.0 if a["zero_infinity"] else torch.inf
        return torch.where(lengths > 0, hopeless, 0.0).to(x.dtype) + x.sum()
    return _functional().ctc_loss(
        x, a["targets"].long(), frames.long(), lengths.long(), a["blank"], "none",
        a["zero_infinity"],
    )  # fmt: skip


@register("ctc_reduction")
def _ctc_reduction(a: dict[str, Any]) -> Any:
    losses = a["losses"]
    return (losses / a["target_lengths"].clamp(min=1)).mean() if a["mean"] else losses.sum()
