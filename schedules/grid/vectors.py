"""Moves of several elements at once, where the layout of a tensor allows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...dsl.expr import Axis, Const, DimRef, Expr, Read, ScalarRef, Stage, Tensor
from ...dsl.lower import storage
from ...dsl.walk import free_axes, walk
from ..capability import WIDE_BYTES
from ..nest import static
from .nest import GridNest

Tir = Any
Write = Callable[[Stage, Tir], None]
MOST_LANES = 8


class Vectors:
    """Reads and writes along one axis, `lanes` neighbours a thread.

    A tensor that several different elements of are read, or whose rows are not known to be
    aligned, is read one element at a time. `alias` gives, for an axis that runs along with another
    one, that other axis.
    """

    def __init__(
        self, nest: GridNest, axis: Axis, nodes: Sequence[Expr], results: Sequence[Stage],
        alias: Mapping[Axis, Axis] | None = None,
    ) -> None:  # fmt: skip
        self.nest, self.axis, self.alias = nest, axis, alias or {}
        wide = nest.emitter.wide
        sole = sole_reads(nodes, self.alias)
        along = [r for r in sole if self.along(r)]
        self.reads = [r for r in along if wide(r.tensor)]
        self.results = [s for s in results if self._is_axis(s.axes[-1]) and wide(s)]
        self.lanes = self._lanes(along)
        if self.lanes == 1:
            self.narrow()

    def _lanes(self, along: Sequence[Read]) -> int:
        """As many as fill 16 bytes, if that serves at least half of the largest tensors read.

        What is written counts where nothing is read: the order in which a row is summed must not
        depend on where its results go.
        """
        axes = [len(free_axes(r)) for r in along]
        large: list[Tensor] = [r.tensor for r, n in zip(along, axes, strict=True) if n == max(axes)]
        wide = [t for t in large or self.results if self.nest.emitter.wide(t)]
        if not wide or 2 * len(wide) < len(large):
            return 1
        return min(MOST_LANES, WIDE_BYTES // min(t.dtype.bytes for t in wide))

    def narrow(self) -> None:
        """One element at a time."""
        self.lanes, self.reads, self.results = 1, [], []

    def _is_axis(self, index: Expr) -> bool:
        return isinstance(index, Axis) and self.alias.get(index, index) is self.axis

    def along(self, read: Read) -> bool:
        """Whether neighbours along the axis are neighbours in the tensor."""
        own = {self.axis, *(a for a, b in self.alias.items() if b is self.axis)}
        return (
            bool(read.index)
            and read.fill is None
            and self._is_axis(read.index[-1])
            and not any(own & set(free_axes(i)) for i in read.index[:-1])
            and id(read.tensor) in self.nest.sources
            and all(id(n.tensor) in self.nest.sources for i in read.index for n in _reads(i))
        )

    def run(self, start: Tir, env: Mapping[Axis, Tir], body: Callable[[Tir, Write], None]) -> None:
        """`body(index, write)` for the axis' `lanes` indices from `start`, which all exist.

        `write(stage, value)` sets the stage's element there to a value as it is stored.
        """
        nest = self.nest
        with self._loaded(start, env) as lane:
            held = {id(s): self.registers(s, self.lanes) for s in self.results}
            for i in range(self.lanes):
                lane[0] = nest.number(i)
                here = start + nest.number(i)

                def write(stage: Stage, value: Tir, i: int = i, here: Tir = here) -> None:
                    if id(stage) in held:
                        nest.store(held[id(stage)], [nest.number(i)], value)
                    else:
                        self._write(stage, here, env, value)

                body(here, write)
            for stage in self.results:
                self.flush(stage, held[id(stage)], 0, start, env)

    def cover(self, start: Tir, end: Tir, env: Mapping[Axis, Tir],
              body: Callable[[Tir, Write], None]) -> None:  # fmt: skip
        """As `run`, for those of the `lanes` indices from `start`, a multiple, that are < `end`."""
        nest, lanes = self.nest, self.lanes
        whole = static(end)
        if lanes == 1 or (whole is not None and whole % lanes == 0):
            self.run(start, env, body)
            return
        with nest.choice(start + nest.number(lanes) <= end) as otherwise:
            self.run(start, env, body)
            otherwise()
            with nest.loop("rest", end - start) as i:
                here = start + i
                body(here, lambda stage, value: self._write(stage, here, env, value))

    def registers(self, tensor: Tensor, count: int) -> Tir:
        """Room for `count` elements of a tensor, as they are stored."""
        nest = self.nest
        return nest.private(f"{tensor.name}_lanes", [nest.number(count)], storage(tensor.dtype))

    def fetch(self, read: Read, held: Tir, at: int, start: Tir, env: Mapping[Axis, Tir]) -> None:
        """`lanes` elements of a wide read, from `start` on, into registers from `at` on."""
        last = read.index[-1]
        assert isinstance(last, Axis)
        here: dict[Axis, Tir] = {**env, last: start}
        index = self.nest.emitter.lowering.places(read, here)[:-1]
        source = self.nest.sources[id(read.tensor)]
        for near, far in self._moves(at, start, read.tensor.dtype.bytes):
            self.nest.store(held, [near], source[(*index, far)])

    def flush(self, stage: Stage, held: Tir, at: int, start: Tir, env: Mapping[Axis, Tir]) -> None:
        """`lanes` elements of a wide result, from registers from `at` on."""
        index = [env[a] for a in stage.axes[:-1]]
        target = self.nest.targets[id(stage)]
        for near, far in self._moves(at, start, stage.dtype.bytes):
            self.nest.store(target, [*index, far], held[near])

    def _moves(self, at: int, start: Tir, size: int) -> Iterator[tuple[Tir, Tir]]:
        """Indices of registers and of memory, in vector loops of up to 16 bytes."""
        nest, step = self.nest, min(self.lanes, WIDE_BYTES // size)
        for first in range(0, self.lanes, step):
            with nest.loop("lane", nest.number(step), "vector") as lane:
                yield nest.number(at + first) + lane, start + nest.number(first) + lane

    def _write(self, stage: Stage, here: Tir, env: Mapping[Axis, Tir], value: Tir) -> None:
        index = [here if self._is_axis(a) else env[a] for a in stage.axes]
        self.nest.store(self.nest.targets[id(stage)], index, value)

    @contextmanager
    def _loaded(self, start: Tir, env: Mapping[Axis, Tir]) -> Iterator[list[Tir]]:
        """Inside, the wide tensors are read from registers, at the lane in the yielded cell."""
        lane = [self.nest.number(0)]
        fresh: dict[int, Callable[..., Tir]] = {}
        for read in self.reads:
            held = self.registers(read.tensor, self.lanes)
            self.fetch(read, held, 0, start, env)
            fresh[id(read.tensor)] = lambda *_, held=held: held[lane[0]]
        with reading(self.nest, fresh):
            yield lane


@contextmanager
def reading(nest: GridNest, fresh: Mapping[int, Callable[..., Tir]]) -> Iterator[None]:
    """Inside, reads of tensors (by identity) go elsewhere."""
    readers = nest.emitter.lowering.readers
    before = {key: readers[key] for key in fresh if key in readers}
    readers.update(fresh)
    yield
    for key in fresh:
        readers.pop(key)
    readers.update(before)


def sole_reads(nodes: Sequence[Expr], alias: Mapping[Axis, Axis]) -> list[Read]:
    """The reads of tensors that are read at one place only."""
    found: dict[Tensor, list[Read]] = {}
    for node in nodes:
        for read in _reads(node):
            found.setdefault(read.tensor, []).append(read)
    return [
        reads[0] for reads in found.values() if len({_signature(r, alias) for r in reads}) == 1
    ]  # fmt: skip


def _reads(node: Expr) -> Iterator[Read]:
    return (n for n in walk(node) if isinstance(n, Read))


def _signature(node: Expr, alias: Mapping[Axis, Axis]) -> Any:
    """Equal for equal expressions."""
    if isinstance(node, Axis):
        return id(alias.get(node, node))
    if isinstance(node, Const):
        return (node.value, node.dtype)
    if isinstance(node, (DimRef, ScalarRef)):
        return node.name
    more: tuple[Any, ...] = ()
    if isinstance(node, Read):
        more = (id(node.tensor), node.fill)
    children = (_signature(c, alias) for c in node.children())
    return (type(node).__name__, getattr(node, "op", ""), node.dtype, *more, *children)
