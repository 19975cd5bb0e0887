"""How far a mask's comparison lets an axis go: which part of a tile of pairs can be left out."""

from __future__ import annotations

from collections.abc import Iterator

from ..dsl.expr import Axis, Binary, Expr
from ..dsl.walk import free_axes
from .group import chain


def upper_bounds(
    mask: Expr | None, axis: Axis, row: Axis | None, batch: set[Axis]
) -> Iterator[Expr]:
    """Exclusive bounds of `axis`, from the mask's parts `axis ≤ f` and `axis < f`.

    f is the row (if one is given) plus what rows share, so that nothing counts for a run of rows
    that is past the bound of the last of them. It may read tensors at batch axes.
    """
    for part in chain(mask, "and"):
        bound = _upper_bound(part, axis, row, batch)
        if bound is not None:
            yield bound


def _upper_bound(node: Expr, axis: Axis, row: Axis | None, batch: set[Axis]) -> Expr | None:
    if not isinstance(node, Binary) or node.op not in ("le", "lt") or node.a is not axis:
        return None
    if not _steps_with(node.b, row, batch):
        return None
    return node.b + 1 if node.op == "le" else node.b


def _steps_with(node: Expr, row: Axis | None, batch: set[Axis]) -> bool:
    """Whether `node` never falls as the row grows."""
    axes = set(free_axes(node))
    if node is row or row is None or row not in axes:
        return all(a is row or a in batch for a in axes)
    if isinstance(node, Binary) and node.op == "add":
        return _steps_with(node.a, row, batch) and _steps_with(node.b, row, batch)
    if isinstance(node, Binary) and node.op == "sub":
        return _steps_with(node.a, row, batch) and row not in free_axes(node.b)
    return False
