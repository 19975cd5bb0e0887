"""Recurrences: the steps in order, the independent ones beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import DType, f32, i64
from ...dsl.expr import Axis, Expr, Read, Size, as_expr, binary
from ...dsl.lower import constant, storage
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..margins import margins
from ..nest import static
from ..recurrence import Held, Recurrence, column_of, functions_nested, rejection
from ..rule import Config, Rejection
from .direct import CoreNest


@dataclass(frozen=True)
class ScanConfig(Config):
    """`tile` elements of the state's independent axis a task; `unroll` vectors at a time."""

    tile: int = 2048
    unroll: int = 4


class Scan:
    """`parallel rows, tiles: state ← init; for t: state ← step(state); result[t] ← emit(state)`.

    A tile is a range of an axis along which the state's elements do not depend on each other; it
    is vectorised. Without such an axis a task has all of the state, vectorised along its last. A
    state of dynamic size is in the workspace. Reductions inside a step become small vectors
    computed before it, so a step that reads the state elsewhere through them alone is done in
    place.
    """

    name = "scan"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return rejection(group)

    def default(self, group: Group, caps: Capability) -> ScanConfig:
        """A tile of the state that fills the first-level cache, at most 2048 wide."""
        head = group.stages[0].expr
        assert isinstance(head, forms.Scan)
        column = column_of(group)
        rest = 1
        for axis in head.axes:
            if axis is not column and isinstance(axis.extent, int):
                rest *= axis.extent
        tile = ScanConfig().tile
        while tile > caps.lanes() and tile * rest * 4 > caps.l1_bytes:
            tile //= 2
        if any(functions_nested(e) for e in (head.init, head.step, head.emit)):
            return ScanConfig(tile, 1)  # enough to do for one vector
        return ScanConfig(tile)

    def space(self, group: Group, caps: Capability) -> Iterator[ScanConfig]:
        first = self.default(group, caps)
        yield first
        for tile in (16, 32, 64, 128, 256, 512, 1024):
            if tile != first.tile:
                yield replace(first, tile=tile)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: ScanConfig) -> Any:
        return _Tiles(emitter, group, caps, config).build()


class _Tiles(Recurrence):
    """One lowering of a recurrence: each task a tile of the column axis."""

    def __init__(
        self, emitter: Emitter, group: Group, caps: Capability, config: ScanConfig
    ) -> None:
        self.tasks = CoreNest(emitter)
        super().__init__(self.tasks, group)
        self.vector, self.unroll, self.cores = caps.lanes(), config.unroll, caps.cores
        self.start: Any = self.nest.number(0)
        self.width: Any = None
        axes = self.scan.axes
        last = axes[-1] if axes else None
        self.along = last if self.column is None else self.column
        emitted = [s.expr.emit for s in self.stages if isinstance(s.expr, forms.Scan)]
        states = (self.scan.state, self.scan.after)
        self.margins = margins([self.scan.step, *emitted], states, axes)
        if self.column is not None:
            extent = self.size(self.column.extent)
            self.tile = min(static(extent) or config.tile, config.tile)

    def build(self) -> Any:
        from tvm import tirx

        nest = self.tasks
        extents = [self.size(a.extent) for a in self.outer]
        if self.column is not None:
            columns, rows = self.size(self.column.extent), nest.product(extents)
            ranges, tile = nest.columns(columns, rows, self.tile, self.cores)
            extents.append(ranges)
        with nest.loop("task", nest.product(extents), "parallel") as task:
            index = nest.unflatten(task, extents)
            for axis, value in zip(self.outer, index, strict=False):
                self.env[axis] = nest.opaque(axis.name, value)
            if self.column is not None:
                self.start = nest.opaque("start", index[-1] * tile)
                count, width = static(columns), static(tile)
                exact = count is not None and width is not None and count % width == 0
                self.width = tile if exact else nest.opaque(
                    "width", tirx.min(tile, columns - self.start)
                )  # fmt: skip
            elif self.along is not None:
                self.width = nest.opaque("width", self.size(self.along.extent))
            self.run()
        return nest.finish()

    def hold(self, name: str, axes: Sequence[Axis], dtype: DType) -> Held:
        """A buffer of a task, with one tile of the column axis only."""
        return self._hold(name, axes, dtype, (0,) * len(axes), (0,) * len(axes))

    def _hold(
        self, name: str, axes: Sequence[Axis], dtype: DType, before: Sequence[int],
        after: Sequence[int],
    ) -> Held:  # fmt: skip
        """A buffer with so many elements before and after each axis: private, or where its size is
        dynamic, in the workspace and not cut in tiles."""
        nest = self.nest
        tiled = all(a is self.column or isinstance(a.extent, int) for a in axes)
        sizes: list[Size] = [self.tile if tiled and a is self.column else a.extent for a in axes]
        whole = [binary("add", as_expr(s, i64), b + e)
                 for s, b, e in zip(sizes, before, after, strict=True)]  # fmt: skip
        first: list[Any] = []
        if tiled:
            buffer = nest.private(name, [self.size(w) for w in whole], storage(dtype))
        else:
            buffer = nest.workspace(name, [*(a.extent for a in self.outer), *whole], dtype)
            first = [self.env[a] for a in self.outer]

        def places(index: Sequence[Any]) -> list[Any]:
            moved = [
                (i - self.start if tiled and a is self.column else i) + nest.number(b)
                for i, a, b in zip(index, axes, before, strict=True)
            ]
            return [*first, *moved] or [nest.number(0)]

        return Held(buffer, tuple(axes), places)

    def hold_state(self) -> Held:
        """The state, all of it and its margins set to what reads past its edges give."""
        if self.margins is None:
            return super().hold_state()
        before, after, fill = self.margins.before, self.margins.after, self.margins.fill
        held = self._hold("state", self.scan.axes, f32, before, after)
        sizes = [self.size(a.extent) + self.nest.number(b + e)
                 for a, b, e in zip(self.scan.axes, before, after, strict=True)]  # fmt: skip

        def set_all(rest: Sequence[Any], at: list[Any]) -> None:
            if not rest:
                place = held.places([i - b for i, b in zip(at, before, strict=True)])
                self.nest.store(held.buffer, place, constant(fill, f32))
                return
            with self.nest.loop("margin", rest[0]) as var:
                set_all(rest[1:], [*at, var])

        set_all(sizes, [])
        return held

    def plain(self, node: Read) -> Expr:
        return node if self.margins is None else replace(node, fill=None)

    def sync(self) -> None:
        """A task works alone."""

    def each(
        self, axes: Sequence[Axis], body: Callable[[dict[Axis, Any]], None],
        over: Sequence[Axis] = (), once: bool = False,
    ) -> None:  # fmt: skip
        """Loops over `axes`, one of them last and by vectors, `over` outside each of these."""
        nest = self.nest
        env = dict(self.env)
        wide = any(a is self.along for a in axes)

        def serial(rest: Sequence[Axis], then: Callable[[], None]) -> None:
            if not rest:
                then()
                return
            with nest.loop(rest[0].name, self.size(rest[0].extent)) as var:
                env[rest[0]] = var
                serial(rest[1:], then)

        def one(j: Any) -> None:
            env[self.along] = self.start + j  # type: ignore[index]
            body(env)

        def innermost() -> None:
            if wide:
                self.tasks.lanes(self.width, self.vector, self.unroll, one,
                                 lambda then: serial(over, then), twice=not once)  # fmt: skip
            else:
                serial(over, lambda: body(env))

        serial([a for a in axes if a is not self.along], innermost)
