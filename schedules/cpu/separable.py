"""Sums and extrema whose taps are rows times columns: one side after the other.

Σ_{u, v} x[…, row(i, u), column(j, v)] · above(i, u) · beside(j, v), as resampling has it, is taken

    few taps:     for each row of x once: across[j] = Σ_v x[row, column(j, v)] · beside(j, v)
                  out[i, j] = Σ_u above(i, u) · across[row(i, u)][j]
    many taps:    down[w] = Σ_u above(i, u) · x[row(i, u), w]
                  out[i, j] = Σ_v down[column(j, v)] · beside(j, v)

What depends on columns alone is worked out once, ahead of all rows. A task has rows of one plane.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import bool_, f32
from ...dsl.expr import Axis, Binary, Cast, Expr, Read, Stage, binary, cast
from ...dsl.graph import reads
from ...dsl.walk import free_axes, walk
from ..capability import Capability
from ..emit import Emitter
from ..group import Group, chain, is_map, known, reads_at
from ..rule import Config, Rejection

NEEDS = "needs reductions over rows times columns of one tensor, and pointwise stages after them"
_FEW = 8


@dataclass(frozen=True)
class SeparableConfig(Config):
    """`block` rows a task. `across_first`: rows of the source are kept when taken across."""

    across_first: bool
    block: int = 32


@dataclass(frozen=True)
class Fold:
    """One reduction: `value` of what is read, times factors of rows and of columns."""

    stage: Stage
    value: Expr
    rows: tuple[Expr, ...]
    columns: tuple[Expr, ...]

    @property
    def op(self) -> str:
        assert isinstance(self.stage.expr, forms.Reduce)
        return self.stage.expr.op


@dataclass(frozen=True)
class Separable:
    """Reductions of what one `read` gives, where both conditions hold; then pointwise stages."""

    read: Read
    folds: tuple[Fold, ...]
    row_taps: tuple[Axis, ...]
    column_taps: tuple[Axis, ...]
    row_kept: tuple[Expr, ...]
    column_kept: tuple[Expr, ...]

    @property
    def few(self) -> bool:
        """Whether the taps of either side are a small number, and none is outside."""
        sides = (self.row_taps, self.column_taps)
        numbers = all(isinstance(a.extent, int) for side in sides for a in side)
        few = numbers and all(math.prod(map(known, side)) <= _FEW for side in sides)
        return few and self.read.fill is None


def separable(group: Group) -> Separable | None:
    """A group as reductions over rows times columns, or None."""
    reductions = [s for s in group.stages if isinstance(s.expr, forms.Reduce)]
    others = [s for s in group.stages if s not in reductions]
    axes = group.head.axes
    if not reductions or len(axes) < 2 or any(s.axes != axes for s in group.stages):
        return None
    if not all(map(is_map, others)) or not _last(group, reductions, others):
        return None
    first = reductions[0].expr
    assert isinstance(first, forms.Reduce)
    read = _source(first.body, axes[-1], first.over)
    if read is None:
        return None
    taps = free_axes(read.index[-1])
    columns = tuple(a for a in first.over if a in taps)
    rows = tuple(a for a in first.over if a not in taps)
    sides = _Sides(axes, rows, columns)
    kept = sides.sort(chain(first.where, "and"))
    found = [_fold(s, first, read, sides) for s in reductions]
    folds = tuple(f for f in found if f is not None)
    if kept is None or len(folds) < len(found) or not sides.takes(read):
        return None
    return Separable(read, folds, rows, columns, *kept)


def _last(group: Group, reductions: list[Stage], others: list[Stage]) -> bool:
    """Whether pointwise stages alone read other stages, element for element, in registers."""
    plain = all(
        reads_at(o.expr, s, s.axes) and s.dtype != bool_ for o in others for s in group.stages
    )
    narrow = any(s.dtype.is_narrow_float and s in reads(o.expr) for o in others for s in others)
    apart = all(t not in group.stages for s in reductions for t in reads(s.expr))
    return plain and apart and not narrow


def _source(body: Expr, place: Axis, over: tuple[Axis, ...]) -> Read | None:
    """The one read whose last index mixes the place and taps, and is found in no other's index."""
    found = []
    for node in walk(body):
        if isinstance(node, Read) and node.index:
            last = free_axes(node.index[-1])
            whole = free_axes(node)
            if place in last and set(over) & set(last) and len(whole) > len(last):
                found.append(node)
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class _Sides:
    """Who knows what: expressions of rows, of columns."""

    axes: tuple[Axis, ...]
    row_taps: tuple[Axis, ...]
    column_taps: tuple[Axis, ...]

    def of_rows(self, node: Expr) -> bool:
        return set(free_axes(node)) <= {*self.axes[:-1], *self.row_taps}

    def of_columns(self, node: Expr) -> bool:
        return set(free_axes(node)) <= {self.axes[-1], *self.column_taps}

    def sort(self, nodes: list[Expr]) -> tuple[tuple[Expr, ...], tuple[Expr, ...]] | None:
        """(those of rows, those of columns); None if there are others."""
        rows = tuple(n for n in nodes if self.of_rows(n))
        columns = tuple(n for n in nodes if not self.of_rows(n) and self.of_columns(n))
        return (rows, columns) if len(rows) + len(columns) == len(nodes) else None

    def takes(self, read: Read) -> bool:
        *leading, last = read.index
        return all(map(self.of_rows, leading)) and self.of_columns(last)


def _fold(stage: Stage, first: forms.Reduce, read: Read, sides: _Sides) -> Fold | None:
    node = stage.expr
    assert isinstance(node, forms.Reduce)
    if node.op not in ("sum", "max", "min") or node.over != first.over:
        return None
    if node.where is not first.where:
        return None
    factors = _factors(node.body) if node.op == "sum" else [node.body]
    values = [f for f in factors if any(n is read for n in walk(f))]
    rest = sides.sort([f for f in factors if all(f is not v for v in values)])
    if len(values) != 1 or rest is None or not _from_read(values[0], read):
        return None
    return Fold(stage, values[0], *rest)


def _factors(node: Expr) -> list[Expr]:
    """The factors of a product; a quotient has 1 / each of its divisor's, too.

    Widening keeps whole numbers that areas are made of, so the product is widened factor by factor.
    """
    if isinstance(node, Binary) and node.op == "mul":
        return _factors(node.a) + _factors(node.b)
    if isinstance(node, Binary) and node.op == "div":
        return _factors(node.a) + [binary("div", 1.0, f) for f in _factors(node.b)]
    if isinstance(node, Cast) and node.dtype == f32 and node.a.dtype.is_int:
        return [cast(f, f32) for f in _factors(node.a)]
    return [node]


def _from_read(node: Expr, read: Read) -> bool:
    """Whether `node` depends on axes through what is read alone."""
    if node is read:
        return True
    if isinstance(node, (Axis, Read)):
        return False
    return all(_from_read(c, read) for c in node.children())


class SeparableFolds:
    """Reductions over rows times columns, vectors of columns at a time."""

    name = "separable"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return Rejection(NEEDS) if separable(group) is None else None

    def default(self, group: Group, caps: Capability) -> SeparableConfig:
        return next(self.space(group, caps))

    def space(self, group: Group, caps: Capability) -> Iterator[SeparableConfig]:
        found = separable(group)
        assert found is not None
        for block in (32, 8, 128):
            yield SeparableConfig(found.few, block)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: SeparableConfig
    ) -> Any:
        from .separable_nest import AcrossFirst, DownFirst

        found = separable(group)
        assert found is not None
        kind = AcrossFirst if config.across_first else DownFirst
        return kind(emitter, group, found, caps.lanes(), config).lower()
