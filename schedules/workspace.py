"""Where intermediates between kernels live: one arena, shared by buffers that never coexist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..dsl.dtypes import i64
from ..dsl.expr import Expr, Size, Stage, as_expr, binary
from ..dsl.host import align
from .group import Group

if TYPE_CHECKING:
    import networkx as nx

ALIGNMENT = 64


@dataclass(frozen=True)
class WorkspacePlan:
    """Byte offsets of the intermediates and the total, as expressions of the dims."""

    offsets: tuple[tuple[Stage, Expr], ...]
    total: Expr


def dataflow(groups: Sequence[Group]) -> nx.DiGraph[Any]:
    """The program as a graph: kernels (`("kernel", i)`) and the tensors between them."""
    import networkx as nx

    dag: nx.DiGraph[Any] = nx.DiGraph()
    for i, group in enumerate(groups):
        dag.add_node(("kernel", i), label=group.name)
        for tensor in group.inputs():
            dag.add_edge(("tensor", tensor.name), ("kernel", i))
        for stage in group.outputs:
            dag.add_edge(("kernel", i), ("tensor", stage.name))
    return dag


def order(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups in an order in which each finds its inputs computed."""
    import networkx as nx

    dag = dataflow(groups)
    return tuple(groups[i] for kind, i in nx.lexicographical_topological_sort(dag, key=str)
                 if kind == "kernel")  # fmt: skip


def plan(
    groups: Sequence[Group], keep: Sequence[Stage], scratch: Sequence[Sequence[Stage]] = ()
) -> WorkspacePlan:
    """Assign each tensor between kernels, `keep` (the results) apart, a place in the arena.

    `scratch[i]` are tensors that kernel i alone uses. Two tensors share a slot when the last reader
    of one runs before the writer of the other.
    """
    dag = dataflow(groups)
    position = {("kernel", i): i for i in range(len(groups))}
    slots: list[tuple[int, Expr, list[Stage]]] = []
    for i, group in enumerate(groups):
        own = scratch[i] if scratch else ()
        for stage in (*group.outputs, *own):
            if stage in keep:
                continue
            node = ("tensor", stage.name)
            readers = dag.successors(node) if node in dag else ()
            until = max((position[r] for r in readers), default=i)
            size = align(_bytes(stage), ALIGNMENT)
            free = next((n for n, (end, _, _) in enumerate(slots) if end < i), None)
            if free is None:
                slots.append((until, size, [stage]))
            else:
                _, have, members = slots[free]
                slots[free] = (until, binary("max", have, size), [*members, stage])
    offset: Expr = as_expr(0, i64)
    offsets: list[tuple[Stage, Expr]] = []
    for _, size, members in slots:
        offsets += [(stage, offset) for stage in members]
        offset = binary("add", offset, size)
    return WorkspacePlan(tuple(offsets), offset)


def _bytes(stage: Stage) -> Expr:
    total: Size = stage.dtype.bytes
    for extent in stage.shape:
        total = binary("mul", as_expr(extent, i64), total)
    return as_expr(total, i64)
