"""The threads that share a row, and their passes over its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ...dsl import forms
from ...dsl.expr import Axis, Expr, Read, Stage, Tensor
from ...dsl.graph import reads
from ...dsl.lower import encode, storage
from ...dsl.walk import free_axes, walk
from ..emit import combine, identity, masked
from ..group import is_map
from ..nest import static
from .nest import GridNest
from .passes import Pass, Scalars, Space
from .vectors import Vectors, Write, reading, sole_reads

Tir = Any


@dataclass
class Row:
    """One row as `width` threads see it: `at` is the thread's place among them.

    `env` has the row's indices. `exists` is None if that is certain; where it does not hold the
    indices are those of another row, and nothing may be written.
    """

    nest: GridNest
    env: dict[Axis, Tir]
    at: Tir
    width: int
    exists: Tir | None
    outputs: Sequence[Stage]
    sums: dict[Stage, Tir] = field(default_factory=dict)

    def scalars(self, step: Scalars) -> None:
        """Stages with one element a row: every thread computes them, one writes."""
        for stage in step.stages:
            value = self.nest.emitter.lowering.expr(stage.expr, self.env)
            self.settle(stage, encode(value, stage.dtype))

    def settle(self, stage: Stage, value: Tir) -> None:
        """From here on the row's element of a stage is `value`, as it is stored."""
        nest = self.nest
        value = nest.bind(stage.name, value)
        self._name(stage, value)
        if stage in self.outputs:
            first = self.at.equal(nest.number(0))
            with nest.when(first if self.exists is None else _both(first, self.exists)):
                nest.store(nest.targets[id(stage)], [self.env[a] for a in stage.axes], value)

    def start(self, stages: Sequence[Stage]) -> None:
        """Each reduction of `stages` at its neutral element, in each thread."""
        nest = self.nest
        for stage in stages:
            if isinstance(stage.expr, forms.Reduce):
                value = encode(identity(stage.expr.op, stage.dtype), stage.dtype)
                self.sums[stage] = nest.private(f"{stage.name}_part", [], storage(stage.dtype))
                nest.store(self.sums[stage], [], value)

    def finish(self, stages: Sequence[Stage]) -> None:
        """The reductions' results, from those of the threads."""
        zero = self.nest.number(0)
        for stage in stages:
            if isinstance(stage.expr, forms.Reduce):
                part = self.sums[stage][zero]
                self.settle(stage, self.nest.reduce(stage.expr.op, part, self.width))

    def evaluate(self, stages: Sequence[Stage], space: Space, index: Sequence[Tir],
                 put: Write) -> None:  # fmt: skip
        """Stages at one element, in order; `put` gets the pointwise ones as they are stored."""
        nest, zero = self.nest, self.nest.number(0)
        env = self.env | space.bind(index)
        for stage in stages:
            node = stage.expr
            if isinstance(node, forms.Reduce):
                value = encode(nest.emitter.lowering.expr(masked(node), env), stage.dtype)
                cell = self.sums[stage]
                nest.store(cell, [], combine(node.op, cell[zero], value))
            else:
                value = encode(nest.emitter.lowering.expr(node, env), stage.dtype)
                value = nest.bind(stage.name, value)
                self._name(stage, value)
                put(stage, value)

    def _name(self, stage: Stage, value: Tir) -> None:
        self.nest.emitter.lowering.readers[id(stage)] = lambda *_: value


def _both(a: Tir, b: Tir) -> Tir:
    from tvm import tirx

    return tirx.all(a, b)


def expressions(stages: Sequence[Stage]) -> list[Expr]:
    """What is evaluated at each element."""
    return [masked(s.expr) if isinstance(s.expr, forms.Reduce) else s.expr for s in stages]


def vectors_of(nest: GridNest, space: Space, stages: Sequence[Stage],
               results: Sequence[Stage]) -> Vectors:  # fmt: skip
    """Moves along the last axis of a space."""
    maps = [s for s in results if is_map(s)]
    return Vectors(nest, space.axes[-1], expressions(stages), maps, space.alias)


class Strided:
    """A pass that reads its elements from memory, a vector a thread at a time.

    Stages along the row that are not results are computed again in every pass.
    """

    def __init__(self, row: Row, step: Pass) -> None:
        self.row, self.step = row, step
        nest, space = row.nest, step.space
        self.vectors = vectors_of(nest, space, step.stages, step.results)
        self.extents = [nest.emitter.size(e) for e in space.extents]
        *outer, length = self.extents
        self.counts = [*outer, nest.ceil_div(length, self.vectors.lanes)]
        self.total = nest.simple(nest.product(self.counts))

    def run(self, first: Tir | None = None, end: Tir | None = None) -> None:
        """Over vectors `first` … `end` − 1 of the row's `total`, by default all."""
        nest, row = self.row.nest, self.row
        first = nest.number(0) if first is None else first
        end = self.total if end is None else end
        steps = nest.ceil_div(end - first, row.width)
        row.start(self.step.stages)
        with nest.loop("step", nest.hidden("steps", steps)) as i:
            place = nest.hidden("place", first + i * nest.number(row.width) + row.at)
            exact = static(nest.simple(end - first))
            guarded = exact is None or exact % row.width != 0
            with nest.when(place < end) if guarded else nullcontext():
                self._one(place)
        row.finish(self.step.stages)

    def _one(self, place: Tir) -> None:
        nest, row, space = self.row.nest, self.row, self.step.space
        *outer, last = nest.unflatten(place, self.counts)
        outer = [nest.hidden(a.name, i) for a, i in zip(space.axes, outer, strict=False)]
        start = nest.opaque("start", last * nest.number(self.vectors.lanes))

        def body(here: Tir, write: Write) -> None:
            def put(stage: Stage, value: Tir) -> None:
                if stage in self.step.results:
                    write(stage, value)

            row.evaluate(self.step.stages, space, [*outer, here], put)

        env = row.env | space.bind([*outer, start])
        self.vectors.cover(start, self.extents[-1], env, body)


class Held:
    """Passes over a space whose elements stay in the threads' registers from one to the next.

    A thread has `count` vectors, `width` apart. `stages` are all that go over the space, in
    `passes`.
    """

    def __init__(self, nest: GridNest, space: Space, passes: Sequence[Pass]) -> None:
        self.nest, self.space, self.passes = nest, space, passes
        self.stages = list(dict.fromkeys(s for p in passes for s in p.stages))
        results = list(dict.fromkeys(s for p in passes for s in p.results))
        self.vectors = vectors_of(nest, space, self.stages, results)
        length = static(nest.emitter.size(space.extents[-1]))
        if length is not None and length % self.vectors.lanes:
            self.vectors.narrow()
        self.lanes = self.vectors.lanes
        self.counts = [nest.emitter.size(e) for e in space.extents]
        self.counts[-1] = nest.ceil_div(self.counts[-1], self.lanes)
        self.total = static(nest.simple(nest.product(self.counts)))
        self.reads = self._kept_reads()
        self.kept: dict[int, Tir] = {}

    def _kept_reads(self) -> list[Read]:
        """Reads that several passes share, or that are wide."""
        found = list(self.vectors.reads)
        axes = {*self.space.axes, *self.space.alias}
        for read in sole_reads(expressions(self.stages), self.space.alias):
            inputs = [n for n in walk(read) if isinstance(n, Read)]
            if (
                all(id(r.tensor) in self.nest.sources for r in inputs)
                and read.fill is None
                and axes & set(free_axes(read))
                and self._uses(read) > 1
                and all(r.tensor is not read.tensor for r in found)
            ):
                found.append(read)
        return found

    def _uses(self, read: Read) -> int:
        """How many passes read a tensor."""
        return sum(any(read.tensor in reads(s.expr) for s in p.stages) for p in self.passes)

    def words(self, width: int) -> int | None:
        """Registers (4 bytes) that a thread needs between passes; None if that is not known."""
        if self.total is None:
            return None
        # Narrow elements too: compilers like to keep them converted.
        kept = [sum(-(-t.dtype.bytes // 4) for t in self._alive(i))
                for i in range(1, len(self.passes))]  # fmt: skip
        return max(kept, default=0) * self.elements(width)

    def _alive(self, i: int) -> set[Tensor]:
        """What pass number i and later ones need of what earlier ones have read or computed."""
        done = {s for p in self.passes[:i] for s in p.stages}
        had = {t for s in done for t in reads(s.expr)} & {r.tensor for r in self.reads}
        alive: set[Tensor] = set()
        for step in self.passes[i:]:
            wanted: set[Tensor] = set(step.results)
            for stage in reversed(step.stages):
                if stage not in wanted:
                    continue
                if stage in done and is_map(stage):
                    alive.add(stage)
                else:
                    wanted |= set(reads(stage.expr))
            alive |= wanted & had
        return alive

    def elements(self, width: int) -> int:
        """Elements of a row in each of `width` threads."""
        assert self.total is not None
        return -(-self.total // width) * self.lanes

    def run(self, row: Row, step: Pass) -> None:
        """The next pass."""
        assert self.total is not None
        fresh = [s for s in step.stages if not is_map(s) or id(s) not in self.kept]
        later = self._alive(self.passes.index(step) + 1)
        count = -(-self.total // row.width)
        self._load(row, fresh, count)
        for stage in fresh:
            if is_map(stage) and (stage in step.results or stage in later):
                self.kept[id(stage)] = self.vectors.registers(stage, count * self.lanes)
        row.start(step.stages)
        for i in range(count):
            with self._vector(row, i) as (outer, start):
                self._compute(row, fresh, i, outer, start)
                self._write(row, step, i, outer, start)
        row.finish(step.stages)

    @contextmanager
    def _vector(self, row: Row, i: int) -> Iterator[tuple[list[Tir], Tir]]:
        """The thread's vector number i, if it has one: where it starts."""
        nest = self.nest
        place = nest.number(i * row.width) + row.at
        assert self.total is not None
        some = (i + 1) * row.width > self.total
        with nest.when(place < nest.number(self.total)) if some else nullcontext():
            *outer, last = nest.unflatten(place, self.counts)
            yield [nest.simple(o) for o in outer], nest.simple(last * nest.number(self.lanes))

    def _load(self, row: Row, stages: Sequence[Stage], count: int) -> None:
        """All that `stages` read and later passes share, before anything waits for it."""
        nest = self.nest
        wanted = {t for s in stages for t in reads(s.expr)}
        due = [r for r in self.reads if r.tensor in wanted and id(r.tensor) not in self.kept]
        for read in due:
            self.kept[id(read.tensor)] = self.vectors.registers(read.tensor, count * self.lanes)
        for i in range(count if due else 0):
            with self._vector(row, i) as (outer, start):
                for read in due:
                    held = self.kept[id(read.tensor)]
                    if any(read is r for r in self.vectors.reads):
                        env = row.env | self.space.bind([*outer, start])
                        self.vectors.fetch(read, held, i * self.lanes, start, env)
                        continue
                    for lane in range(self.lanes):
                        env = row.env | self.space.bind([*outer, start + nest.number(lane)])
                        source = nest.sources[id(read.tensor)]
                        value = source[tuple(nest.emitter.lowering.places(read, env))]
                        nest.store(held, [nest.number(i * self.lanes + lane)], value)

    def _compute(self, row: Row, stages: Sequence[Stage], i: int, outer: list[Tir],
                 start: Tir) -> None:  # fmt: skip
        nest = self.nest
        cell = [nest.number(0)]

        def reader(held: Tir) -> Callable[..., Tir]:
            return lambda *_: held[cell[0]]

        def put(stage: Stage, value: Tir) -> None:
            if id(stage) in self.kept:
                nest.store(self.kept[id(stage)], [cell[0]], value)

        with reading(nest, {key: reader(held) for key, held in self.kept.items()}):
            for lane in range(self.lanes):
                cell[0] = nest.number(i * self.lanes + lane)
                row.evaluate(stages, self.space, [*outer, start + nest.number(lane)], put)

    def _write(self, row: Row, step: Pass, i: int, outer: list[Tir], start: Tir) -> None:
        """The results' elements, which are in registers, to memory."""
        nest = self.nest
        maps = [s for s in step.results if is_map(s)]
        if not maps:
            return
        with nest.when(row.exists) if row.exists is not None else nullcontext():
            for stage in maps:
                held = self.kept[id(stage)]
                if stage in self.vectors.results:
                    env = row.env | self.space.bind([*outer, start])
                    self.vectors.flush(stage, held, i * self.lanes, start, env)
                    continue
                for lane in range(self.lanes):
                    env = row.env | self.space.bind([*outer, start + nest.number(lane)])
                    place = [env[a] for a in stage.axes]
                    value = held[nest.number(i * self.lanes + lane)]
                    nest.store(nest.targets[id(stage)], place, value)
