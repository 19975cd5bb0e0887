"""Reductions across rows: sums over outer axes, kept axes contiguous (gradients of weights)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import i64
from ...dsl.expr import Axis, Size, Stage, as_expr, binary
from ...dsl.lower import encode, storage
from ..capability import Capability
from ..emit import Emitter, combine, identity, masked
from ..group import Group
from ..nest import static
from ..rule import Config, Rejection, check, first_rejection
from .nest import GridNest, block_size
from .passes import kept_axis
from .vectors import Vectors

Tir = Any
_BLOCKS = 1024  # enough for any device
_MOST_CHUNKS = 512
_UNROLL = 4  # rows whose elements are on their way at the same time


@dataclass(frozen=True)
class ColumnsConfig(Config):
    """`threads` of a block, up to `across` of them side by side; each sums `rows` rows or more."""

    threads: int = 256
    across: int = 32
    rows: int = 8


class Columns:
    """Σ_r f(r, h) → blocks over columns h and chunks of rows r, then the sum over chunks.

    Neighbouring threads read neighbouring columns. The order of additions depends on the sizes
    and the configuration alone.
    """

    name = "columns"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return first_rejection(
            check(len(group.stages) == 1, "needs one stage"),
            check(isinstance(group.head.expr, forms.Reduce), "needs a reduction"),
            check(kept_axis(group.head) is not None, "needs a kept axis innermost"),
        )

    def default(self, group: Group, caps: Capability) -> ColumnsConfig:
        return ColumnsConfig(block_size(caps, 256))

    def space(self, group: Group, caps: Capability) -> Iterator[ColumnsConfig]:
        yield self.default(group, caps)
        for threads in (128, 256, 512):
            for across in (16, 32, 64):
                for rows in (8, 32):
                    if threads <= caps.max_threads:
                        yield ColumnsConfig(threads, across, rows)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: ColumnsConfig) -> Any:
        nest = GridNest(emitter, caps)
        reduce_columns(nest, group.head, config)
        return nest.finish()


@dataclass(frozen=True)
class _Shape:
    """How a launch goes over columns: `across` × `down` threads, `lanes` columns each.

    `outer` are the kept axes but the one that is `across`, `count` its vectors.
    """

    outer: tuple[Axis, ...]
    axis: Axis
    lanes: int
    across: int
    down: int
    count: Tir


def reduce_columns(nest: GridNest, stage: Stage, config: ColumnsConfig) -> None:
    """The launches that compute a reduction whose result is contiguous where its operand is."""
    node = stage.expr
    axis = kept_axis(stage)
    assert isinstance(node, forms.Reduce) and axis is not None
    vectors = Vectors(nest, axis, [masked(node)], [])
    if not isinstance(axis.extent, int) or axis.extent % vectors.lanes:
        vectors.narrow()
    shape = _shape(nest, stage, axis, vectors.lanes, config)
    rows: Size = 1
    for over in node.over:
        rows = binary("mul", as_expr(over.extent, i64), rows)
    least = shape.down * config.rows
    chunk = binary("max", as_expr(least, i64), _ceil(rows, _chunks(shape)))
    chunks = _ceil(rows, chunk)
    overs = [nest.emitter.size(a.extent) for a in node.over]

    def add(row: Tir, start: Tir, env: dict[Axis, Tir], take: Callable[[int, Tir], None]) -> None:
        index = zip(node.over, nest.unflatten(row, overs), strict=True)
        inside = env | {a: nest.hidden(a.name, i) for a, i in index} | {axis: start}
        lane = iter(range(shape.lanes))

        def body(here: Tir, _: Any) -> None:
            value = nest.emitter.lowering.expr(masked(node), inside | {axis: here})
            take(next(lane), encode(value, stage.dtype))

        vectors.run(start, inside, body)

    def store(column: Tir, env: dict[Axis, Tir], value: Tir) -> None:
        here = env | {axis: column}
        nest.store(nest.targets[id(stage)], [here[a] for a in stage.axes], value)

    size, total = nest.emitter.size(chunk), nest.emitter.size(rows)
    if static(nest.emitter.size(chunks)) == 1:
        _launch(nest, stage, shape, nest.number(1), total, total, add,
                lambda _, column, env, value: store(column, env, value))  # fmt: skip
        return
    parts = nest.workspace(f"{stage.name}_parts", [chunks, *stage.shape], node.dtype)

    def keep(part: Tir, column: Tir, env: dict[Axis, Tir], value: Tir) -> None:
        here = env | {axis: column}
        nest.store(parts, [part, *(here[a] for a in stage.axes)], value)

    def fold(row: Tir, start: Tir, env: dict[Axis, Tir], take: Callable[[int, Tir], None]) -> None:
        here = env | {axis: start}
        take(0, parts[(row, *(here[a] for a in stage.axes))])

    count = nest.emitter.size(chunks)
    _launch(nest, stage, shape, count, size, total, add, keep)
    _launch(nest, stage, _shape(nest, stage, axis, 1, config), nest.number(1), count, count, fold,
            lambda _, column, env, value: store(column, env, value))  # fmt: skip


def _shape(nest: GridNest, stage: Stage, axis: Axis, lanes: int, config: ColumnsConfig) -> _Shape:
    count = nest.ceil_div(nest.emitter.size(axis.extent), lanes)
    known, across = static(count), 1
    while across < config.across and (known is None or across < known):
        across *= 2
    outer = tuple(a for a in stage.axes if a is not axis)
    return _Shape(outer, axis, lanes, across, config.threads // across, count)


def _chunks(shape: _Shape) -> int:
    """Into how many chunks many rows are cut: enough blocks, but no more partial sums."""
    known = static(shape.count)
    blocks = 1 if known is None else -(-known // shape.across)
    for axis in shape.outer:
        blocks *= axis.extent if isinstance(axis.extent, int) else 1
    return max(1, min(_MOST_CHUNKS, _BLOCKS // max(blocks, 1)))


def _ceil(value: Size, by: Size) -> Size:
    above = binary("add", as_expr(value, i64), binary("sub", as_expr(by, i64), 1))
    return binary("floordiv", above, by)


def _launch(
    nest: GridNest, stage: Stage, shape: _Shape, chunks: Tir, size: Tir, total: Tir,
    add: Callable[..., None], keep: Callable[..., None],
) -> None:  # fmt: skip
    """A launch that reduces each chunk of `size` of the `total` rows.

    `add(row, start, env, take)` calls `take(lane, value)` for the row's columns from `start`;
    `keep(chunk, column, env, value)` stores what they come to.
    """
    from tvm import tirx

    assert isinstance(stage.expr, forms.Reduce)
    op = stage.expr.op
    extents = [nest.emitter.size(a.extent) for a in shape.outer]
    across = nest.number(shape.across)
    blocks = nest.ceil_div(shape.count, shape.across)
    counts = [chunks, *extents, blocks]
    threads = shape.across * shape.down
    with nest.launch(nest.simple(nest.product(counts)), threads) as (block, thread):
        part, *outer, column = nest.unflatten(block, counts)
        part = nest.hidden("part", part)
        env = {a: nest.hidden(a.name, i) for a, i in zip(shape.outer, outer, strict=True)}
        x, y = nest.opaque("x", thread % across), nest.opaque("y", thread // across)
        vector = nest.hidden("vector", column * across + x)
        # All threads of a block meet at its barriers: those without a column repeat the last.
        start = tirx.min(vector, shape.count - nest.number(1)) * nest.number(shape.lanes)
        start = nest.opaque("start", start)
        sums = nest.private("sums", [nest.number(shape.lanes)], storage(stage.dtype))
        begin = nest.hidden("begin", part * size)
        end = nest.hidden("end", tirx.min(begin + size, total))

        def take(lane: int, value: Tir) -> None:
            cell = nest.number(lane)
            nest.store(sums, [cell], combine(op, sums[cell], value))

        for lane in range(shape.lanes):
            neutral = encode(identity(op, stage.dtype), stage.dtype)
            nest.store(sums, [nest.number(lane)], neutral)
        for row in _rows(nest, begin + y, end, shape.down):
            add(row, start, env, take)
        _fold_down(nest, op, sums, shape, x, y)
        with nest.when(tirx.all(y.equal(nest.number(0)), vector < shape.count)):
            for lane in range(shape.lanes):
                keep(part, start + nest.number(lane), env, sums[nest.number(lane)])


def _rows(nest: GridNest, first: Tir, end: Tir, step: int) -> Iterator[Tir]:
    """Loops over every `step`-th row from `first` to `end` − 1, some at a time."""
    from tvm import tirx

    count = nest.hidden("count", nest.ceil_div(end - first, step))
    many = nest.hidden("many", tirx.truncdiv(count, nest.number(_UNROLL)))
    with nest.loop("some", many) as i:
        for more in range(_UNROLL):
            place = i * nest.number(_UNROLL * step) + nest.number(more * step)
            yield nest.hidden("row", first + place)
    done = many * nest.number(_UNROLL)
    with nest.loop("rest", count - done) as i:
        yield nest.hidden("row", first + (done + i) * nest.number(step))


def _fold_down(nest: GridNest, op: str, sums: Tir, shape: _Shape, x: Tir, y: Tir) -> None:
    """The sums of the threads below each other, in the uppermost."""
    if shape.down == 1:
        return
    lanes = [nest.number(i) for i in range(shape.lanes)]
    cells = nest.shared("cells", [nest.number(shape.down * shape.lanes * shape.across)],
                        str(sums.dtype))  # fmt: skip

    def cell(row: Tir, lane: Tir) -> Tir:
        return (row * nest.number(shape.lanes) + lane) * nest.number(shape.across) + x

    for lane in lanes:
        nest.store(cells, [cell(y, lane)], sums[lane])
    nest.barrier()
    step = shape.down // 2
    while step:
        with nest.when(y < nest.number(step)):
            for lane in lanes:
                below = cells[cell(y + nest.number(step), lane)]
                nest.store(sums, [lane], combine(op, sums[lane], below))
                nest.store(cells, [cell(y, lane)], sums[lane])
        nest.barrier()
        step //= 2
