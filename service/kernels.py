"""The scoring stage: attention kernels by name, one to be put where another was.

`score(q, k)` gives an object whose `aggregate(v)` finishes, so what a kernel keeps between the two
is its own affair: a dense one its weights, a fused one q and k. A package offers a kernel through
the entry-point group `rudnn.kernels`: a name, and what makes a `Kernel` of a scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from ..attention import AttentionOptions, attention
from ..dsl import In, Out, Param, axes, bool_, exp, max, op, sum, where
from ..dsl import tensor as keep
from ..dsl.errors import AttentionError, ServiceError


class Scores(Protocol):
    """What a kernel made of queries and keys."""

    def aggregate(self, v: Any) -> Any:
        """Σⱼ softmax(score)ᵢⱼ · vⱼ: v [B, K, E] → [B, Q, E]."""


class Kernel(Protocol):
    """An attention kernel; its scale is its own."""

    def score(self, q: Any, k: Any, mask: Any = None) -> Scores:
        """Queries [B, Q, D] against keys [B, K, D] of the same dtype.

        mask is bool, of a shape that broadcasts to [B, Q, K]; True keeps a key, and each query
        keeps one at least.
        """


GROUP = "rudnn.kernels"
Maker = Callable[[float], Kernel]
_MAKERS: dict[str, Maker] = {}


def register(name: str) -> Callable[[Maker], Maker]:
    """A decorator that makes `--kernel name` mean what it decorates: scale → kernel."""

    def add(maker: Maker) -> Maker:
        _MAKERS[name] = maker
        return maker

    return add


def kernel_names() -> tuple[str, ...]:
    """The names that `kernel_named` knows: ours, registered ones, those of installed packages."""
    return tuple(dict.fromkeys((*_MAKERS, *_offered())))


def kernel_named(name: str, scale: float) -> Kernel:
    """A kernel whose scores are multiplied by `scale`.

    Raises ServiceError for another name, or a package's kernel that cannot be had.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        point = _offered().get(name)
        if point is None:
            raise ServiceError(f"needs a kernel among {', '.join(kernel_names())}, got {name!r}")
        try:
            maker = point.load()
        except Exception as error:  # someone else's package: whatever it raises
            raise ServiceError(f"needs a kernel that can be loaded, got {name} = {point.value}: "
                               f"{type(error).__name__}: {error}") from error  # fmt: skip
    return maker(scale)


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


_EXAMPLE = {"B": 2, "Q": 16, "K": 16, "D": 8, "E": 8}


@op(out=Out("B", "Q", "K"), static=("D",), example=_EXAMPLE, error=AttentionError)
def attention_weights(
    q: Any = In("B", "Q", "D"),
    k: Any = In("B", "K", "D"),
    mask: Any = In("B", "Q", "K", dtype=bool_, optional=True, broadcast=True),
    *,
    scale: Any = Param(),
) -> Any:
    """softmaxⱼ(scale · qᵢ·kⱼ) over the keys that are kept; 0 for the others.

    q [B, Q, D], k [B, K, D] f32, f16 or bf16, both the same → [B, Q, K] alike. A query that keeps
    no key is NaN. Raises AttentionError.
    """
    b, i, j, d = axes("B", "Q", "K", "D")
    product = scale * sum(q[b, i, d] * k[b, j, d], over=d)
    kept = product if mask is None else where(mask[b, i, j], product, -math.inf)
    score = keep("score", (b, i, j), kept)
    top = max(score[b, i, j], over=j, nan="any")
    weight = keep("weight", (b, i, j), exp(score[b, i, j] - top))
    return weight[b, i, j] * (1 / sum(weight[b, i, j], over=j))


@op(out=Out("B", "Q", "E"), static=("E",), example=_EXAMPLE, error=AttentionError)
def weighted_values(weights: Any = In("B", "Q", "K"), v: Any = In("B", "K", "E")) -> Any:
    """Σⱼ weightsᵢⱼ · vⱼ, sums in f32.

    weights [B, Q, K], v [B, K, E] f32, f16 or bf16, both the same → [B, Q, E] alike. Unlike
    `matmul` it is compiled once for any number of keys. Raises AttentionError.
    """
    b, i, j, e = axes("B", "Q", "K", "E")
    return sum(weights[b, i, j] * v[b, j, e], over=j)


@dataclass(frozen=True)
class DenseScores:
    """The weights [B, Q, K], all of them."""

    weights: Any

    def aggregate(self, v: Any) -> Any:
        return weighted_values(self.weights, v)


@register("dense")
@dataclass(frozen=True)
class Dense:
    """Holds every weight: memory grows with Q·K. v must be finite, also where it is masked."""

    scale: float

    def score(self, q: Any, k: Any, mask: Any = None) -> DenseScores:
        return DenseScores(attention_weights(q, k, mask, scale=self.scale))


@dataclass(frozen=True)
class FlashScores:
    """What the fused kernel needs beside the values."""

    q: Any
    k: Any
    mask: Any
    scale: float

    def aggregate(self, v: Any) -> Any:
        mask = None if self.mask is None else self.mask[:, None]
        options = AttentionOptions(scale=self.scale)
        heads = (self.q[:, None], self.k[:, None], v[:, None])
        return attention(*heads, mask, options=options)[:, 0]


@register("flash")
@dataclass(frozen=True)
class Flash:
    """`rudnn.attention.attention` (Dao et al. 2022, where the device has it tiled)."""

    scale: float

    def score(self, q: Any, k: Any, mask: Any = None) -> FlashScores:
        return FlashScores(q, k, mask, self.scale)
