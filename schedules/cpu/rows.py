"""Row reductions with the pointwise work around them: all passes over a row while it is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ...dsl import forms
from ...dsl.expr import DimRef, Read, Size, Stage
from ...dsl.graph import reads
from ..capability import Capability
from ..emit import Emitter, combine, masked, reducer
from ..group import Group, innermost, is_map, reads_at
from ..nest import static
from ..rule import Config, Rejection, check, first_rejection
from .loops import fuse_all, vectorize


@dataclass(frozen=True)
class RowsConfig(Config):
    """`unroll` vectors of partial results per reduction, which hides the latency of the adds."""

    unroll: int = 4


@dataclass
class _Parts:
    """Block names of one reduction: lane partials, scalar tail, fold of the lanes, the result.

    `width` partial results are kept.
    """

    width: int
    partial: str | None
    tail: str | None
    folds: list[str]
    result: str


class Rows:
    """One parallel loop over rows; inside it each reduction keeps a vector of partial results.

    TVM's rfactor loses the guard of a split that does not divide, so the lanes are written into
    the expression: Σᵢ f(i) = Σ_w Σ_o f(o·W + w) + Σ_t f(tail). The order of additions depends
    on W alone, hence the same bits on any number of threads.
    """

    name = "rows"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        head = group.head.expr
        return first_rejection(
            check(isinstance(head, forms.Reduce), "needs a reduction"),
            check(all(is_map(s) or isinstance(s.expr, forms.Reduce) for s in group.stages),
                  "needs reductions and pointwise stages only"),
            check(bool(group.head.axes), "needs at least one row axis"),
            check(all(s.axes[: len(group.head.axes)] == group.head.axes for s in group.stages),
                  "needs every stage over the same rows"),
            check(all(isinstance(a.extent, (int, DimRef)) for a in group.head.axes[1:]),
                  "needs numbers or dims as the extents of rows"),
            check(not _across(group), "needs the reduced axis innermost in memory"),
            check(not _stranded(group), "needs one result, the others read by it or reading none"),
        )  # fmt: skip

    def default(self, group: Group, caps: Capability) -> RowsConfig:
        return RowsConfig()

    def space(self, group: Group, caps: Capability) -> Iterator[RowsConfig]:
        for unroll in (4, 1, 2, 8):
            yield RowsConfig(unroll)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: RowsConfig) -> Any:
        lanes = caps.lanes()
        parts: dict[str, _Parts] = {}
        blocks: list[str] = []
        for stage in group.stages:
            if is_map(stage):
                made = emitter.pointwise(stage)
            else:
                made, parts[stage.name] = _reduction(emitter, stage, lanes, config.unroll)
            emitter.made[stage] = made
            blocks.append(made.op.name)
            if stage in group.outputs:
                emitter.publish(stage, made)
        _share_memory(emitter, group)
        sch = emitter.schedule()
        _place(sch, group, [t.op.name for _, t in emitter.results], blocks, parts)
        riders = _riders(emitter, group, parts)
        for source, part in riders.items():
            _ride(sch, source, part, lanes)
        for part in parts.values():
            _vectorize_reduction(sch, part, lanes, part in riders.values())
        for name in dict.fromkeys([*blocks, *(t.op.name for _, t in emitter.results)]):
            loops = sch.get_loops(sch.get_sblock(name))
            if len(loops) > 1 and name not in riders:
                vectorize(sch, loops[-1], lanes, 2)
        return sch


def _riders(emitter: Emitter, group: Group, parts: dict[str, _Parts]) -> dict[str, _Parts]:
    """Pointwise blocks by name, each with a reduction of just its values along the row.

    Only rows of two or more whole steps, known when compiling: then neither loop has a tail.
    """
    found: dict[str, _Parts] = {}
    for stage in group.stages:
        node = stage.expr
        if not isinstance(node, forms.Reduce) or not isinstance(node.body, Read):
            continue
        source, part = node.body.tensor, parts[stage.name]
        along = (*stage.axes, *node.over)
        fits = (
            isinstance(source, Stage)
            and source in group.stages
            and is_map(source)
            and node.where is None
            and source.axes == along
            and part.partial is not None
            and _whole_steps(node.over[-1].extent, part.width)
            and reads_at(node.body, source, along)
        )
        if fits and isinstance(source, Stage):
            found.setdefault(emitter.made[source].op.name, part)
    return found


def _whole_steps(extent: Size, width: int) -> bool:
    return isinstance(extent, int) and extent % width == 0 and extent >= 2 * width


def _ride(sch: Any, source: str, part: _Parts, lanes: int) -> None:
    """Reduce a stage's values as they are made, while they are in registers.

    `for h: w[h] = …; for o, l: lanes[l] ⊕= w[o·W + l]` →
    `for o: {for l: w[o·W + l] = …; for l: lanes[l] ⊕= w[o·W + l]}`
    """
    outer = vectorize(sch, sch.get_loops(sch.get_sblock(source))[-1], lanes, part.width // lanes)
    block = sch.get_sblock(part.partial)
    sch.reverse_compute_at(block, outer)
    wide = sch.get_loops(block)[-1]
    chunks, lane = sch.split(wide, [None, lanes])
    sch.vectorize(lane)
    sch.unroll(chunks)
    sch.decompose_reduction(block, outer)


def _share_memory(emitter: Emitter, group: Group) -> None:
    """A row's intermediate moves into the result's row where the result is its last reader."""
    last = group.stages[-1]
    if last not in group.outputs or not is_map(last):
        return
    result = dict((s, t) for s, t in emitter.results).get(last)
    for stage in group.stages[:-1]:
        same = stage.axes == last.axes and stage.dtype == last.dtype
        if result is None or not same or not is_map(stage) or stage in group.outputs:
            continue
        if stage in reads(last.expr) and reads_at(last.expr, stage, last.axes):
            emitter.share(emitter.made[stage], result)
            return


def _across(group: Group) -> bool:
    for stage in group.stages:
        node = stage.expr
        if isinstance(node, forms.Reduce):
            inner = innermost(node.body)
            if set(stage.axes) & inner and not set(node.over) & inner:
                return True
    return False


def _stranded(group: Group) -> list[Stage]:
    """Results that `_place` cannot bring under the loop of the widest one.

    TVM moves a block to its consumers or to its producers: one that no stage reads, with
    producers that no other stage reads, cannot be moved before they are, nor they before it.
    """
    read = {t for s in group.stages for t in reads(s.expr)}
    unread = [s for s in group.stages if s in group.outputs and s not in read]
    anchor = max(unread, key=lambda s: len(s.axes), default=None)
    inside = set(group.stages)
    return [
        s for s in unread
        if s is not anchor and (not is_map(s) or inside & set(reads(s.expr)))
    ]  # fmt: skip


def _reduction(emitter: Emitter, stage: Stage, lanes: int, unroll: int) -> tuple[Any, _Parts]:
    """The TE stages of one reduction (see `Rows`)."""
    node = stage.expr
    assert isinstance(node, forms.Reduce)
    last = node.over[-1]
    count = emitter.size(last.extent)
    known = static(count)
    width = lanes * unroll
    if known is not None and known < width:
        width = lanes if known >= lanes else 0
    main = emitter.index(0) if width == 0 else count // width
    partial = total = tail = None
    folds: list[str] = []
    if width:
        step = emitter.reduce_axis(last, main)
        wide = [emitter.index(width)]
        partial = _partial(emitter, stage, step, lambda w: step * width + w, wide, "lanes")
        total = partial
        for narrow in _narrowing(width, lanes):
            total = _fold(emitter, stage, total, narrow, reducer(node.op, node.dtype))
            folds.append(total.op.name)
    if known is None or width == 0 or known % width:
        start = main * width
        rest = emitter.reduce_axis(last, count - start)
        tail = _partial(emitter, stage, rest, lambda: start + rest, [], "tail")

    def result(*i: Any) -> Any:
        found = [total(*i, emitter.index(0))] if total is not None else []
        found += [tail(*i)] if tail is not None else []
        return reduce(lambda a, b: combine(node.op, a, b), found)

    made = emitter.define(stage, result)
    return made, _Parts(
        width,
        partial.op.name if partial is not None else None,
        tail.op.name if tail is not None else None,
        folds,
        made.op.name,
    )


def _partial(
    emitter: Emitter, stage: Stage, step: Any, place: Callable[..., Any], extra: list[Any],
    name: str,
) -> Any:  # fmt: skip
    """[rows…, extra…] → the reduction, over `step`, of the row's elements at `place(extra…)`."""
    node = stage.expr
    assert isinstance(node, forms.Reduce)
    body, fold, rank = masked(node), reducer(node.op, node.dtype), len(stage.axes)
    others = [emitter.reduce_axis(a) for a in node.over[:-1]]

    def value(*i: Any) -> Any:
        bound = dict(zip(node.over, [*others, place(*i[rank:])], strict=True))
        return fold(emitter.at(body, stage.axes, i[:rank], bound), axis=[*others, step])

    rows = [emitter.size(e) for e in stage.shape]
    return emitter.compute([*rows, *extra], value, f"{stage.name}_{name}")


def _narrowing(width: int, lanes: int) -> list[int]:
    """Widths on the way from `width` partial results to one: a short tree, not a chain."""
    steps = [lanes] if width > lanes else []
    narrow = lanes
    while narrow > 1:
        narrow //= 2
        steps.append(narrow)
    return steps


def _fold(emitter: Emitter, stage: Stage, wide: Any, narrow: int, fold: Any) -> Any:
    """wide[…, W] → […, narrow], elements `narrow` apart combined."""
    count = int(wide.shape[-1]) // narrow
    step = emitter.reduce_axis(stage.axes[0], emitter.index(count))
    return emitter.compute(
        [*wide.shape[:-1], emitter.index(narrow)],
        lambda *i: fold(wide(*i[:-1], step * narrow + i[-1]), axis=step),
        f"{stage.name}_fold",
    )


def _place(
    sch: Any, group: Group, results: list[str], blocks: list[str], parts: dict[str, _Parts]
) -> None:
    """Bring everything under one parallel loop over rows, anchored at the widest output."""
    rank = len(group.head.axes)
    anchor = max(results, key=lambda n: len(sch.get_loops(sch.get_sblock(n))))
    loops = sch.get_loops(sch.get_sblock(anchor))
    row = fuse_all(sch, loops[:rank])
    sch.parallel(row)
    order: list[str] = []
    for stage, block in zip(group.stages, blocks, strict=True):
        part = parts.get(stage.name)
        if part is not None:
            order += [n for n in (part.partial, *part.folds, part.tail) if n is not None]
        order.append(block)
    for name in reversed(order):
        if name not in results:
            sch.compute_at(sch.get_sblock(name), row)
    for name in results:
        if name != anchor:
            sch.reverse_compute_at(sch.get_sblock(name), row)


def _vectorize_reduction(sch: Any, part: _Parts, lanes: int, riding: bool) -> None:
    """`for w, k: lanes[w] ⊕= …` → `for k: unrolled vectors of w`; folds are unrolled whole."""
    if part.partial is not None and not riding:
        block = sch.get_sblock(part.partial)
        wide, *inner = sch.get_loops(block)[1:]
        if inner:
            sch.reorder(*inner, wide)
        chunks, lane = sch.split(wide, [None, lanes])
        sch.vectorize(lane)
        sch.unroll(chunks)
        if inner:
            sch.decompose_reduction(block, inner[0])
    if part.tail is not None:
        # Apart from the loop, or a tail of no elements would leave the result unset.
        block = sch.get_sblock(part.tail)
        rest = sch.get_loops(block)[1:]
        if rest:
            sch.decompose_reduction(block, rest[0])
    for name in part.folds:
        block = sch.get_sblock(name)
        *wide, step = sch.get_loops(block)[1:]
        if wide:
            sch.reorder(step, wide[0])
            sch.vectorize(wide[0])
        sch.unroll(step)
        sch.decompose_reduction(block, step)
