"""Scaled dot-product attention with grouped heads, masks, bias, soft cap and causal masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..dsl import (
    In,
    Option,
    Out,
    axes,
    constrain,
    f32,
    finite,
    log_sum_exp,
    op,
    require,
    softmax_sum,
    sum,
    tanh,
)
from ..dsl.errors import AttentionError
from ..runtime.settings import flag
from .attention_backward import (
    ALIGNMENTS,
    BIAS,
    EXAMPLE,
    MASK,
    SCORES,
    SCORING,
    attention_backward_op,
    attention_bias_backward,
    capped_by,
    grouped,
    kept,
)


class AttentionGradients(NamedTuple):
    """Gradients of attention's arguments, by their names; None without a bias."""

    query: Any
    key: Any
    value: Any
    attn_bias: Any


@dataclass(frozen=True)
class AttentionOptions:
    """What attention computes, besides its tensors.

    Parameters
    ----------
    scale : float, optional
        Factor of the scores; None is 1/√D.
    softcap : float, optional
        c > 0 turns a scaled score s into c·tanh(s/c), before bias and mask.
    is_causal : bool
        Row i keeps keys j ≤ i (top_left) or j ≤ i + K − Q (bottom_right).
    causal_alignment : str
        "top_left" (as torch) or "bottom_right" (decoding: the last row sees every key).
    """

    scale: float | None = None
    softcap: float | None = None
    is_causal: bool = False
    causal_alignment: str = "top_left"


@dataclass(frozen=True)
class Strategy:
    """How attention is computed: a constraint on the kernels, the same results."""


@dataclass(frozen=True)
class Fallback(Strategy):
    """Several kernels on the device of the tensors, scores in a workspace; runs everywhere."""


@dataclass(frozen=True)
class FlashUnit(Strategy):
    """One kernel, tiled over the keys with online softmax, on plain arithmetic units."""


@dataclass(frozen=True)
class FlashAccelerated(Strategy):
    """As `FlashUnit`, on matrix units; on a CPU, its widest multiply-add."""


@dataclass(frozen=True)
class Autotune(Strategy):
    """Whichever strategy and configuration is measured to be fastest."""


# What each strategy asks of the kernels; "auto" leaves the choice to the device.
STRATEGIES: dict[str, dict[str, str]] = {
    "auto": {},
    "FlashAccelerated": {"form": "tiled", "units": "matrix"},
    "FlashUnit": {"form": "tiled", "units": "plain"},
    "Fallback": {"form": "materialised"},
}


@op(out=(Out("B", "Hq", "Q", "Dv"), Out("B", "Hq", "Q", dtype=f32, name="lse")),
    static=("D", "Dv"), example=EXAMPLE, error=AttentionError, name="attention")  # fmt: skip
def attention_op(
    query: Any = In("B", "Hq", "Q", "D"),
    key: Any = In("B", "Hkv", "K", "D"),
    value: Any = In("B", "Hkv", "K", "Dv"),
    mask: Any = MASK,
    attn_bias: Any = BIAS,
    *,
    how: Any = SCORING,
    return_lse: Any = Option(False, (False, True)),
    strategy: Any = Option("auto", tuple(STRATEGIES)),
) -> Any:
    """Σⱼ softmax(scale · query·keyⱼ) · valueⱼ, and the log-sum-exp of the scores if asked for.

    query [B, Hq, Q, D], key [B, Hkv, K, D], value [B, Hkv, K, Dv] f32, f16 or bf16, all the same →
    [B, Hq, Q, Dv] alike, lse [B, Hq, Q] f32. Raises AttentionError.
    """
    if strategy != "auto":
        constrain(strategy, **STRATEGIES[strategy])
    heads_each = grouped()
    require(finite(how.scale), "scale finite", scale=how.scale)
    b, h, i, j, d, e = axes("B", "Hq", "Q", "K", "D", "Dv")
    group = h // heads_each
    score = how.scale * sum(query[b, h, i, d] * key[b, group, j, d], over=d)
    if how.capped:
        capped_by(how.softcap)
        score = how.softcap * tanh(score / how.softcap)
    if attn_bias is not None:
        score = score + attn_bias[b, h, i, j]
    keep = kept(mask, how.causal, b, h, i, j)
    mean = softmax_sum(score, value[b, group, j, e], over=j, where=keep)
    return mean, log_sum_exp(mean) if return_lse else None


attention_op.differentiable(
    attention_backward_op, "query", "key", "value", asked={"lse": "return_lse"}
)
attention_op.also_differentiable(attention_bias_backward, "attn_bias")


def attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    attn_bias: Any = None,
    options: AttentionOptions = AttentionOptions(),
    strategy: Strategy | None = None,
    return_lse: bool = False,
    *,
    out: Any = None,
) -> Any:
    """Scaled dot-product attention.

    Parameters
    ----------
    query, key, value : array [B, Hq, Q, D], [B, Hkv, K, D], [B, Hkv, K, Dv]
        f32, f16 or bf16, all the same; Hq divisible by Hkv. Any strides. Arithmetic is f32.
    mask : bool array, optional
        Broadcastable to [B, Hq, Q, K]; True keeps a key. What is masked has no influence, be it
        NaN or infinite.
    attn_bias : array, optional
        f32, f16 or bf16, broadcastable to [B, Hq, Q, K]; added to the scores.
    options : AttentionOptions
    strategy : Strategy, optional
        None: chosen by the device and the head size.
    return_lse : bool
        Return (result, lse) with lse the natural log-sum-exp of the scores, f32 [B, Hq, Q].
    out : array [B, Hq, Q, Dv], or (result, lse) with `return_lse`, optional
        Receives the result.

    Returns
    -------
    array [B, Hq, Q, Dv] in query's dtype. A row that keeps nothing, or whose scores are all −inf,
    is 0 and its lse −inf.

    Raises
    ------
    AttentionError
        On shapes, dtypes, options or a strategy that do not fit, and on a strategy for which the
        device lacks something.
    """
    settings = _settings(options, query) | {
        "return_lse": return_lse,
        "strategy": "auto" if strategy is None else _name(strategy),
    }
    return attention_op(query, key, value, mask, attn_bias, out=out, **settings)


def attention_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    result: Any,
    lse: Any,
    mask: Any = None,
    attn_bias: Any = None,
    options: AttentionOptions = AttentionOptions(),
    strategy: Strategy | None = None,
    *,
    grad_lse: Any = None,
) -> AttentionGradients:
    """The gradients of `attention`, from what it returned; no [Q, K] matrix is held in memory.

    Parameters
    ----------
    grad : array [B, Hq, Q, Dv]
        Gradient of the result, in query's dtype.
    query, key, value, mask, attn_bias, options, strategy
        As given to `attention`; of a strategy the units count.
    result, lse : array [B, Hq, Q, Dv], [B, Hq, Q]
        What `attention` returned with `return_lse=True`.
    grad_lse : array f32 [B, Hq, Q], optional
        Gradient of lse.

    Returns
    -------
    named tuple (query, key, value, attn_bias)
        Gradients in the shapes and dtypes of these; that of a bias is f32, in the bias's own shape
        (dims that it broadcasts are summed), or None without one. Rows that keep nothing give 0.

    Raises
    ------
    AttentionError
        On shapes, dtypes or options that do not fit, and on a strategy for which the device lacks
        something.
    """
    settings = _settings(options, query)
    given = {"mask": mask, "grad_lse": grad_lse} | settings
    known = (grad, query, key, value, result, lse)
    dquery, dkey, dvalue = attention_backward_op(
        *known,
        attn_bias=attn_bias,
        strategy="auto" if strategy is None else _name(strategy),
        **given,
    )
    if attn_bias is None:
        return AttentionGradients(dquery, dkey, dvalue, None)
    shape = tuple(attn_bias.shape)
    if len(shape) > len(SCORES):
        raise AttentionError(f"needs attn_bias of at most 4 dims, got {list(shape)}")
    whole = attn_bias[(None,) * (len(SCORES) - len(shape))] if len(shape) < 4 else attn_bias
    bias = attention_bias_backward(*known, whole, **given)
    spare = (0,) * (len(SCORES) - len(shape))
    return AttentionGradients(dquery, dkey, dvalue, bias[spare])


def _settings(options: AttentionOptions, query: Any) -> dict[str, Any]:
    """The declarations' params and options. Raises AttentionError."""
    if options.causal_alignment not in ALIGNMENTS:
        raise AttentionError(
            f"needs causal_alignment among {list(ALIGNMENTS)}, got {options.causal_alignment!r}"
        )
    causal = flag("is_causal", options.is_causal, AttentionError)
    settings: dict[str, Any] = {
        "scale": _scale(options, query),
        "causal": options.causal_alignment if causal else "none",
        "capped": options.softcap is not None,
    }
    return settings if options.softcap is None else settings | {"softcap": options.softcap}


def _name(strategy: Any) -> str:
    name = type(strategy).__name__
    if isinstance(strategy, Autotune):
        raise AttentionError(f"{name} needs a tuner, got none here")
    if not isinstance(strategy, Strategy) or name not in STRATEGIES:
        raise AttentionError(
            f"needs strategy to be one of those of rudnn.attention, got {strategy!r}"
        )
    return name


def _scale(options: AttentionOptions, query: Any) -> float:
    if options.scale is not None:
        return options.scale
    shape: tuple[int, ...] = getattr(query, "shape", ())
    depth = shape[-1] if len(shape) == 4 else 1
    return 1 / math.sqrt(depth) if depth else 1.0
