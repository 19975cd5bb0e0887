"""From a group to a tensor-expression function: placeholders, stage tensors, strided parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..dsl import forms
from ..dsl.dtypes import DType, bool_, f32
from ..dsl.errors import CompileError
from ..dsl.expr import Axis, Const, Expr, Select, Size, Stage, Tensor, Unary
from ..dsl.graph import Names, reads
from ..dsl.lower import Lowering, constant, encode, storage
from .group import Group

Tir = Any


@dataclass(frozen=True)
class Kernel:
    """A scheduled function and what its parameters are.

    `function` is a PrimFunc whose first parameters are buffers for `tensors`, in order, and whose
    last are the variables of dims and scalars, shared by all kernels of a program. `scratch` are
    those of the tensors that only this kernel uses.
    """

    name: str
    function: Any
    tensors: tuple[Tensor, ...]
    rule: str
    config: Any
    scratch: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class Written:
    """A function built statement by statement, where a `tvm.s_tir.Schedule` is expected.

    Its parameters are the group's inputs and outputs, then `scratch`, tensors in the workspace.
    """

    mod: dict[str, Any]
    scratch: tuple[Stage, ...] = ()


@dataclass
class Emitter:
    """Builds the TE stages of one group.

    `strides` gives, for a tensor, the strides of its parameter: None means compact. `wide` tells
    whether each of its rows starts at a multiple of 16 bytes.
    """

    group: Group
    lowering: Lowering
    strides: Callable[[Tensor], Sequence[Tir] | None]
    wide: Callable[[Tensor], bool] = lambda _: False
    placeholders: list[tuple[Tensor, Tir]] = field(default_factory=list)
    results: list[tuple[Stage, Tir]] = field(default_factory=list)
    exposed: list[tuple[Stage, Tir]] = field(default_factory=list)
    scratch: list[tuple[Stage, Tir]] = field(default_factory=list)
    made: dict[Stage, Tir] = field(default_factory=dict)
    aliases: list[tuple[Tir, Tir]] = field(default_factory=list)
    _names: Names = field(default_factory=Names)

    def __post_init__(self) -> None:
        from tvm import te

        self.lowering = replace(self.lowering, readers={})
        for tensor in self.group.inputs():
            shape = [self.size(e) for e in tensor.shape]
            holder = te.placeholder(shape, storage(tensor.dtype), self.name(tensor.name))
            self.placeholders.append((tensor, holder))
            self.lowering.readers[id(tensor)] = _indexer(holder)

    def name(self, stem: str) -> str:
        """A fresh name, an identifier also where an axis is called by its extent."""
        stem = stem.replace(".", "_")
        return self._names.fresh(f"n{stem}" if stem[:1].isdigit() else stem)

    def size(self, value: Any) -> Tir:
        return self.lowering.size(value)

    def index(self, value: int) -> Tir:
        from tvm import tirx

        return tirx.IntImm("int64", value)

    def compute(self, shape: Sequence[Tir], fn: Callable[..., Tir], name: str) -> Tir:
        """A TE stage under a fresh name."""
        from tvm import te

        return te.compute(tuple(shape), fn, self.name(name))

    def define(self, stage: Stage, fn: Callable[..., Tir], name: str | None = None) -> Tir:
        """The TE tensor of `stage`: `fn` gives its value at an index, stored in its dtype."""
        made = self.compute(
            [self.size(e) for e in stage.shape],
            lambda *i: encode(fn(*i), stage.dtype),
            name or stage.name,
        )
        self.lowering.readers[id(stage)] = _indexer(made)
        return made

    def pointwise(self, stage: Stage) -> Tir:
        """The TE tensor of a pointwise stage."""
        return self.define(stage, lambda *i: self.at(stage.expr, stage.axes, i))

    def at(self, node: Expr, axes: Sequence[Axis], index: Sequence[Tir],
           extra: dict[Axis, Tir] | None = None) -> Tir:  # fmt: skip
        """`node` with `axes` bound to `index`."""
        env = dict(zip(axes, index, strict=True)) | (extra or {})
        return self.lowering.expr(node, env)

    def reduce_axis(self, axis: Axis, extent: Tir | None = None) -> Tir:
        from tvm import te

        limit = self.size(axis.extent) if extent is None else extent
        return te.reduce_axis((self.index(0), limit), self.name(axis.name))

    def publish(self, stage: Stage, made: Tir) -> None:
        """Mark the TE tensor of an output.

        One that is read inside the group too stays an intermediate for scheduling, where blocks
        can still be moved, and becomes a parameter in `kernel`.
        """
        consumed = any(stage in reads(s.expr) for s in self.group.stages)
        (self.exposed if consumed else self.results).append((stage, made))

    def keep_in_workspace(
        self, made: Tir, name: str, shape: Sequence[Size], dtype: DType = f32
    ) -> None:
        """Place a large intermediate (compact) in the planned workspace."""
        stage = Stage(f"{self.group.name}.{name}", tuple(shape), dtype)
        self.scratch.append((stage, made))

    def share(self, made: Tir, result: Tir) -> None:
        """Let an intermediate live in the memory of a result of the same shape and dtype.

        Right where the result's element is the last reader of the intermediate's.
        """
        self.aliases.append((made, result))

    def schedule(self) -> Any:
        """An `s_tir.Schedule` over the group's function, parameters strided."""
        from tvm import s_tir, te

        outputs = [t for _, t in self.results]
        numbers = [*self.lowering.dims.values(), *self.lowering.scalars.values()]
        function = te.create_prim_func([p for _, p in self.placeholders] + outputs + numbers)
        strides = [self.strides(t) for t, _ in (*self.placeholders, *self.results)]
        return s_tir.Schedule(_restride(function, strides))

    def kernel(self, schedule: Any, rule: str, config: Any) -> Kernel:
        """The finished kernel."""
        if isinstance(schedule, Written):
            tensors = [t for t, _ in (*self.placeholders, *self.results)]
            order = (*tensors, *schedule.scratch)
            function = schedule.mod["main"]
            return Kernel(self.group.name, function, order, rule, config, schedule.scratch)
        function = schedule.mod["main"]
        for made, result in self.aliases:
            function = _share(function, made.op.name, result.op.name)
        lifted = (*self.exposed, *self.scratch)
        for stage, made in reversed(lifted):
            function = _expose(function, made.op.name, self.strides(stage))
        tensors = [t for t, _ in (*lifted, *self.placeholders, *self.results)]
        scratch = tuple(s for s, _ in self.scratch)
        return Kernel(self.group.name, function, tuple(tensors), rule, config, scratch)


def _indexer(tensor: Tir) -> Callable[..., Tir]:
    return lambda *index: tensor(*index)


def _restride(function: Any, strides: Sequence[Sequence[Tir] | None]) -> Any:
    """The function with each parameter declared with the given strides and no more than
    element alignment: caller memory may be a view and unaligned."""
    pairs = zip(function.params, strides, strict=False)
    return _swap(function, [(p, _declare(p, s)) for p, s in pairs])


def _declare(buffer: Any, strides: Sequence[Tir] | None) -> Any:
    """A parameter buffer like `buffer`, with strides (None: compact)."""
    import tvm
    from tvm import tirx

    kind = buffer.ty
    alignment = max(1, tvm.DataType(str(kind.dtype)).bits // 8)
    return tirx.decl_buffer(
        kind.shape, str(kind.dtype), buffer.name, data_alignment=alignment,
        strides=list(strides) if strides is not None else None,
    )  # fmt: skip


def _swap(node: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """`node` with variables replaced."""
    import tvm
    import tvm_ffi

    by_name: dict[str, list[tuple[Any, Any]]] = {}
    for old, new in pairs:
        by_name.setdefault(old.name, []).append((old, new))

    def replace_var(v: tvm.ir.Var) -> tvm.ir.Var:
        return next((new for old, new in by_name.get(v.name, ()) if v.same_as(old)), v)

    replace_var.__annotations__ = {"v": tvm.ir.Var, "return": tvm.ir.Var}
    return tvm_ffi.structural_map(node, (tvm.ir.Var, replace_var))


def _expose(function: Any, name: str, strides: Sequence[Tir] | None) -> Any:
    """The intermediate buffer `name` as the function's first parameter.

    `root { alloc t; …t… }` → `f(t, …) { root { …t… } }`. TE has no output that later stages read.
    """
    from tvm import tirx

    found, body = _without_buffer(function, name)
    fresh = _declare(found, strides)
    made = tirx.PrimFunc([found, *function.params], body, function.ret_type, function.attrs)
    return _swap(made, [(found, fresh)])


def _share(function: Any, name: str, result: str) -> Any:
    """The intermediate buffer `name` in the memory of the parameter `result`."""
    from tvm import tirx

    found, body = _without_buffer(function, name)
    target = next(p for p in function.params if p.name == result)
    made = tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)
    return _swap(made, [(found, target)])


def _without_buffer(function: Any, name: str) -> tuple[Any, Any]:
    """The root block's buffer `name`, and the body without its allocation."""
    from tvm import s_tir

    realize = function.body
    root = realize.block
    found = next(b for b in root.alloc_buffers if b.name == name)
    rest = [b for b in root.alloc_buffers if not b.same_as(found)]
    block = s_tir.SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, root.body, root.init, rest,
        root.match_buffers, root.annotations,
    )  # fmt: skip
    return found, s_tir.SBlockRealize(realize.iter_values, realize.predicate, block)


def neutral(op: str, dtype: DType) -> float | int:
    """The neutral element of a monoid: for extrema, the end of the type's range."""
    if op in ("sum", "prod"):
        return 0 if op == "sum" else 1
    if op not in ("max", "min"):
        raise CompileError(f"needs a plain monoid, got {op}")
    if dtype.is_float:
        return float("-inf") if op == "max" else float("inf")
    if dtype.kind == "int":
        edge = 2 ** (dtype.bits - 1)
        return -edge if op == "max" else edge - 1
    if op == "max":
        return 0
    return 1 if dtype.kind == "bool" else 2**dtype.bits - 1


def identity(op: str, dtype: DType) -> Tir:
    """`neutral` as a literal."""
    return constant(neutral(op, dtype), dtype)


def combine(op: str, a: Tir, b: Tir) -> Tir:
    """The monoid's operation."""
    from tvm import tirx

    if op == "sum":
        return a + b
    if op == "prod":
        return a * b
    return tirx.max(a, b) if op == "max" else tirx.min(a, b)


def reducer(op: str, dtype: DType) -> Callable[..., Tir]:
    """The TE reduction of a monoid; extrema start at the infinities, not at the least finite."""
    from tvm import te

    if op == "sum":
        return te.sum
    return te.comm_reducer(lambda a, b: combine(op, a, b), lambda _: identity(op, dtype), name=op)


def masked(node: forms.Reduce) -> Expr:
    """The body with elements that take no part replaced by the neutral element."""
    value = Const(neutral(node.op, node.dtype), node.dtype)
    body = node.body
    if node.op in ("max", "min") and node.nan == "ignore" and node.dtype.is_float:
        body = Select(Unary("isnan", body, bool_), value, body, node.dtype)
    return body if node.where is None else Select(node.where, body, value, node.dtype)
