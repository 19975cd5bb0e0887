"""Stages over the same rows as passes over the elements of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.expr import Axis, Expr, Read, Size, Stage, as_expr
from ...dsl.graph import reads
from ...dsl.host import source
from ...dsl.walk import free_axes, walk
from ..group import is_map
from ..rule import Rejection

Tir = Any


def contiguous_axes(node: Expr) -> set[Axis]:
    """Axes along which the largest tensors that `node` reads are contiguous."""
    axes = {read: len(free_axes(read)) for read in _reads(node)}
    most = max(axes.values(), default=0)
    large = [read for read, count in axes.items() if count == most]
    return set().union(*(free_axes(r.index[-1]) for r in large if r.index))


def kept_axis(stage: Stage) -> Axis | None:
    """The kept axis of a reduction that is contiguous in memory, if no reduced axis is."""
    node = stage.expr
    if not isinstance(node, forms.Reduce):
        return None
    inner = contiguous_axes(node.body)
    if set(node.over) & inner:
        return None
    return next((a for a in reversed(stage.axes) if a in inner), None)


def own_axes(stage: Stage, rank: int) -> tuple[Axis, ...]:
    """The axes along a row that a stage goes over, those that are contiguous in memory last.

    A row has the first `rank` axes of a stage.
    """
    node = stage.expr
    if isinstance(node, forms.Reduce):
        inner = contiguous_axes(node.body)
        return tuple(sorted(node.over, key=lambda a: a in inner))
    return stage.axes[rank:]


@dataclass(frozen=True)
class Space:
    """The elements of a row that some stages go over: row-major indices over `axes`.

    `alias` gives, for the axes of a stage that goes over the same with axes of its own, those of
    the space.
    """

    axes: tuple[Axis, ...]
    alias: Mapping[Axis, Axis]

    @property
    def extents(self) -> tuple[Size, ...]:
        return tuple(a.extent for a in self.axes)

    def bind(self, index: Sequence[Tir]) -> dict[Axis, Tir]:
        """What the axes stand for at an index."""
        here = dict(zip(self.axes, index, strict=True))
        return here | {a: here[b] for a, b in self.alias.items()}


@dataclass(frozen=True)
class Scalars:
    """Pointwise stages with one element a row."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Pass:
    """Stages computed in one go over the elements of a space, in order.

    `results` are those of them that are reductions or that others see.
    """

    space: Space
    stages: tuple[Stage, ...]
    results: tuple[Stage, ...]


Step = Scalars | Pass


def row_rejection(stages: Sequence[Stage], rows: tuple[Axis, ...]) -> Rejection | None:
    """Why stages cannot be computed row by row, each element from its own and the row's."""
    for stage in stages:
        if not is_map(stage) and not isinstance(stage.expr, forms.Reduce):
            return Rejection("needs reductions and pointwise stages only")
        if stage.axes[: len(rows)] != rows:
            return Rejection("needs every stage over the same rows")
        if not is_map(stage) and stage.axes != rows:
            return Rejection("needs one result a row of each reduction")
        own = own_axes(stage, len(rows))
        if any(_tangled(own, own_axes(s, len(rows))) for s in stages):
            return Rejection("needs stages that go along a row by the same axes in one order")
        for read in _reads(stage.expr):
            target = read.tensor
            if target in stages and not _at_hand(read, rows, own):
                return Rejection(f"needs {target.name} read at the row and element of its readers")
    return None


def _at_hand(read: Read, rows: tuple[Axis, ...], own: tuple[Axis, ...]) -> bool:
    """Whether a read in a stage that goes over `own` along a row is of that very element."""
    assert isinstance(read.tensor, Stage)
    target = read.tensor.axes
    wanted = rows if len(target) == len(rows) else (*rows, *own)
    return (
        len(wanted) == len(target)
        and all(i is a for i, a in zip(read.index, wanted, strict=True))
        and _sizes(target) == _sizes(wanted)
    )


def _tangled(a: tuple[Axis, ...], b: tuple[Axis, ...]) -> bool:
    """Whether the axes of one space mean different indices to two stages."""
    same = all(x is y for x, y in zip(a, b, strict=False))
    return _sizes(a) == _sizes(b) and not same and bool(set(a) & set(b))


def _reads(node: Expr) -> Iterator[Read]:
    return (n for n in walk(node) if isinstance(n, Read))


def _sizes(axes: Sequence[Axis]) -> tuple[str, ...]:
    return tuple(source(as_expr(a.extent)) for a in axes)


def spaces_of(stages: Sequence[Stage], rank: int) -> dict[Stage, Space]:
    """The space of each stage that is not one element a row."""
    axes: dict[tuple[str, ...], tuple[Axis, ...]] = {}
    alias: dict[tuple[str, ...], dict[Axis, Axis]] = {}
    keys: dict[Stage, tuple[str, ...]] = {}
    for stage in stages:
        own = own_axes(stage, rank)
        if not own:
            continue
        key = keys[stage] = _sizes(own)
        first = axes.setdefault(key, own)
        pairs = zip(own, first, strict=True)
        alias.setdefault(key, {}).update({a: b for a, b in pairs if a is not b})
    made = {key: Space(axes[key], alias[key]) for key in axes}
    return {stage: made[key] for stage, key in keys.items()}


def steps_of(stages: Sequence[Stage], outputs: Sequence[Stage], rank: int) -> tuple[Step, ...]:
    """The stages in the fewest passes: each as soon as the reductions it needs are there.

    A stage along the row that others do not see is part of every pass that reads it.
    """
    space = spaces_of(stages, rank)
    level: dict[Stage, int] = {}
    for stage in stages:
        needs = [level[s] + (not is_map(s)) for s in _inside(stage, stages)]
        level[stage] = max(needs, default=0)
    steps: list[Step] = []
    for now in range(max(level.values()) + 1):
        scalars = tuple(s for s in stages if s not in space and level[s] == now)
        if scalars:
            steps.append(Scalars(scalars))
        due: dict[int, list[Stage]] = {}
        for stage in stages:
            if stage in space and level[stage] == now and (not is_map(stage) or stage in outputs):
                due.setdefault(id(space[stage]), []).append(stage)
        for results in due.values():
            needed = _closure(results, stages, space)
            steps.append(Pass(space[results[0]], needed, tuple(results)))
    return tuple(steps)


def _inside(stage: Stage, stages: Sequence[Stage]) -> list[Stage]:
    return [t for t in reads(stage.expr) if isinstance(t, Stage) and t in stages]


def _closure(
    results: Sequence[Stage], stages: Sequence[Stage], space: Mapping[Stage, Space]
) -> tuple[Stage, ...]:
    """`results` and the pointwise stages along the row that they are made of, in order."""
    found = set(results)
    for stage in reversed(stages):
        if stage in found:
            found |= {s for s in _inside(stage, stages) if s in space and is_map(s)}
    return tuple(s for s in stages if s in found)
