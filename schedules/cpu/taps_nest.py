"""The nest of `TapFolds`."""

from __future__ import annotations

from functools import reduce
from typing import Any

from ...dsl import forms
from ...dsl.dtypes import DType, bf16, bool_, f32
from ...dsl.expr import Axis, Cast, Expr, Read, Tensor, cast
from ...dsl.lower import convert
from ...dsl.walk import rebuild
from ..emit import Emitter, combine, masked
from ..group import Group
from .staged_rows import StagedRows
from .taps import Taps, TapsConfig, View, combinations
from .tiling import Tiling, ceil_div, index

Tir = Any


class TapsNest:
    """Emits the nest for one group."""

    def __init__(
        self, emitter: Emitter, group: Group, found: Taps, lanes: int, config: TapsConfig
    ) -> None:
        self.nest = Tiling(emitter)
        self.group, self.found, self.lanes, self.config = group, found, lanes, config
        self.axes = group.head.axes
        self.place = self.axes[-1]
        self.env: dict[Axis, Tir] = {}
        self.remainder = 0
        self.first: Tir = None  # the first place of the vector at hand
        self.lane: Tir = None
        self.rows: dict[tuple[int, tuple[int, ...]], Tir] = {}
        self.staged: dict[int, Expr] = {}
        self.memo: dict[int, tuple[Expr, Expr]] = {}

    def lower(self) -> Any:
        nest, steps = self.nest, index(self.found.period)
        self.width = nest.opaque("width", nest.size(self.place.extent))
        places = (self.width + steps - index(1)) // steps
        self.vectors = nest.opaque("vectors", ceil_div(places, self.lanes))
        with nest.row_blocks(self.axes, self.config.block) as (outer, first, rows):
            self.env |= outer
            self._prepare()
            with nest.loop("row", rows) as row:
                self.env[self.axes[-2]] = nest.bind("at", first + row)
                self._row()
        return nest.finish()

    def _prepare(self) -> None:
        """Memory for the lines that are read and for one of each result."""
        nest, step = self.nest, index(self.found.period)
        # Extents of memory are of dims alone: it is allocated before anything is bound.
        places = (nest.size(self.place.extent) + step - index(1)) // step
        length = ceil_div(places, self.lanes) * index(self.lanes)
        whole = length * step
        self.sources = {id(v.read): StagedRows(nest, v, length, self.lanes, self.axes[-2])
                        for v in self.found.views}  # fmt: skip
        for view in self.found.views:
            self._replace(view)
        self.results = {id(s): nest.scratch("line", [whole], _held(s.dtype))
                        for s in self.group.outputs}  # fmt: skip

    def _replace(self, view: View) -> None:
        """Reads of a view go to its lines."""
        read = view.read
        kind = f32 if read.dtype.is_narrow_float else read.dtype
        taps = tuple(dict.fromkeys((*view.rows, *view.taps)))
        line = Tensor("line", tuple(a.extent for a in taps), kind)
        self.staged[id(read)] = Read(line, taps, None, kind)

        def element(*at: Tir) -> Tir:
            chosen = {a: int(t.value) for a, t in zip(taps, at, strict=True)}
            row = self.rows[id(read), tuple(chosen[a] for a in view.rows)]
            part, shift = view.displacement(self.remainder, [chosen[a] for a in view.taps])
            return self.sources[id(read)].element(row, part, index(shift) + self.first, self.lane)

        self.nest.emitter.lowering.readers[id(line)] = element

    def _row(self) -> None:
        nest = self.nest
        for view in self.found.views:
            source = self.sources[id(view.read)]
            for taps in combinations(view.rows):
                known = {a: index(t) for a, t in zip(view.rows, taps, strict=True)}
                self.rows[id(view.read), taps] = source.stage(self.env | known, taps)
        with nest.loop("step", self.vectors) as step:
            self.first = nest.bind("first", step * index(self.lanes))
            made = [self._places(r) for r in range(self.found.period)]
            for stage in self.group.outputs:
                self._gather(self.results[id(stage)], [m[id(stage)] for m in made])
        for stage in self.group.outputs:
            result = self.results[id(stage)]

            def write(at: Tir, stage: Any = stage, result: Tir = result) -> None:
                where = self.env | {self.place: at}
                nest.write(stage, [where[a] for a in stage.axes], result[at])

            nest.run(self.width, self.lanes, write)

    def _places(self, remainder: int) -> dict[int, Tir]:
        """A vector of each stage at the places of one remainder, by stage."""
        nest = self.nest
        self.remainder = remainder
        made: dict[int, Tir] = {}
        for stage in self.group.stages:
            (register,) = nest.registers("value", 1, self.lanes, _held(stage.dtype))
            made[id(stage)] = register
            with nest.vector(self.lanes) as lane:
                self.lane = lane
                place = (self.first + lane) * index(self.found.period) + index(remainder)
                env = self.env | {self.place: place}
                nest.put(register, [lane], self._value(stage.expr, env, stage.dtype))
            # Later stages read it lane for lane.
            nest.emitter.lowering.readers[id(stage)] = lambda *_, r=register: r[self.lane]
        return made

    def _value(self, node: Expr, env: dict[Axis, Tir], dtype: DType) -> Tir:
        from tvm import tirx

        if not isinstance(node, forms.Reduce):
            return self.nest.value(self._with_lines(node), env)
        taps = [env | {a: index(t) for a, t in zip(node.over, at, strict=True)}
                for at in combinations(node.over)]  # fmt: skip
        if node.op == "max" and node.where is None and _is_flag(node.body):
            # Whether any is: conditions need no numbers.
            flag = self._with_lines(node.body.a)  # type: ignore[attr-defined]
            met = reduce(tirx.any, (self.nest.value(flag, e) for e in taps))
            return convert(met, bool_, node.dtype)
        body = self._with_lines(masked(node))
        return reduce(lambda a, b: combine(node.op, a, b),
                      (self.nest.value(body, e) for e in taps))  # fmt: skip

    def _with_lines(self, node: Expr) -> Expr:
        """`node` with its views read from their lines."""
        found = self.memo.get(id(node))
        if found is not None:
            return found[1]
        line = self.staged.get(id(node))
        if line is not None:
            made = cast(line, node.dtype)
        elif isinstance(node, Cast) and id(node.a) in self.staged:
            made = cast(self.staged[id(node.a)], node.dtype)
        else:
            children = tuple(self._with_lines(c) for c in node.children())
            made = rebuild(node, children) if children else node
        self.memo[id(node)] = (node, made)
        return made

    def _gather(self, line: Tir, registers: list[Tir]) -> None:
        """Vectors of each remainder into a line, one of each in turn."""
        from tvm import tirx

        nest, count, lanes = self.nest, len(registers), self.lanes
        whole = [r[tirx.Ramp(index(0), index(1), lanes)] for r in registers]
        for part in range(count):
            places = range(part * lanes, (part + 1) * lanes)
            order = [index(p % count * lanes + p // count) for p in places]
            value = whole[0] if count == 1 else tirx.Shuffle(whole, order)
            at = self.first * index(count) + index(part * lanes)
            nest.put(line, [tirx.Ramp(at, index(1), lanes)], value)


def _held(dtype: DType) -> str:
    """The type of a value in a register."""
    return "float32" if dtype == bf16 else dtype.name


def _is_flag(node: Expr) -> bool:
    return isinstance(node, Cast) and node.a.dtype == bool_
