"""What the benchmark measures, as data: an operator, shapes, settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BenchCase:
    """One line of the benchmark, f32.

    `shapes` are the inputs by name, filled with normal numbers, weights scaled down by √K, points
    of a grid uniform over the image; a mask keeps fewer keys from batch element to batch element.
    `integers` are those of them that hold integers instead, from low to below high, i32.
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
    integers: dict[str, tuple[int, int]] = field(default_factory=dict)


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


def _ctc(op: str, label: str, t: int, n: int, c: int, s: int) -> BenchCase:
    grad: dict[str, tuple[int, ...]] = {"grad": (n,)} if op == "ctc_loss_backward" else {}
    shapes: dict[str, tuple[int, ...]] = {
        "log_probs": (t, n, c), "targets": (n, s), "input_lengths": (n,), "target_lengths": (n,)
    }  # fmt: skip
    integers = {"targets": (1, c), "input_lengths": (t, t + 1), "target_lengths": (s, s + 1)}
    case = f"{label}{t}×{n}×{c} of {s} labels"
    return BenchCase("ctc", op, case, grad | shapes, integers=integers)


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
    _ctc("ctc_loss", "", 200, 32, 80, 50),
    _ctc("ctc_loss_backward", "loss and gradient ", 200, 32, 80, 50),
    BenchCase("overhead", "softmax_last_axis", "16×64 numpy", {"x": (16, 64)}, numpy=True),
)  # fmt: skip
MINILM = "minilm"
SUITES = (*dict.fromkeys(c.suite for c in CASES), MINILM)
