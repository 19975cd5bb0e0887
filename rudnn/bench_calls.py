"""What the benchmark calls: what users of an operator call, and what torch offers for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .bench_cases import CASES
from .references import reference


def face(op: str) -> Callable[..., Any]:
    """The function that users call for an operator, else the operator itself."""
    from . import attention, ctc, nn, normalization
    from .ops.registry import operators

    for module in (nn, normalization):
        if op in module.__all__:
            return getattr(module, op)
    if op == "attention":
        return _with_options(attention)
    if op == "paged_attention":
        return _decoding()
    if op in _CTC:
        return partial(_CTC[op], ctc.ctc_loss)
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
    if op in _CTC:
        return lambda a: _CTC[op](_torch_ctc, **a)
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


def _torch_ctc(*arguments: Any, reduction: str) -> Any:
    import torch

    return torch.nn.functional.ctc_loss(*arguments, reduction=reduction)


def _ctc_loss(loss: Callable[..., Any], **arrays: Any) -> Any:
    return loss(*arrays.values(), reduction="none")


def _ctc_gradient(loss: Callable[..., Any], grad: Any, log_probs: Any, **others: Any) -> Any:
    """The loss and then its gradient, by autograd."""
    x = log_probs.detach().requires_grad_()
    loss(x, *others.values(), reduction="none").backward(grad)
    return x.grad


_CTC: dict[str, Callable[..., Any]] = {
    "ctc_loss": _ctc_loss,
    "ctc_loss_backward": _ctc_gradient,
}


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
