"""Rows of several requests as the input of one kernel call, kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# A call of so many scores costs little more than the call itself.
_FREE_SCORES = 1 << 16


@dataclass(frozen=True)
class Batch:
    """Rows of requests: x [B, N, d] f32, and mask bool [B, 1, N] or [1, N, N] or None.

    Padded, a request is one of B, and the mask hides the padding of its keys. Packed, B is 1, the
    requests follow each other, and the mask is block-diagonal. Where `mask` is None all requests
    have N rows.
    """

    x: Array
    mask: Array | None
    lengths: tuple[int, ...]

    def split(self, y: Array) -> list[Array]:
        """Each request's rows of y [B, N, E]."""
        if len(y) == len(self.lengths):
            return [y[i, :n] for i, n in enumerate(self.lengths)]
        return np.split(y[0], np.cumsum(self.lengths)[:-1])


def pack(requests: Sequence[Array]) -> Batch:
    """Requests [n, d], one or more, as a batch: padded or packed, whichever has fewer scores."""
    lengths = tuple(len(rows) for rows in requests)
    longest, total = max(lengths), sum(lengths)
    if len(requests) * longest**2 <= total**2:
        x = np.zeros((len(requests), longest, requests[0].shape[1]), np.float32)
        for place, rows in zip(x, requests, strict=True):
            place[: len(rows)] = rows
        if min(lengths) == longest:
            return Batch(x, None, lengths)
        seen = np.arange(longest) < np.array(lengths)[:, None]
        return Batch(x, seen[:, None], lengths)
    owner = np.repeat(np.arange(len(requests)), lengths)
    return Batch(np.concatenate(requests)[None], (owner[:, None] == owner)[None], lengths)


@dataclass
class Fill:
    """How full a batch is: requests are added while most of the scores computed are wanted."""

    most_rows: int
    lengths: list[int] = field(default_factory=list)
    total: int = 0
    longest: int = 0
    squares: int = 0

    def add(self, rows: int) -> bool:
        """Whether a request of so many rows still fits; if so it is counted. The first does."""
        total, longest = self.total + rows, max(self.longest, rows)
        squares = self.squares + rows**2
        computed = min((len(self.lengths) + 1) * longest**2, total**2)
        fits = total <= self.most_rows and computed <= max(2 * squares, _FREE_SCORES)
        if self.lengths and not fits:
            return False
        self.lengths.append(rows)
        self.total, self.longest, self.squares = total, longest, squares
        return True
