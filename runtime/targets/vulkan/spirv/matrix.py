"""Cooperative matrices: fragments held by a subgroup, made by the functions of a matrix unit.

A kernel writes fragments as local arrays that only these functions name. Here each array becomes a
variable of cooperative matrices, as many as its elements fill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .....dsl.errors import CompileError
from .....schedules.capability import MatrixUnit
from .memory import static_size
from .opcodes import (
    COLUMN_MAJOR,
    MATRIX_A,
    MATRIX_ACCUMULATOR,
    MATRIX_B,
    NON_PRIVATE_POINTER,
    ROW_MAJOR,
    Capability,
    Op,
    Storage,
)
from .types import F16, F32, U32

if TYPE_CHECKING:
    from .emitter import Emitter

_LOADS = {  # by function: the role of what is loaded, and how the tile lies in memory
    "load_a": (MATRIX_A, ROW_MAJOR),
    "load_a_t": (MATRIX_A, COLUMN_MAJOR),
    "load_b": (MATRIX_B, COLUMN_MAJOR),
    "load_b_t": (MATRIX_B, ROW_MAJOR),
}
# By function: the arguments that are fragments, with their roles.
_ROLES = {
    **{name: ((0, role),) for name, (role, _) in _LOADS.items()},
    "mma": ((0, MATRIX_ACCUMULATOR), (1, MATRIX_A), (2, MATRIX_B)),
    "zero": ((0, MATRIX_ACCUMULATOR),),
    "store": ((2, MATRIX_ACCUMULATOR),),
}


@dataclass
class Fragment:
    """A local array as matrices of `type_`, `elements` of the array each; `variable` holds them."""

    type_: int
    elements: int
    variable: int = 0


def matrix_unit(shape: tuple[int, int, int], operands: str, subgroup: int) -> MatrixUnit:
    """What schedules see of a device's cooperative matrices of `shape` (m, n, k).

    `operands` is "float16" or "bfloat16"; the accumulators are f32.
    """
    m, n, k = shape
    short = {"float16": "f16", "bfloat16": "bf16"}[operands]
    name = f"rudnn_matrix_{short}_{m}x{n}x{k}"
    held = (m * k // subgroup, k * n // subgroup, m * n // subgroup)
    return MatrixUnit(shape, operands, "float32", name, *held)


def _function(e: Emitter, name: str) -> tuple[MatrixUnit, str] | None:
    """The unit and the function that an external name means."""
    for unit in e.module.features.matrix:
        function = name.removeprefix(f"{unit.intrinsic}_")
        if function != name and function in _ROLES:
            return unit, function
    return None


def note_fragments(e: Emitter, name: str, arguments: list[Any]) -> None:
    """Before anything is emitted: learn from a call which arrays are fragments, and of what."""
    from .emitter import key

    found = _function(e, name)
    if found is None:
        return
    unit, function = found
    e.module.vulkan_memory = e.subgroup = True
    e.module.require(Capability.VulkanMemoryModel)
    e.module.require(Capability.CooperativeMatrixKHR, "SPV_KHR_cooperative_matrix")
    for position, role in _ROLES[function]:
        fragment = Fragment(_type(e, unit, role), (unit.a, unit.b, unit.c)[role])
        known = e.fragments.setdefault(key(arguments[position].args[0].source), fragment)
        if known != fragment:
            raise CompileError(f"needs fragments with one role each, got another in {name}")


def _type(e: Emitter, unit: MatrixUnit, role: int) -> int:
    m, n, k = unit.shape
    rows, columns = {MATRIX_A: (m, k), MATRIX_B: (k, n), MATRIX_ACCUMULATOR: (m, n)}[role]
    if role == MATRIX_ACCUMULATOR:
        component = e.module.scalar(F32)
    elif unit.operands == "bfloat16":
        component = e.module.bfloat16()
    else:
        component = e.module.scalar(F16)
    return e.module.cooperative_matrix(component, rows, columns, role)


def fragment_buffer(e: Emitter, buffer: Any) -> bool:
    """Allocate a local array that is a fragment; False for others."""
    from .emitter import key

    fragment = e.fragments.get(key(buffer))
    if fragment is None:
        return False
    count, rest = divmod(static_size(buffer), fragment.elements)
    if rest or not count:
        raise CompileError(f"needs arrays of {fragment.elements} elements a fragment, got {buffer}")
    fragment.variable = e.body.local_variable(e.module.array(fragment.type_, count))
    return True


def matrix_call(e: Emitter, name: str, arguments: list[Any]) -> bool:
    """Emit a function of a matrix unit; False for other names."""
    found = _function(e, name)
    if found is None:
        return False
    _, function = found
    if function in _LOADS:
        target, memory, stride = arguments
        place, type_ = _fragment(e, target)
        layout = e.body.index(_LOADS[function][1])
        loaded = e.body.result(
            Op.CooperativeMatrixLoadKHR, type_, _pointer(e, memory), layout, e.low32(stride),
            NON_PRIVATE_POINTER,
        )  # fmt: skip
        e.body.effect(Op.Store, place, loaded)
    elif function == "store":
        memory, stride, source = arguments
        e.body.effect(
            Op.CooperativeMatrixStoreKHR, _pointer(e, memory, True), _value(e, source),
            e.body.index(ROW_MAJOR), e.low32(stride), NON_PRIVATE_POINTER,
        )  # fmt: skip
    elif function == "zero":
        place, type_ = _fragment(e, arguments[0])
        zero = e.module.composite(type_, e.body.constant(F32, 0))
        e.body.effect(Op.Store, place, zero)
    else:
        place, type_ = _fragment(e, arguments[0])
        sum_, left, right = (_value(e, a) for a in arguments)
        product = e.body.result(Op.CooperativeMatrixMulAddKHR, type_, left, right, sum_)
        e.body.effect(Op.Store, place, product)
    return True


def _fragment(e: Emitter, address: Any) -> tuple[int, int]:
    """Pointer to the matrix at an address in a fragment array, and its type."""
    from .emitter import key

    load = address.args[0]
    fragment = e.fragments[key(load.source)]
    (index,) = load.indices
    if isinstance(getattr(index, "value", None), int):
        number = e.body.index(index.value // fragment.elements)
    else:
        number = e.body.pure(Op.UDiv, U32, e.low32(index), e.body.index(fragment.elements))
    pointer = e.module.pointer(Storage.Function, fragment.type_)
    return e.body.pure_typed(Op.AccessChain, pointer, fragment.variable, number), fragment.type_


def _value(e: Emitter, address: Any) -> int:
    place, type_ = _fragment(e, address)
    return e.body.result(Op.Load, type_, place)


def _pointer(e: Emitter, address: Any, write: bool = False) -> int:
    """Pointer to the element that a tile begins with."""
    load = address.args[0]
    buffer = e.buffer(load.source)
    if buffer.parameter is not None:
        buffer.parameter.read |= not write
        buffer.parameter.written |= write
    return e.memory.element(buffer, load.indices[0])
