"""Row reductions with the pointwise work around them: all passes over a row in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import i64
from ...dsl.expr import Axis, Size, Stage, as_expr, binary
from ..capability import Capability
from ..emit import Emitter, combine
from ..group import Group
from ..nest import static
from ..rule import Config, Rejection, check, first_rejection
from .nest import GridNest, block_size
from .passes import Pass, Scalars, kept_axis, own_axes, row_rejection, steps_of
from .row import Held, Row, Strided

Tir = Any
_REGISTERS = 64 * 1024  # of a multiprocessor, shared by the threads of a block
_WORKING = 40  # registers of a thread for anything but elements of its row
_FEW_ROWS = 32  # fewer do not fill a device with a block each
_LONG = 32 * 1024  # elements of a row that several blocks share
_MOST_PARTS = 256


@dataclass(frozen=True)
class RowsConfig(Config):
    """`threads` of a block at least; each is to have `elements` of a row."""

    threads: int = 128
    elements: int = 16


class Rows:
    """A block for a row, or for several short ones; threads keep what they read in registers.

    `for rows: {for h: …; for h: …}` → `blocks of rows: threads over h, pass by pass`.
    The order of operations depends on the sizes and the configuration alone.
    """

    name = "rows"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        head = group.head
        return first_rejection(
            check(isinstance(head.expr, forms.Reduce), "needs a reduction"),
            check(all(kept_axis(s) is None for s in group.stages),
                  "needs the reduced axis innermost in memory"),
            row_rejection(group.stages, head.axes),
            check(len(group.stages) == 1 or not _few_and_long(head),
                  f"needs {_FEW_ROWS} rows or more, or elements no more than {_LONG}"),
        )  # fmt: skip

    def default(self, group: Group, caps: Capability) -> RowsConfig:
        return RowsConfig()

    def space(self, group: Group, caps: Capability) -> Iterator[RowsConfig]:
        yield self.default(group, caps)
        for threads in (64, 128, 256, 512):
            for elements in (4, 8, 16, 32):
                if (threads, elements) != (128, 16):
                    yield RowsConfig(threads, elements)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: RowsConfig) -> Any:
        nest = GridNest(emitter, caps)
        reduce_rows(nest, group.stages, group.outputs, group.head.axes, config)
        return nest.finish()


def _elements(stage: Stage) -> int | None:
    """Elements of a row that a reduction goes over, if known."""
    total = 1
    for axis in own_axes(stage, len(stage.axes)):
        known = axis.extent if isinstance(axis.extent, int) else None
        if known is None:
            return None
        total *= known
    return total


def _few_and_long(stage: Stage) -> bool:
    rows = 1
    for extent in stage.shape:
        if not isinstance(extent, int):
            return False
        rows *= extent
    elements = _elements(stage)
    return rows < _FEW_ROWS and (elements is None or elements > _LONG)


def reduce_rows(
    nest: GridNest, stages: Sequence[Stage], outputs: Sequence[Stage], rows: tuple[Axis, ...],
    config: RowsConfig,
) -> None:  # fmt: skip
    """The launches that compute stages row by row; a long row of one reduction by many blocks."""
    if len(stages) == 1:
        elements = _elements(stages[0])
        if elements is None or elements > _LONG:
            _split(nest, stages[0], config)
            return
    steps = steps_of(stages, outputs, len(rows))
    passes = [s for s in steps if isinstance(s, Pass)]
    spaces = {id(p.space): p.space for p in passes}
    held = {
        key: Held(nest, space, [p for p in passes if p.space is space])
        for key, space in spaces.items()
    }
    width, keep = _width(nest, list(held.values()), config)
    threads = max(width, block_size(nest.caps, config.threads)) if keep else width
    with _launch(nest, rows, outputs, width, threads) as row:
        for step in steps:
            if isinstance(step, Scalars):
                row.scalars(step)
            elif keep:
                held[id(step.space)].run(row, step)
            else:
                Strided(row, step).run()


def _width(nest: GridNest, held: Sequence[Held], config: RowsConfig) -> tuple[int, bool]:
    """Threads a row, and whether they keep its elements in registers."""
    most = block_size(nest.caps, 1024)
    if any(h.total is None for h in held):
        return min(most, 256), False
    width = 1
    for space in held:
        assert space.total is not None
        # One element at a time, neighbours in memory go to neighbouring threads of a subgroup.
        wanted = config.elements // space.lanes if space.lanes > 1 else 4
        need = _power(-(-space.total // max(1, wanted)))
        if space.lanes == 1 and need > nest.caps.subgroup:
            need = max(nest.caps.subgroup, _power(-(-space.total // config.elements)))
        width = max(width, min(need, most))
    registers = min(nest.caps.registers or 255, _REGISTERS // width)
    words = sum(h.words(width) or 0 for h in held)
    short = all(h.elements(width) <= 2 * config.elements for h in held)
    if short and words + _WORKING <= registers:
        return width, True
    return min(most, 512, _power(max(h.total or 1 for h in held))), False


def _power(least: int) -> int:
    """The power of two that is `least` or the next one above."""
    return 1 << max(0, least - 1).bit_length()


@contextmanager
def _launch(
    nest: GridNest, rows: tuple[Axis, ...], outputs: Sequence[Stage], width: int, threads: int
) -> Iterator[Row]:
    """A launch of all rows, `width` threads each."""
    from tvm import tirx

    extents = [nest.emitter.size(a.extent) for a in rows]
    total = nest.simple(nest.product(extents))
    per_block = threads // width
    with nest.launch(nest.ceil_div(total, per_block), threads) as (block, thread):
        row, exists = block, None
        at = nest.opaque("at", thread % nest.number(width))
        if per_block > 1:
            row = block * nest.number(per_block) + thread // nest.number(width)
            known = static(total)
            if known is None or known % per_block:
                # All threads of a block meet in reductions: those without a row repeat the last.
                exists = row < total
                row = tirx.min(row, total - nest.number(1))
        yield Row(nest, _indices(nest, row, rows, extents), at, width, exists, outputs)


def _indices(nest: GridNest, row: Tir, rows: tuple[Axis, ...], extents: list[Tir]) -> Any:
    index = nest.unflatten(row, extents)
    return {a: nest.hidden(a.name, i) for a, i in zip(rows, index, strict=True)}


def _split(nest: GridNest, stage: Stage, config: RowsConfig) -> None:
    """A row of one reduction by several blocks, whose parts a second launch folds.

    `out[r] = ⊕ f(r, h)` → `parts[r, c] = ⊕ f(r, chunk c)`, `out[r] = ⊕ parts[r, c]`
    """
    from tvm import tirx

    node = stage.expr
    assert isinstance(node, forms.Reduce)
    (step,) = (s for s in steps_of([stage], [stage], len(stage.axes)) if isinstance(s, Pass))
    width = block_size(nest.caps, 256)
    lanes = Held(nest, step.space, [step]).lanes
    total: Size = _ceil(step.space.extents[-1], lanes)
    for extent in step.space.extents[:-1]:
        total = binary("mul", as_expr(extent, i64), total)
    least = width * max(1, config.elements // lanes)
    chunk = binary("max", as_expr(least, i64), _ceil(total, _MOST_PARTS))
    count = _ceil(total, chunk)
    parts = nest.workspace(f"{stage.name}_parts", [*stage.shape, count], node.dtype)
    size, chunks = nest.emitter.size(chunk), nest.emitter.size(count)
    extents = [nest.emitter.size(e) for e in stage.shape]
    blocks = nest.simple(nest.product(extents) * chunks)
    with nest.launch(blocks, width) as (block, thread):
        *outer, part = nest.unflatten(block, [nest.product(extents), chunks])
        env = _indices(nest, outer[0], stage.axes, extents)
        row = Row(nest, env, thread, width, None, [])
        part = nest.hidden("part", part)
        first = nest.hidden("first", part * size)
        walk = Strided(row, step)
        walk.run(first, nest.hidden("end", tirx.min(first + size, walk.total)))
        with nest.when(thread.equal(nest.number(0))):
            value = nest.emitter.lowering.readers[id(stage)]()
            nest.store(parts, [*(env[a] for a in stage.axes), part], value)
    width = block_size(nest.caps, 32)
    with _launch(nest, stage.axes, [stage], width, width) as row:
        row.start([stage])
        cell = row.sums[stage]
        with nest.loop("step", nest.ceil_div(chunks, width)) as i:
            part = nest.hidden("part", i * nest.number(width) + row.at)
            with nest.when(part < chunks):
                value = parts[(*(row.env[a] for a in stage.axes), part)]
                nest.store(cell, [], combine(node.op, cell[nest.number(0)], value))
        row.finish([stage])


def _ceil(value: Size, by: Size) -> Size:
    above = binary("add", as_expr(value, i64), binary("sub", as_expr(by, i64), 1))
    return binary("floordiv", above, by)
