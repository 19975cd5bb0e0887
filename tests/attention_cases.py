"""Cases of attention for tests: options, arrays, and the float64 oracle's results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from rudnn.dsl.declare import Spec
from rudnn.dsl.dtypes import bf16, bool_, f16, f32
from rudnn.dsl.oracle import evaluate
from rudnn.ops.attention import AttentionOptions, attention_op

Array = Any
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
NAMES = {np.dtype(np.float32): f32, np.dtype(np.float16): f16,
         np.dtype(ml_dtypes.bfloat16): bf16, np.dtype(bool): bool_}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Which options and optional tensors; `bias` and `mask` are broadcast patterns of b h q k."""

    mask: str | None = None
    bias: str | None = None
    options: AttentionOptions = AttentionOptions()
    bias_dtype: Any = np.float32


CASES = {
    "plain": Case(),
    "scale": Case(options=AttentionOptions(scale=-0.7)),
    "softcap": Case(options=AttentionOptions(softcap=1.5)),
    "top_left": Case(options=AttentionOptions(is_causal=True)),
    "bottom_right": Case(options=AttentionOptions(is_causal=True, causal_alignment="bottom_right")),
    "mask": Case(mask="bhqk"),
    "padding": Case(mask="b11k"),
    "bias": Case(bias="1hqk"),
    "all": Case("1h1k", "bhq1", AttentionOptions(0.3, 2.0, True, "bottom_right"), np.float16),
}


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def inputs(case: Case, sizes: tuple[int, ...], heads: tuple[int, int], dtype: Any) -> list[Array]:
    rng = np.random.default_rng(sum(sizes) + 31 * sum(heads))
    b, hq, hkv, q, k = sizes
    full = {"b": b, "h": hq, "q": q, "k": k}

    def shape(pattern: str) -> list[int]:
        return [full[c] if c != "1" else 1 for c in pattern]

    mask = None if case.mask is None else rng.random(shape(case.mask)) < 0.7
    bias = None if case.bias is None else normal(rng, *shape(case.bias), dtype=case.bias_dtype)
    return [
        normal(rng, b, hq, q, heads[0], dtype=dtype), normal(rng, b, hkv, k, heads[0], dtype=dtype),
        normal(rng, b, hkv, k, heads[1], dtype=dtype), mask, bias,
    ]  # fmt: skip


def expected(arrays: list[Array], options: AttentionOptions) -> tuple[Array, Array]:
    """The float64 oracle's result and log-sum-exp."""
    query, key, value = arrays[:3]
    (b, hq, q, d), hkv, k = query.shape, key.shape[1], key.shape[2]
    names = ("query", "key", "value", "mask", "attn_bias")
    given = {n: a for n, a in zip(names, arrays, strict=True) if a is not None}
    for name in ("mask", "attn_bias"):
        if name in given:
            given[name] = np.broadcast_to(given[name], (b, hq, q, k))
    causal = options.causal_alignment if options.is_causal else "none"
    spec = Spec(
        tuple((n, NAMES[a.dtype]) for n, a in given.items()), (),
        (("D", d), ("Dv", value.shape[3])),
        (("causal", causal), ("capped", options.softcap is not None), ("return_lse", True)),
    )  # fmt: skip
    scale = d**-0.5 if options.scale is None else options.scale
    numbers = {"B": b, "Hq": hq, "Hkv": hkv, "Q": q, "K": k, "scale": scale,
               "softcap": options.softcap or 0.0}  # fmt: skip
    result = evaluate(attention_op.trace(spec), given, numbers, precision="float64")
    return result[0], result[1]


def close(got: Array, want: Array, tolerance: float) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(
        got.astype(np.float64), want, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def poison(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.full(shape, np.nan, dtype)
