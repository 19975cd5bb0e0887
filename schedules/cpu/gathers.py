"""Sums over taps found by data, at points that many channels share.

Σ_taps x[n, c, row(n, tap, p), column(n, tap, p)] · weight(n, tap, p), as sampling at given points:

    parallel (outer axes of points, block of rows):
        for row of points:
            tables[tap, point] = where x is read, whether that is inside, the weight
            for channel:
                out[channel, point] = Σ_tap weight · x[channel][where]

Indices and weights are worked out once for all channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.expr import Axis, Cast, Expr, Read
from ...dsl.graph import reads
from ...dsl.walk import free_axes, walk
from ..capability import Capability
from ..emit import Emitter
from ..group import Group, chain, is_map, reads_at
from ..rule import Config, Rejection

NEEDS = "needs a sum over few taps at places from data that other axes share"
_MOST_TAPS = 16


@dataclass(frozen=True)
class GathersConfig(Config):
    """`block` rows of points a task."""

    block: int = 8


@dataclass(frozen=True)
class Gathers:
    """Σ over `taps` of `source` · `factors`; `channels` are in plain indices of the source alone."""

    source: Read
    factors: tuple[Expr, ...]
    channels: tuple[Axis, ...]
    points: tuple[Axis, ...]
    taps: tuple[Axis, ...]


def gathers(group: Group) -> Gathers | None:
    """A group as such a sum with pointwise stages after it, or None."""
    head, *others = group.stages
    node, axes = head.expr, head.axes
    if not isinstance(node, forms.Reduce) or node.op != "sum" or node.where is not None:
        return None
    if any(not is_map(s) or s.axes != axes or not reads_at(s.expr, head, axes) for s in others):
        return None
    if any(not isinstance(a.extent, int) for a in node.over):
        return None
    if not 1 <= math.prod(int(a.extent) for a in node.over) <= _MOST_TAPS:  # type: ignore[arg-type]
        return None
    factors = chain(node.body, "mul")
    for factor in factors:
        source = read_of(factor)
        if source is None or not any(map(reads, source.index)):
            continue
        rest = tuple(f for f in factors if f is not factor)
        channels = _channels(source, rest, axes)
        points = tuple(a for a in axes if a not in channels)
        if channels and len(points) >= 2 and axes[-1] in points:
            return Gathers(source, rest, channels, points, node.over)
    return None


def read_of(node: Expr) -> Read | None:
    """The read that a factor is, as it is or widened."""
    found = node.a if isinstance(node, Cast) else node
    return found if isinstance(found, Read) else None


def _channels(source: Read, rest: tuple[Expr, ...], axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    plain = [i for i in source.index if isinstance(i, Axis)]
    known = {a for i in source.index if not isinstance(i, Axis) for a in free_axes(i)}
    known |= {a for f in rest for a in free_axes(f)}
    return tuple(a for a in axes if a in plain and a not in known and plain.count(a) == 1)


class GatheredSums:
    """Sums at places from data, a vector of points at a time, channel by channel."""

    name = "gathers"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return Rejection(NEEDS) if gathers(group) is None else None

    def default(self, group: Group, caps: Capability) -> GathersConfig:
        return GathersConfig()

    def space(self, group: Group, caps: Capability) -> Iterator[GathersConfig]:
        for block in (8, 2, 32):
            yield GathersConfig(block)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: GathersConfig) -> Any:
        from .gathers_nest import GathersNest

        found = gathers(group)
        assert found is not None
        return GathersNest(emitter, group, found, caps.lanes(), config).lower()
