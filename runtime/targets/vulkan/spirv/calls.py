"""Calls in TIR: control flow in expressions, functions of numbers, exchange among threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .....dsl.errors import CompileError
from .convert import cast
from .opcodes import Capability, Glsl, Op, Scope, Semantics
from .types import BOOL, F32, U32, type_of

if TYPE_CHECKING:
    from .emitter import Emitter, Lanes

_GLSL = {"sqrt": Glsl.Sqrt, "floor": Glsl.Floor, "ceil": Glsl.Ceil, "trunc": Glsl.Trunc,
         "fabs": Glsl.FAbs}  # fmt: skip
_ATOMIC_ADD = "rudnn_atomic_add_f32"


def call(e: Emitter, node: Any) -> Lanes:
    """A call as an expression or, giving no lanes, for its effect. Raises CompileError."""
    name, arguments = node.op.name.split(".")[-1], list(node.args)
    if name in ("call_extern", "call_pure_extern"):
        return _extern(e, node, arguments[0].value, arguments[1:])
    if name in _GLSL:
        return _function(e, node, _GLSL[name], arguments[0])
    emit = _CALLS.get(name)
    if emit is None:
        raise CompileError(f"needs a function known to the SPIR-V emitter, got {node}")
    return emit(e, node, arguments)


def _extern(e: Emitter, node: Any, name: str, arguments: list[Any]) -> Lanes:
    """A function by its C name: of a matrix unit, or an atomic."""
    from .matrix import matrix_call

    if name == _ATOMIC_ADD:
        return _atomic_add(e, *arguments)
    if matrix_call(e, name, arguments):
        return ()
    if name.removesuffix("f") in _GLSL:
        return _function(e, node, _GLSL[name.removesuffix("f")], arguments[0])
    raise CompileError(f"needs a function known to the SPIR-V emitter, got {name} in {node}")


def _function(e: Emitter, node: Any, which: Glsl, argument: Any) -> Lanes:
    scalar, _ = type_of(node)
    lanes = (cast(e.body, value, scalar, F32) for value in e.value(argument))
    return tuple(cast(e.body, e.body.glsl(which, F32, value), F32, scalar) for value in lanes)


def _is_nan(e: Emitter, node: Any, arguments: list[Any]) -> Lanes:
    from .expressions import is_nan

    scalar, _ = type_of(arguments[0])
    return tuple(is_nan(e.body, scalar, value) for value in e.value(arguments[0]))


def _if_then_else(e: Emitter, node: Any, arguments: list[Any]) -> Lanes:
    """One side only is evaluated: the other may read what is not there."""
    condition, yes, no = arguments
    scalar, _ = type_of(node)
    lanes = e.value(condition)
    if len(lanes) != 1:
        raise CompileError(f"needs one condition for all lanes, got {node}")
    return e.body.branch(lanes[0], lambda: e.value(yes), lambda: e.value(no), scalar)


def _reinterpret(e: Emitter, node: Any, arguments: list[Any]) -> Lanes:
    source, goal = type_of(arguments[0])[0], type_of(node)[0]
    if source.bits != goal.bits or BOOL in (source, goal):
        raise CompileError(f"needs types of one width to reinterpret, got {source} as {goal}")
    values = e.value(arguments[0])
    if source.is_float == goal.is_float:
        return values
    return tuple(e.body.pure(Op.Bitcast, goal, value) for value in values)


def _operation(name: str) -> Callable[[Emitter, Any, list[Any]], Lanes]:
    """A binary operation that is a node elsewhere."""

    def emit(e: Emitter, node: Any, arguments: list[Any]) -> Lanes:
        from .expressions import binary

        scalar, _ = type_of(node)
        left, right = (e.value(a) for a in arguments)
        return tuple(binary(e.body, name, scalar, *p) for p in zip(left, right, strict=True))

    return emit


def _first(e: Emitter, node: Any, arguments: list[Any]) -> Lanes:
    return e.value(arguments[0])


def _sync(e: Emitter, node: Any, arguments: list[Any]) -> Lanes:
    """Every thread of the block arrives; what each wrote before is seen by all after."""
    if arguments[0].value != "shared":
        raise CompileError(f'needs a barrier of kind "shared", got {arguments[0].value!r}')
    meaning = Semantics.AcquireRelease | Semantics.WorkgroupMemory | Semantics.UniformMemory
    if e.module.vulkan_memory:
        meaning |= Semantics.MakeAvailable | Semantics.MakeVisible
    e.memory.coherent = True
    scope = e.body.index(Scope.Workgroup)
    e.body.effect(Op.ControlBarrier, scope, scope, e.body.index(meaning))
    return ()


def _active_mask(e: Emitter, node: Any, arguments: list[Any]) -> Lanes:
    """Only ever passed on to shuffles, which take it from the control flow."""
    return (e.body.constant(type_of(node)[0], 0),)


def _shuffle(e: Emitter, node: Any, arguments: list[Any]) -> Lanes:
    """The value of lane `lane` of the thread's group of `width` lanes."""
    _, value, lane, width, warp = arguments
    source = e.low32(lane)
    if width.value != warp.value:
        group = e.body.pure(Op.BitwiseAnd, U32, e.lane(), e.body.index(-width.value))
        within = e.body.pure(Op.BitwiseAnd, U32, source, e.body.index(width.value - 1))
        source = e.body.pure(Op.BitwiseOr, U32, group, within)
    return (_exchange(e, Op.GroupNonUniformShuffle, value, source),)


def _shuffle_down(e: Emitter, node: Any, arguments: list[Any]) -> Lanes:
    """The value of the lane `delta` further, past the group's end the thread's own."""
    _, value, delta, width, _ = arguments
    distance, lane = e.low32(delta), e.lane()
    within = e.body.pure(Op.BitwiseAnd, U32, lane, e.body.index(width.value - 1))
    reach = e.body.pure(Op.IAdd, U32, within, distance)
    inside = e.body.pure(Op.ULessThan, BOOL, reach, e.body.index(width.value))
    own = e.scalar(value)
    moved = _exchange(e, Op.GroupNonUniformShuffleDown, value, distance)
    return (e.body.select(type_of(value)[0], inside, moved, own),)


def _exchange(e: Emitter, op: Op, value: Any, operand: int) -> int:
    scalar, _ = type_of(value)
    if scalar.bits != 32:
        raise CompileError(f"needs 32-bit values to exchange between lanes, got {scalar}")
    e.module.require(Capability.GroupNonUniformShuffle)
    if op == Op.GroupNonUniformShuffleDown:
        e.module.require(Capability.GroupNonUniformShuffleRelative)
    type_, subgroup = e.module.scalar(scalar), e.body.index(Scope.Subgroup)
    return e.body.result(op, type_, subgroup, e.scalar(value), operand)


def _atomic_add(e: Emitter, address: Any, value: Any) -> Lanes:
    """memory += value, seen by the whole device; gives what memory held."""
    load = address.args[0]
    buffer, (index,) = e.buffer(load.source), load.indices
    if buffer.parameter is None or buffer.scalar != F32:
        raise CompileError(f"needs float32 in a parameter to add to, got {load}")
    buffer.parameter.read = buffer.parameter.written = True
    amount = e.scalar(value)
    everyone = Scope.QueueFamily if e.module.vulkan_memory else Scope.Device
    scope, relaxed = e.body.index(everyone), e.body.index(Semantics.Relaxed)
    if e.module.features.atomic_float32_add:
        e.module.require(Capability.AtomicFloat32AddEXT, "SPV_EXT_shader_atomic_float_add")
        pointer, type_ = e.memory.element(buffer, index), e.module.scalar(F32)
        return (e.body.result(Op.AtomicFAddEXT, type_, pointer, scope, relaxed, amount),)
    return (_exchange_until_added(e, e.memory.word(buffer, index), scope, relaxed, amount),)


def _exchange_until_added(e: Emitter, pointer: int, scope: int, relaxed: int, amount: int) -> int:
    """Compare-and-exchange of the sum until nobody came between; gives what memory held."""
    body, type_ = e.body, e.module.scalar(U32)
    seen, done = body.local_variable(type_), body.local_variable(e.module.scalar(BOOL))
    body.effect(Op.Store, seen, body.result(Op.AtomicLoad, type_, pointer, scope, relaxed))
    body.effect(Op.Store, done, body.constant(BOOL, False))

    def again() -> int:
        return body.pure(Op.LogicalNot, BOOL, body.load(BOOL, done))

    def attempt() -> None:
        before = body.load(U32, seen)
        sum_ = body.pure(Op.FAdd, F32, body.pure(Op.Bitcast, F32, before), amount)
        wanted = body.pure(Op.Bitcast, U32, sum_)
        found = body.result(
            Op.AtomicCompareExchange, type_, pointer, scope, relaxed, relaxed, wanted, before
        )
        body.effect(Op.Store, seen, found)
        body.effect(Op.Store, done, body.pure(Op.IEqual, BOOL, found, before))

    body.while_loop(again, attempt)
    return body.pure(Op.Bitcast, F32, body.load(U32, seen))


_CALLS: dict[str, Callable[[Emitter, Any, list[Any]], Lanes]] = {
    "if_then_else": _if_then_else,
    "isnan": _is_nan,
    "reinterpret": _reinterpret,
    "likely": _first,
    "shift_left": _operation("LShift"),
    "shift_right": _operation("RShift"),
    "bitwise_and": _operation("BitwiseAnd"),
    "bitwise_or": _operation("BitwiseOr"),
    "bitwise_xor": _operation("BitwiseXor"),
    "tvm_storage_sync": _sync,
    "tvm_warp_activemask": _active_mask,
    "tvm_warp_shuffle": _shuffle,
    "tvm_warp_shuffle_down": _shuffle_down,
}
