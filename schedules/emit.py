"""From a group to a tensor-expression function: placeholders, stage tensors, strided parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..dsl import forms
from ..dsl.dtypes import DType
from ..dsl.errors import CompileError
from ..dsl.expr import Axis, Expr, Stage, Tensor
from ..dsl.lower import Lowering, constant, encode, storage
from .group import Group

Tir = Any


@dataclass(frozen=True)
class Kernel:
    """A scheduled function and what its parameters are.

    `function` is a PrimFunc whose first parameters are buffers for `tensors`, in order, and whose
    last are the variables of dims and scalars, shared by all kernels of a program.
    """

    name: str
    function: Any
    tensors: tuple[Tensor, ...]
    rule: str
    config: Any


@dataclass
class Emitter:
    """Builds the TE stages of one group.

    `strides` gives, for a tensor, the strides of its parameter: None means compact.
    """

    group: Group
    lowering: Lowering
    strides: Callable[[Tensor], Sequence[Tir] | None]
    placeholders: list[tuple[Tensor, Tir]] = field(default_factory=list)
    results: list[tuple[Stage, Tir]] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from tvm import te

        self.lowering = replace(self.lowering, readers={})
        for tensor in self.group.inputs():
            shape = [self.size(e) for e in tensor.shape]
            holder = te.placeholder(shape, storage(tensor.dtype), self.name(tensor.name))
            self.placeholders.append((tensor, holder))
            self.lowering.readers[id(tensor)] = _indexer(holder)

    def name(self, stem: str) -> str:
        """A fresh block name."""
        clean = stem.replace(".", "_")
        count = self._names.get(clean, 0)
        self._names[clean] = count + 1
        return clean if count == 0 else f"{clean}_{count}"

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
        """Mark the TE tensor of an output; one read inside too is copied out."""
        consumed = any(stage in _reads(s) for s in self.group.stages)
        if consumed:
            copy = self.compute(made.shape, lambda *i: made(*i), f"{stage.name}_out")
            self.results.append((stage, copy))
        else:
            self.results.append((stage, made))

    def schedule(self) -> Any:
        """An `s_tir.Schedule` over the group's function, parameters strided."""
        from tvm import s_tir, te

        outputs = [t for _, t in self.results]
        numbers = [*self.lowering.dims.values(), *self.lowering.scalars.values()]
        function = te.create_prim_func([p for _, p in self.placeholders] + outputs + numbers)
        tensors = [t for t, _ in self.placeholders] + [s for s, _ in self.results]
        return s_tir.Schedule(_restride(function, [self.strides(t) for t in tensors]))

    def kernel(self, made: Any, rule: str, config: Any) -> Kernel:
        """The finished kernel, from a schedule or a ready PrimFunc over the same parameters."""
        from tvm import tirx

        function = made if isinstance(made, tirx.PrimFunc) else made.mod["main"]
        tensors = [t for t, _ in self.placeholders] + [s for s, _ in self.results]
        return Kernel(self.group.name, function, tuple(tensors), rule, config)


def _reads(stage: Stage) -> tuple[Tensor, ...]:
    from ..dsl.graph import reads

    return reads(stage.expr)


def _indexer(tensor: Tir) -> Callable[..., Tir]:
    return lambda *index: tensor(*index)


def _restride(function: Any, strides: Sequence[Sequence[Tir] | None]) -> Any:
    """The function with each parameter declared with the given strides and no more than
    element alignment: caller memory may be a view and unaligned."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    swap: dict[str, tuple[Any, Any]] = {}
    for param, stride in zip(function.params, strides, strict=False):
        kind = param.ty
        alignment = max(1, tvm.DataType(str(kind.dtype)).bits // 8)
        fresh = tirx.decl_buffer(
            kind.shape, str(kind.dtype), param.name, data_alignment=alignment,
            strides=list(stride) if stride is not None else None,
        )  # fmt: skip
        swap[param.name] = (param, fresh)

    def replace_var(v: tvm.ir.Var) -> tvm.ir.Var:
        pair = swap.get(v.name)
        return pair[1] if pair is not None and v.same_as(pair[0]) else v

    replace_var.__annotations__ = {"v": tvm.ir.Var, "return": tvm.ir.Var}
    return tvm_ffi.structural_map(function, (tvm.ir.Var, replace_var))


def identity(op: str, dtype: DType) -> Tir:
    """The neutral element of a monoid."""
    if op == "sum":
        return constant(0, dtype)
    if op == "prod":
        return constant(1, dtype)
    if dtype.is_float:
        return constant(float("-inf") if op == "max" else float("inf"), dtype)
    edge = 2 ** (dtype.bits - 1)
    return constant(-edge if op == "max" else edge - 1, dtype)


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
    return te.comm_reducer(  # type: ignore[no-any-return]
        lambda a, b: combine(op, a, b), lambda _: identity(op, dtype), name=op
    )


def masked(node: forms.Reduce) -> Expr:
    """The body with elements that take no part replaced by the neutral element."""
    from ..dsl.expr import Const, Select

    if node.where is None:
        return node.body
    value = {"sum": 0, "prod": 1, "max": float("-inf"), "min": float("inf")}.get(node.op)
    if value is None:
        raise CompileError(f"needs a plain monoid, got {node.op}")
    if not node.dtype.is_float and node.op in ("max", "min"):
        edge = 2 ** (node.dtype.bits - 1)
        value = -edge if node.op == "max" else edge - 1
    return Select(node.where, node.body, Const(value, node.dtype), node.dtype)
