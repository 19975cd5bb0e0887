"""Recurrences whose state a block of threads shares: every loop of a step is dealt out to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import DType, i64
from ...dsl.expr import Axis, Read, Size, as_expr, binary
from ...dsl.lower import storage
from ..capability import Capability
from ..emit import Emitter, identity, masked
from ..group import Group
from ..nest import static
from ..recurrence import Held, Recurrence, carrying
from .nest import GridNest

Tir = Any


class Together(Recurrence):
    """One lowering: a block for each `tile` columns of the state, with barriers between loops."""

    def __init__(
        self, emitter: Emitter, group: Group, caps: Capability, threads: int, tile: int
    ) -> None:
        self.grid = GridNest(emitter, caps)
        super().__init__(self.grid, group)
        self.threads, self.tile = threads, tile
        self.room = caps.shared_bytes // 2  # the other half is for what reductions exchange

    def build(self) -> Any:
        nest = self.grid
        extents = [self.size(a.extent) for a in self.outer]
        self.columns = self.start = nest.number(0)
        if self.column is not None:
            self.columns = self.size(self.column.extent)
            extents.append(nest.ceil_div(self.columns, self.tile))
        with nest.launch(nest.simple(nest.product(extents)), self.threads) as (block, _):
            self.block = block
            index = nest.unflatten(block, extents)
            for axis, value in zip(self.outer, index, strict=False):
                self.env[axis] = nest.opaque(axis.name, value)
            if self.column is not None:
                self.start = nest.opaque("start", index[-1] * nest.number(self.tile))
            self.run()
        return nest.finish()

    def _extent(self, axis: Axis) -> Tir:
        return self.nest.number(self.tile) if axis is self.column else self.size(axis.extent)

    def hold(self, name: str, axes: Sequence[Axis], dtype: DType) -> Held:
        """Shared memory, or the workspace where it is large."""
        shape = [self._extent(a) for a in axes]
        count = static(self.nest.simple(self.nest.product(shape)))
        shift = [self.start if a is self.column else None for a in axes]
        if count is not None and count * 4 <= self.room:
            self.room -= count * 4
            buffer, first = self.grid.shared(name, shape, storage(dtype)), []
        else:
            sizes = [self.tile if a is self.column else a.extent for a in axes]
            buffer = self.nest.workspace(name, [self._blocks(), *sizes], dtype)
            first = [self.block]

        def places(index: Sequence[Tir]) -> list[Tir]:
            moved = [i if s is None else i - s for i, s in zip(index, shift, strict=True)]
            return [*first, *moved] or [self.nest.number(0)]

        return Held(buffer, tuple(axes), places)

    def _blocks(self) -> Size:
        """How many blocks are launched."""
        total: Size = 1
        for axis in self.outer:
            total = binary("mul", as_expr(axis.extent, i64), total)
        if self.column is None:
            return total
        more = binary("add", as_expr(self.column.extent, i64), self.tile - 1)
        return binary("mul", binary("floordiv", more, self.tile), total)

    def sync(self) -> None:
        self.grid.barrier()

    def each(
        self, axes: Sequence[Axis], body: Callable[[dict[Axis, Any]], None],
        over: Sequence[Axis] = (), once: bool = False,
    ) -> None:  # fmt: skip
        """The elements are dealt out to the threads; the loops over `over` are each thread's."""
        nest = self.nest
        inner = [a for a in axes if a not in self.env and a is not self.column]
        inner += [a for a in axes if a is self.column]  # neighbours side by side
        extents = [self._extent(a) for a in inner]
        count = nest.opaque("count", nest.product(extents))
        with nest.loop("deal", self.grid.ceil_div(count, self.threads)) as turn:
            item = nest.bind("item", turn * nest.number(self.threads) + self.grid.thread)
            with nest.when(item < count):
                self._element(inner, nest.unflatten(item, extents), over, body)

    def _element(
        self, axes: Sequence[Axis], index: Sequence[Tir], over: Sequence[Axis],
        body: Callable[[dict[Axis, Any]], None],
    ) -> None:  # fmt: skip
        """`body` at one element of `axes`, if its column exists, inside loops over `over`."""
        nest, env = self.nest, dict(self.env)
        with ExitStack() as stack:
            for axis, value in zip(axes, index, strict=True):
                env[axis] = nest.bind(axis.name, value)
                if axis is self.column:
                    env[axis] = nest.bind(axis.name, self.start + value)
                    stack.enter_context(nest.when(env[axis] < self.columns))
            for axis in over:
                env[axis] = stack.enter_context(nest.loop(axis.name, self.size(axis.extent)))
            body(env)

    def reduce(self, node: forms.Reduce) -> Read:
        """A reduction to few results is shared by threads too."""
        axes = self.kept_axes(node)
        if not axes:
            return self._to_one(node)
        count = static(self.nest.simple(self.nest.product([self._extent(a) for a in axes])))
        lanes = 1
        while count is not None and lanes < count:
            lanes *= 2
        if count is None or 2 * lanes > self.threads:
            return super().reduce(node)
        return self._to_few(node, axes, count, lanes)

    def _fold(self, node: forms.Reduce, cell: Tir, env: dict[Axis, Any], part: Tir,
              parts: int) -> None:  # fmt: skip
        """Every `parts`-th element from `part` on, folded into `cell`."""
        nest, zero = self.nest, self.nest.number(0)
        extents = [nest.opaque(a.name, self.size(a.extent)) for a in node.over]
        total = nest.opaque("total", nest.product(extents))
        with nest.loop("fold", self.grid.ceil_div(total, parts)) as turn:
            item = nest.bind("item", turn * nest.number(parts) + part)
            with nest.when(item < total):
                index = nest.unflatten(item, extents)
                inside = env | dict(zip(node.over, index, strict=True))
                value = self.lower(masked(node), inside)
                nest.store(cell, [zero], carrying(node, cell[zero], value))

    def _cell(self, node: forms.Reduce) -> Tir:
        cell = self.nest.private("mine", [], storage(node.dtype))
        self.nest.store(cell, [self.nest.number(0)], identity(node.op, node.dtype))
        return cell

    def _to_one(self, node: forms.Reduce) -> Read:
        """All threads fold, and all know the result."""
        from tvm import tirx

        nest, zero = self.grid, self.nest.number(0)
        cell = self._cell(node)
        self._fold(node, cell, self.env, nest.thread, self.threads)
        mine = cell[zero]
        if node.op in ("max", "min") and node.dtype.is_float:
            lost = tirx.isnan(mine)
            yes, no = tirx.const(1.0, "float32"), tirx.const(0.0, "float32")
            any_lost = nest.reduce("max", tirx.Select(lost, yes, no), self.threads)
            least = tirx.Select(lost, identity(node.op, node.dtype), mine)
            found = nest.reduce(node.op, least, self.threads)
            nan = tirx.const(float("nan"), str(found.ty.dtype))
            result = nest.bind("result", tirx.Select(any_lost > no, nan, found))
        else:
            result = nest.reduce(node.op, mine, self.threads)
        return self.stand_in(node.op, (), node.dtype, lambda: result)

    def _to_few(self, node: forms.Reduce, axes: tuple[Axis, ...], count: int, lanes: int) -> Read:
        """`lanes` threads beside each other take an element each, the others shares of it."""
        nest = self.nest
        parts = self.threads // lanes
        cells = self.grid.shared("shares", [nest.number(parts), nest.number(lanes)],
                                 storage(node.dtype))  # fmt: skip
        part = nest.bind("share", self.grid.thread // nest.number(lanes))
        lane = nest.bind("lane", self.grid.thread % nest.number(lanes))
        cell = self._cell(node)
        with nest.when(lane < nest.number(count)):
            index = nest.unflatten(lane, [self._extent(a) for a in axes])
            self._element(axes, index, (), lambda env: self._fold(node, cell, env, part, parts))
        nest.store(cells, [part, lane], cell[nest.number(0)])
        self.sync()
        held = self.hold(node.op, axes, node.dtype)

        def total(env: dict[Axis, Any]) -> None:
            place: Tir = nest.number(0)
            for axis in axes:
                shift = self.start if axis is self.column else nest.number(0)
                place = place * self._extent(axis) + env[axis] - shift
            found: Tir = cells[nest.number(0), place]
            for i in range(1, parts):
                found = carrying(node, nest.bind("found", found), cells[nest.number(i), place])
            self.put(held, env, found)

        self.each(axes, total)
        self.sync()
        return self.stand_in(node.op, axes, node.dtype, held.read)
