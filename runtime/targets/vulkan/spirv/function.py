"""One device function to one SPIR-V module."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from .emitter import Emitter, key
from .features import SpirvFeatures
from .matrix import note_fragments
from .memory import Parameter
from .opcodes import Decoration, Op, Storage
from .shader import Shader
from .types import BOOL, U8, U32, Scalar, parse, type_of

_FORMAT = {"int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f"}


def emit(function: Any, features: SpirvFeatures, name: str = "") -> Shader:
    """A device function, after `LowerIntrin`, for devices with `features`.

    Raises CompileError for what the device lacks or SPIR-V cannot say.
    """
    e = Emitter(features)
    name = name or str(function.attrs["global_symbol"])
    pointers = [p for p in function.params if type(p.ty).__name__ == "PointerType"]
    numbers = [p for p in function.params if type(p.ty).__name__ != "PointerType"]
    for binding, pointer in enumerate(pointers):
        scalar, _ = parse(str(pointer.ty.element_type.dtype))
        e.parameters[key(pointer)] = Parameter(binding, U8 if scalar == BOOL else scalar)
    parameters = list(e.parameters.values())
    _survey(e, function.body)
    layout, in_buffer = _arguments(e, parameters, numbers)
    e.statement(function.body)
    e.memory.finish(parameters)
    words = e.module.assemble(e.local_size, e.body.variables, e.body.words)
    readonly = tuple(not p.written for p in parameters)
    return Shader(name, words, e.local_size, readonly, layout, in_buffer, e.subgroup)


def _survey(e: Emitter, body: Any) -> None:
    """What must be known before the first instruction: do threads work in subgroups?"""
    import tvm
    import tvm_ffi

    def visit(call: tvm.ir.Call) -> None:
        name = call.op.name
        if name.startswith("tirx.tvm_warp_shuffle"):
            e.subgroup = True
        if name == "tirx.call_extern":
            note_fragments(e, call.args[0].value, list(call.args[1:]))

    tvm_ffi.structural_walk(body, (tvm.ir.Call, visit))


def _arguments(
    e: Emitter, parameters: Sequence[Parameter], numbers: Sequence[Any]
) -> tuple[str, bool]:
    """Read the block of numbers: its `struct` layout, and whether it is a buffer."""
    members: list[tuple[Scalar, int]] = []
    layout = "<"
    for scalar in [U32] * len(parameters) + [type_of(n)[0] for n in numbers]:
        start = struct.calcsize(layout)
        padding = -start % scalar.nbytes
        layout += "x" * padding + _FORMAT[str(scalar)]
        members.append((scalar, start + padding))
    if not members:
        return layout, False
    in_buffer = struct.calcsize(layout) > e.module.features.push_bytes
    block = e.module.block((e.module.scalar(scalar), offset) for scalar, offset in members)
    storage = Storage.StorageBuffer if in_buffer else Storage.PushConstant
    variable = e.module.variable(storage, block)
    if in_buffer:
        e.module.decorate(variable, Decoration.DescriptorSet, 0)
        e.module.decorate(variable, Decoration.Binding, len(parameters))
        e.module.decorate(variable, Decoration.NonWritable)
    values = []
    for i, (scalar, _) in enumerate(members):
        pointer = e.module.pointer(storage, e.module.scalar(scalar))
        at = e.body.pure_typed(Op.AccessChain, pointer, variable, e.body.index(i))
        values.append(e.body.load(scalar, at))
    for parameter, value in zip(parameters, values, strict=False):
        parameter.offset = value
    for number, value in zip(numbers, values[len(parameters) :], strict=True):
        e.values[key(number)] = (value,)
    return layout, in_buffer
