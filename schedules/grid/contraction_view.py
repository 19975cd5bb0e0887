"""A contraction as tiles of a grid see it: sizes, places in it, and where operands lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from ...dsl.expr import Axis
from ...dsl.lower import encode
from ..group import Group
from ..nest import Nest
from ..roles import roles, steps_through
from .nest import GridNest
from .vectors import Vectors, reading

Tir = Any


class Space:
    """Where tiles of values are copied from: points of axes, `k` those that a loop goes along.

    `env` are the axes known for the whole block, `dtype` is that of the values.
    """

    def __init__(self, nest: GridNest, k: tuple[Axis, ...], dtype: str = "float32") -> None:
        self.nest, self.k, self.dtype = nest, k, dtype
        self.env: dict[Axis, Tir] = {}

    def size(self, axes: Sequence[Axis]) -> Tir:
        """How many points the axes have together."""
        nest = self.nest
        return nest.simple(nest.product([nest.emitter.size(a.extent) for a in axes]))

    def place(self, axes: Sequence[Axis], index: Tir) -> dict[Axis, Tir]:
        """One index over all of `axes`, an existing one, as one for each, computed here."""
        nest = self.nest
        if len(axes) == 1:
            return {axes[0]: index}
        parts = nest.unflatten(index, [nest.emitter.size(a.extent) for a in axes])
        return {a: self.fixed(a.name, i) for a, i in zip(axes, parts, strict=True)}

    def fixed(self, name: str, value: Tir) -> Tir:
        """`value`, computed once here: TVM's simplifier would put it back into every use.

        Where no division is in it, it may.
        """
        value = self.nest.simple(value)
        return Nest.opaque(self.nest, name, value) if _costs(value) else value

    @contextmanager
    def lanes(self, count: int) -> Iterator[Tir]:
        """A statement for `count` neighbours at once; yields the index of each."""
        if count == 1:
            yield self.nest.number(0)
        else:
            with self.nest.loop("lane", self.nest.number(count), "vector") as lane:
                yield lane

    def maybe(self, condition: Tir | None) -> Any:
        """Statements that run where `condition`, if there is one, holds."""
        return nullcontext() if condition is None else self.nest.when(condition)


class View(Space):
    """Σₖ a·b over m × n for each `batch`; several axes may make up m, and several k.

    Axes that only `a` has are all in m, so that many short rows fill a tile; but where memory is
    contiguous along m the last one is alone, so that neighbours stay neighbours.
    """

    def __init__(self, nest: GridNest, group: Group) -> None:
        found = roles(group)
        assert found is not None
        super().__init__(nest, found.k, group.stages[0].dtype.name)
        self.head, self.out = group.stages[0], group.stages[-1]
        self.a, self.b = found.a, found.b
        alone = {x for i, x in enumerate(found.batch) if i in found.b_batch}
        rows = tuple(x for x in found.batch if x not in alone)
        if steps_through(found.a, (*rows, found.m), found.k):
            rows = ()
        self.m = (*rows, found.m)
        self.n = (found.n,)
        self.batch = tuple(x for x in found.batch if x not in rows)

    def enter(self, block: Tir, per_element: Tir) -> Tir:
        """Enter the element of the batch that a block works on; the block's place in it."""
        if not self.batch:
            return block
        batch, place = self.nest.unflatten(block, [self.size(self.batch), per_element])
        self.env = self.place(self.batch, self.fixed("batch", batch))
        return self.fixed("place", place)

    def result(self, total: Tir, env: dict[Axis, Tir]) -> Tir:
        """The result's element as it is stored, from the finished sum at a point."""
        if self.out is self.head:
            return encode(total, self.out.dtype)
        with reading(self.nest, {id(self.head): lambda *_: total}):
            value = self.nest.emitter.lowering.expr(self.out.expr, self.env | env)
        return encode(value, self.out.dtype)

    def write(self, total: Tir, env: dict[Axis, Tir]) -> None:
        """Set the result's element at a point."""
        where = self.env | env
        index = [where[a] for a in self.out.axes]
        self.nest.store(self.nest.targets[id(self.out)], index, self.result(total, env))


def _costs(value: Tir) -> bool:
    """Whether a division is in an index."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Call

    found: list[Tir] = []

    def call(node: Tir) -> None:
        if "trunc" in str(node.op):
            found.append(node)

    divisions = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
    tvm_ffi.structural_walk(value, ((divisions, found.append), (Call, call)))
    return bool(found)


def limited(vectors: Vectors, lanes: int) -> Vectors:
    """The same moves by no more than `lanes` neighbours, one by one if that is 1."""
    vectors.lanes = min(vectors.lanes, lanes)
    if vectors.lanes == 1:
        vectors.reads, vectors.results = [], []
    return vectors
