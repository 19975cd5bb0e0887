"""What rules for weighted sums ask of a group, whatever the device: its parts, the axes' roles.

A group has sums whose weights are over the same axes, under them the sums that the weights read,
and after each at most one pointwise stage, its *result*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ..dsl.expr import Axis, Expr, Read, Stage, Tensor, Unary
from ..dsl.forms import Reduce
from ..dsl.graph import reads
from ..dsl.walk import free_axes, rebuild, walk
from ..dsl.weighted import WeightedSum
from .group import Group, is_map
from .roles import Product, product
from .rule import Rejection, check, first_rejection


@dataclass(frozen=True)
class Sum:
    """One weighted sum: its stage, its node, and the stage of what is written."""

    stage: Stage
    node: WeightedSum
    result: Stage


@dataclass(frozen=True)
class Roles:
    """Which axis of the weights is what.

    A tile of weights has `row` and `key`: some sums go over the keys and keep the rows, others go
    over the rows and keep the keys. `batch` axes all results have; `turns` go with the rows, kept
    where these are kept and summed where these are.
    """

    batch: tuple[Axis, ...]
    turns: tuple[Axis, ...]
    row: Axis
    key: Axis
    factors: tuple[Product, ...]
    by_row: tuple[Sum, ...]
    by_key: tuple[Sum, ...]


def rejection(group: Group) -> Rejection | None:
    """Why the group is no weighted sums with sums under their weights and stages after them."""
    inner = inner_sums(group)
    found = sums(group)
    after = [s for s in group.stages if s not in inner and not isinstance(s.expr, WeightedSum)]
    return first_rejection(
        check(bool(found), "needs a weighted sum"),
        check(all(s.expr.op == "sum" for s in inner),  # type: ignore[attr-defined]
              "needs sums under the weights"),
        check(all(is_map(s) for s in after), "needs only pointwise stages after a weighted sum"),
    )  # fmt: skip


def inner_sums(group: Group) -> tuple[Stage, ...]:
    """The sums that the weights read."""
    return tuple(s for s in group.stages if isinstance(s.expr, Reduce))


def sums(group: Group) -> tuple[Sum, ...]:
    """The group's weighted sums."""
    found = []
    for stage in group.stages:
        if isinstance(stage.expr, WeightedSum):
            after = (s for s in group.stages if is_map(s) and stage in reads(s.expr))
            found.append(Sum(stage, stage.expr, next(after, stage)))
    return tuple(found)


def roles(group: Group, fits: Callable[[Axis], bool]) -> Roles | None:
    """The roles for a tiled nest, or None where the group has another shape.

    `fits` tells whether a column or a depth is of a size that the nest can take.
    """
    found = sums(group)
    if not inner_sums(group) or any(len(s.node.column_axes()) != 1 for s in found):
        return None
    if not all(fits(s.node.column_axes()[0]) for s in found):
        return None
    axes = found[0].node.weight_axes()
    for key in (a for a in axes if any(s.node.over == (a,) for s in found)):
        made = _roles(group, found, key)
        if made is not None and all(fits(f.depth) for f in made.factors):
            return made
    return None


def _roles(group: Group, found: Sequence[Sum], key: Axis) -> Roles | None:
    """The roles if `key` is the one axis that some sums go over."""
    axes = found[0].node.weight_axes()
    by_row = tuple(s for s in found if s.node.over == (key,))
    by_key = tuple(s for s in found if s not in by_row)
    over = by_key[0].node.over if by_key else ()
    if key in over or any(set(s.node.over) != set(over) for s in by_key):
        return None
    factors = []
    own: set[Axis] = set()
    for stage in inner_sums(group):
        made = product(stage, key)
        if made is None or set(stage.axes) != set(axes):
            return None
        factors.append(made)
        own |= set(free_axes(made.key))
    rows = [a for a in axes if a not in own and a is not key]
    if by_key and set(over) != set(rows) or not rows:
        return None
    # The last of them runs within a tile.
    *turns, row = rows
    batch = tuple(a for a in axes if a in own and a is not key)
    if not all(row in free_axes(f.row) for f in factors):
        return None
    return Roles(batch, tuple(turns), row, key, tuple(factors), by_row, by_key)


@dataclass(frozen=True)
class Step:
    """A value on the way to the weights: `node`, where it is `origin`'s with parts named."""

    origin: Expr
    node: Expr
    proxy: Tensor


def steps(nodes: Sequence[Expr], functions: Collection[str]) -> tuple[Step, ...]:
    """What to compute for `nodes`, in order: themselves, and before them their `functions`.

    A later one reads the `proxy` of an earlier. Nested in one expression such functions would grow
    past what compilers take, and parts that nodes share would be computed twice.
    """
    wanted: dict[int, Expr] = {}
    for node in nodes:
        for part in walk(node):
            if part is node or (isinstance(part, Unary) and part.op in functions):
                wanted.setdefault(id(part), part)
    known: dict[int, Expr] = {}
    made: list[Step] = []
    for part in wanted.values():
        children = tuple(replaced(c, known) for c in part.children())
        proxy = Tensor(f"step_{len(made)}", (), part.dtype)
        made.append(Step(part, rebuild(part, children) if children else part, proxy))
        known[id(part)] = Read(proxy, (), None, part.dtype)
    return tuple(made)


def replaced(node: Expr, known: Mapping[int, Expr]) -> Expr:
    """`node` with nodes (by identity) replaced by what reads their value."""
    if id(node) in known:
        return known[id(node)]
    children = tuple(replaced(c, known) for c in node.children())
    return rebuild(node, children) if children else node
