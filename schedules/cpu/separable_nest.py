"""The nests of `SeparableFolds`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

from ...dsl.dtypes import f32, i32, i64
from ...dsl.expr import Axis, Cast, Expr, Read, Size, Tensor, cast
from ...dsl.lower import constant, convert
from ...dsl.walk import rebuild
from ..emit import Emitter, combine, identity
from ..group import Group
from .separable import Fold, Separable, SeparableConfig
from .taps import combinations
from .tiling import Tiling, ceil_div, index

Tir = Any


class _Separable:
    """What both orders share: tables of columns, tasks of rows, the result."""

    def __init__(
        self, emitter: Emitter, group: Group, found: Separable, lanes: int, config: SeparableConfig
    ) -> None:
        self.nest = Tiling(emitter)
        self.group, self.found, self.lanes, self.config = group, found, lanes, config
        self.axes = group.head.axes
        self.env: dict[Axis, Tir] = {}
        self.element: Tir = None  # what the read gives, as f32 if it is narrow
        read = found.read
        self.kind = f32 if read.dtype.is_narrow_float else read.dtype
        held = Tensor("element", (), self.kind)
        self.held = Read(held, (), None, self.kind)
        self.nest.emitter.lowering.readers[id(held)] = lambda: self.element
        self.values = [self._of_element(f.value) for f in found.folds]

    def _of_element(self, node: Expr) -> Expr:
        read = self.found.read
        if node is read:
            return cast(self.held, node.dtype)
        if isinstance(node, Cast) and node.a is read:
            return cast(self.held, node.dtype)
        children = tuple(self._of_element(c) for c in node.children())
        return rebuild(node, children) if children else node

    def lower(self) -> Any:
        nest = self.nest
        self.width = nest.opaque("width", nest.size(self.axes[-1].extent))
        self._tables()
        with nest.row_blocks(self.axes, self.config.block) as (outer, first, rows):
            self.env |= outer
            self.prepare()
            with nest.loop("row", rows) as row:
                self.env[self.axes[-2]] = nest.bind("at", first + row)
                self.row()
        return nest.finish()

    def prepare(self) -> None:
        """Memory of a task."""
        raise NotImplementedError

    def row(self) -> None:
        """A row of the result."""
        raise NotImplementedError

    # --- columns ---

    def _tables(self) -> None:
        """[tap, column]: the element, whether it counts, the factor of each reduction."""
        from tvm import tirx

        nest, found = self.nest, self.found
        count: Size = 1
        for axis in found.column_taps:
            count = axis.extent * count
        shape = (count, self.axes[-1].extent)
        self.taps = nest.opaque("taps", nest.size(count))
        self.places = nest.workspace("places", shape, i64)
        self.kept = nest.workspace("kept", shape, i32) if found.column_kept else None
        self.factors = [nest.workspace("factors", shape) if f.columns else None
                        for f in found.folds]  # fmt: skip
        extents = [nest.size(a.extent) for a in found.column_taps]
        with nest.loop("tap", self.taps, "parallel") as tap:
            at = nest.unflatten(tap, extents)
            env = dict(zip(found.column_taps, at, strict=True))
            with nest.loop("column", self.width) as column:
                env[self.axes[-1]] = column
                nest.put(self.places, [tap, column], self._column(env))
                if self.kept is not None:
                    kept = reduce(tirx.all, (nest.value(n, env) for n in found.column_kept))
                    nest.put(self.kept, [tap, column], kept.astype("int32"))
                for fold, table in zip(found.folds, self.factors, strict=True):
                    if table is not None:
                        nest.put(table, [tap, column], self._product(fold.columns, env))

    def _column(self, env: dict[Axis, Tir]) -> Tir:
        """The element that a column reads; the one past the last where it is outside."""
        from tvm import tirx

        read = self.found.read
        place = self.nest.emitter.lowering.place(read, len(read.index) - 1, env)
        if read.fill is None:
            return place
        size = self.source_width()
        inside = tirx.all(place >= index(0), place < size)
        return tirx.Select(inside, place, size)

    def source_width(self) -> Tir:
        return self.nest.size(self.found.read.tensor.shape[-1])

    def _product(self, factors: tuple[Expr, ...], env: dict[Axis, Tir]) -> Tir:
        return reduce(lambda a, b: a * b, (self.nest.real(f, env) for f in factors))

    def term(self, number: int, value: Tir, tap: Tir, column: Tir) -> Tir:
        """A value as it counts for a column, by the tables."""
        from tvm import tirx

        table, fold = self.factors[number], self.found.folds[number]
        if table is not None:
            value = value * table[tap, column]
        if self.kept is None:
            return value
        counts = self.kept[tap, column] != tirx.const(0, "int32")
        return tirx.Select(counts, value, neutral(fold))

    # --- rows ---

    def row_places(self, env: dict[Axis, Tir]) -> list[Tir]:
        read, lowering = self.found.read, self.nest.emitter.lowering
        return [self.nest.opaque("place", lowering.place(read, n, env))
                for n in range(len(read.index) - 1)]  # fmt: skip

    def row_counts(self, env: dict[Axis, Tir]) -> Tir:
        from tvm import tirx

        true = tirx.const(True, "bool")
        return reduce(tirx.all, (self.nest.value(n, env) for n in self.found.row_kept), true)

    def row_factor(self, fold: Fold, env: dict[Axis, Tir]) -> Tir | None:
        return self.nest.bind("factor", self._product(fold.rows, env)) if fold.rows else None

    def source(self, places: list[Tir], column: Tir) -> Tir:
        """An element of a row of the source."""
        read = self.found.read
        element = self.nest.emitter.lowering.read(read.tensor, [*places, column])
        return convert(element, read.dtype, self.kind)

    def value(self, number: int, element: Tir) -> Tir:
        """What a reduction takes of an element."""
        self.element = element
        return self.nest.value(self.values[number], {})

    def write(self, column: Tir, results: list[Tir]) -> None:
        """The group's outputs at a column, the reductions being `results`."""
        made = {id(f.stage): r for f, r in zip(self.found.folds, results, strict=True)}
        self.nest.results(self.group, self.env | {self.axes[-1]: column}, made)


class AcrossFirst(_Separable):
    """Rows of the source are taken across as they come up, and kept while they may be read again.

    Neighbouring rows of the result share them. A row has the slot of its remainder; where two rows
    of one result want the same, the later has one to itself.
    """

    def prepare(self) -> None:
        nest, found = self.nest, self.found
        self.choices = list(combinations(found.row_taps))
        self.shared = 1 << (2 * len(self.choices) - 1).bit_length()
        extent = nest.size(self.axes[-1].extent)
        self.length = nest.opaque("length", ceil_div(self.width, self.lanes) * index(self.lanes))
        total = ceil_div(extent, self.lanes) * index(self.lanes)
        total = total * index(self.shared + len(self.choices))
        self.lines = [nest.scratch("across", [total], kind(f)) for f in found.folds]
        self.rows = nest.scratch("rows", [self.shared], "int64")
        for slot in range(self.shared):
            nest.put(self.rows, [slot], index(-1))

    def row(self) -> None:
        taps = []
        taken: list[tuple[Tir, Tir]] = []
        for number, choice in enumerate(self.choices):
            env = self.env | dict(zip(self.found.row_taps, map(index, choice), strict=True))
            counts = self.nest.bind("counts", self.row_counts(env))
            start = self._line(number, self.row_places(env), counts, taken)
            taps.append((counts, start, [self.row_factor(f, env) for f in self.found.folds]))
        self.nest.run(self.width, self.lanes, lambda at: self.write(at, [
            self._down(n, at, [(c, s, f[n]) for c, s, f in taps])
            for n in range(len(self.found.folds))
        ]))  # fmt: skip

    def _line(
        self, number: int, places: list[Tir], counts: Tir, taken: list[tuple[Tir, Tir]]
    ) -> Tir:
        """Where a row of the source taken across is, made now if it is not there."""
        from tvm import tirx

        nest = self.nest
        row: Tir = index(0)
        for place, extent in zip(places, self.found.read.tensor.shape, strict=False):
            row = row * nest.size(extent) + place
        row = nest.opaque("row", row)
        slot = nest.bind("slot", tirx.bitwise_and(row, index(self.shared - 1)))
        clash = reduce(tirx.any, (tirx.all(slot == s, row != r) for s, r in taken),
                       tirx.const(False, "bool"))  # fmt: skip
        clash = nest.bind("clash", clash)
        taken.append((slot, row))
        start = tirx.Select(clash, index(self.shared + number), slot) * self.length
        start = nest.opaque("start", start)
        with nest.when(tirx.all(counts, tirx.any(clash, self.rows[slot] != row))):
            with nest.when(tirx.Not(clash)):
                nest.put(self.rows, [slot], row)
            for first, width in nest.vectors(self.width, self.lanes):
                self._across(places, start, first, width)
        return start

    def _across(self, places: list[Tir], start: Tir, first: Tir, width: int) -> None:
        """Some columns of a row of the source, all taps of each."""
        nest = self.nest
        taps = range(len(list(combinations(self.found.column_taps))))

        def element(tap: int, lane: Tir) -> Tir:
            return self.source(places, nest.bind("place", self.places[index(tap), first + lane]))

        elements = [nest.gathered(width, partial(element, t), self.kind.name) for t in taps]
        for n, (fold, line) in enumerate(zip(self.found.folds, self.lines, strict=True)):
            with nest.vector(width) as lane:
                terms = (self.term(n, self.value(n, e[lane]), index(t), first + lane)
                         for t, e in enumerate(elements))  # fmt: skip
                total = reduce(partial(combine, fold.op), terms)
                nest.put(line, [start + first + lane], total)

    def _down(self, number: int, column: Tir, taps: list[tuple[Tir, Tir, Tir]]) -> Tir:
        """A column of a row of the result."""
        from tvm import tirx

        fold, line = self.found.folds[number], self.lines[number]
        terms = []
        for counts, start, factor in taps:
            term = line[start + column]
            term = term if factor is None else term * factor
            terms.append(tirx.Select(counts, term, neutral(fold)) if self.found.row_kept else term)
        return reduce(partial(combine, fold.op), terms)


class DownFirst(_Separable):
    """The rows of a result are taken together for every column of the source, then columns."""

    def prepare(self) -> None:
        nest = self.nest
        # One more, for what is outside.
        total = self.source_width() + index(1)
        self.lines = [nest.scratch("down", [total], kind(f)) for f in self.found.folds]
        self.count = nest.opaque("source", self.source_width())

    def row(self) -> None:
        nest, found, lanes = self.nest, self.found, self.lanes
        for fold, line in zip(found.folds, self.lines, strict=True):
            nest.fill(line, [index(0)], self.count + index(1), lanes, neutral(fold))
        extents = [nest.size(a.extent) for a in found.row_taps]
        with nest.loop("tap", nest.product(extents)) as tap:
            at = [nest.bind("at", t) for t in nest.unflatten(tap, extents)]
            env = self.env | dict(zip(found.row_taps, at, strict=True))
            with nest.when(self.row_counts(env)):
                self._down(env)
        for first, width in nest.vectors(self.width, lanes):
            self._across(first, width)

    def _down(self, env: dict[Axis, Tir]) -> None:
        """A row of the source into the lines."""
        from tvm import tirx

        nest, read = self.nest, self.found.read
        places = self.row_places(env)
        factors = [self.row_factor(f, env) for f in self.found.folds]

        def add(number: int, at: Tir, value: Tir) -> None:
            line, factor = self.lines[number], factors[number]
            value = value if factor is None else value * factor
            op = self.found.folds[number].op
            nest.put(line, [at], combine(op, line[at], value))

        def one(number: int, element: Callable[[Tir], Tir], at: Tir) -> None:
            add(number, at, self.value(number, element(at)))

        def everywhere(element: Callable[[Tir], Tir]) -> None:
            for n in range(len(self.lines)):
                nest.run(self.count, self.lanes, partial(one, n, element))

        if read.fill is None:
            everywhere(lambda at: self.source(places, at))
            return
        shape = read.tensor.shape[:-1]
        there = reduce(tirx.all, (tirx.all(p >= index(0), p < nest.size(e))
                                  for p, e in zip(places, shape, strict=True)),
                       tirx.const(True, "bool"))  # fmt: skip
        outside = constant(read.fill, self.kind)
        with nest.when(there):
            everywhere(lambda at: self.source(places, at))
        with nest.otherwise():
            everywhere(lambda at: outside)
        for n in range(len(self.lines)):
            add(n, self.count, self.value(n, outside))

    def _across(self, first: Tir, width: int) -> None:
        nest, folds = self.nest, self.found.folds
        made = [nest.registers("total", 1, width, kind(f))[0] for f in folds]
        for fold, total in zip(folds, made, strict=True):
            with nest.vector(width) as lane:
                nest.put(total, [lane], neutral(fold))

        def element(number: int, tap: Tir, lane: Tir) -> Tir:
            return self.lines[number][nest.bind("place", self.places[tap, first + lane])]

        with nest.loop("tap", self.taps) as tap:
            for n, (fold, total) in enumerate(zip(folds, made, strict=True)):
                values = nest.gathered(width, partial(element, n, tap), kind(fold))
                with nest.vector(width) as lane:
                    term = self.term(n, values[lane], tap, first + lane)
                    nest.put(total, [lane], combine(fold.op, total[lane], term))
        with nest.vector(width) as lane:
            self.write(first + lane, [t[lane] for t in made])


def neutral(fold: Fold) -> Tir:
    return identity(fold.op, fold.stage.expr.dtype)


def kind(fold: Fold) -> str:
    """The type that a reduction is computed in."""
    return fold.stage.expr.dtype.name
