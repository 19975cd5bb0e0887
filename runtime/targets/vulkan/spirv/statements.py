"""TIR statements to SPIR-V."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .....dsl.errors import CompileError
from .convert import cast
from .emitter import key
from .expressions import contiguous, is_multiple, lane_indices
from .matrix import fragment_buffer
from .memory import Buffer, static_size, stored
from .opcodes import BuiltIn, LoopControl, Op, Storage
from .types import I32, U32, Scalar, parse, type_of

if TYPE_CHECKING:
    from .emitter import Emitter

_SCOPES = {"shared": Storage.Workgroup, "local": Storage.Function}


def _sequence(e: Emitter, node: Any) -> None:
    for item in node.seq:
        e.statement(item)


def _bind(e: Emitter, node: Any) -> None:
    e.bind(node.var, node.value)


def _declare(e: Emitter, node: Any) -> None:
    """A name for a pointer parameter."""
    source = node.data.args[0] if type(node.data).__name__ == "Call" else node.data
    parameter = e.parameters.get(key(source))
    if parameter is None:
        raise CompileError(f"needs buffers over parameters of the kernel, got {node.buffer}")
    value = _element(node.buffer)
    scalar = stored(value, True)
    if scalar.bits != parameter.scalar.bits:
        raise CompileError(f"needs {parameter.scalar} elements in a parameter, got {scalar}")
    e.buffers[key(node.buffer)] = Buffer(
        value, scalar, Storage.StorageBuffer, parameter, int(node.buffer.data_alignment)
    )


def _element(buffer: Any) -> Scalar:
    scalar, lanes = parse(str(buffer.dtype))
    if lanes != 1:
        raise CompileError(f"needs buffers of scalars, got {buffer} of {buffer.dtype}")
    return scalar


def _allocate(e: Emitter, node: Any) -> None:
    """An array of the thread or of the block."""
    buffer = node.buffer
    if fragment_buffer(e, buffer):
        return
    storage = _SCOPES.get(buffer.scope())
    if storage is None:
        raise CompileError(f"needs memory of scope shared or local, got {buffer.scope()!r}")
    value = _element(buffer)
    scalar = stored(value, False)
    array = e.module.array(e.module.scalar(scalar), static_size(buffer))
    if storage == Storage.Workgroup:
        variable = e.module.variable(storage, array)
    else:
        variable = e.body.local_variable(array)
    e.buffers[key(buffer)] = Buffer(value, scalar, storage, variable=variable)


def _attribute(e: Emitter, node: Any) -> None:
    if node.attr_key == "thread_extent":
        _axis(e, node.node.var, node.node.thread_tag, node.value)
    e.statement(node.body)


def _axis(e: Emitter, variable: Any, tag: str, extent: Any) -> None:
    """The value of an axis of the launch."""
    from tvm.ir import Range

    if key(variable) in e.values:
        return
    if tag == "threadIdx.x":
        e.local_size = int(extent.value)
        value = e.thread()
    elif tag in ("blockIdx.x", "blockIdx.y"):
        group = e.body.result(
            Op.Load, e.module.vector(U32, 3), e.module.builtin(BuiltIn.WorkgroupId, 3)
        )
        value = e.body.pure(Op.CompositeExtract, U32, group, "xy".index(tag[-1]))
    else:
        raise CompileError(f"needs blocks in x and y and threads in x, got {tag}")
    e.analyzer.bind(variable, Range(0, extent), allow_override=True)
    e.values[key(variable)] = (cast(e.body, value, I32, type_of(variable)[0]),)


def _if(e: Emitter, node: Any) -> None:
    def side(statement: Any) -> Callable[[], tuple[int, ...]]:
        def write() -> tuple[int, ...]:
            e.statement(statement)
            return ()

        return write

    condition = e.scalar(node.condition)
    otherwise = None if node.else_case is None else side(node.else_case)
    e.body.branch(condition, side(node.then_case), otherwise)


def _for(e: Emitter, node: Any) -> None:
    from tvm.ir import Range
    from tvm.tirx import ForKind

    scalar, _ = type_of(node.loop_var)
    if node.kind not in (ForKind.SERIAL, ForKind.UNROLLED):
        raise CompileError(f"needs serial or unrolled loops in kernels, got {node}")
    first, extent = e.scalar(node.min), e.scalar(node.extent)
    last = (
        extent
        if getattr(node.min, "value", 1) == 0
        else e.body.pure(Op.IAdd, scalar, first, extent)
    )
    step = e.body.constant(scalar, 1) if node.step is None else e.scalar(node.step)
    within = Range.from_min_extent(node.min, node.extent)
    e.analyzer.bind(node.loop_var, within, allow_override=True)

    def write(i: int) -> None:
        e.values[key(node.loop_var)] = (i,)
        e.statement(node.body)

    control = LoopControl.Unroll if node.kind == ForKind.UNROLLED else LoopControl.Nothing
    e.body.loop(scalar, (first, last, step), write, control)


def _while(e: Emitter, node: Any) -> None:
    e.body.while_loop(lambda: e.scalar(node.condition), lambda: e.statement(node.body))


def _evaluate(e: Emitter, node: Any) -> None:
    if type(node.value).__name__ != "IntImm":
        e.value(node.value)


def _store(e: Emitter, node: Any) -> None:
    buffer, (index,) = e.buffer(node.buffer), node.indices
    if buffer.parameter is not None:
        buffer.parameter.written = True
    values = e.value(node.value)
    if len(values) == 1:
        e.memory.store(buffer, index, values[0])
        return
    base = contiguous(index)
    if base is None:
        for at, value in zip(lane_indices(index), values, strict=True):
            e.memory.store(buffer, at, value)
        return
    words = e.memory.run_words(buffer, len(values), lambda n: is_multiple(e, base, n))
    if words:
        e.memory.store_run(buffer, base, values, words)
        return
    for lane, value in enumerate(values):
        e.memory.store(buffer, base, value, lane)


STATEMENTS: dict[str, Callable[[Emitter, Any], None]] = {
    "SeqStmt": _sequence,
    "Bind": _bind,
    "DeclBuffer": _declare,
    "AllocBuffer": _allocate,
    "AttrStmt": _attribute,
    "IfThenElse": _if,
    "For": _for,
    "While": _while,
    "Evaluate": _evaluate,
    "BufferStore": _store,
}
