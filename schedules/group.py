"""Groups: the stages that one kernel computes, and what kind of work they are."""

from __future__ import annotations

from dataclasses import dataclass

from ..dsl import forms
from ..dsl.expr import Axis, Binary, Cast, Const, DimRef, Expr, Form, Read, Stage, Tensor
from ..dsl.graph import Constraint, reads
from ..dsl.walk import free_axes, walk


@dataclass(frozen=True)
class Group:
    """Stages fused into one kernel, in order; `outputs` are those that others see.

    `constraint` is what the operator's strategy asks of the kernel.
    """

    name: str
    stages: tuple[Stage, ...]
    outputs: tuple[Stage, ...]
    constraint: Constraint | None = None

    @property
    def form(self) -> str:
        """The form the strategy asks for, "" for any."""
        return "" if self.constraint is None else self.constraint.form

    @property
    def units(self) -> str:
        """The units the strategy asks for, "" for any."""
        return "" if self.constraint is None else self.constraint.units

    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors read from outside, in order of first appearance."""
        seen: dict[Tensor, None] = {}
        for stage in self.stages:
            for tensor in reads(stage.expr):
                if tensor not in self.stages and not _is_placeholder(stage, tensor):
                    seen[tensor] = None
        return tuple(seen)

    @property
    def head(self) -> Stage:
        """The first stage that is a form, or else the last stage."""
        return next((s for s in self.stages if isinstance(s.expr, Form)), self.stages[-1])


def _is_placeholder(stage: Stage, tensor: Tensor) -> bool:
    node = stage.expr
    return isinstance(node, forms.Scan) and tensor in (node.state, node.after)


@dataclass(frozen=True)
class Contraction:
    """Σₖ a·b with axes sorted by who has them.

    `batch` are in both factors and kept, `m` only in `a`, `n` only in `b`, `k` summed.
    """

    a: Expr
    b: Expr
    batch: tuple[Axis, ...]
    m: tuple[Axis, ...]
    n: tuple[Axis, ...]
    k: tuple[Axis, ...]


def contraction(node: Expr) -> Contraction | None:
    """`node` as a contraction, or None: a sum of a product whose factors have axes of their own."""
    if not isinstance(node, forms.Reduce) or node.op != "sum" or node.where is not None:
        return None
    body = node.body
    if not isinstance(body, Binary) or body.op != "mul":
        return None
    left, right = free_axes(body.a), free_axes(body.b)
    m = tuple(x for x in left if x not in right and x not in node.over)
    n = tuple(x for x in right if x not in left and x not in node.over)
    shared = all(x in left and x in right for x in node.over)
    if not (m and n and shared):
        return None
    batch = tuple(x for x in left if x in right and x not in node.over)
    return Contraction(body.a, body.b, batch, m, n, node.over)


def innermost(node: Expr) -> set[Axis]:
    """Axes that index the last dim of some read: where memory is contiguous."""
    found: set[Axis] = set()
    for item in walk(node):
        if isinstance(item, Read) and item.index:
            last = item.index[-1]
            while isinstance(last, Cast):
                last = last.a
            found |= set(free_axes(last))
    return found


def chain(node: Expr | None, op: str) -> list[Expr]:
    """The operands of a chain of one operation."""
    if node is None:
        return []
    if isinstance(node, Binary) and node.op == op:
        return chain(node.a, op) + chain(node.b, op)
    return [node]


def divides(node: Expr) -> bool:
    """A division of axes: one that reads nothing."""
    return (
        isinstance(node, Binary) and node.op in ("floordiv", "mod") and node.dtype.is_int
        and all(isinstance(n, (Axis, Binary, Const, DimRef)) for n in walk(node))
    )  # fmt: skip


def known(axis: Axis) -> int:
    """How many points an axis has, where the rule has seen to it that this is a number."""
    assert isinstance(axis.extent, int)
    return axis.extent


def is_map(stage: Stage) -> bool:
    """A pointwise stage."""
    return not isinstance(stage.expr, Form)


def reads_at(node: Expr, stage: Stage, axes: tuple[Axis, ...]) -> bool:
    """Whether every read of `stage` in `node` is at exactly `axes`."""
    hits = [n for n in walk(node) if isinstance(n, Read) and n.tensor is stage]
    return all(
        len(h.index) == len(axes) and all(i is a for i, a in zip(h.index, axes, strict=True))
        for h in hits
    )
