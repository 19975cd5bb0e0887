"""A traced declaration: the tensors it defines, in order, with their contract checks.

Tracing hoists every form (reduction, scan, …) out of the expression around it into a `Stage` of
its own, so that each stage is either pointwise or one form over pointwise operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .dtypes import DType, i64
from .errors import CompileError, RudnnError
from .expr import (
    Axis,
    DimRef,
    Expr,
    Form,
    Input,
    Read,
    ScalarRef,
    Size,
    Stage,
    Tensor,
    as_expr,
)
from .forms import LogSumExp, Scan
from .walk import free_axes, walk
from .walk import rebuild as rebuild_node


@dataclass(frozen=True)
class Requirement:
    """A contract check: `condition` must hold at launch; the message is "needs …, got …"."""

    condition: Expr | bool
    needs: str
    got: tuple[tuple[str, Expr | int | float], ...]


@dataclass(frozen=True)
class Constraint:
    """What a strategy, called `name`, asks of the schedules; "" leaves the choice to them.

    `form` is "tiled" or "materialised", `units` "matrix" or "plain". `error` is raised
    where a device cannot.
    """

    name: str
    form: str = ""
    units: str = ""
    error: type[RudnnError] = CompileError

    def __str__(self) -> str:
        return f"form {self.form or 'any'}, units {self.units or 'any'}"


@dataclass(frozen=True)
class Graph:
    """One specialisation of a declaration, ready to evaluate or lower.

    `dims` are the dynamic dims in order; packs appear expanded (`rows.0`, `rows.1`, …). `stages`
    are those that the outputs need.
    """

    name: str
    inputs: tuple[Input, ...]
    scalars: tuple[ScalarRef, ...]
    dims: tuple[DimRef, ...]
    stages: tuple[Stage, ...]
    outputs: tuple[Stage, ...]
    requirements: tuple[Requirement, ...]
    index_checks: tuple[tuple[Input, Size], ...] = ()
    constraint: Constraint | None = None

    def consumers(self, tensor: Tensor) -> tuple[Stage, ...]:
        return tuple(s for s in self.stages if tensor in reads(s.expr))


def reads(node: Expr) -> tuple[Tensor, ...]:
    """The tensors an expression reads, in order of first appearance."""
    return tuple(dict.fromkeys(n.tensor for n in walk(node) if isinstance(n, Read)))


def needed(stages: Sequence[Stage], outputs: Iterable[Stage]) -> tuple[Stage, ...]:
    """The stages that outputs are made of, in the order given, which is that of their making."""
    wanted: set[Tensor] = set(outputs)
    for stage in reversed(stages):
        if stage in wanted:
            wanted.update(reads(stage.expr))
    return tuple(s for s in stages if s in wanted)


class Names:
    """Names that are each given out once: tensors are told apart by name."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """`stem` if it is free, else `stem_1`, `stem_2`, …."""
        count = self._counts.get(stem, 0)
        name = f"{stem}_{count}" if count else stem
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._counts[stem] = count
        self._taken.add(name)
        return name


@dataclass
class Hoister:
    """Turns nested forms into stages; memoised by node identity, so sharing is kept.

    `names` holds what the declaration itself has named: no stage but an output gets such a name.
    """

    names: Names = field(default_factory=Names)
    stages: list[Stage] = field(default_factory=list)
    _done: dict[int, tuple[Expr, Expr]] = field(default_factory=dict)

    def define(
        self, stem: str, axes: tuple[Axis, ...], expr: Expr, dtype: DType | None = None
    ) -> Stage:
        """A new stage holding `expr` over `axes`, named after `stem`."""
        return self._define(stem, axes, expr, dtype, reserved=False)

    def define_output(self, name: str, axes: tuple[Axis, ...], expr: Expr, dtype: DType) -> Stage:
        """A new stage with the reserved name of a result."""
        return self._define(name, axes, expr, dtype, reserved=True)

    def _define(
        self, name: str, axes: tuple[Axis, ...], expr: Expr, dtype: DType | None, reserved: bool
    ) -> Stage:
        body = self.visit(expr, root=True)
        goal = dtype or body.dtype
        if goal != body.dtype and _is_form(body):
            body = self.visit(expr)
        body = goal(body)
        shape = tuple(a.extent for a in axes)
        named = name if reserved else self.names.fresh(name)
        stage = Stage(named, shape, goal, axes=axes, expr=body)
        self.stages.append(stage)
        return stage

    def visit(self, node: Expr, root: bool = False) -> Expr:
        found = self._done.get(id(node))
        if found is not None and not (root and _is_form(node)):
            return found[1]
        placeholders = _placeholders(node) if isinstance(node, Scan) else ()
        children = tuple(
            child if _touches(child, placeholders) else self.visit(child, root=_keeps_root(node))
            for child in node.children()
        )
        result = rebuild_node(node, children) if children else node
        if _is_form(result) and not root:
            axes = free_axes(result)
            stem = type(result).__name__.lower()
            stage = self.define(getattr(result, "op", stem), axes, result)
            result = Read(stage, axes, None, stage.dtype)
        if not root:
            self._done[id(node)] = (node, result)
        return result


def _is_form(node: Expr) -> bool:
    return isinstance(node, Form)


def _keeps_root(node: Expr) -> bool:
    """LogSumExp keeps the form below it: the two are one stage of work."""
    return isinstance(node, LogSumExp)


def _placeholders(scan: Scan) -> tuple[Tensor, ...]:
    return (scan.state, scan.after)


def _touches(node: Expr, tensors: Iterable[Tensor]) -> bool:
    wanted = {id(t) for t in tensors}
    return bool(wanted) and any(isinstance(n, Read) and id(n.tensor) in wanted for n in walk(node))


def size(value: Size) -> Expr:
    """A dim size as an expression."""
    return as_expr(value, i64)
