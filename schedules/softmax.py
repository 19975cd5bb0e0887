"""What rules for softmax_sum ask of a group, whatever the device: its parts, the roles of axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..dsl import forms
from ..dsl.expr import Axis, Expr, Read, Stage
from ..dsl.graph import reads
from ..dsl.walk import free_axes, walk
from .bounds import upper_bounds
from .group import Group, is_map
from .roles import Product, product
from .rule import Rejection, check, first_rejection


@dataclass(frozen=True)
class Roles:
    """Which axis of a softmax_sum is what.

    `row` is in the scores only, `key` is summed, `column` is in the values only; `batch` axes
    may be anywhere. `products` are the contractions whose results the score reads.
    """

    node: forms.SoftmaxSum
    batch: tuple[Axis, ...]
    row: Axis
    key: Axis
    column: Axis
    products: tuple[Product, ...]


def rejection(group: Group) -> Rejection | None:
    """Why the group is no softmax_sum with sums before it and pointwise work after it."""
    before, heads, after = split(group)
    return first_rejection(
        check(bool(heads), "needs a softmax_sum"),
        check(all(isinstance(s.expr, forms.Reduce) and s.expr.op == "sum" for s in before),
              "needs sums before the softmax_sum"),
        check(all(is_map(s) and heads[0] in reads(s.expr) for s in after),
              "needs only pointwise stages after the softmax_sum"),
    )  # fmt: skip


def source(stage: Stage) -> forms.SoftmaxSum | None:
    """The softmax_sum of a stage that is one, or its log-sum-exp."""
    node = stage.expr
    if isinstance(node, forms.LogSumExp):
        return node.source
    return node if isinstance(node, forms.SoftmaxSum) else None


def split(group: Group) -> tuple[list[Stage], list[Stage], list[Stage]]:
    """The group's stages: contractions under the score, the forms, what follows them."""
    forms_at = [i for i, s in enumerate(group.stages) if source(s) is not None]
    if not forms_at:
        return list(group.stages), [], []
    before, rest = group.stages[: forms_at[0]], group.stages[forms_at[0] :]
    heads = [s for s in rest if source(s) is not None]
    return list(before), heads, [s for s in rest if s not in heads]


def roles(group: Group, fits: Callable[[Axis], bool]) -> Roles | None:
    """The roles for a tiled nest, or None where the group has another shape.

    `fits` tells whether a column or a depth is of a size that the nest can take.
    """
    before, heads, _ = split(group)
    node = source(heads[0])
    assert node is not None
    columns, rows = node.column_axes(), node.row_axes()
    if len(node.over) != 1 or len(columns) != 1 or not fits(columns[0]):
        return None
    (key,) = node.over
    products: list[Product] = []
    fixed = set(free_axes(node.value))
    for stage in before:
        made = product(stage, key)
        if made is None or not fits(made.depth):
            return None
        products.append(made)
        fixed |= set(free_axes(made.key))
    only_rows = [a for a in rows if a not in fixed]
    if not only_rows or any(only_rows[-1] not in free_axes(p.row) for p in products):
        return None
    row = only_rows[-1]
    return Roles(node, tuple(a for a in rows if a is not row), row, key, columns[0],
                 tuple(products))  # fmt: skip


def key_bounds(found: Roles) -> list[Expr]:
    """Exclusive bounds of the keys that count for a row: they never fall as the row grows.

    Those of a tile's last row are bounds for the tile. They may read tensors at batch axes.
    """
    return list(upper_bounds(found.node.where, found.key, found.row, set(found.batch)))


def row_bounds(found: Roles) -> list[Expr]:
    """Exclusive bounds of the rows that any key counts for: functions of the batch axes."""
    return list(upper_bounds(found.node.where, found.row, None, set(found.batch)))


def inner_axis(found: Roles) -> Axis | None:
    """A batch axis that all keys and values have next to their innermost, and no mask has.

    Memory is read in the order in which it lies where that axis is gone over for each key.
    """
    masked = free_axes(found.node.where) if found.node.where is not None else ()
    sides = [(p.key, p.depth) for p in found.products] + [(found.node.value, found.column)]
    near = {_beside(node, along) for node, along in sides}
    (axis,) = near if len(near) == 1 else (None,)
    fits = any(axis is a for a in found.batch) and not any(axis is a for a in masked)
    return axis if fits else None


def _beside(node: Expr, along: Axis) -> Axis | None:
    """The axis that indexes the dim before the last, which `along` does, in the node's one read."""
    found = [n for n in walk(node) if isinstance(n, Read) and along in free_axes(n)]
    if len(found) != 1 or len(found[0].index) < 2 or found[0].index[-1] is not along:
        return None
    axis = found[0].index[-2]
    return axis if isinstance(axis, Axis) else None
