"""Reductions over few taps of a window: vectors of neighbouring places, every tap unrolled.

    parallel (outer axes.., block of rows):
        for row:
            lines = the rows of each tensor that its taps read, what is outside filled in
            for vector of places: result = fold of all taps
            out = result

A line is split by the stride of its places, so that the places of a vector read a tap side by side.
It is made as long as the vectors reach: nothing is asked about edges where the taps are folded.
Where an index divides the place (a backward), places are taken by their remainders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import bool_
from ...dsl.expr import Axis, Form, Read, Stage
from ...dsl.graph import reads
from ...dsl.walk import free_axes, walk
from ..affine import Line, line, period
from ..capability import Capability
from ..emit import Emitter
from ..group import Group, is_map, known, reads_at
from ..rule import Config, Rejection, check, first_rejection

_MOST_TAPS = 32
_MOST_STEPS = 4  # of a stride, or of remainders
_MOST_SPREAD = 64


@dataclass(frozen=True)
class TapsConfig(Config):
    """`block` rows a task."""

    block: int = 32


@dataclass(frozen=True)
class View:
    """A read of a row: at slope · q + start for the q-th place of each remainder.

    `rows` are the taps that choose the row, `starts` the starts by remainder and `taps`.
    """

    read: Read
    slope: int
    rows: tuple[Axis, ...]
    taps: tuple[Axis, ...]
    starts: dict[tuple[int, ...], int]

    @property
    def low(self) -> int:
        return min(self.starts.values())

    @property
    def extra(self) -> int:
        """How many more elements than places each part of a line has."""
        return (max(self.starts.values()) - self.low) // self.slope

    def displacement(self, remainder: int, taps: Sequence[int]) -> tuple[int, int]:
        """(part of the line, element in it) at which place 0 has a tap."""
        place = self.starts[(remainder, *taps)] - self.low
        return place % self.slope, place // self.slope


@dataclass(frozen=True)
class Taps:
    """A group as windows along its last axis: places of one remainder mod `period` together."""

    period: int
    views: tuple[View, ...]


def combinations(axes: Sequence[Axis]) -> Iterator[tuple[int, ...]]:
    """Every choice of a number for each of the axes, whose extents are known."""
    return itertools.product(*(range(known(a)) for a in axes))


def _over(group: Group) -> tuple[Axis, ...]:
    """The reduced axes of a group."""
    found = (a for s in group.stages if isinstance(s.expr, Form) for a in s.expr.over)
    return tuple(dict.fromkeys(found))


def taps_of(group: Group) -> Taps | None:
    """The windows of a group, or None."""
    axes = group.head.axes
    nodes = [s.expr for s in group.stages]
    steps = period(nodes, axes[-1])
    if steps > _MOST_STEPS:
        return None
    found = [r for r in _outside(group) if axes[-1] in free_axes(r)]
    views = [_view(r, axes[-1], _over(group), steps) for r in found]
    made = tuple(v for v in views if v is not None)
    windowed = any(v.taps for v in made)
    return Taps(steps, made) if len(made) == len(views) and windowed else None


def _outside(group: Group) -> Iterator[Read]:
    """Reads of tensors that the group does not make."""
    seen: set[int] = set()
    for stage in group.stages:
        for node in walk(stage.expr):
            if isinstance(node, Read) and node.tensor not in group.stages and id(node) not in seen:
                seen.add(id(node))
                yield node


def _view(read: Read, place: Axis, over: tuple[Axis, ...], steps: int) -> View | None:
    *leading, last = read.index
    inner = tuple(a for a in free_axes(last) if a in over)
    rows = tuple(dict.fromkeys(a for i in leading for a in free_axes(i) if a in over))
    if any(place in free_axes(i) or reads(i) for i in leading):
        return None
    starts: dict[tuple[int, ...], int] = {}
    slopes = set()
    for remainder in range(steps):
        for taps in combinations(inner):
            at = {a: Line(0, t) for a, t in zip(inner, taps, strict=True)}
            found = line(last, at | {place: Line(steps, remainder)})
            if found is None:
                return None
            starts[(remainder, *taps)] = found.start
            slopes.add(found.slope)
    if len(slopes) != 1:
        return None
    (slope,) = slopes
    view = View(read, slope, rows, inner, starts)
    fits = 1 <= slope <= _MOST_STEPS and view.extra <= _MOST_SPREAD
    return view if fits else None


class TapFolds:
    """Each reduction of a group over few taps, places side by side in vectors."""

    name = "taps"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        axes, over = group.head.axes, _over(group)
        shape = first_rejection(
            check(all(is_map(s) or isinstance(s.expr, forms.Reduce) for s in group.stages),
                  "needs reductions and pointwise stages only"),
            check(len(axes) >= 2 and all(s.axes == axes for s in group.stages),
                  "needs every stage over the same two axes or more"),
            check(bool(over) and all(isinstance(a.extent, int) for a in over),
                  "needs numbers of taps known"),
        )  # fmt: skip
        if shape is not None:
            return shape
        taps = math.prod(map(known, over))
        if not 1 <= taps <= _MOST_TAPS:
            return Rejection(f"needs 1 to {_MOST_TAPS} taps, got {taps}")
        return first_rejection(
            check(all(_plain(s, group) for s in group.stages),
                  "needs stages read where they are, in the type they are computed in"),
            check(taps_of(group) is not None,
                  "needs windows along the last axis, at even steps in the last dim read"),
        )  # fmt: skip

    def default(self, group: Group, caps: Capability) -> TapsConfig:
        return TapsConfig()

    def space(self, group: Group, caps: Capability) -> Iterator[TapsConfig]:
        for block in (32, 8, 128):
            yield TapsConfig(block)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: TapsConfig) -> Any:
        from .taps_nest import TapsNest

        found = taps_of(group)
        assert found is not None
        return TapsNest(emitter, group, found, caps.lanes(), config).lower()


def _plain(stage: Stage, group: Group) -> bool:
    """Whether values of a stage can stay in registers."""
    read = [s for s in group.stages if stage in reads(s.expr)]
    here = all(reads_at(s.expr, stage, stage.axes) for s in read)
    return here and stage.dtype != bool_ and not (read and stage.dtype.is_narrow_float)
