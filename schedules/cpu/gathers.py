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
from ...dsl.walk import free_axes
from ..capability import Capability
from ..emit import Emitter
from ..group import Group, chain, is_map, known, reads_at
from ..rule import Config, Rejection

NEEDS = "needs a sum over few taps at places from data that other axes share"
_MOST_TAPS = 16
_MOST_SIDES = 4


@dataclass(frozen=True)
class GathersConfig(Config):
    """`block` rows of points a task."""

    block: int = 8


@dataclass(frozen=True)
class Gathers:
    """Σ over `taps` of `source` · `weights` at `points`, for `channels` or summed over them.

    Channels are plain indices of the source. Summed, `scales` are the factors that know them, and
    `sides` the last kept axes, few, that only weights know.
    """

    source: Read
    weights: tuple[Expr, ...]
    scales: tuple[Expr, ...]
    channels: tuple[Axis, ...]
    points: tuple[Axis, ...]
    taps: tuple[Axis, ...]
    sides: tuple[Axis, ...] = ()

    @property
    def summed(self) -> bool:
        return bool(self.scales)


def gathers(group: Group) -> Gathers | None:
    """A group as such a sum with pointwise stages after it, or None."""
    head, *others = group.stages
    node, axes = head.expr, head.axes
    if not isinstance(node, forms.Reduce) or node.op != "sum" or node.where is not None:
        return None
    if any(not is_map(s) or s.axes != axes or not reads_at(s.expr, head, axes) for s in others):
        return None
    factors = chain(node.body, "mul")
    for factor in factors:
        source = read_of(factor)
        if source is None or not any(map(reads, source.index)):
            continue
        rest = [f for f in factors if f is not factor]
        found = _kept(source, rest, node, axes) or _summed(source, rest, node, axes)
        if found is not None and _few(found.taps, _MOST_TAPS) and len(found.points) >= 2:
            return found
    return None


def _kept(
    source: Read, rest: list[Expr], node: forms.Reduce, axes: tuple[Axis, ...]
) -> Gathers | None:
    weighed = {a for f in rest for a in free_axes(f)}
    channels = tuple(a for a in _plain(source) if a in axes and a not in weighed)
    points = tuple(a for a in axes if a not in channels)
    if not channels or axes[-1] in channels:
        return None
    return Gathers(source, tuple(rest), (), channels, points, node.over)


def _summed(
    source: Read, rest: list[Expr], node: forms.Reduce, axes: tuple[Axis, ...]
) -> Gathers | None:
    channels = tuple(a for a in _plain(source) if a in node.over)
    taps = tuple(a for a in node.over if a not in channels)
    scales = tuple(f for f in rest if set(free_axes(f)) & set(channels))
    weights = tuple(f for f in rest if not set(free_axes(f)) & set(channels))
    needed = {a for f in (source, *scales) for a in free_axes(f)}
    count = next((n for n, a in enumerate(reversed(axes)) if a in needed), len(axes))
    points, sides = axes[: len(axes) - count], axes[len(axes) - count :]
    apart = not any(set(free_axes(f)) & set(taps) for f in scales)
    if not channels or not scales or not apart or not _few(sides, _MOST_SIDES):
        return None
    return Gathers(source, weights, scales, channels, points, taps, sides)


def _few(axes: tuple[Axis, ...], most: int) -> bool:
    """Whether the axes have 1 to `most` points, known when compiling."""
    numbers = all(isinstance(a.extent, int) for a in axes)
    return numbers and 1 <= math.prod(map(known, axes)) <= most


def read_of(node: Expr) -> Read | None:
    """The read that a factor is, as it is or widened."""
    found = node.a if isinstance(node, Cast) else node
    return found if isinstance(found, Read) else None


def _plain(source: Read) -> list[Axis]:
    """Axes that are an index of a read, and in no other of its indices."""
    plain = [i for i in source.index if isinstance(i, Axis)]
    inside = {a for i in source.index if not isinstance(i, Axis) for a in free_axes(i)}
    return [a for a in plain if a not in inside and plain.count(a) == 1]


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
        from .gathers_nest import KeptChannels, SummedChannels

        found = gathers(group)
        assert found is not None
        kind = SummedChannels if found.summed else KeptChannels
        return kind(emitter, group, found, caps.lanes(), config).lower()
