"""Margins of a recurrence's state: elements beside it that hold what reads past its edges give.

before::  state[s − 1] if 0 ≤ s − 1 < count else fill
after::   padded[s − 1 + margin]

So a read beside an element needs no condition, and neighbours stay neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dsl.expr import Axis, Binary, Const, Expr, Read, Tensor
from ..dsl.walk import walk

WIDEST = 64  # elements


@dataclass(frozen=True)
class Margins:
    """Elements before and after each axis of the state, all of them `fill`."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    fill: float | int


def margins(
    nodes: Sequence[Expr], tensors: Sequence[Tensor], axes: Sequence[Axis]
) -> Margins | None:
    """What the reads with a fill value need, where all are at constant offsets and share it."""
    before, after = [0] * len(axes), [0] * len(axes)
    fills: dict[float | int, None] = {}
    for read in (n for e in nodes for n in walk(e)):
        if not isinstance(read, Read) or read.tensor not in tensors or read.fill is None:
            continue
        fills[read.fill] = None
        for place, (index, axis) in enumerate(zip(read.index, axes, strict=True)):
            offset = _offset(index, axis)
            if offset is None or abs(offset) > WIDEST:
                return None
            before[place] = max(before[place], -offset)
            after[place] = max(after[place], offset)
    if len(fills) != 1:
        return None
    (fill,) = fills
    return Margins(tuple(before), tuple(after), fill)


def _offset(index: Expr, axis: Axis) -> int | None:
    """k where `index` is `axis` + k."""
    if index is axis:
        return 0
    if not isinstance(index, Binary) or index.a is not axis or not isinstance(index.b, Const):
        return None
    sign = {"add": 1, "sub": -1}.get(index.op)
    return None if sign is None else sign * int(index.b.value)
