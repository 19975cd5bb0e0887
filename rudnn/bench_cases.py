"""What the benchmark measures, as data: an operator, shapes, settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .references import reference


@dataclass(frozen=True)
class BenchCase:
    """One line of the benchmark, f32.

    `shapes` are the inputs by name, filled with normal numbers, weights scaled down by √K.
    `packed`: the weight is packed beforehand. `numpy`: our side gets NumPy arrays and has no peer
    (a torch call would measure another interface).
    """

    suite: str
    op: str
    case: str
    shapes: dict[str, tuple[int, ...]]
    settings: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    numpy: bool = False


_ROWS = (4096, 1024)


def _linear(m: int, n: int, k: int, packed: bool, activation: str | None = None) -> BenchCase:
    name = f"{m}³" if m == n == k else f"{m}×{k}×{n}"
    shapes: dict[str, tuple[int, ...]] = {"x": (m, k), "weight": (n, k)}
    if activation:
        shapes["bias"] = (n,)
    label = " ".join((name, *((activation,) if activation else ()), *(("packed",) * packed)))
    return BenchCase("linear", "linear", label, shapes, {"activation": activation}, packed)


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
    BenchCase("attention", "attention", "1×8×512×64",
              dict.fromkeys(("query", "key", "value"), (1, 8, 512, 64)), {"scale": 0.125}),
    BenchCase("pointwise", "gelu", "4096×1024", {"x": _ROWS}, {"approximate": "none"}),
    BenchCase("pointwise", "add", "4096×1024", {"a": _ROWS, "b": _ROWS}),
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
        return _attention(attention)
    return operators()[op]


def _attention(module: Any) -> Callable[..., Any]:
    def call(query: Any, key: Any, value: Any, scale: float) -> Any:
        return module.attention(query, key, value, options=options)

    options = module.AttentionOptions(scale=0.125)
    return call


def peer(op: str) -> Callable[[dict[str, Any]], Any] | None:
    """What torch offers for an operator; takes the arguments by name."""
    return _sdpa if op == "attention" else reference(op)


def _sdpa(a: dict[str, Any]) -> Any:
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(a["query"], a["key"], a["value"], scale=a["scale"])
