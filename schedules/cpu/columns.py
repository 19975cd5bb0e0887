"""Reductions across rows: sums over outer axes, kept axes contiguous (gradients of weights)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import i64
from ...dsl.expr import as_expr, binary
from ..capability import Capability
from ..emit import Emitter, identity, masked, reducer
from ..group import Group, innermost
from ..rule import Config, Rejection, check, first_rejection
from .loops import fuse_all, vectorize


@dataclass(frozen=True)
class ColumnsConfig(Config):
    """`chunk` rows summed by one task before the partial sums are added in order."""

    chunk: int = 64


class Columns:
    """Σ_r f(r, h) → per chunk of rows a partial sum over h, then the sum over chunks.

    Rows stream through contiguously; the chunk is fixed, so the order of additions does not
    depend on the number of threads.
    """

    name = "columns"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        node = group.head.expr
        if not isinstance(node, forms.Reduce):
            return Rejection("needs a reduction")
        return first_rejection(
            check(len(group.stages) == 1, "needs one stage"),
            check(bool(group.head.axes), "needs a kept axis"),
            check(bool(set(group.head.axes) & innermost(node.body)), "needs a kept axis innermost"),
        )

    def default(self, group: Group, caps: Capability) -> ColumnsConfig:
        return ColumnsConfig()

    def space(self, group: Group, caps: Capability) -> Iterator[ColumnsConfig]:
        for chunk in (64, 16, 256):
            yield ColumnsConfig(chunk)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: ColumnsConfig) -> Any:
        from tvm import tirx

        (stage,) = group.stages
        node = stage.expr
        assert isinstance(node, forms.Reduce)
        body, first = masked(node), node.over[0]
        rows = emitter.size(first.extent)
        chunks = (rows + config.chunk - 1) // config.chunk
        fold = reducer(node.op, node.dtype)
        inner = emitter.reduce_axis(first, emitter.index(config.chunk))
        others = [emitter.reduce_axis(a) for a in node.over[1:]]

        def part(chunk: Any, *index: Any) -> Any:
            row = chunk * config.chunk + inner
            bound = {first: row} | dict(zip(node.over[1:], others, strict=True))
            value = emitter.at(body, stage.axes, index, bound)
            guarded = tirx.if_then_else(row < rows, value, identity(node.op, node.dtype))
            return fold(guarded, axis=[inner, *others])

        partial = emitter.compute(
            [chunks, *(emitter.size(e) for e in stage.shape)], part, f"{stage.name}_partial"
        )
        chunk = emitter.reduce_axis(first, chunks)
        made = emitter.define(stage, lambda *i: fold(partial(chunk, *i), axis=chunk))
        emitter.publish(stage, made)
        parts = binary("floordiv", as_expr(first.extent, i64) + (config.chunk - 1), config.chunk)
        emitter.keep_in_workspace(partial, "partial", [parts, *stage.shape], node.dtype)
        sch = emitter.schedule()
        lanes = caps.lanes()
        block = sch.get_sblock(partial.op.name)
        outer, *kept = sch.get_loops(block)[: 1 + len(stage.axes)]
        reduced = sch.get_loops(block)[1 + len(stage.axes) :]
        sch.reorder(outer, *reduced, *kept)
        sch.parallel(outer)
        vectorize(sch, kept[-1], lanes, 2)
        sch.decompose_reduction(block, reduced[0])
        block = sch.get_sblock(made.op.name)
        *kept, summed = sch.get_loops(block)
        wide, lane = sch.split(kept[-1], [None, 4 * lanes])
        sch.reorder(wide, summed, lane)
        sch.parallel(fuse_all(sch, [*kept[:-1], wide]))
        vectorize(sch, lane, lanes, 4)
        sch.decompose_reduction(block, summed)
        return sch
