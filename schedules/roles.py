"""Which axes of a contraction play m, n and k in a nest of tiles."""

from __future__ import annotations

from dataclasses import dataclass

from ..dsl.expr import Axis, Expr
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
    product = contraction(head.expr)
    if product is None or len(others) > 1 or not all(map(is_map, others)):
        return None
    return _assigned(product, group.stages[-1].axes)


def _assigned(product: Contraction, order: tuple[Axis, ...]) -> Roles:
    a, b, left, right = product.a, product.b, product.m, product.n
    if order[-1] in left:
        a, b, left, right = b, a, right, left
    m = next(x for x in reversed(order) if x in left)
    n = next(x for x in reversed(order) if x in right)
    batch = tuple(x for x in order if x is not m and x is not n)
    shared = tuple(i for i, x in enumerate(batch) if x in product.batch or x in right)
    return Roles(a, b, m, n, product.k, batch, shared)


def steps_through(node: Expr, own: tuple[Axis, ...], k: tuple[Axis, ...]) -> bool:
    """Whether an axis of `own`, and none of k, steps through memory one element at a time."""
    inner = innermost(node)
    return bool(set(own) & inner) and not set(k) & inner
