"""From a graph to scheduled kernels: partition, workspace, one rule per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dsl.canonical import canonicalise
from ..dsl.expr import Tensor
from ..dsl.graph import Graph
from ..dsl.host import identifier
from ..dsl.lower import Lowering
from .capability import Capability
from .emit import Emitter, Kernel
from .group import Group
from .partition import partition
from .rule import Rule, choose
from .workspace import WorkspacePlan, order, plan


@dataclass(frozen=True)
class Program:
    """The kernels of one specialisation, in launch order.

    `dims` and `scalars` are TIR variables by name; `strides` those of each argument tensor, an
    int where the stride is compiled in.
    """

    graph: Graph
    kernels: tuple[Kernel, ...]
    workspace: WorkspacePlan
    dims: dict[str, Any]
    scalars: dict[str, Any]
    strides: dict[str, tuple[Any, ...]]


def groups_of(graph: Graph) -> tuple[Group, ...]:
    """The graph's kernels-to-be, in launch order."""
    return order(partition(graph))


def build(graph: Graph, rules: Sequence[Rule], caps: Capability, unit: frozenset[str]) -> Program:
    """Schedule every group.

    `unit` names the argument tensors whose last stride is 1; all other strides are arguments.
    """
    from tvm import tirx

    from .vector_math import functions

    graph = canonicalise(graph)
    dims = {d.name: tirx.Var(identifier(d.name), "int64") for d in graph.dims}
    scalars = {s.name: tirx.Var(s.name, s.dtype.name) for s in graph.scalars}
    strides = {t.name: _strides(t, t.name in unit) for t in (*graph.inputs, *graph.outputs)}
    arguments = {id(t) for t in (*graph.inputs, *graph.outputs)}
    groups = groups_of(graph)

    def strides_of(tensor: Tensor) -> Sequence[Any] | None:
        return strides[tensor.name] if id(tensor) in arguments else None

    kernels = []
    for group in groups:
        rule = choose(rules, group, caps)
        config = rule.default(group, caps)
        emitter = Emitter(group, Lowering(dims, scalars, functions(caps.vector_ldexp)), strides_of)
        schedule = rule.lower(emitter, group, caps, config)
        kernels.append(emitter.kernel(schedule, rule.name, config))
    workspace = plan(groups, graph.outputs, [k.scratch for k in kernels])
    return Program(graph, tuple(kernels), workspace, dims, scalars, strides)


def _strides(tensor: Tensor, unit: bool) -> tuple[Any, ...]:
    from tvm import tirx

    name = identifier(tensor.name)
    made = [tirx.Var(f"{name}_s{i}", "int64") for i in range(len(tensor.shape))]
    if unit and made:
        made[-1] = tirx.IntImm("int64", 1)
    return tuple(made)
