"""A graph as canonical text: the same in every process, different whenever the meaning is.

It keys the compile cache, so that an operator is recompiled exactly when what it computes changes.
"""

from __future__ import annotations

from dataclasses import fields

from .expr import Axis, Const, DimRef, Expr, Input, ScalarRef, Tensor
from .graph import Graph, size


class _Writer:
    """Numbers nodes, axes and tensors by first appearance."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ids: dict[int, str] = {}
        self.keep: list[object] = []

    def line(self, item: object, text: str) -> str:
        name = f"%{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.ids[id(item)] = name
        self.keep.append(item)
        return name

    def tensor(self, tensor: Tensor) -> str:
        found = self.ids.get(id(tensor))
        if found is not None:
            return found
        shape = " ".join(self.expr(size(e)) for e in tensor.shape)
        kind = "input" if isinstance(tensor, Input) else "state"
        return self.line(tensor, f"{kind} {tensor.name} {tensor.dtype.name} [{shape}]")

    def expr(self, node: Expr) -> str:
        found = self.ids.get(id(node))
        if found is not None:
            return found
        if isinstance(node, Const):
            return self.line(node, f"const {node.value!r} {node.dtype.name}")
        if isinstance(node, (DimRef, ScalarRef)):
            return self.line(node, f"{type(node).__name__} {node.name} {node.dtype.name}")
        if isinstance(node, Axis):
            return self.line(node, f"axis {node.name} {self.expr(size(node.extent))}")
        parts = [f"{f.name}={self.field(getattr(node, f.name))}" for f in fields(node)]  # type: ignore[arg-type]
        return self.line(node, f"{type(node).__name__} {' '.join(parts)}")

    def field(self, value: object) -> str:
        if isinstance(value, Expr):
            return self.expr(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, tuple):
            return "(" + " ".join(self.field(v) for v in value) + ")"
        return repr(value)


def describe(graph: Graph) -> str:
    """The canonical text of a graph."""
    writer = _Writer()
    for tensor in graph.inputs:
        writer.tensor(tensor)
    for stage in graph.stages:
        axes = " ".join(writer.expr(a) for a in stage.axes)
        body = writer.expr(stage.expr)
        writer.line(stage, f"stage {stage.name} {stage.dtype.name} [{axes}] {body}")
    dims = " ".join(d.name for d in graph.dims)
    scalars = " ".join(f"{s.name}:{s.dtype.name}" for s in graph.scalars)
    outputs = " ".join(writer.ids[id(s)] for s in graph.outputs)
    asked = [] if graph.constraint is None else [str(graph.constraint)]
    head = f"{graph.name} dims {dims} scalars {scalars}"
    return "\n".join([head, *writer.lines, outputs, *asked])
