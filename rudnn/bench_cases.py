"""What the benchmark measures, as data: an operator, shapes, settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .references import reference


@dataclass(frozen=True)
class BenchCase:
    """One line of the benchmark, f32.

    `shapes` are the inputs by name, filled with normal numbers, weights scaled down by √K, points
    of a grid uniform over the image; a mask keeps fewer keys from batch element to batch element.
    `packed`: the weight is packed beforehand. `numpy`: our side gets NumPy arrays and has no peer
    (a torch call would measure another interface). `nbytes`: what must be moved at least, where
    `shapes` are not the operator's own inputs; such a case needs torch.
    """

    suite: str
    op: str
    case: str
    shapes: dict[str, tuple[int, ...]]
    settings: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    numpy: bool = False
    nbytes: int | None = None


_ROWS = (4096, 1024)


def _linear(m: int, n: int, k: int, packed: bool, activation: str | None = None) -> BenchCase:
    name = f"{m}³" if m == n == k else f"{m}×{k}×{n}"
    shapes: dict[str, tuple[int, ...]] = {"x": (m, k), "weight": (n, k)}
    if activation:
        shapes["bias"] = (n,)
    label = " ".join((name, *((activation,) if activation else ()), *(("packed",) * packed)))
    return BenchCase("linear", "linear", label, shapes, {"activation": activation}, packed)


def _convolutions(
    label: str, x: tuple[int, ...], weight: tuple[int, ...], stride: int = 1, groups: int = 1
) -> tuple[BenchCase, ...]:
    """Forward, data and weight gradient of a square kernel with half of it as padding."""
    size, kernel = x[2], weight[2]
    padding = kernel // 2
    count = (size + 2 * padding - kernel) // stride + 1
    windows = {"SH": stride, "SW": stride, "PH": padding, "PW": padding, "groups": groups}
    image, taps = (*x[:2], 1, *x[2:]), (*weight[:2], 1, *weight[2:])
    grad = (x[0], weight[0], 1, count, count)
    shape = "×".join(map(str, x))
    return (
        BenchCase("convolution", "conv_forward", f"{label} {shape}", {"x": image, "weight": taps},
                  windows | {"OD": 1, "OH": count, "OW": count}),
        BenchCase("convolution", "conv_data_backward", f"{label} {shape}",
                  {"grad": grad, "weight": taps},
                  windows | {"C": x[1], "D": 1, "H": size, "W": size}),
        BenchCase("convolution", "conv_weight_backward", f"{label} {shape}",
                  {"grad": grad, "x": image},
                  windows | {"I": weight[1], "KD": 1, "KH": kernel, "KW": kernel}),
    )  # fmt: skip


def _pools() -> tuple[BenchCase, ...]:
    """Windows of 3, stride 2, padding 1, forward and backward."""
    image, pooled = (8, 64, 112, 112), (8, 64, 56, 56)
    windows = {"KH": 3, "KW": 3, "SH": 2, "SW": 2, "PH": 1, "PW": 1}
    out, own = {"OH": 56, "OW": 56}, {"H": 112, "W": 112}
    label = "3/2/1 8×64×112×112"
    return (
        BenchCase("pooling", "max_pool", label, {"x": image}, windows | out),
        BenchCase("pooling", "avg_pool", label, {"x": image}, windows | out),
        BenchCase("pooling", "max_pool_backward_from_input", label,
                  {"grad": pooled, "x": image}, windows),
        BenchCase("pooling", "avg_pool_backward", label, {"grad": pooled}, windows | own),
    )  # fmt: skip


def _resampled(mode: str) -> tuple[BenchCase, ...]:
    """Twice as many rows and columns, forward and backward."""
    image, double = (8, 32, 64, 64), (8, 32, 128, 128)
    label = f"{mode} ×2 8×32×64×64"
    return (
        BenchCase("interpolation", "interpolate", label, {"x": image},
                  {"OH": 128, "OW": 128, "mode": mode}),
        BenchCase("interpolation", "interpolate_backward", label, {"grad": double},
                  {"H": 64, "W": 64, "mode": mode}),
    )  # fmt: skip


def _sampled() -> tuple[BenchCase, ...]:
    image, grid = (8, 32, 64, 64), (8, 64, 64, 2)
    label = "bilinear 8×32×64×64"
    return (
        BenchCase("grid_sampling", "grid_sample", label, {"x": image, "grid": grid}),
        BenchCase("grid_sampling", "grid_sample_backward", label,
                  {"grad": image, "x": image, "grid": grid}),
    )  # fmt: skip


def _attention(kind: str, batch: int, heads: int, rows: int, head: int) -> BenchCase:
    """As many keys as rows; "padding": sequences of different lengths, by a mask."""
    shape = (batch, heads, rows, head)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key", "value"), shape)
    if kind == "padding":
        shapes["mask"] = (batch, 1, 1, rows)
    settings: dict[str, Any] = {"scale": head**-0.5}
    if kind == "causal":
        settings["causal"] = "top_left"
    label = " ".join(("×".join(map(str, shape)), kind)).strip()
    return BenchCase("attention", "attention", label, shapes, settings)


def _paged(sequences: int, length: int, page: int = 16) -> BenchCase:
    """Decoding: a query a sequence, its history of `length` keys in shuffled pages."""
    heads, kv_heads, depth = 32, 8, 128
    cache = (sequences * length // page, page, kv_heads, depth)
    shapes = {"q": (sequences, heads, depth), "k": cache, "v": cache}
    return BenchCase("paged", "paged_attention", f"{sequences}×{length} keys", shapes,
                     {"scale": depth**-0.5}, nbytes=2 * 4 * math.prod(cache))  # fmt: skip


CASES = (
    BenchCase("normalization", "softmax_last_axis", "4096×1024", {"x": _ROWS}),
    BenchCase("normalization", "layer_norm", "4096×1024",
              {"x": _ROWS, "gamma": _ROWS[1:], "beta": _ROWS[1:]}, {"epsilon": 1e-5}),
    BenchCase("normalization", "rms_norm", "4096×1024", {"x": _ROWS, "gamma": _ROWS[1:]},
              {"epsilon": 1e-6}),
    _linear(1024, 1024, 1024, packed=True),
    _linear(1024, 1024, 1024, packed=False),
    _linear(2048, 2048, 2048, packed=True),
    _linear(2048, 2048, 2048, packed=False),
    _linear(4096, 1536, 384, packed=True, activation="gelu"),
    _attention("", 1, 8, 512, 64),
    _attention("", 1, 8, 2048, 64),
    _attention("causal", 1, 8, 2048, 64),
    _attention("padding", 4, 12, 128, 32),
    BenchCase("attention", "attention_backward", "1×8×2048×64",
              dict.fromkeys(("grad", "query", "key", "value", "y"), (1, 8, 2048, 64))
              | {"lse": (1, 8, 2048)}, {"scale": 0.125}),
    BenchCase("pointwise", "gelu", "4096×1024", {"x": _ROWS}, {"approximate": "none"}),
    BenchCase("pointwise", "add", "4096×1024", {"a": _ROWS, "b": _ROWS}),
    *_convolutions("3×3", (8, 64, 56, 56), (64, 64, 3, 3)),
    *_convolutions("1×1", (8, 256, 56, 56), (64, 256, 1, 1)),
    *_convolutions("depthwise 3×3", (8, 128, 56, 56), (128, 1, 3, 3), groups=128),
    *_convolutions("7×7 stride 2", (8, 3, 224, 224), (64, 3, 7, 7), stride=2),
    *_pools(),
    *_resampled("linear"),
    *_resampled("bicubic"),
    *_sampled(),
    _paged(32, 4096),
    _paged(32, 1024),
    BenchCase("overhead", "softmax_last_axis", "16×64 numpy", {"x": (16, 64)}, numpy=True),
)  # fmt: skip
MINILM = "minilm"
SUITES = (*dict.fromkeys(c.suite for c in CASES), MINILM)


def face(op: str) -> Callable[..., Any]:
    """The function that users call for an operator, else the operator itself."""
    from . import attention, nn, normalization
    from .ops.registry import operators

    for module in (nn, normalization):
        if op in module.__all__:
            return getattr(module, op)
    if op == "attention":
        return _with_options(attention)
    if op == "paged_attention":
        return _decoding()
    return operators()[op]


def _with_options(module: Any) -> Callable[..., Any]:
    """Attention by the settings of a case, as `AttentionOptions`."""

    def call(query: Any, key: Any, value: Any, scale: float, mask: Any = None,
             causal: str = "none") -> Any:  # fmt: skip
        return module.attention(query, key, value, mask, options=options[scale, causal])

    options = {
        (s["scale"], c): module.AttentionOptions(s["scale"], is_causal=c != "none")
        for s in (case.settings for case in CASES if case.op == "attention")
        for c in (s.get("causal", "none"),)
    }
    return call


def _tables(q: Any, k: Any) -> Any:
    """[sequences, pages of each]: all pages in some order."""
    return np.random.default_rng(0).permutation(k.shape[0]).reshape(q.shape[0], -1)


def _decoding() -> Callable[..., Any]:
    from . import paged_attention

    plans: list[Any] = []

    def call(q: Any, k: Any, v: Any, scale: float) -> Any:
        if not plans:
            tables, page = _tables(q, k), k.shape[1]
            lengths = np.full(len(tables), tables.shape[1] * page)
            host = paged_attention.HostPlan(
                page, k.shape[0], tables, lengths, np.arange(len(tables)), lengths - 1
            )
            plans.append(paged_attention.DevicePlan.upload(host, q))
        return plans[0].attention(q, k, v, scale, True)

    return call


def _gathered(a: dict[str, Any]) -> Any:
    import torch

    q = a["q"]
    k, v = (a[n][torch.from_numpy(_tables(q, a[n]))].flatten(1, 2).transpose(1, 2) for n in "kv")
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q[:, :, None], k, v, scale=a["scale"], enable_gqa=True)[:, :, 0]


def peer(op: str) -> Callable[[dict[str, Any]], Any] | None:
    """What torch offers for an operator; takes the arguments by name."""
    attention = {"attention": _sdpa, "attention_backward": _sdpa_backward}
    special = attention | {"paged_attention": _gathered} | _CONVOLUTIONS | _SAMPLING
    return special.get(op) or reference(op)


def _sdpa(a: dict[str, Any]) -> Any:
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(
        a["query"], a["key"], a["value"], a.get("mask"), is_causal="causal" in a, scale=a["scale"]
    )


def _sdpa_backward(a: dict[str, Any]) -> Any:
    """torch's gradients from the same result and log-sum-exp."""
    import torch

    names = ("grad", "query", "key", "value", "y", "lse")
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(*(a[n] for n in names), 0.0, False, scale=a["scale"])


def _plane(array: Any) -> Any:
    """[N, C, 1, H, W] as torch's convolutions of two dims take it."""
    return array[:, :, 0]


def _settings(a: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Stride and padding."""
    return [a["SH"], a["SW"]], [a["PH"], a["PW"]]


def _convolution(a: dict[str, Any]) -> Any:
    import torch

    stride, padding = _settings(a)
    conv = torch.nn.functional.conv2d
    y = conv(_plane(a["x"]), _plane(a["weight"]), None, stride, padding, 1, a["groups"])
    return y[:, :, None]


def _data_gradient(a: dict[str, Any]) -> Any:
    import torch

    grad, weight = _plane(a["grad"]), _plane(a["weight"])
    x = grad.new_empty(1).expand(grad.shape[0], a["C"], a["H"], a["W"])  # its shape counts
    return _gradients(torch, a, grad, x, weight, (True, False, False))[0][:, :, None]


def _weight_gradient(a: dict[str, Any]) -> Any:
    import torch

    grad, x = _plane(a["grad"]), _plane(a["x"])
    weight = grad.new_empty(1).expand(grad.shape[1], a["I"], a["KH"], a["KW"])
    return _gradients(torch, a, grad, x, weight, (False, True, False))[1][:, :, None]


def _gradients(torch: Any, a: dict[str, Any], grad: Any, x: Any, weight: Any, want: Any) -> Any:
    stride, padding = _settings(a)
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, [1, 1], False, [0, 0], a["groups"], want
    )


_CONVOLUTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "conv_forward": _convolution,
    "conv_data_backward": _data_gradient,
    "conv_weight_backward": _weight_gradient,
}


# Called as users would: the references of the tests pad first.


def _windows(a: dict[str, Any]) -> list[list[int]]:
    """Kernel, stride and padding."""
    return [[a[f"{n}H"], a[f"{n}W"]] for n in "KSP"]


def _max_pool(a: dict[str, Any]) -> Any:
    import torch

    return torch.nn.functional.max_pool2d(a["x"], *_windows(a))


def _max_pool_gradient(a: dict[str, Any]) -> Any:
    """Finds the maxima too: ours is given none."""
    import torch

    kernel, stride, padding = _windows(a)
    pool = torch.ops.aten.max_pool2d_with_indices
    _, at = pool(a["x"], kernel, stride, padding)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    return backward(a["grad"], a["x"], kernel, stride, padding, [1, 1], False, at)


def _avg_pool(a: dict[str, Any]) -> Any:
    import torch

    return torch.nn.functional.avg_pool2d(a["x"], *_windows(a))


def _avg_pool_gradient(a: dict[str, Any]) -> Any:
    import torch

    grad = a["grad"]
    x = grad.new_empty(1).expand(*grad.shape[:2], a["H"], a["W"])  # its shape counts
    backward = torch.ops.aten.avg_pool2d_backward
    return backward(grad, x, *_windows(a), False, True, None)


def _interpolate(a: dict[str, Any]) -> Any:
    import torch

    mode = {"linear": "bilinear"}.get(a["mode"], a["mode"])
    resample = torch.nn.functional.interpolate
    return resample(a["x"], (a["OH"], a["OW"]), mode=mode, align_corners=False)


def _interpolate_gradient(a: dict[str, Any]) -> Any:
    import torch

    mode, grad = {"linear": "bilinear"}.get(a["mode"], a["mode"]), a["grad"]
    backward = getattr(torch.ops.aten, f"upsample_{mode}2d_backward")
    return backward(grad, grad.shape[2:], [*grad.shape[:2], a["H"], a["W"]], False)


def _grid_sample(a: dict[str, Any]) -> Any:
    import torch

    return torch.nn.functional.grid_sample(a["x"], a["grid"], align_corners=False)


def _grid_sample_gradients(a: dict[str, Any]) -> Any:
    import torch

    backward = torch.ops.aten.grid_sampler_2d_backward
    return backward(a["grad"], a["x"], a["grid"], 0, 0, False, [True, True])


_SAMPLING: dict[str, Callable[[dict[str, Any]], Any]] = {
    "max_pool": _max_pool,
    "max_pool_backward_from_input": _max_pool_gradient,
    "avg_pool": _avg_pool,
    "avg_pool_backward": _avg_pool_gradient,
    "interpolate": _interpolate,
    "interpolate_backward": _interpolate_gradient,
    "grid_sample": _grid_sample,
    "grid_sample_backward": _grid_sample_gradients,
}
