"""Recurrences on grids: the steps in order, independent parts of the state side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import DType
from ...dsl.expr import Axis, Expr, Read
from ...dsl.lower import storage
from ...dsl.walk import free_axes, walk
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..recurrence import Held, Recurrence, column_of, rejection
from ..rule import Config, Rejection
from .nest import GridNest, block_size

Tir = Any
LONGEST = 128  # loops up to this many rounds are written out
MOST_ROUNDS = 1024  # of all loops of a step, written out
FEW = 8  # elements of a state that one thread computes although they depend on each other


@dataclass(frozen=True)
class ScanConfig(Config):
    """`threads` a block. With `alone` each thread has a column of the state in its registers,

    else a block has `tile` columns in shared memory.
    """

    threads: int = 128
    alone: bool = True
    tile: int = 32


class Scan:
    """`for parts: state ← init; for t: state ← step(state); result[t] ← emit(state)`.

    Along one axis the state's elements do not depend on each other: a part is one such column, in
    registers, or where the state is not of that kind or too large, a block's share of them. What
    does not fit in shared memory is in the workspace.
    """

    name = "scan"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return rejection(group)

    def default(self, group: Group, caps: Capability) -> ScanConfig:
        threads = block_size(caps, 128)
        if _fits_registers(group, caps):
            return ScanConfig(threads)
        head = group.stages[0].expr
        assert isinstance(head, forms.Scan)
        column = column_of(group)
        rest = _count([a for a in head.axes if a is not column])
        tile = 1
        if column is not None:
            extent = column.extent if isinstance(column.extent, int) else threads
            while tile < min(extent, 32) and 4 * 2 * tile * rest * 4 <= caps.shared_bytes:
                tile *= 2
        return ScanConfig(threads, False, tile)

    def space(self, group: Group, caps: Capability) -> Iterator[ScanConfig]:
        first = self.default(group, caps)
        yield first
        for threads in (32, 64, 256):
            if threads <= caps.max_threads:
                yield ScanConfig(threads, first.alone, first.tile)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: ScanConfig) -> Any:
        if config.alone:
            return _Alone(emitter, group, caps, config).build()
        from .scan_blocks import Together

        return Together(emitter, group, caps, config.threads, config.tile).build()


def _count(axes: Sequence[Axis]) -> int:
    total = 1
    for axis in axes:
        total *= axis.extent if isinstance(axis.extent, int) else 1
    return total


def _short(axis: Axis) -> bool:
    return isinstance(axis.extent, int) and axis.extent <= LONGEST


def _fits_registers(group: Group, caps: Capability) -> bool:
    """Whether one thread can hold a column of the state, each index into it known."""
    scan = group.stages[0].expr
    assert isinstance(scan, forms.Scan)
    column = column_of(group)
    rest = [a for a in scan.axes if a is not column]
    # Of a thread's registers the state takes a quarter: addresses and sums need the rest.
    limit = FEW if column is None else max(32, (caps.registers + 1) // 4)
    state = _count(rest)
    nodes: list[Expr] = [scan.init, scan.step, *(s.expr.emit for s in group.stages
                                                 if isinstance(s.expr, forms.Scan))]  # fmt: skip
    fixed = [a for a in free_axes(scan) if a not in rest]
    rounds = 3 * state
    for node in nodes:
        for item in walk(node):
            if isinstance(item, forms.Reduce):
                kept = [a for a in free_axes(item) if a not in fixed and a is not scan.along]
                if not all(map(_short, kept)) or _count(kept) > limit:
                    return False
                rounds += _count(kept) * _count([a for a in item.over if _short(a)])
            if isinstance(item, Read) and item.tensor in (scan.state, scan.after):
                for index in item.index:
                    inner = [a for a in free_axes(index) if a is not column]
                    if not all(map(_short, inner)) or any(isinstance(n, Read) for n in walk(index)):
                        return False
    return state <= limit and all(map(_short, rest)) and rounds <= MOST_ROUNDS


class _Alone(Recurrence):
    """One lowering: a thread for each column, and nothing shared between threads."""

    def __init__(
        self, emitter: Emitter, group: Group, caps: Capability, config: ScanConfig
    ) -> None:
        self.grid = GridNest(emitter, caps)
        super().__init__(self.grid, group)
        self.threads = config.threads

    def build(self) -> Any:
        nest = self.grid
        fixed = [*self.outer, *([] if self.column is None else [self.column])]
        extents = [self.size(a.extent) for a in fixed]
        total = nest.simple(nest.product(extents))
        with nest.launch(nest.ceil_div(total, self.threads), self.threads) as (block, thread):
            item = nest.opaque("item", block * nest.number(self.threads) + thread)
            with nest.when(item < total):
                for axis, value in zip(fixed, nest.unflatten(item, extents), strict=True):
                    self.env[axis] = nest.opaque(axis.name, value)
                self.run()
        return nest.finish()

    def hold(self, name: str, axes: Sequence[Axis], dtype: DType) -> Held:
        """Registers; the column axis is fixed."""
        kept = [i for i, a in enumerate(axes) if a is not self.column]
        shape = [self.size(axes[i].extent) for i in kept]

        def places(index: Sequence[Tir]) -> list[Tir]:
            return [index[i] for i in kept] or [self.nest.number(0)]

        return Held(self.nest.private(name, shape, storage(dtype)), tuple(axes), places)

    def sync(self) -> None:
        """A thread works alone."""

    def each(
        self, axes: Sequence[Axis], body: Callable[[dict[Axis, Any]], None],
        over: Sequence[Axis] = (), once: bool = False,
    ) -> None:  # fmt: skip
        """Loops in registers are written out."""

        def open_loops(rest: Sequence[Axis], env: dict[Axis, Any]) -> None:
            if not rest:
                body(env)
                return
            kind = "unroll" if _short(rest[0]) else "serial"
            with self.nest.loop(rest[0].name, self.size(rest[0].extent), kind) as var:
                open_loops(rest[1:], env | {rest[0]: var})

        open_loops([a for a in (*axes, *over) if a not in self.env], dict(self.env))
