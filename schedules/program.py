"""From a graph to scheduled kernels: partition, workspace, one rule per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dsl.canonical import canonicalise
from ..dsl.expr import Binary, Const, Size, Tensor
from ..dsl.graph import Graph
from ..dsl.host import identifier
from ..dsl.lower import Lowering
from .capability import WIDE_BYTES, Capability
from .emit import Emitter, Kernel
from .group import Group
from .materialise import materialise
from .partition import partition
from .rule import Rule, choose
from .workspace import WorkspacePlan, order, plan


@dataclass(frozen=True)
class Program:
    """The kernels of one specialisation, in launch order.

    `dims` and `scalars` are TIR variables by name; `strides` are those of each argument tensor,
    and `stride_slots` the variables in them by tensor and axis, with how many elements each counts.
    """

    graph: Graph
    kernels: tuple[Kernel, ...]
    workspace: WorkspacePlan
    dims: dict[str, Any]
    scalars: dict[str, Any]
    strides: dict[str, tuple[Any, ...]]
    stride_slots: dict[tuple[str, int], tuple[Any, int]]


def groups_of(graph: Graph) -> tuple[Group, ...]:
    """The graph's kernels-to-be, in launch order."""
    return order(partition(graph))


def prepared(graph: Graph, caps: Capability) -> Graph:
    """The graph in the terms that rules of the device know, in the form that it is to have."""
    graph = canonicalise(graph)
    asked = graph.constraint
    # Grids have a rule of their own for this form.
    if asked is not None and asked.form == "materialised" and caps.model == "cores":
        graph = materialise(graph)
    return graph


def build(
    graph: Graph, rules: Sequence[Rule], caps: Capability, unit: frozenset[str],
    wide: frozenset[str] = frozenset(),
) -> Program:  # fmt: skip
    """Schedule every group.

    `unit` names the argument tensors whose last stride is 1; all other strides are arguments.
    `wide` those of `unit` whose rows all start at multiples of 16 bytes.
    """
    from tvm import tirx

    from .vector_math import functions

    graph = prepared(graph, caps)
    dims = {d.name: tirx.Var(identifier(d.name), "int64") for d in graph.dims}
    scalars = {s.name: tirx.Var(s.name, s.dtype.name) for s in graph.scalars}
    tensors = (*graph.inputs, *graph.outputs)
    slots: dict[tuple[str, int], tuple[Any, int]] = {}
    strides = {t.name: _strides(t, t.name in unit, t.name in wide, slots) for t in tensors}
    arguments = {id(t) for t in tensors}
    groups = groups_of(graph)

    def strides_of(tensor: Tensor) -> Sequence[Any] | None:
        return strides[tensor.name] if id(tensor) in arguments else None

    def is_wide(tensor: Tensor) -> bool:
        return tensor.name in wide if id(tensor) in arguments else _rows_wide(tensor)

    kernels = []
    for group in groups:
        rule = choose(rules, group, caps)
        config = rule.default(group, caps)
        lowering = Lowering(dims, scalars, functions(caps.vector_ldexp))
        emitter = Emitter(group, lowering, strides_of, is_wide)
        schedule = rule.lower(emitter, group, caps, config)
        kernels.append(emitter.kernel(schedule, rule.name, config))
    workspace = plan(groups, graph.outputs, [k.scratch for k in kernels])
    return Program(graph, tuple(kernels), workspace, dims, scalars, strides, slots)


def _strides(
    tensor: Tensor, unit: bool, wide: bool, slots: dict[tuple[str, int], tuple[Any, int]]
) -> tuple[Any, ...]:
    """Strides of an argument in elements; those of a wide one are multiples, so that it shows."""
    from tvm import tirx

    name = identifier(tensor.name)
    scale = WIDE_BYTES // tensor.dtype.bytes if wide else 1
    made: list[Any] = []
    for axis in range(len(tensor.shape)):
        if unit and axis == len(tensor.shape) - 1:
            made.append(tirx.IntImm("int64", 1))
            continue
        var = tirx.Var(f"{name}_s{axis}", "int64")
        slots[tensor.name, axis] = (var, scale)
        made.append(var * tirx.IntImm("int64", scale) if scale > 1 else var)
    return tuple(made)


def _rows_wide(tensor: Tensor) -> bool:
    """Whether the rows of a compact tensor start at multiples of 16 bytes, as the tensor does."""
    one = len(tensor.shape) <= 1
    return one or _known_factor(tensor.shape[-1]) * tensor.dtype.bytes % WIDE_BYTES == 0


def _known_factor(size: Size) -> int:
    """A number that divides a size whatever the dims."""
    if isinstance(size, int):
        return size
    if isinstance(size, Const):
        return int(size.value)
    if isinstance(size, Binary) and size.op == "mul":
        return _known_factor(size.a) * _known_factor(size.b)
    return 1
