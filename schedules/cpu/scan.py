"""Recurrences: the steps in order, the independent ones beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import DType
from ...dsl.expr import Axis
from ...dsl.lower import storage
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..nest import static
from ..recurrence import Held, Recurrence, column_of, rejection
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
    is vectorised. Reductions inside a step become small vectors computed before it, so a step
    that reads the state elsewhere through them alone is done in place.
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
        return ScanConfig(tile)

    def space(self, group: Group, caps: Capability) -> Iterator[ScanConfig]:
        first = self.default(group, caps)
        yield first
        for tile in (16, 32, 64, 128, 256, 512, 1024):
            if tile != first.tile:
                yield ScanConfig(tile)

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
        self.start: Any = None
        self.width: Any = None
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
            self.run()
        return nest.finish()

    def hold(self, name: str, axes: Sequence[Axis], dtype: DType) -> Held:
        """A private buffer, which has one tile of the column axis only."""
        shape = [self.nest.number(self.tile) if a is self.column else self.size(a.extent)
                 for a in axes]  # fmt: skip
        shift = [self.start if a is self.column else None for a in axes]

        def places(index: Sequence[Any]) -> list[Any]:
            moved = [i if s is None else i - s for i, s in zip(index, shift, strict=True)]
            return moved or [self.nest.number(0)]

        return Held(self.nest.private(name, shape, storage(dtype)), tuple(axes), places)

    def sync(self) -> None:
        """A task works alone."""

    def each(
        self, axes: Sequence[Axis], body: Callable[[dict[Axis, Any]], None],
        over: Sequence[Axis] = (),
    ) -> None:  # fmt: skip
        """Loops over `axes`, the column axis last and by vectors, `over` outside each of these."""
        nest = self.nest
        env = dict(self.env)
        tiled = any(a is self.column for a in axes)

        def serial(rest: Sequence[Axis], then: Callable[[], None]) -> None:
            if not rest:
                then()
                return
            with nest.loop(rest[0].name, self.size(rest[0].extent)) as var:
                env[rest[0]] = var
                serial(rest[1:], then)

        def one(j: Any) -> None:
            env[self.column] = self.start + j  # type: ignore[index]
            body(env)

        def innermost() -> None:
            if tiled:
                self.tasks.lanes(self.width, self.vector, self.unroll, one,
                           lambda then: serial(over, then))  # fmt: skip
            else:
                serial(over, lambda: body(env))

        serial([a for a in axes if a is not self.column], innermost)
