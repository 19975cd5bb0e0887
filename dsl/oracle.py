"""The NumPy oracle: what a graph means, evaluated by broadcasting.

Each value is an array whose dims are labelled with axes; nothing here knows of schedules. With
`precision="float64"` all float arithmetic is done in double and results stay double.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from .dtypes import DType
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
    Size,
    Stage,
    Unary,
)
from .graph import Graph, size

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Labelled:
    """An array with one dim per axis, in the order of `axes`."""

    array: Array
    axes: tuple[Axis, ...]

    def over(self, axes: tuple[Axis, ...]) -> Array:
        """The array with its dims ordered as `axes`, missing ones of size 1."""
        moved = self.array.transpose([self.axes.index(a) for a in axes if a in self.axes])
        sizes = iter(moved.shape)
        return moved.reshape([next(sizes) if a in self.axes else 1 for a in axes])


def union(values: list[Labelled]) -> tuple[Axis, ...]:
    return tuple(dict.fromkeys(a for v in values for a in v.axes))


_UNARY: dict[str, Any] = {
    "neg": np.negative, "exp": np.exp, "log": np.log, "tanh": np.tanh, "sqrt": np.sqrt,
    "abs": np.abs, "floor": np.floor, "isnan": np.isnan, "finite": np.isfinite,
    "not": np.logical_not, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))),
                                  np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x)))),
}  # fmt: skip

_BINARY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide,
    "floordiv": np.floor_divide, "mod": np.mod, "max": np.maximum, "min": np.minimum,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip


def _sinpi(x: Array) -> Array:
    whole = np.floor(np.abs(x))
    part = np.abs(x) - whole
    turned = np.where(whole % 2 == 0, 1.0, -1.0) * np.sin(np.pi * np.minimum(part, 1 - part))
    return np.copysign(1.0, x).astype(x.dtype) * turned.astype(x.dtype)


def _erf(x: Array) -> Array:
    from math import erf

    return np.vectorize(erf, otypes=[x.dtype])(x) if x.size else x


_SPECIAL: dict[str, Any] = {"erf": _erf, "sinpi": _sinpi}


@dataclass
class Evaluator:
    """Evaluates the stages of one graph for given inputs, scalars and dim sizes."""

    values: dict[int, Array]
    numbers: Mapping[str, int | float]
    double: bool
    _memo: dict[int, tuple[Expr, Labelled]] = field(default_factory=dict)

    def type(self, dtype: DType) -> np.dtype[Any]:
        """The NumPy type computed in for `dtype`."""
        if dtype.is_float and self.double:
            return np.dtype(np.float64)
        return dtype.numpy

    def extent(self, value: Size) -> int:
        return int(self.eval(size(value)).array)

    def eval(self, node: Expr) -> Labelled:
        found = self._memo.get(id(node))
        if found is None:
            found = self._memo[id(node)] = (node, self._eval(node))
        return found[1]

    def _eval(self, node: Expr) -> Labelled:
        if isinstance(node, Const):
            return Labelled(np.asarray(node.value, self.type(node.dtype)), ())
        if isinstance(node, Axis):
            return Labelled(np.arange(self.extent(node.extent), dtype=np.int64), (node,))
        if isinstance(node, (DimRef, ScalarRef)):
            return Labelled(np.asarray(self.numbers[node.name], self.type(node.dtype)), ())
        if isinstance(node, Cast):
            inner = self.eval(node.a)
            return Labelled(inner.array.astype(self.type(node.dtype)), inner.axes)
        if isinstance(node, Unary):
            inner = self.eval(node.a)
            fn = _SPECIAL.get(node.op) or _UNARY[node.op]
            return Labelled(fn(inner.array), inner.axes)
        if isinstance(node, Binary):
            return self._elementwise(_BINARY[node.op], node.a, node.b)
        if isinstance(node, Select):
            return self._elementwise(np.where, node.condition, node.then, node.otherwise)
        if isinstance(node, Read):
            return self._read(node)
        from .oracle_forms import RULES

        handler = RULES.get(type(node))
        if handler is None:
            raise DeclarationError(f"the oracle has no rule for {type(node).__name__}")
        return handler(self, node)

    def _elementwise(self, fn: Any, *nodes: Expr) -> Labelled:
        values = [self.eval(n) for n in nodes]
        axes = union(values)
        return Labelled(np.asarray(fn(*(v.over(axes) for v in values))), axes)

    def _read(self, node: Read) -> Labelled:
        source = self.values[id(node.tensor)]
        if node.fill is None and all(isinstance(i, Axis) for i in node.index):
            direct = self._read_axes(node, source)
            if direct is not None:
                return direct
        return self._gather(node, source, [self.eval(i) for i in node.index])

    def _gather(self, node: Read, source: Array, index: list[Labelled]) -> Labelled:
        """The elements of `source` at `index`; outside it the read's fill value."""
        axes = union(index)
        arrays = [i.over(axes) for i in index]
        if node.fill is None:
            return Labelled(source[tuple(arrays)], axes)
        inside = reduce(
            np.logical_and,
            ((a >= 0) & (a < n) for a, n in zip(arrays, source.shape, strict=True)),
        )
        if 0 in source.shape:
            picked = np.zeros(np.broadcast_shapes(*(a.shape for a in arrays)), source.dtype)
        else:
            safe = [np.clip(a, 0, n - 1) for a, n in zip(arrays, source.shape, strict=True)]
            picked = source[tuple(safe)]
        return Labelled(np.where(inside, picked, np.asarray(node.fill, source.dtype)), axes)

    def _read_axes(self, node: Read, source: Array) -> Labelled | None:
        """A read at plain distinct axes over the whole shape is the array itself."""
        axes = tuple(i for i in node.index if isinstance(i, Axis))
        whole = all(self.extent(a.extent) == n for a, n in zip(axes, source.shape, strict=True))
        if not whole or len(set(axes)) != len(axes):
            return None
        return Labelled(source, axes)

    def full(self, node: Expr, axes: tuple[Axis, ...]) -> Array:
        """`node` broadcast to exactly `axes`."""
        shape = tuple(self.extent(a.extent) for a in axes)
        return np.broadcast_to(self.eval(node).over(axes), shape)

    def stage(self, stage: Stage) -> None:
        self.values[id(stage)] = self.full(stage.expr, stage.axes).astype(self.type(stage.dtype))


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Array],
    numbers: Mapping[str, int | float],
    *,
    precision: str = "storage",
) -> tuple[Array, ...]:
    """The graph's outputs.

    `inputs` by name, `numbers` the sizes of dynamic dims and the scalars. `precision` is
    "storage" (f32 arithmetic, declared output dtypes) or "float64" (everything in double).
    """
    double = precision == "float64"
    ev = Evaluator({}, numbers, double)
    for tensor in graph.inputs:
        array = np.asarray(inputs[tensor.name])
        ev.values[id(tensor)] = array.astype(ev.type(tensor.dtype), copy=False)
    with np.errstate(all="ignore"):
        for stage in graph.stages:
            ev.stage(stage)
    return tuple(ev.values[id(s)] for s in graph.outputs)
