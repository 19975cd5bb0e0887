"""What tiled loop nests need besides `Nest`: vectors, registers, strips, transposing copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from ...dsl.dtypes import DType, f32
from ...dsl.expr import Axis, Expr, Read, Stage, Tensor, cast
from ...dsl.forms import Reduce
from ...dsl.walk import free_axes, rebuild
from ..emit import Emitter
from ..group import Group, divides
from ..nest import Nest

Tir = Any


def index(value: Tir) -> Tir:
    """A Python int as an int64 literal; expressions pass through."""
    from tvm import tirx

    return tirx.IntImm("int64", value) if isinstance(value, int) else value


def real(value: float) -> Tir:
    """A float32 literal."""
    from tvm import tirx

    return tirx.const(value, "float32")


def ceil_div(a: Tir, b: int) -> Tir:
    """⌈a / b⌉ for a ≥ 0 and a positive constant b."""
    return (a + index(b - 1)) // index(b)


class Tiling(Nest):
    """A `Nest` whose statements are vectors and register tiles."""

    def __init__(self, emitter: Emitter) -> None:
        super().__init__(emitter)
        self._settled: dict[int, Expr] = {}

    def put(self, buffer: Tir, at: Sequence[Tir], value: Tir) -> None:
        """buffer[at] = value; ints among the indices are literals."""
        self.store(buffer, [index(i) for i in at], value)

    def scratch(self, name: str, shape: Sequence[Tir], dtype: str = "float32") -> Tir:
        """Memory of this thread for the rest of the block; contents are undefined."""
        return self._allocate(name, shape, dtype)

    def registers(self, name: str, count: int, lanes: int, dtype: str = "float32") -> list[Tir]:
        """`count` vectors that live in registers, each a buffer of its own.

        TVM puts a local array of a kilobyte or more on the heap.
        """
        return [self._allocate(name, [lanes], dtype) for _ in range(count)]

    def _allocate(self, name: str, shape: Sequence[Tir], dtype: str) -> Tir:
        from tvm import tirx

        extents = [index(e) for e in shape]
        buffer = tirx.decl_buffer(extents, dtype, self.emitter.name(name), data_alignment=64)
        self.add(tirx.AllocBuffer(buffer))
        return buffer

    def vector(self, width: int) -> AbstractContextManager[Tir]:
        """Statements for `width` lanes at once; yields the lane."""
        return self.loop("lane", index(width), "vector" if width > 1 else "serial")

    @contextmanager
    def points(
        self, axes: Sequence[Axis], env: dict[Axis, Tir]
    ) -> Iterator[tuple[dict[Axis, Tir], Tir]]:
        """Loops over `axes`; yields `env` with them, and the row-major position."""
        with ExitStack() as stack:
            place: Tir = index(0)
            inside = dict(env)
            for axis in axes:
                extent = self.size(axis.extent)
                inside[axis] = stack.enter_context(self.loop("at", extent))
                place = place * extent + inside[axis]
            yield inside, place

    @contextmanager
    def otherwise(self) -> Iterator[None]:
        """The else of the `when` just closed."""
        from tvm import tirx

        self.blocks.append([])
        yield
        body = self.close()
        last = self.blocks[-1].pop()
        self.add(tirx.IfThenElse(last.condition, last.then_case, body))

    def strip(self, count: int, lanes: int, body: Callable[[Tir, int], None]) -> None:
        """`body(first, width)` over 0 … count − 1: whole vectors in a loop, then the rest."""
        whole = count // lanes
        if whole == 1:
            body(index(0), lanes)
        elif whole > 1:
            with self.loop("vector", index(whole)) as v:
                body(v * index(lanes), lanes)
        if count % lanes:
            body(index(whole * lanes), count % lanes)

    def run(self, count: Tir, lanes: int, body: Callable[[Tir], None]) -> None:
        """`body` at 0 … count − 1: vectors, then single elements."""
        whole = self.simple(count // index(lanes))
        with self.loop("vector", whole) as v, self.vector(lanes) as lane:
            body(v * index(lanes) + lane)
        with self.loop("rest", self.simple(count - whole * index(lanes))) as at:
            body(whole * index(lanes) + at)

    def fill(self, buffer: Tir, at: Sequence[Tir], count: Tir, lanes: int, value: Tir) -> None:
        """`value` in `count` elements of `buffer`, the last index of the first being `at`'s."""
        *leading, first = at
        self.run(count, lanes, lambda n: self.put(buffer, [*leading, first + n], value))

    def vectors(self, count: Tir, lanes: int) -> Iterator[tuple[Tir, int]]:
        """(first, width) of vectors over 0 … count − 1, then of single ones, each inside a loop."""
        whole = self.opaque("whole", count // index(lanes))
        with self.loop("vector", whole) as v:
            yield self.bind("first", v * index(lanes)), lanes
        done = self.opaque("done", whole * index(lanes))
        with self.loop("single", self.opaque("rest", count - done)) as at:
            yield self.bind("first", done + at), 1

    def gathered(self, width: int, value: Callable[[Tir], Tir], dtype: str = "float32") -> Tir:
        """A register filled lane by lane, where the lanes' places are no neighbours."""
        (register,) = self.registers("gathered", 1, width, dtype)
        for lane in range(width):
            self.put(register, [lane], value(index(lane)))
        return register

    @contextmanager
    def row_blocks(
        self, axes: Sequence[Axis], block: int
    ) -> Iterator[tuple[dict[Axis, Tir], Tir, Tir]]:
        """Tasks of `block` rows: yields all axes but the last two at hand, first row and number."""
        from tvm import tirx

        *outer, rows, _ = (self.opaque("extent", self.size(a.extent)) for a in axes)
        size = index(block)
        blocks = self.opaque("blocks", (rows + size - index(1)) // size)
        extents = [*outer, blocks]
        with self.loop("task", self.product(extents), "parallel") as task:
            *at, part = self.unflatten(task, extents)
            env = {a: self.opaque(a.name, i) for a, i in zip(axes[:-2], at, strict=True)}
            first = self.opaque("first", part * size)
            yield env, first, self.opaque("rows", tirx.min(size, rows - first))

    def results(self, group: Group, env: dict[Axis, Tir], made: dict[int, Tir]) -> None:
        """A group's outputs at a point, `made` the values of some stages: other stages follow."""
        readers = self.emitter.lowering.readers
        for stage in group.stages:
            value = made[id(stage)] if id(stage) in made else self.value(stage.expr, env)
            readers[id(stage)] = lambda *_, v=value: v
            if stage in group.outputs:
                self.write(stage, [env[a] for a in stage.axes], value)

    def add_up(self, sums: Sequence[Stage], env: dict[Axis, Tir]) -> None:
        """Stages that are sums at a point, one element after the other; reads find the results."""
        readers = self.emitter.lowering.readers
        for stage in sums:
            node = stage.expr
            assert isinstance(node, Reduce)
            (total,) = self.registers("sum", 1, 1)
            self.put(total, [0], real(0.0))
            with self.points(node.over, env) as (inside, _), ExitStack() as stack:
                if node.where is not None:
                    stack.enter_context(self.when(self.value(node.where, inside)))
                self.put(total, [0], total[index(0)] + self.real(node.body, inside))
            readers[id(stage)] = lambda *_, t=total: t[index(0)]

    def transposed(
        self, rows: Tir, columns: Tir, copy: Callable[[Tir, Tir], None], edge: int = 4
    ) -> None:
        """`copy(row, column)` over a rectangle in squares, the row being the vector axis.

        A square of loads along columns and stores along rows is what LLVM turns into loads,
        shuffles and stores of whole vectors.
        """
        square = index(edge)
        high = self.bind("rows_whole", rows - rows % square)
        wide = self.bind("columns_whole", columns - columns % square)
        with self.loop("i", high // square) as i, self.loop("j", wide // square) as j:
            for across in range(edge):
                with self.vector(edge) as lane:
                    copy(i * square + lane, j * square + index(across))
        with self.loop("i", high) as i, self.loop("j", columns - wide) as j:
            copy(i, wide + j)
        with self.loop("i", rows - high) as i, self.loop("j", columns) as j:
            copy(high + i, j)

    def size(self, value: Any) -> Tir:
        return self.emitter.size(value)

    def value(self, node: Expr, env: dict[Axis, Tir]) -> Tir:
        """`node` at a point."""
        return self.emitter.lowering.expr(node, env)

    def real(self, node: Expr, env: dict[Axis, Tir]) -> Tir:
        """`node` at a point, as float32."""
        return self.value(cast(node, f32), env)

    def settle(self, node: Expr, env: dict[Axis, Tir]) -> Expr:
        """`node` with the divisions that depend on the axes of `env` alone computed here, once."""
        found = self._settled.get(id(node))
        if found is None:
            children = tuple(self.settle(c, env) for c in node.children())
            found = rebuild(node, children) if children else node
            if divides(node) and all(a in env for a in free_axes(node)):
                found = self._held(self.bind("part", self.value(found, env)), node.dtype)
            self._settled[id(node)] = found
        return found

    def _held(self, var: Tir, dtype: DType) -> Expr:
        """A leaf that stands for a variable."""
        tensor = Tensor("held", (), dtype)
        self.emitter.lowering.readers[id(tensor)] = lambda: var
        return Read(tensor, (), None, dtype)
