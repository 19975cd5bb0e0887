"""A traced graph as mathematics: one line for each stage, `sum[rows] = Σ_H x[rows, H]²`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import forms, weighted
from .errors import DeclarationError
from .expr import (
    Axis,
    Binary,
    Cast,
    Const,
    DimRef,
    Expr,
    Read,
    ScalarRef,
    Select,
    Stage,
    Tensor,
    Unary,
)
from .graph import Graph, size

# (text, precedence): a child that binds less tightly than its parent is put in parentheses.
_BINARY = {
    "or": ("∨", 1), "and": ("∧", 2),
    "lt": ("<", 3), "le": ("≤", 3), "gt": (">", 3), "ge": ("≥", 3), "eq": ("=", 3), "ne": ("≠", 3),
    "add": ("+", 4), "sub": ("−", 4),
    "mul": ("·", 5), "div": ("/", 5), "floordiv": ("div", 5), "mod": ("mod", 5),
}  # fmt: skip
_NOT_ASSOCIATIVE = ("sub", "div", "floordiv", "mod")
_CONDITION, _SUM, _PRODUCT, _PREFIX, _ATOM = 0, 4, 5, 6, 7
_AROUND = {
    "exp": "exp({})", "log": "ln({})", "tanh": "tanh({})", "erf": "erf({})", "sigmoid": "σ({})",
    "sinpi": "sin(π·{})", "sqrt": "√({})", "abs": "|{}|", "floor": "⌊{}⌋", "isnan": "isnan({})",
    "finite": "finite({})",
}  # fmt: skip
_REDUCE = {"sum": "Σ", "prod": "Π", "max": "max", "min": "min", "any": "∃", "argmax": "argmax"}
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def math_text(graph: Graph) -> str:
    """The graph as text: a signature, the dims, the contract, then one line for each stage."""
    writer = _Writer(_single_packs(graph))
    given = [f"{t.name}: {t.dtype}{writer.shape(t)}" for t in graph.inputs]
    numbers = [f"{s.name}: {s.dtype}" for s in graph.scalars]
    results = [f"{t.name}: {t.dtype}{writer.shape(t)}" for t in graph.outputs]
    lines = [f"{graph.name}({', '.join(given + numbers)}) → {', '.join(results)}"]
    lines += [f"  needs {item.needs}" for item in graph.requirements]
    for tensor, below in graph.index_checks:
        lines.append(f"  needs 0 ≤ {tensor.name} < {writer.text(size(below))}")
    lines += [writer.stage(stage) for stage in graph.stages]
    return "\n".join(lines)


def _single_packs(graph: Graph) -> dict[str, str]:
    """Shown names of pack dims: `rows` where the pack has one dim, else `rows₀`, `rows₁`, …"""
    names = {d for t in graph.inputs for d in t.dims} | {d.name for d in graph.dims}
    shown = {}
    for name in names:
        stem, dot, position = name.rpartition(".")
        if dot:
            alone = position == "0" and f"{stem}.1" not in names
            shown[name] = stem if alone else stem + position.translate(_SUBSCRIPTS)
    return shown


@dataclass
class _Writer:
    """Expressions to text; two axes of one name in a stage are told apart by primes."""

    packs: dict[str, str]
    axes: dict[int, str] = field(default_factory=dict)
    # By identity; the node is kept too, or a later one could be given its identity.
    _memo: dict[int, tuple[Expr, str, int]] = field(default_factory=dict)

    def name(self, dim: str) -> str:
        return self.packs.get(dim, dim)

    def shape(self, tensor: Tensor) -> str:
        """`[rows, H=1024]`: dims by name, compiled-in sizes with them."""
        names: list[str | None] = [None] * len(tensor.shape)
        if isinstance(tensor, Stage):
            names = [self.name(a.name) for a in tensor.axes]
        elif hasattr(tensor, "dims"):
            names = [self.name(d) for d in tensor.dims]
        parts = []
        for name, extent in zip(names, tensor.shape, strict=True):
            text = self.text(size(extent))
            parts.append(text if name is None or name == text else f"{name}={text}")
        return f"[{', '.join(parts)}]"

    def stage(self, stage: Stage) -> str:
        self.axes, self._memo = {}, {}
        index = ", ".join(self.axis(a) for a in stage.axes)
        left = f"{stage.name}[{index}]" if stage.axes else stage.name
        return f"{left} = {self.text(stage.expr)}"

    def axis(self, axis: Axis) -> str:
        found = self.axes.get(id(axis))
        if found is None:
            found = self.name(axis.name)
            while found in self.axes.values():
                found += "′"
            self.axes[id(axis)] = found
        return found

    def text(self, node: Expr, at_least: int = 0) -> str:
        """`node`, in parentheses if it binds less tightly than `at_least`."""
        found = self._memo.get(id(node))
        if found is None:
            found = self._memo[id(node)] = (node, *self.write(node))
        _, text, precedence = found
        return f"({text})" if precedence < at_least else text

    def write(self, node: Expr) -> tuple[str, int]:
        if isinstance(node, Const):
            return _number(node.value)
        if isinstance(node, Axis):
            return self.axis(node), _ATOM
        if isinstance(node, (DimRef, ScalarRef)):
            return self.name(node.name), _ATOM
        if isinstance(node, Cast):
            if node.dtype.is_float:  # storage widened to f32, or counts taken into arithmetic
                return self.text(node.a), self._memo[id(node.a)][2]
            return f"{node.dtype}({self.text(node.a)})", _ATOM
        if isinstance(node, Read):
            return self.read(node), _ATOM
        if isinstance(node, Unary):
            return self.unary(node)
        if isinstance(node, Binary):
            return self.binary(node)
        if isinstance(node, Select):
            then, condition = self.text(node.then, 1), self.text(node.condition, 1)
            return f"{then} if {condition} else {self.text(node.otherwise)}", _CONDITION
        writer = _FORMS.get(type(node))
        if writer is None:
            raise DeclarationError(f"no mathematical form for {type(node).__name__}")
        return writer(self, node)

    def read(self, node: Read) -> str:
        if not node.index:
            return node.tensor.name
        index = ", ".join(self.text(i) for i in node.index)
        outside = "" if node.fill is None else f" | {_number(node.fill)[0]} outside"
        return f"{node.tensor.name}[{index}{outside}]"

    def unary(self, node: Unary) -> tuple[str, int]:
        if node.op == "neg":
            return f"−{self.text(node.a, _PREFIX)}", _SUM
        if node.op == "not":
            return f"¬{self.text(node.a, _PREFIX)}", _PREFIX
        if node.op == "rsqrt":
            return f"1 / √({self.text(node.a)})", _PRODUCT
        return _AROUND.get(node.op, f"{node.op}({{}})").format(self.text(node.a)), _ATOM

    def binary(self, node: Binary) -> tuple[str, int]:
        if node.op in ("max", "min"):
            return f"{node.op}({self.text(node.a)}, {self.text(node.b)})", _ATOM
        if node.op == "mul" and _same(node.a, node.b):
            return f"{self.text(node.a, _ATOM)}²", _PREFIX
        sign, precedence = _BINARY[node.op]
        left = self.text(node.a, precedence)
        if node.op == "mul" and isinstance(node.b, Unary) and node.b.op == "rsqrt":
            return f"{left} / √({self.text(node.b.a)})", precedence
        tight = node.op in _NOT_ASSOCIATIVE or (node.op == "mul" and _divides(node.b))
        return f"{left} {sign} {self.text(node.b, precedence + tight)}", precedence

    def under(self, over: tuple[Axis, ...], where: Expr | None = None) -> str:
        """The subscript of a big operator: `_H`, `_{I, J}`, `_{J : J ≤ I}`."""
        names = ", ".join(self.axis(a) for a in over)
        if where is not None:
            return f"_{{{names} : {self.text(where)}}}"
        return f"_{names}" if len(over) == 1 else f"_{{{names}}}"

    def reduce(self, node: forms.Reduce) -> tuple[str, int]:
        under = self.under(node.over, node.where)
        return f"{_REDUCE[node.op]}{under} {self.text(node.body, _PRODUCT)}", _SUM

    def softmax_sum(self, node: forms.SoftmaxSum) -> tuple[str, int]:
        weight = f"softmax{self.under(node.over, node.where)}({self.text(node.score)})"
        return f"Σ{self.under(node.over)} {weight} · {self.text(node.value, _PRODUCT)}", _SUM

    def weighted_sum(self, node: weighted.WeightedSum) -> tuple[str, int]:
        under = self.under(node.over, node.where)
        weight = self.text(node.weight, _PRODUCT)
        return f"Σ{under} {weight} · {self.text(node.value, _PRODUCT)}", _SUM

    def log_sum_exp(self, node: forms.LogSumExp) -> tuple[str, int]:
        source = node.source
        under = self.under(source.over, source.where)
        return f"ln Σ{under} exp({self.text(source.score)})", _SUM

    def scan(self, node: forms.Scan) -> tuple[str, int]:
        state = ", ".join(self.axis(a) for a in node.axes)
        start = f"state[{state}] ← {self.text(node.init)}"
        each = f"state[{state}] ← {self.text(node.step)}"
        result = "last state" if node.final else self.text(node.emit)
        return f"scan_{self.axis(node.along)}({start}; {each}; {result})", _ATOM

    def top_k(self, node: forms.TopK) -> tuple[str, int]:
        name = "top" if node.take == "value" else "argtop"
        return f"{name}{self.under(node.over)}({self.text(node.score)})", _ATOM

    def scatter_add(self, node: forms.ScatterAdd) -> tuple[str, int]:
        names = ", ".join(self.axis(a) for a in node.over)
        condition = f"{self.text(node.at, _SUM)} = {self.axis(node.target)}"
        return f"Σ_{{{names} : {condition}}} {self.text(node.value, _PRODUCT)}", _SUM


_FORMS: dict[type, Callable[[_Writer, Any], tuple[str, int]]] = {
    forms.Reduce: _Writer.reduce,
    forms.SoftmaxSum: _Writer.softmax_sum,
    forms.LogSumExp: _Writer.log_sum_exp,
    forms.Scan: _Writer.scan,
    forms.TopK: _Writer.top_k,
    forms.ScatterAdd: _Writer.scatter_add,
    weighted.WeightedSum: _Writer.weighted_sum,
}


def _same(a: Expr, b: Expr) -> bool:
    """One value, seen through casts between floats."""
    while isinstance(a, Cast) and a.dtype.is_float:
        a = a.a
    while isinstance(b, Cast) and b.dtype.is_float:
        b = b.a
    return a is b


def _divides(node: Expr) -> bool:
    while isinstance(node, Cast):
        node = node.a
    return isinstance(node, Binary) and node.op in _NOT_ASSOCIATIVE


def _number(value: float | int | bool) -> tuple[str, int]:
    if isinstance(value, bool):
        return str(value).lower(), _ATOM
    if isinstance(value, float) and not math.isfinite(value):
        return ("NaN", _ATOM) if math.isnan(value) else ("∞", _ATOM) if value > 0 else ("−∞", _SUM)
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return (f"−{text[1:]}", _SUM) if text.startswith("-") else (text, _ATOM)
