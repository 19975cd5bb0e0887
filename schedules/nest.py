"""Loop nests written out statement by statement, for what tensor expressions cannot say.

A `Nest` collects statements in order; the `with` blocks open loops and branches. Its parameters
are strided buffers like those of `Emitter.schedule`, so both kinds of kernel run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..dsl.dtypes import DType, f32
from ..dsl.expr import Size, Stage, Tensor
from ..dsl.lower import encode, storage
from .capability import WIDE_BYTES
from .emit import Emitter, Written

Tir = Any


def static(extent: Any) -> int | None:
    """A loop extent or size as a number if it is one."""
    value = getattr(extent, "value", None)
    return int(value) if value is not None else None


class Nest:
    """Builds one kernel of `emitter`'s group; the group's outputs are `targets`."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.blocks: list[list[Tir]] = [[]]
        self.params: list[Tir] = []
        self.kept: list[Stage] = []
        self.sources = {id(t): self._parameter(t) for t, _ in emitter.placeholders}
        for tensor, _ in emitter.placeholders:
            self.reader(tensor, self.sources[id(tensor)])
        self.targets = {id(s): self._parameter(s) for s in emitter.group.outputs}
        emitter.results = [(s, self.targets[id(s)]) for s in emitter.group.outputs]

    def _parameter(self, tensor: Tensor) -> Tir:
        from tvm import tirx

        # TVM has no element of a buffer without dims.
        shape = [self.emitter.size(e) for e in tensor.shape] or [self.number(1)]
        strides = self.emitter.strides(tensor) if tensor.shape else None
        made = tirx.decl_buffer(
            shape, storage(tensor.dtype), self.emitter.name(f"{tensor.name}_at"),
            data_alignment=WIDE_BYTES if self.emitter.wide(tensor) else tensor.dtype.bytes,
            strides=list(strides) if strides is not None else None,
        )  # fmt: skip
        self.params.append(made)
        return made

    def reader(self, tensor: Tensor, buffer: Tir, shift: Sequence[Tir] | None = None) -> None:
        """Reads of `tensor` go to `buffer`, `shift` subtracted from the index."""

        def read(*index: Tir) -> Tir:
            moved = index if shift is None else [
                i if s is None else i - s for i, s in zip(index, shift, strict=True)
            ]  # fmt: skip
            return buffer[tuple(moved)] if moved else buffer[self.number(0)]

        self.emitter.lowering.readers[id(tensor)] = read

    def number(self, value: int) -> Tir:
        return self.emitter.index(value)

    def add(self, statement: Tir) -> None:
        self.blocks[-1].append(statement)

    def close(self) -> Tir:
        """The statements of the innermost open block, as one."""
        from tvm import tirx

        inside = self.blocks.pop()
        if not inside:
            return tirx.Evaluate(self.number(0))
        return inside[0] if len(inside) == 1 else tirx.SeqStmt(inside)

    @contextmanager
    def loop(self, name: str, extent: Tir, kind: str = "serial", start: int = 0) -> Iterator[Tir]:
        """`for name in start … start + extent − 1`; yields the variable."""
        from tvm import tirx

        var = tirx.Var(self.emitter.name(name), "int64")
        self.blocks.append([])
        yield var
        body = self.close()
        kinds = tirx.ForKind
        chosen = {"serial": kinds.SERIAL, "parallel": kinds.PARALLEL, "unroll": kinds.UNROLLED,
                  "vector": kinds.VECTORIZED}[kind]  # fmt: skip
        self.add(tirx.For(var, self.number(start), extent, chosen, body))

    @contextmanager
    def when(self, condition: Tir) -> Iterator[None]:
        """Statements that run where `condition` holds."""
        from tvm import tirx

        self.blocks.append([])
        yield
        body = self.close()
        self.add(tirx.IfThenElse(condition, body, None))

    @contextmanager
    def choice(self, condition: Tir) -> Iterator[Callable[[], None]]:
        """Statements that run where `condition` holds, and after the yielded call the others."""
        from tvm import tirx

        self.blocks.append([])
        cases: list[Tir] = []

        def otherwise() -> None:
            cases.append(self.close())
            self.blocks.append([])

        yield otherwise
        cases.append(self.close())
        self.add(tirx.IfThenElse(condition, *cases))

    @contextmanager
    def repeat(self, condition: Tir) -> Iterator[None]:
        """Statements that run while `condition` holds."""
        from tvm import tirx

        self.blocks.append([])
        yield
        body = self.close()
        self.add(tirx.While(condition, body))

    def private(self, name: str, shape: Sequence[Tir], dtype: str) -> Tir:
        """A scratch buffer of the current block; its contents are undefined at first."""
        from tvm import tirx

        made = tirx.decl_buffer(list(shape) or [self.number(1)], dtype, self.emitter.name(name))
        self.add(tirx.AllocBuffer(made))
        return made

    def workspace(self, name: str, shape: Sequence[Size], dtype: DType = f32) -> Tir:
        """A buffer (compact) in the planned workspace, which the whole kernel shares."""
        stage = Stage(f"{self.emitter.group.name}.{name}", tuple(shape), dtype)
        self.kept.append(stage)
        return self._parameter(stage)

    def bind(self, name: str, value: Tir) -> Tir:
        """`value`, computed once here."""
        from tvm import tirx

        var = tirx.Var(self.emitter.name(name), value.ty)
        self.add(tirx.Bind(var, value))
        return var

    def lay_by(self, name: str, value: Tir) -> Tir:
        """`value`, computed once here, as a load: TVM's passes do not look behind it."""
        cell = self.private(name, [], str(value.ty.dtype))
        self.store(cell, [], value)
        return cell[self.number(0)]

    def store(self, buffer: Tir, index: Sequence[Tir], value: Tir) -> None:
        from tvm import tirx

        self.add(tirx.BufferStore(buffer, value, list(index) or [self.number(0)]))

    def write(self, stage: Stage, index: Sequence[Tir], value: Tir) -> None:
        """An element of an output, stored in the stage's dtype."""
        self.store(self.targets[id(stage)], index, encode(value, stage.dtype))

    def simple(self, value: Tir) -> Tir:
        """`value` simplified: constants fold."""
        from tvm import sym

        return sym.Analyzer().simplify(value)

    def opaque(self, name: str, value: Tir) -> Tir:
        """An int64 `value` as a number or a variable.

        TVM's passes put the values of plain variables back into every index and condition, and
        then take seconds over proofs; past a load they do not.
        """
        made = self.simple(value)
        if static(made) is not None:
            return made
        return self.bind(name, self.lay_by(f"{name}_cell", made))

    def unflatten(self, index: Tir, extents: Sequence[Tir]) -> list[Tir]:
        """One index over all of `extents` as one index for each, row-major."""
        from tvm import tirx

        parts: list[Tir] = []
        for extent in reversed(extents[1:]):
            # Nothing here is negative: TVM lowers a floor division to selects on four signs.
            parts.append(tirx.truncmod(index, extent))
            index = tirx.truncdiv(index, extent)
        return [*([index] if extents else []), *reversed(parts)]

    def product(self, extents: Sequence[Tir]) -> Tir:
        total: Tir = self.number(1)
        for extent in extents:
            total = total * extent
        return total

    def finish(self) -> Written:
        """The kernel: a PrimFunc over the group's tensors, then dims and scalars."""
        from tvm import tirx

        lowering = self.emitter.lowering
        numbers = [*lowering.dims.values(), *lowering.scalars.values()]
        function = tirx.PrimFunc([*self.params, *numbers], self.close())
        return Written({"main": function}, tuple(self.kept))
