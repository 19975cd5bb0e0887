"""Recurrences as statements, whatever the device: state, steps, reductions inside them, results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..dsl import forms
from ..dsl.dtypes import DType, f32
from ..dsl.expr import Axis, Const, Expr, Form, Read, Stage, Tensor, Unary
from ..dsl.lower import storage
from ..dsl.walk import free_axes, rebuild, walk
from .emit import combine, identity, masked
from .group import Group
from .nest import Nest
from .rule import Rejection, check, first_rejection
from .vector_math import FUNCTIONS

Tir = Any
INLINE = ("sum", "prod", "max", "min")


def rejection(group: Group) -> Rejection | None:
    """Why the group is not the results of one recurrence with pointwise steps."""
    head = group.stages[0].expr
    if not isinstance(head, forms.Scan):
        return Rejection("needs a scan")
    nested = [n for e in (head.init, head.step, head.emit) for n in walk(e)
              if isinstance(n, Form)]  # fmt: skip
    return first_rejection(
        check(all(isinstance(s.expr, forms.Scan) and s.expr.state is head.state
                  for s in group.stages), "needs the results of one recurrence only"),
        check(all(isinstance(n, forms.Reduce) and n.op in INLINE for n in nested),
              f"needs no form but {', '.join(INLINE)} in a step"),
    )  # fmt: skip


def column_of(group: Group) -> Axis | None:
    """The last state axis along which the elements are independent, if there is one."""
    scan = group.stages[0].expr
    assert isinstance(scan, forms.Scan)
    nodes = [scan.step, *(s.expr.emit for s in group.stages
                          if isinstance(s.expr, forms.Scan) and not s.expr.final)]  # fmt: skip
    reduced = {a for e in nodes for n in walk(e) if isinstance(n, forms.Reduce) for a in n.over}
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


@dataclass(frozen=True)
class Held:
    """A buffer over `axes`; `places` turns their values into its indices."""

    buffer: Tir
    axes: tuple[Axis, ...]
    places: Callable[[Sequence[Tir]], list[Tir]]

    def place(self, env: dict[Axis, Any]) -> list[Tir]:
        return self.places([env[a] for a in self.axes])

    def get(self, env: dict[Axis, Any]) -> Tir:
        return self.buffer[tuple(self.place(env))]

    def read(self, *index: Tir) -> Tir:
        return self.buffer[tuple(self.places(index))]


class Recurrence(ABC):
    """One lowering of a recurrence: `run` writes what happens to one independent part of it.

    Reductions inside a step are computed into buffers before it, so a step that reads the state
    elsewhere through them alone is done in place. `env` holds the axes that are fixed.
    """

    def __init__(self, nest: Nest, group: Group) -> None:
        scan = group.stages[0].expr
        assert isinstance(scan, forms.Scan)
        self.nest, self.scan, self.stages = nest, scan, group.stages
        self.lower = nest.emitter.lowering.expr
        self.size = nest.emitter.size
        self.column = column_of(group)
        self.outer = tuple(a for a in free_axes(scan) if a is not scan.along and a not in scan.axes)
        self.env: dict[Axis, Any] = {}
        self.kept: list[Tensor] = []  # readers go by identity

    @abstractmethod
    def hold(self, name: str, axes: Sequence[Axis], dtype: DType) -> Held:
        """A buffer over `axes`."""

    @abstractmethod
    def each(
        self, axes: Sequence[Axis], body: Callable[[dict[Axis, Any]], None],
        over: Sequence[Axis] = (), once: bool = False,
    ) -> None:  # fmt: skip
        """`body` for every element of `axes`, and inside for every element of `over`.

        `once`: no element may be done twice, for `body` reads what it writes.
        """

    @abstractmethod
    def sync(self) -> None:
        """From here on all who work on the recurrence see what was stored before."""

    def holds(self, node: forms.Reduce) -> bool:
        """Whether a reduction's results are computed into a buffer, not where they are needed."""
        return True

    def hold_state(self) -> Held:
        """The buffer of the state."""
        return self.hold("state", self.scan.axes, f32)

    def plain(self, node: Read) -> Expr:
        """A read of the state as the buffer of `hold_state` needs it."""
        return node

    def run(self) -> None:
        scan = self.scan
        state = self.hold_state()
        self.read_from(scan.state, state)
        self.read_from(scan.after, state)
        self._fill(state, scan.init)
        moved = self._moves()
        following = self.hold("following", scan.axes, f32) if moved else state
        emitted = [s for s in self.stages if isinstance(s.expr, forms.Scan) and not s.expr.final]
        with self.nest.loop("t", self.size(scan.along.extent)) as step:
            self.env[scan.along] = step
            self._fill(following, scan.step, once=not moved)
            if moved:
                self.each(scan.axes, lambda env: self.put(state, env, following.get(env)))
                self.sync()
            for stage in emitted:
                self._publish(stage, stage.expr.emit)  # type: ignore[attr-defined]
        del self.env[scan.along]
        for stage in self.stages:
            if stage not in emitted:
                self._publish(stage, Read(scan.after, scan.axes, None, scan.dtype))

    def put(self, held: Held, env: dict[Axis, Any], value: Tir) -> None:
        self.nest.store(held.buffer, held.place(env), value)

    def read_from(self, tensor: Tensor, held: Held) -> None:
        """Reads of `tensor`, which is over the buffer's axes, go to it."""
        self.nest.emitter.lowering.readers[id(tensor)] = held.read

    def _moves(self) -> bool:
        """Whether an element of the next state needs others of this one when it is stored."""
        scan = self.scan
        return any(
            not all(i is a for i, a in zip(n.index, scan.axes, strict=True))
            for n in walk(self._without_held(scan.step))
            if isinstance(n, Read) and n.tensor is scan.state
        )

    def _without_held(self, node: Expr) -> Expr:
        """`node` with the reductions that are computed before taken as constants."""
        if isinstance(node, forms.Reduce) and self.holds(node):
            return Const(0, node.dtype)
        children = tuple(self._without_held(c) for c in node.children())
        return rebuild(node, children) if children else node

    def _fill(self, held: Held, node: Expr, once: bool = False) -> None:
        """`held` ← `node`."""
        plain = self._outline(node)
        self.each(held.axes, lambda env: self.put(held, env, self.value(plain, env)), once=once)
        self.sync()

    def _publish(self, stage: Stage, node: Expr) -> None:
        """A result ← `node`."""
        plain = self._outline(node)
        inner = [a for a in stage.axes if a not in self.env]
        self.each(inner, lambda env: self.nest.write(
            stage, [env[a] for a in stage.axes], self.value(plain, env)
        ))  # fmt: skip
        self.sync()

    def value(self, node: Expr, env: dict[Axis, Any]) -> Tir:
        """`node` at a point; reductions left in it are computed here."""
        plain = self._reduced_here(node, env)
        lowering = self.nest.emitter.lowering
        if functions_nested(plain):
            return lowering.split(plain, env, self.nest.lay_by)
        return lowering.expr(plain, env)

    def _reduced_here(self, node: Expr, env: dict[Axis, Any]) -> Expr:
        if not isinstance(node, forms.Reduce):
            children = tuple(self._reduced_here(c, env) for c in node.children())
            return rebuild(node, children) if children else node
        nest, zero = self.nest, self.nest.number(0)
        cell = nest.private(node.op, [], storage(node.dtype))
        nest.store(cell, [zero], identity(node.op, node.dtype))
        body = masked(node)

        def fold(rest: Sequence[Axis], inside: dict[Axis, Any]) -> None:
            if rest:
                with nest.loop(rest[0].name, self.size(rest[0].extent)) as var:
                    fold(rest[1:], inside | {rest[0]: var})
                return
            found = carrying(node, cell[zero], self.value(body, inside))
            nest.store(cell, [zero], found)

        fold(node.over, env)
        return self.stand_in(node.op, (), node.dtype, lambda: cell[zero])

    def stand_in(self, name: str, axes: Sequence[Axis], dtype: Any, read: Any) -> Read:
        """An expression for what `read` gives at `axes`."""
        made = Tensor(name, tuple(a.extent for a in axes), dtype)
        self.nest.emitter.lowering.readers[id(made)] = read
        self.kept.append(made)
        return Read(made, tuple(axes), None, dtype)

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
            if isinstance(fresh, forms.Reduce) and self.holds(fresh):
                fresh = self.reduce(fresh)
            if isinstance(fresh, Read) and fresh.tensor in (self.scan.state, self.scan.after):
                fresh = self.plain(fresh)
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
        return self.stand_in("settled", (), f32, lambda: value)

    def reduce(self, node: forms.Reduce) -> Read:
        """A reduction's results over the axes that are not fixed, in a buffer."""
        held = self.hold(node.op, self.kept_axes(node), node.dtype)
        body, start = masked(node), identity(node.op, node.dtype)
        self.each(held.axes, lambda env: self.put(held, env, start))

        def fold(env: dict[Axis, Any]) -> None:
            self.put(held, env, carrying(node, held.get(env), self.lower(body, env)))

        self.each(held.axes, fold, node.over, once=True)
        self.sync()
        return self.stand_in(node.op, held.axes, node.dtype, held.read)

    def kept_axes(self, node: forms.Reduce) -> tuple[Axis, ...]:
        """The axes of a reduction's results that vary within a step."""
        return tuple(a for a in free_axes(node) if a not in self.env and a is not self.scan.along)


def functions_nested(node: Expr) -> bool:
    """Whether an elementary function is part of the argument of another."""

    def functions(root: Expr) -> list[Unary]:
        return [n for n in walk(root) if isinstance(n, Unary) and n.op in FUNCTIONS]

    return any(functions(n.a) for n in functions(node))


def carrying(node: forms.Reduce, have: Tir, value: Tir) -> Tir:
    """One step of a reduction, NaN treated as it says."""
    from tvm import tirx

    if node.op in ("max", "min") and node.dtype.is_float:
        if node.nan == "ignore":
            return tirx.Select(tirx.isnan(value), have, combine(node.op, have, value))
        either = tirx.any(tirx.isnan(have), tirx.isnan(value))
        return tirx.Select(either, have + value, combine(node.op, have, value))
    return combine(node.op, have, value)
