"""Gradients of attention, from its result and log-sum-exp: probabilities are computed anew.

With s the scores and p = exp(s − lse): dvⱼ = Σᵢ p · doᵢ, dp = doᵢ · vⱼ, ds = p · (dp − δᵢ) with
δᵢ = doᵢ · oᵢ − dlseᵢ, and a soft cap's slope on the way to q·k. No [Q, K] matrix is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..dsl import (
    In,
    Option,
    Out,
    Param,
    Shared,
    abs,
    axes,
    axis,
    bool_,
    constrain,
    dim,
    exp,
    f16,
    f32,
    finite,
    maximum,
    op,
    require,
    sum,
    tanh,
    tensor,
    weighted_sum,
)
from ..dsl.dtypes import bf16
from ..dsl.errors import AttentionError

ALIGNMENTS = ("top_left", "bottom_right")
SCORES = ("B", "Hq", "Q", "K")
EXAMPLE = {"B": 1, "Hq": 8, "Hkv": 2, "Q": 64, "K": 96, "D": 64, "Dv": 64, "scale": 0.125}
MASK = In(*SCORES, dtype=bool_, optional=True, broadcast=True)
BIAS = In(*SCORES, dtype=(f32, f16, bf16), optional=True, broadcast=True)
# How scores come about; the soft cap counts where they are `capped`.
SCORING = Shared(
    scale=Param(), softcap=Param(0.0), causal=Option("none", ("none", *ALIGNMENTS)),
    capped=Option(False, (False, True)),
)  # fmt: skip
_ROWS = ("B", "Hq", "Q")
# What a backward starts from; y is the result, lse its log-sum-exp.
_GIVEN = Shared(
    grad=In(*_ROWS, "Dv"), query=In(*_ROWS, "D"), key=In("B", "Hkv", "K", "D"),
    value=In("B", "Hkv", "K", "Dv"), y=In(*_ROWS, "Dv"), lse=In(*_ROWS, dtype=f32),
)  # fmt: skip
# The units that strategies of `attention` ask for; the form of the gradients' kernels is one.
UNITS = {"auto": "", "FlashAccelerated": "matrix", "FlashUnit": "plain", "Fallback": ""}


def grouped() -> Any:
    """Query heads a key head; they must come out even."""
    heads, shared = dim("Hq"), dim("Hkv")
    divides = (shared > 0) & (heads % shared == 0) if shared is not heads else True
    require(divides, "Hq divisible by Hkv", Hq=heads, Hkv=shared)
    return heads // shared


def capped_by(softcap: Any) -> None:
    """The contract of a soft cap."""
    require(finite(softcap) & (softcap > 0), "softcap finite and > 0", softcap=softcap)


def kept(mask: Any, causal: str, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Whether key j counts for row i; None where all do."""
    keep = None if mask is None else mask[b, h, i, j]
    if causal != "none":
        seen = j <= (i if causal == "top_left" else i + (dim("K") - dim("Q")))
        keep = seen if keep is None else seen & keep
    return keep


def _delta(given: Any, grad_lse: Any) -> Any:
    """The part of ds that a row shares, a tensor [B, Hq, Q]."""
    b, h, i, e = axes("B", "Hq", "Q", "Dv")
    shared = sum(given.grad[b, h, i, e] * given.y[b, h, i, e], over=e)
    return tensor("delta", (b, h, i), shared if grad_lse is None else
                  shared - grad_lse[b, h, i])  # fmt: skip


@dataclass(frozen=True)
class _Point:
    """A query, a key, their weights; `ds` is the score's gradient, `dot` that of query · key."""

    query: Any
    key: Any
    grad: Any
    depth: Any
    p: Any
    ds: Any
    dot: Any
    keep: Any


def _point(given: Any, how: Any, mask: Any, delta: Any, bias: Any, at: tuple[Any, ...]) -> _Point:
    """At (batch, query head, key head, query, key); `bias` is the element to add, or None.

    A row that kept nothing has lse −inf and no weights.
    """
    require(finite(how.scale), "scale finite", scale=how.scale)
    b, h, shared, i, j = at
    d, e = axes("D", "Dv")
    query, key = f32(given.query[b, h, i, d]), f32(given.key[b, shared, j, d])
    grad, value = f32(given.grad[b, h, i, e]), f32(given.value[b, shared, j, e])
    score, slope = how.scale * sum(query * key, over=d), how.scale
    if how.capped:
        capped_by(how.softcap)
        bent = score / how.softcap
        far = exp(-2 * abs(bent))  # 1 − tanh² without a difference of near numbers
        score, slope = how.softcap * tanh(bent), how.scale * 4 * far / ((1 + far) * (1 + far))
    if bias is not None:
        score = score + bias
    lse = given.lse[b, h, i]
    p = exp(score - lse)
    ds = p * (sum(grad * value, over=e) - delta[b, h, i])
    alive, keep = lse != float("-inf"), kept(mask, how.causal, b, h, i, j)
    keep = alive if keep is None else keep & alive
    return _Point(query, key, grad, d, p, ds, ds * slope, keep)


@op(
    out=(
        Out("B", "Hq", "Q", "D", name="dquery"),
        Out("B", "Hkv", "K", "D", name="dkey"),
        Out("B", "Hkv", "K", "Dv", name="dvalue"),
    ),
    static=("D", "Dv"),
    example=EXAMPLE,
    error=AttentionError,
    name="attention_backward",
)
def attention_backward_op(
    given: Any = _GIVEN,
    mask: Any = MASK,
    attn_bias: Any = BIAS,
    grad_lse: Any = In(*_ROWS, dtype=f32, optional=True),
    *,
    how: Any = SCORING,
    strategy: Any = Option("auto", tuple(UNITS)),
) -> Any:
    """(dquery, dkey, dvalue) of `attention` from its result y and log-sum-exp.

    grad, y [B, Hq, Q, Dv], query [B, Hq, Q, D], key [B, Hkv, K, D], value [B, Hkv, K, Dv] f32, f16
    or bf16, all the same; lse and grad_lse [B, Hq, Q] f32 → as query, key and value. Raises
    AttentionError.
    """
    if UNITS[strategy]:
        constrain(strategy, units=UNITS[strategy])
    group = grouped()
    delta = _delta(given, grad_lse)
    b, h, n, i, j = axes("B", "Hq", "Hkv", "Q", "K")
    g = axis("G", group)
    head = n * group + g
    bias = None if attn_bias is None else attn_bias[b, head, i, j]
    point = _point(given, how, mask, delta, bias, (b, head, n, i, j))
    rows = weighted_sum(point.dot, point.key, over=j, where=point.keep)
    by_group = tensor("by_group", (b, n, g, i, point.depth), rows)
    dkey = weighted_sum(point.dot, point.query, over=(g, i), where=point.keep)
    dvalue = weighted_sum(point.p, point.grad, over=(g, i), where=point.keep)
    return by_group[b, h // group, h % group, i, point.depth], dkey, dvalue


@op(
    out=Out("Bb", "Hb", "Qb", "Kb", dtype=f32, name="dattn_bias"),
    static=("D", "Dv"),
    example=EXAMPLE | dict.fromkeys(("Bb", "Hb", "Qb", "Kb"), 1),
    error=AttentionError,
    name="_attention_bias_backward",  # private: a single sum of all scores cancels past tolerances
)
def attention_bias_backward(
    given: Any = _GIVEN,
    attn_bias: Any = In("Bb", "Hb", "Qb", "Kb", dtype=(f32, f16, bf16)),
    mask: Any = MASK,
    grad_lse: Any = In(*_ROWS, dtype=f32, optional=True),
    *,
    how: Any = SCORING,
) -> Any:
    """The gradient of attention's bias, in the shape that the bias has before it is broadcast.

    attn_bias [Bb, Hb, Qb, Kb] f32, f16 or bf16, each dim 1 or that of the scores; the others as in
    `attention_backward` → [Bb, Hb, Qb, Kb] f32. Raises AttentionError.
    """
    group = grouped()
    delta = _delta(given, grad_lse)
    own = axes("Bb", "Hb", "Qb", "Kb")
    places, over, reads = [], [], []
    for mine, theirs in zip(own, SCORES, strict=True):
        whole, size = dim(theirs), mine.extent
        fits = (size == 1) | (size == whole)
        require(fits, f"{mine.name} of 1 or {theirs}", **{mine.name: size, theirs: whole})
        # One of the two runs over the scores' dim, the other has a single value.
        turn = axis(f"{theirs}_sum", whole // maximum(size, 1))
        places.append(mine + turn * size)
        over.append(turn)
        reads.append(mine)
    b, h, i, j = places
    point = _point(given, how, mask, delta, attn_bias[tuple(reads)], (b, h, h // group, i, j))
    return weighted_sum(point.ds, 1.0, over=tuple(over), where=point.keep)
