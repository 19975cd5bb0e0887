"""Recurrences: the steps in order, the independent ones beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import f32
from ...dsl.expr import Axis, Const, Expr, Form, Read, Stage, Tensor
from ...dsl.lower import storage
from ...dsl.walk import free_axes, rebuild, walk
from ..capability import Capability
from ..emit import Emitter, combine, identity, masked
from ..group import Group
from ..nest import static
from ..rule import Config, Rejection, check, first_rejection
from .direct import CoreNest

INLINE = ("sum", "prod", "max", "min")


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
        head = group.stages[0].expr
        if not isinstance(head, forms.Scan):
            return Rejection("needs a scan")
        nested = [n for e in (head.init, head.step, head.emit) for n in walk(e)
                  if isinstance(n, Form)]  # fmt: skip
        column = _column(group, head)
        return first_rejection(
            check(all(isinstance(s.expr, forms.Scan) and s.expr.state is head.state
                      for s in group.stages), "needs the results of one recurrence only"),
            check(all(isinstance(n, forms.Reduce) and n.op in INLINE for n in nested),
                  f"needs no form but {', '.join(INLINE)} in a step"),
            check(all(a is column or isinstance(a.extent, int) for a in head.axes),
                  "needs a state of static size, one independent axis apart"),
        )  # fmt: skip

    def default(self, group: Group, caps: Capability) -> ScanConfig:
        """A tile of the state that fills the first-level cache, at most 2048 wide."""
        head = group.stages[0].expr
        assert isinstance(head, forms.Scan)
        column = _column(group, head)
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
        return _Recurrence(emitter, group, caps, config).build()


def _bound(nodes: Sequence[Expr]) -> set[Axis]:
    return {a for e in nodes for n in walk(e) if isinstance(n, forms.Reduce) for a in n.over}


def _column(group: Group, scan: forms.Scan) -> Axis | None:
    """The last state axis along which the elements are independent, if there is one."""
    nodes = [scan.step, *(s.expr.emit for s in group.stages
                          if isinstance(s.expr, forms.Scan) and not s.expr.final)]  # fmt: skip
    reduced = _bound(nodes)
    found = None
    for place, axis in enumerate(scan.axes):
        own = all(
            n.index[place] is axis
            for e in nodes for n in walk(e)
            if isinstance(n, Read) and n.tensor in (scan.state, scan.after)
        )  # fmt: skip
        if own and axis not in reduced and all(axis in s.axes for s in group.stages):
            found = axis
    return found


class _Recurrence:
    """One lowering of a recurrence."""

    def __init__(
        self, emitter: Emitter, group: Group, caps: Capability, config: ScanConfig
    ) -> None:
        scan = group.stages[0].expr
        assert isinstance(scan, forms.Scan)
        self.nest, self.scan, self.stages = CoreNest(emitter), scan, group.stages
        self.lower = emitter.lowering.expr
        self.size = emitter.size
        self.vector, self.unroll, self.cores = caps.lanes(), config.unroll, caps.cores
        self.column = _column(group, scan)
        self.outer = tuple(a for a in free_axes(scan) if a is not scan.along and a not in scan.axes)
        self.env: dict[Axis, Any] = {}
        self.kept: list[Tensor] = []  # readers go by identity
        self.start: Any = None
        self.width: Any = None
        if self.column is not None:
            extent = self.size(self.column.extent)
            self.tile = min(static(extent) or config.tile, config.tile)

    def build(self) -> Any:
        from tvm import tirx

        nest, scan = self.nest, self.scan
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
            self._run(scan)
        return nest.finish()

    def _run(self, scan: forms.Scan) -> None:
        nest = self.nest
        state = self._hold("state", scan.axes)
        self._reader(scan.state, state, scan.axes)
        self._reader(scan.after, state, scan.axes)
        self._fill(state, scan.axes, scan.init)
        moved = any(
            not all(i is a for i, a in zip(n.index, scan.axes, strict=True))
            for n in walk(_without_reductions(scan.step))
            if isinstance(n, Read) and n.tensor is scan.state
        )
        following = self._hold("following", scan.axes) if moved else state
        emitted = [s for s in self.stages if isinstance(s.expr, forms.Scan) and not s.expr.final]
        with nest.loop("t", self.size(scan.along.extent)) as step:
            self.env[scan.along] = step
            self._fill(following, scan.axes, scan.step)
            if moved:
                self._each(scan.axes, lambda env: nest.store(
                    state, self._place(scan.axes, env),
                    following[tuple(self._place(scan.axes, env))],
                ))  # fmt: skip
            for stage in emitted:
                self._publish(stage, stage.expr.emit)  # type: ignore[attr-defined]
        del self.env[scan.along]
        for stage in self.stages:
            if stage not in emitted:
                self._publish(stage, Read(scan.after, scan.axes, None, scan.dtype))

    def _hold(self, name: str, axes: Sequence[Axis], dtype: str = "float32") -> Any:
        """A private buffer over `axes`, of which the column axis has one tile only."""
        shape = [self.nest.number(self.tile) if a is self.column else self.size(a.extent)
                 for a in axes]  # fmt: skip
        return self.nest.private(name, shape, dtype)

    def _reader(self, tensor: Tensor, buffer: Any, axes: Sequence[Axis]) -> None:
        shift = [self.start if a is self.column else None for a in axes]
        self.nest.reader(tensor, buffer, shift)

    def _place(self, axes: Sequence[Axis], env: dict[Axis, Any]) -> list[Any]:
        """Where the element at `axes` is in a private buffer."""
        return [env[a] - self.start if a is self.column else env[a] for a in axes]

    def _each(
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
                nest.lanes(self.width, self.vector, self.unroll, one,
                           lambda then: serial(over, then))  # fmt: skip
            else:
                serial(over, lambda: body(env))

        serial([a for a in axes if a is not self.column], innermost)

    def _fill(self, buffer: Any, axes: Sequence[Axis], node: Expr) -> None:
        """`buffer` over `axes` ← `node`."""
        plain = self._outline(node)
        self._each(axes, lambda env: self.nest.store(
            buffer, self._place(axes, env), self.lower(plain, env)
        ))  # fmt: skip

    def _publish(self, stage: Stage, node: Expr) -> None:
        """A result ← `node`."""
        plain = self._outline(node)
        inner = [a for a in stage.axes if a not in self.env]
        self._each(inner, lambda env: self.nest.write(
            stage, [env[a] for a in stage.axes], self.lower(plain, env)
        ))  # fmt: skip

    def _outline(self, node: Expr) -> Expr:
        """`node` with each reduction computed here into a buffer and read from it.

        What no inner loop changes is computed here too: an exponential of the step's decay
        would otherwise be part of every loop's body.
        """
        made: dict[int, Expr] = {}
        for item in walk(node):
            children = tuple(made[id(c)] for c in item.children())
            if not self._settled(item):
                old = item.children()
                children = tuple(self._settle(c) if self._settled(o) else c
                                 for o, c in zip(old, children, strict=True))  # fmt: skip
            fresh = rebuild(item, children) if children else item
            if isinstance(fresh, forms.Reduce):
                fresh = self._reduce(fresh)
            made[id(item)] = fresh
        return made[id(node)]

    def _settled(self, node: Expr) -> bool:
        """Whether `node` is one value at this point, whatever the state."""
        return all(a in self.env for a in free_axes(node)) and not any(
            isinstance(n, forms.Reduce)
            or (isinstance(n, Read) and n.tensor in (self.scan.state, self.scan.after))
            for n in walk(node)
        )

    def _settle(self, node: Expr) -> Expr:
        if node.dtype != f32 or isinstance(node, Const):
            return node
        value = self.nest.bind("settled", self.lower(node, self.env))
        stand_in = Tensor("settled", (), f32)
        self.nest.emitter.lowering.readers[id(stand_in)] = lambda: value
        self.kept.append(stand_in)
        return Read(stand_in, (), None, f32)

    def _reduce(self, node: forms.Reduce) -> Read:
        nest = self.nest
        axes = tuple(a for a in free_axes(node) if a not in self.env)
        held = self._hold(node.op, axes, storage(node.dtype))
        body = masked(node)
        self._each(axes, lambda env: nest.store(
            held, self._place(axes, env), identity(node.op, node.dtype)
        ))  # fmt: skip

        def fold(env: dict[Axis, Any]) -> None:
            place = self._place(axes, env)
            have = held[tuple(place)] if place else held[nest.number(0)]
            nest.store(held, place, _combine(node, have, self.lower(body, env)))

        self._each(axes, fold, node.over)
        result = Tensor(node.op, tuple(a.extent for a in axes), node.dtype)
        self.kept.append(result)
        self._reader(result, held, axes)
        return Read(result, axes, None, node.dtype)


def _combine(node: forms.Reduce, have: Any, value: Any) -> Any:
    from tvm import tirx

    if node.op in ("max", "min") and node.dtype.is_float:
        if node.nan == "ignore":
            return tirx.Select(tirx.isnan(value), have, combine(node.op, have, value))
        either = tirx.any(tirx.isnan(have), tirx.isnan(value))
        return tirx.Select(either, have + value, combine(node.op, have, value))
    return combine(node.op, have, value)


def _without_reductions(node: Expr) -> Expr:
    """`node` with reductions taken as constants."""
    if isinstance(node, forms.Reduce):
        return Const(0, node.dtype)
    children = tuple(_without_reductions(c) for c in node.children())
    return rebuild(node, children) if children else node
