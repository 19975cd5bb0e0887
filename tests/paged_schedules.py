"""Schedules of paged attention for tests, and what dense attention makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rudnn.errors import PagedAttentionError, RudnnError
from rudnn.paged_attention import HostPlan

Array = Any
PAGE, HEADS, KV_HEADS, DEPTH, WIDTH = 16, 6, 2, 24, 20
TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


class Schedule:
    """Lengths, tables over shuffled pages, and the queries; caches with NaN where none reaches."""

    def __init__(
        self, lengths: Sequence[int], queries: Sequence[tuple[int, int]], page: int = PAGE,
        spare: int = 3, seed: int = 0,
    ) -> None:  # fmt: skip
        self.random = np.random.default_rng(seed)
        self.page, self.lengths = page, list(lengths)
        needed = [-(-n // page) for n in lengths]
        self.pages = sum(needed) + spare
        order = list(self.random.permutation(self.pages))
        self.tables = [[int(order.pop()) for _ in range(n)] for n in needed]
        self.ids, self.positions = (list(x) for x in zip(*queries, strict=True))

    def share_prefix(self, a: int, b: int, pages: int) -> None:
        self.tables[b][:pages] = self.tables[a][:pages]

    def host(self) -> HostPlan:
        return HostPlan(self.page, self.pages, self.tables, self.lengths, self.ids, self.positions)

    def cache(self, heads: int, depth: int, dtype: Any = np.float32) -> Array:
        made = np.full((self.pages, self.page, heads, depth), np.nan, dtype)
        for table, length in zip(self.tables, self.lengths, strict=True):
            for j in range(length):
                made[table[j // self.page], j % self.page] = self.unit(heads, depth)
        return made

    def unit(self, *shape: int) -> Array:
        """Values of unit scale."""
        return self.random.uniform(-1, 1, shape)

    def history(self, cache: Array, sequence: int) -> Array:
        """[length, heads, depth] of a sequence, in order."""
        flat = [cache[self.tables[sequence][j // self.page], j % self.page]
                for j in range(self.lengths[sequence])]  # fmt: skip
        return np.array(flat, cache.dtype).reshape(len(flat), *cache.shape[2:])


def dense(
    s: Schedule, q: Array, k: Array, v: Array, scale: float, causal: bool,
) -> Array:  # fmt: skip
    """Each query on its own, by float64 NumPy."""
    out = np.zeros((*q.shape[:2], v.shape[3]))
    for i, (sequence, position) in enumerate(zip(s.ids, s.positions, strict=True)):
        keys, values = s.history(k, sequence), s.history(v, sequence)
        if causal:
            keys, values = keys[: position + 1], values[: position + 1]
        group = q.shape[1] // k.shape[2]
        for h in range(q.shape[1] if len(keys) else 0):
            score = scale * (keys[:, h // group].astype(np.float64) @ q[i, h].astype(np.float64))
            weight = np.exp(score - score.max())
            out[i, h] = weight @ values[:, h // group].astype(np.float64) / weight.sum()
    return out


MIXED = (
    [0, 1, PAGE - 1, PAGE, PAGE + 1, 70, 0, 300],
    [(7, 299), (0, 0), (1, 0), (2, PAGE - 2), (3, PAGE - 1), (4, PAGE),
     *((5, p) for p in range(20, 70)), (7, 8), (6, 0), (7, 150)],
)  # fmt: skip
DECODE = ([40, 1, 257, 16, 0, 100], [(0, 39), (2, 256), (1, 0), (3, 15), (4, 0), (5, 99)])


def given(s: Schedule, dtype: Any = np.float32) -> tuple[Array, Array, Array]:
    q = s.unit(len(s.ids), HEADS, DEPTH).astype(dtype)
    return q, s.cache(KV_HEADS, DEPTH, dtype), s.cache(KV_HEADS, WIDTH, dtype)


def close(got: Array, want: Array, dtype: str = "float32") -> None:
    assert got.shape == want.shape and got.dtype.name == dtype
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=TOLERANCE[dtype])


def mla_dense(s: Schedule, arrays: tuple[Array, ...], scale: float, causal: bool) -> Array:
    q, qp, latent, kp = arrays
    joined = [np.concatenate(pair, -1) for pair in ((q, qp), (latent, kp))]
    return dense(s, joined[0], joined[1], latent, scale, causal)


def given_mla(s: Schedule, heads: int = 5, dtype: Any = np.float32) -> tuple[Array, ...]:
    q, qp = (s.unit(len(s.ids), heads, n).astype(dtype) for n in (40, 8))
    return q, qp, s.cache(1, 40, dtype), s.cache(1, 8, dtype)


def refused(match: str, make: Any) -> None:
    with pytest.raises(PagedAttentionError, match=match) as info:
        make()
    assert isinstance(info.value, RudnnError)
