"""Indices along one axis: which move in even steps, and from where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..dsl.expr import Axis, Binary, Const, Expr
from ..dsl.walk import free_axes, walk


@dataclass(frozen=True)
class Line:
    """slope · q + start for q = 0, 1, …"""

    slope: int
    start: int


def line(node: Expr, at: Mapping[Axis, Line]) -> Line | None:
    """The integer `node`, its axes on the lines `at`, as a line; None if it is none."""
    if isinstance(node, Axis):
        return at.get(node)
    if isinstance(node, Const):
        return Line(0, int(node.value))
    if not isinstance(node, Binary):
        return None
    a, b = line(node.a, at), line(node.b, at)
    if a is None or b is None:
        return None
    if node.op == "add":
        return Line(a.slope + b.slope, a.start + b.start)
    if node.op == "sub":
        return Line(a.slope - b.slope, a.start - b.start)
    if node.op == "mul" and 0 in (a.slope, b.slope):
        factor, moving = (a.start, b) if a.slope == 0 else (b.start, a)
        return Line(factor * moving.slope, factor * moving.start)
    if node.op in ("floordiv", "mod") and b.slope == 0 and b.start > 0 and a.slope % b.start == 0:
        if node.op == "mod":
            return Line(0, a.start % b.start)
        return Line(a.slope // b.start, a.start // b.start)
    return None


def period(nodes: Iterable[Expr], axis: Axis) -> int:
    """The least n such that divisions by constants are even along every n-th place of `axis`."""
    divisors = (
        int(item.b.value)
        for node in nodes for item in walk(node)
        if isinstance(item, Binary) and item.op in ("floordiv", "mod")
        and isinstance(item.b, Const) and item.b.value > 0 and axis in free_axes(item.a)
    )  # fmt: skip
    return math.lcm(*divisors)
