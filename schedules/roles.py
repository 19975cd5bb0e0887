"""Which axes and factors of a contraction play which part in a nest of tiles."""

from __future__ import annotations

from dataclasses import dataclass

from ..dsl.expr import Axis, Expr, Stage
from .group import Contraction, Group, contraction, innermost, is_map

NEEDS = (
    "needs a sum of products of factors with axes of their own, and one pointwise consumer at most"
)


@dataclass(frozen=True)
class Roles:
    """A contraction as nests of tiles see it: `a` has m and `b` has n, the later in the result.

    n is the result's last axis, unless both factors have that. `batch` are all other kept axes,
    whichever factor has them; `b_batch` are the places in it of those that `b` has.
    """

    a: Expr
    b: Expr
    m: Axis
    n: Axis
    k: tuple[Axis, ...]
    batch: tuple[Axis, ...]
    b_batch: tuple[int, ...]


def roles(group: Group) -> Roles | None:
    """Roles of the axes in a contraction and its pointwise consumer, if it has one.

    None for any other group.
    """
    head, *others = group.stages
    found = contraction(head.expr)
    if found is None or len(others) > 1 or not all(map(is_map, others)):
        return None
    return _assigned(found, group.stages[-1].axes)


def _assigned(found: Contraction, order: tuple[Axis, ...]) -> Roles:
    a, b, left, right = found.a, found.b, found.m, found.n
    if order[-1] in left:
        a, b, left, right = b, a, right, left
    m = next(x for x in reversed(order) if x in left)
    n = next(x for x in reversed(order) if x in right)
    batch = tuple(x for x in order if x is not m and x is not n)
    shared = tuple(i for i, x in enumerate(batch) if x in found.batch or x in right)
    return Roles(a, b, m, n, found.k, batch, shared)


@dataclass(frozen=True)
class Product:
    """A contraction under a score or a weight: Σ over `depth` of `row` times `key`, its factors."""

    stage: Stage
    row: Expr
    key: Expr
    depth: Axis


def product(stage: Stage, key: Axis) -> Product | None:
    """The stage as a product, `key` an axis of one factor only; None if it is none."""
    found = contraction(stage.expr)
    if found is None or len(found.k) != 1:
        return None
    if key in found.n:
        return Product(stage, found.a, found.b, found.k[0])
    return Product(stage, found.b, found.a, found.k[0]) if key in found.m else None


def steps_through(node: Expr, own: tuple[Axis, ...], k: tuple[Axis, ...]) -> bool:
    """Whether an axis of `own`, and none of k, steps through memory one element at a time."""
    inner = innermost(node)
    return bool(set(own) & inner) and not set(k) & inner
