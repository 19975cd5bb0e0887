"""Moves of several elements at once, where the layout of a tensor allows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...dsl.expr import Axis, Expr, Read, Stage, Tensor
from ...dsl.lower import encode, storage
from ...dsl.walk import free_axes, walk
from ..emit import WIDE_BYTES
from ..nest import static
from .nest import GridNest

Tir = Any
MOST_LANES = 8


class Vectors:
    """Reads and writes along one axis, `lanes` neighbours a thread.

    A tensor that several different elements of are read, or whose rows are not known to be
    aligned, is read one element at a time.
    """

    def __init__(
        self, nest: GridNest, axis: Axis, nodes: Sequence[Expr], results: Sequence[Stage]
    ) -> None:
        self.nest, self.axis = nest, axis
        wide = nest.emitter.wide
        self.reads = [r for r in _sole_reads(nodes) if _along(r, axis) and wide(r.tensor)]
        self.results = [s for s in results if s.axes and s.axes[-1] is axis and wide(s)]
        moved: list[Tensor] = [*(r.tensor for r in self.reads), *self.results]
        least = min((t.dtype.bytes for t in moved), default=WIDE_BYTES)
        self.lanes = min(MOST_LANES, WIDE_BYTES // least)

    def run(self, start: Tir, env: Mapping[Axis, Tir], body: Callable[[Tir, Any], None]) -> None:
        """`body(index, write)` for the axis' `lanes` indices from `start`, which all exist.

        `write(stage, value)` sets the stage's element there.
        """
        nest = self.nest
        with self._loaded(start, env) as lane:
            held = {id(s): self._buffer(s) for s in self.results}
            for i in range(self.lanes):
                lane[0] = nest.number(i)
                here = start + nest.number(i)

                def write(stage: Stage, value: Tir, i: int = i, here: Tir = here) -> None:
                    if id(stage) in held:
                        nest.store(held[id(stage)], [nest.number(i)], encode(value, stage.dtype))
                    else:
                        nest.write(stage, [*self._outer(stage, env), here], value)

                body(here, write)
            for stage in self.results:
                target, outer = nest.targets[id(stage)], self._outer(stage, env)
                self._move(held[id(stage)], target, outer, start, stage.dtype.bytes, out=True)

    def cover(self, start: Tir, end: Tir, env: Mapping[Axis, Tir],
              body: Callable[[Tir, Any], None]) -> None:  # fmt: skip
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

                def write(stage: Stage, value: Tir) -> None:
                    nest.write(stage, [*self._outer(stage, env), here], value)

                body(here, write)

    def _outer(self, stage: Stage, env: Mapping[Axis, Tir]) -> list[Tir]:
        return [env[a] for a in stage.axes[:-1]]

    def _buffer(self, tensor: Tensor) -> Tir:
        nest = self.nest
        return nest.private(f"{tensor.name}_lanes", [nest.number(self.lanes)],
                            storage(tensor.dtype))  # fmt: skip

    @contextmanager
    def _loaded(self, start: Tir, env: Mapping[Axis, Tir]) -> Iterator[list[Tir]]:
        """Inside, the wide tensors are read from registers, at the lane in the yielded cell."""
        nest, lane = self.nest, [self.nest.number(0)]
        readers = nest.emitter.lowering.readers
        before = {id(r.tensor): readers[id(r.tensor)] for r in self.reads}
        for read in self.reads:
            held = self._buffer(read.tensor)
            outer = [nest.emitter.lowering.expr(i, env) for i in read.index[:-1]]
            source = nest.sources[id(read.tensor)]
            self._move(held, source, outer, start, read.tensor.dtype.bytes, out=False)
            readers[id(read.tensor)] = lambda *_, held=held: held[lane[0]]
        yield lane
        readers.update(before)

    def _move(self, held: Tir, far: Tir, outer: list[Tir], start: Tir, size: int,
              out: bool) -> None:  # fmt: skip
        """Registers from or to memory, 16 bytes at a time."""
        nest = self.nest
        step = min(self.lanes, WIDE_BYTES // size)
        for first in range(0, self.lanes, step):
            with nest.loop("lane", nest.number(step), "vector") as lane:
                near, place = nest.number(first) + lane, [*outer, start + nest.number(first) + lane]
                if out:
                    nest.store(far, place, held[near])
                else:
                    nest.store(held, [near], far[tuple(place)])


def _sole_reads(nodes: Sequence[Expr]) -> list[Read]:
    """The reads of tensors that are read at one place only."""
    found: dict[Tensor, list[Read]] = {}
    for node in nodes:
        for item in walk(node):
            if isinstance(item, Read):
                found.setdefault(item.tensor, []).append(item)
    return [
        reads[0] for reads in found.values()
        if all(r.index == reads[0].index and r.fill is None for r in reads)
    ]  # fmt: skip


def _along(read: Read, axis: Axis) -> bool:
    """Whether neighbours along `axis` are neighbours in the tensor."""
    if not read.index or read.index[-1] is not axis:
        return False
    return all(
        axis not in free_axes(i) and not any(isinstance(n, Read) for n in walk(i))
        for i in read.index[:-1]
    )
