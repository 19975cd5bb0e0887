"""Weighted sums whose values are not all finite: those columns again, masked points left out.

A tiled product multiplies a masked value by its weight 0, which for NaN or an infinity is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import bool_
from ...dsl.expr import Axis, Stage, Unary
from ...dsl.lower import encode
from ...dsl.walk import free_axes
from .nest import GridNest
from .vectors import reading

Tir = Any
_WIDTH = 32  # columns of a block, side by side


def mend(
    nest: GridNest, product: Stage, result: Stage, node: forms.SoftmaxSum, threads: int
) -> None:
    """A launch that sets `result` again in columns where a value is not finite.

    `product` is Σ weights · value as `result` reads it.
    """
    _Mending(nest, product, result, node, threads).launch()


class _Mending:
    def __init__(
        self, nest: GridNest, product: Stage, result: Stage, node: forms.SoftmaxSum, threads: int
    ) -> None:
        self.nest, self.product, self.result, self.node = nest, product, result, node
        self.threads, self.parts = threads, threads // _WIDTH
        own = free_axes(node.value)
        self.column = next(a for a in reversed(result.axes) if a in node.column_axes())
        self.fixed = [a for a in result.axes if a in own and a is not self.column]
        self.rows = [a for a in result.axes if a not in own]
        self.lower = nest.emitter.lowering.expr
        self.size = nest.emitter.size

    def launch(self) -> None:
        nest, width = self.nest, self.nest.number(_WIDTH)
        columns = self.size(self.column.extent)
        extents = [self.size(a.extent) for a in self.fixed]
        extents.append(nest.ceil_div(columns, _WIDTH))
        with nest.launch(nest.simple(nest.product(extents)), self.threads) as (block, thread):
            *index, tile = nest.unflatten(block, extents)
            env = {a: nest.opaque(a.name, i) for a, i in zip(self.fixed, index, strict=True)}
            lane = nest.bind("lane", thread % width)
            part = nest.bind("part", thread // width)
            env[self.column] = nest.bind("column", tile * width + lane)
            exists = env[self.column] < columns
            with nest.when(_both(exists, self._odd(env, lane, part, exists))):
                self._again(env, part)

    def _points(self, axes: Sequence[Axis], part: Tir, body: Any) -> None:
        """`body(indices by axis)` for every `parts`-th point of the axes, from `part` on."""
        nest = self.nest
        extents = [nest.opaque(a.name, self.size(a.extent)) for a in axes]
        total = nest.opaque("total", nest.product(extents))
        with nest.loop("turn", nest.ceil_div(total, self.parts)) as turn:
            point = nest.bind("point", turn * nest.number(self.parts) + part)
            with nest.when(point < total):
                index = nest.unflatten(point, extents)
                body({a: nest.bind(a.name, i) for a, i in zip(axes, index, strict=True)})

    def _odd(self, env: dict[Axis, Tir], lane: Tir, part: Tir, exists: Tir) -> Tir:
        """Whether any value of the thread's column is NaN or infinite."""
        nest, zero = self.nest, self.nest.number(0)
        found = nest.private("found", [], "int32")
        nest.store(found, [zero], _int(0))

        def look(point: dict[Axis, Tir]) -> None:
            # Selected by `finite`, not by its negation: TVM turns that comparison round, NaN or no.
            finite = self.lower(Unary("finite", self.node.value, bool_), env | point)
            nest.store(found, [zero], _select(finite, found[zero], _int(1)))

        with nest.when(exists):
            self._points(self.node.over, part, look)
        cells = nest.shared("odd", [nest.number(self.parts), nest.number(_WIDTH)], "int32")
        nest.store(cells, [part, lane], found[zero])
        nest.barrier()
        total: Tir = _int(0)
        for i in range(self.parts):
            total = total + cells[nest.number(i), lane]
        return nest.bind("any", total) > _int(0)

    def _again(self, env: dict[Axis, Tir], part: Tir) -> None:
        """The rows of one column, each summed over the points that count."""
        nest, zero, node = self.nest, self.nest.number(0), self.node
        weights = self.product.expr.body.a  # type: ignore[attr-defined]
        total = nest.private("total", [], "float32")

        def row(index: dict[Axis, Tir]) -> None:
            here = env | index
            nest.store(total, [zero], _real(0.0))
            self._sum(node.over, here, lambda at: nest.store(
                total, [zero],
                total[zero] + self.lower(weights, at) * self.lower(node.value, at),
            ))  # fmt: skip
            with reading(nest, {id(self.product): lambda *_: total[zero]}):
                value = self.lower(self.result.expr, here)
            index_ = [here[a] for a in self.result.axes]
            value = encode(value, self.result.dtype)
            nest.store(nest.targets[id(self.result)], index_, value)

        self._points(self.rows, part, row)

    def _sum(self, rest: Sequence[Axis], env: dict[Axis, Tir], add: Any) -> None:
        """`add` at every point of the axes that is not masked."""
        nest = self.nest
        if rest:
            with nest.loop(rest[0].name, self.size(rest[0].extent)) as var:
                self._sum(rest[1:], env | {rest[0]: var}, add)
            return
        with nest.when(self.lower(self.node.where, env)):  # type: ignore[arg-type]
            add(env)


def _both(a: Tir, b: Tir) -> Tir:
    from tvm import tirx

    return tirx.all(a, b)


def _select(condition: Tir, then: Tir, otherwise: Tir) -> Tir:
    from tvm import tirx

    return tirx.Select(condition, then, otherwise)


def _int(value: int) -> Tir:
    from tvm import tirx

    return tirx.const(value, "int32")


def _real(value: float) -> Tir:
    from tvm import tirx

    return tirx.const(value, "float32")
