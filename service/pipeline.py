"""The stages, each a function whose result the next one takes.

    requests → pack → project → score → aggregate → deliver → answers

Only `score` knows a kernel, and only as an object with `score` and `aggregate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from ..nn import PackedWeight, linear
from ..runtime.arrays import kind_of
from .batch import Array, Batch, pack
from .kernels import Kernel, Scores
from .projections import Projections

Stage = Callable[[Any], Any]
Place = Callable[[Array], Any]
Attend = Callable[[Sequence[Array]], list[Array]]

# Columns of the identity that are aggregated at once: a fixed width is compiled once.
_PROBE = 16


def compose(*stages: Stage) -> Stage:
    """compose(f, g)(x) is g(f(x))."""
    return lambda value: reduce(lambda made, stage: stage(made), stages, value)


def here(array: Array) -> Any:
    """Where the CPU's kernels take an array: where it is."""
    return array


@dataclass(frozen=True)
class Projected:
    """q, k [B, N, D] and v [B, N, E] of a batch, and its mask, on the device."""

    batch: Batch
    q: Any
    k: Any
    v: Any
    mask: Any


@dataclass(frozen=True)
class Scored:
    """What a kernel made of q and k, and the values to be aggregated."""

    batch: Batch
    scores: Scores
    v: Any


def project(weights: Projections, place: Place = here) -> Callable[[Batch], Projected]:
    """x → x·query, x·key, x·value, in one product."""
    packed: PackedWeight = weights.packed(place)
    depth = weights.query.shape[1]

    def stage(batch: Batch) -> Projected:
        made = linear(place(batch.x), packed)
        mask = None if batch.mask is None else place(batch.mask)
        q, k, v = made[..., :depth], made[..., depth : 2 * depth], made[..., 2 * depth :]
        return Projected(batch, q, k, v, mask)

    return stage


def score(kernel: Kernel) -> Callable[[Projected], Scored]:
    """q and k → scores, in the form the kernel likes."""

    def stage(made: Projected) -> Scored:
        return Scored(made.batch, kernel.score(made.q, made.k, made.mask), made.v)

    return stage


def aggregate(made: Scored) -> list[Array]:
    """Scores and values → each request's rows [n, E]."""
    return made.batch.split(np.asarray(made.scores.aggregate(made.v)))


def attend(weights: Projections, kernel: Kernel, place: Place = here) -> Attend:
    """Requests [n, d] f32 → their attention [n, E] f32, in one kernel call.

    No number may exceed `weights.largest_input`: then everything stays finite, and rows of one
    request cannot reach another's, not even as NaN.
    """
    return compose(pack, project(weights, place), score(kernel), aggregate)


def attention_map(
    weights: Projections, kernel: Kernel, place: Place = here
) -> Callable[[Array], Array]:
    """A request [n, d] → its weights [n, n], from any kernel: they are what it makes of identity.

    A fused kernel has no weights to show, but Σⱼ weightᵢⱼ · eⱼ is the weights' row i.
    """

    def merge(columns: list[Array]) -> Array:
        return np.concatenate(columns, axis=1)

    projected = compose(lambda rows: pack([rows]), project(weights, place))
    stages = compose(projected, _probe(place), score(kernel), aggregate, merge)
    return lambda rows: stages(rows)[:, : len(rows)]


def _probe(place: Place) -> Callable[[Projected], Projected]:
    """The identity in place of the values, some columns in each of B; q and k the same for all."""

    def stage(made: Projected) -> Projected:
        (rows,) = made.batch.lengths
        parts = -(-rows // _PROBE)
        eye = np.eye(rows, parts * _PROBE, dtype=np.float32)
        columns = np.ascontiguousarray(eye.reshape(rows, parts, _PROBE).transpose(1, 0, 2))
        q, k = (kind_of(a, "a").expand(a, (parts, *a.shape[1:])) for a in (made.q, made.k))
        batch = Batch(made.batch.x, None, (rows,) * parts)
        return Projected(batch, q, k, place(columns), None)

    return stage
