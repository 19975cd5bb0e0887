"""The arguments of a compiled program: one slot each, the same on every target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..dsl.dtypes import i64
from ..dsl.expr import Form, Size, as_expr, binary
from ..dsl.graph import Graph
from .plan import Slot

if TYPE_CHECKING:
    from ..schedules.program import Program


def argument_slots(program: Program) -> tuple[Slot, ...]:
    """Dims, pointers, strides, scalars, and the workspace if there is one."""
    graph = program.graph
    tensors = (*graph.inputs, *graph.outputs)
    slots = [Slot("dim", d.name) for d in graph.dims]
    slots += [Slot("pointer", t.name, dtype=t.dtype.name) for t in tensors]
    for (name, axis), (_, scale) in program.stride_slots.items():
        slots.append(Slot("stride", name, axis, scale=scale))
    slots += [Slot("scalar", s.name, dtype=s.dtype.name) for s in graph.scalars]
    if program.workspace.offsets:
        slots.append(Slot("workspace", "workspace"))
    return tuple(slots)


def work(graph: Graph) -> Any:
    """Elements touched by all stages, reduced axes included: decides how many threads to use."""
    total: Any = as_expr(0, i64)
    for stage in graph.stages:
        points: Size = 1
        over = stage.expr.over if isinstance(stage.expr, Form) else ()
        for axis in (*stage.axes, *(a for a in over if a not in stage.axes)):
            points = binary("mul", as_expr(axis.extent, i64), points)
        total = binary("add", total, points)
    return total
