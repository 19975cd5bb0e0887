"""Small schedule steps that several rules share."""

from __future__ import annotations

from typing import Any


def vectorize(sch: Any, loop: Any, lanes: int, unroll: int = 1) -> Any:
    """`for i` → `for o: unrolled for u: vectorised for l`, tail peeled off; returns the outer loop.

    The guard of a split that does not divide is taken off whole vectors when lowering.
    """
    outer, inner = sch.split(loop, [None, lanes * unroll])
    if unroll > 1:
        middle, lane = sch.split(inner, [unroll, lanes])
        sch.unroll(middle)
    else:
        lane = inner
    sch.vectorize(lane)
    return outer


def parallel_all(sch: Any, loops: list[Any]) -> Any:
    """Adjacent loops run in parallel, fused where their extents are numbers or dims.

    Returns the innermost loop left. TVM follows an index that a fused loop was taken apart for only
    where it divides by those.
    """
    from tvm import tirx

    extents = [sch.get(loop).extent for loop in loops[1:]]
    if all(isinstance(e, (tirx.IntImm, tirx.Var)) for e in extents):
        loops = [fuse_all(sch, loops)]
    sch.parallel(loops[0])
    return loops[-1]


def fuse_all(sch: Any, loops: list[Any]) -> Any:
    """One loop for several adjacent ones."""
    return loops[0] if len(loops) == 1 else sch.fuse(*loops)
