"""A SPIR-V module in the making: types and constants made once, decorations, the final words."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from .....dsl.errors import CompileError
from .features import SpirvFeatures
from .opcodes import (
    BFLOAT16_ENCODING,
    GLCOMPUTE,
    GLSL450_MEMORY,
    MAGIC,
    VERSION_1_5,
    VULKAN_MEMORY,
    BuiltIn,
    Capability,
    Decoration,
    Mode,
    Op,
    Scope,
    Storage,
)
from .types import U32, Scalar

_FEATURE = {
    Capability.Int64: ("int64", "64-bit integers"),
    Capability.Int16: ("int16", "16-bit integers"),
    Capability.Int8: ("int8", "8-bit integers"),
    Capability.Float16: ("float16", "16-bit floats"),
    Capability.StorageBuffer16BitAccess: ("storage16", "16-bit elements in buffers"),
    Capability.StorageBuffer8BitAccess: ("storage8", "8-bit elements in buffers"),
    Capability.GroupNonUniformShuffle: ("shuffle", "subgroup shuffles"),
    Capability.GroupNonUniformShuffleRelative: ("shuffle_relative", "relative shuffles"),
}
_INT_CAPABILITY = {64: Capability.Int64, 16: Capability.Int16, 8: Capability.Int8}


def text(value: str) -> tuple[int, ...]:
    """A literal string as words."""
    data = value.encode() + b"\0"
    data += b"\0" * (-len(data) % 4)
    return struct.unpack(f"<{len(data) // 4}I", data)


class Module:
    """Everything of a module but the body of its one function."""

    def __init__(self, features: SpirvFeatures) -> None:
        self.features = features
        self.interface: list[int] = []
        self.vulkan_memory = False
        self._bound = 1
        self._capabilities: dict[Capability, None] = {}
        self._extensions: dict[str, None] = {}
        self._decorations: list[int] = []
        self._declarations: list[int] = []
        self._made: dict[tuple[int, ...], int] = {}
        self._builtins: dict[BuiltIn, int] = {}
        self._integers: dict[int, int] = {}
        self._half = False
        self.require(Capability.Shader)
        self.glsl = self.new_id()

    def new_id(self) -> int:
        self._bound += 1
        return self._bound - 1

    def require(self, capability: Capability, extension: str = "") -> None:
        """Declare a capability. Raises CompileError where the device lacks it."""
        feature, meaning = _FEATURE.get(capability, ("", ""))
        if feature and not getattr(self.features, feature):
            raise CompileError(f"needs a Vulkan device with {meaning}, got one without")
        self._capabilities[capability] = None
        if extension:
            self._extensions[extension] = None

    def decorate(self, target: int, decoration: Decoration, *operands: int) -> None:
        instruction(self._decorations, Op.Decorate, target, decoration, *operands)

    def decorate_member(
        self, target: int, member: int, decoration: Decoration, *operands: int
    ) -> None:
        instruction(self._decorations, Op.MemberDecorate, target, member, decoration, *operands)

    def _unique(self, op: Op, *operands: int, typed: bool = False) -> int:
        """The declaration with these operands; if `typed`, the first is the result's type."""
        key = (op, *operands)
        if key not in self._made:
            self._made[key] = self._declare(op, *operands, typed=typed)
        return self._made[key]

    def _declare(self, op: Op, *operands: int, typed: bool = False) -> int:
        made = self.new_id()
        split = 1 if typed else 0
        instruction(self._declarations, op, *operands[:split], made, *operands[split:])
        return made

    def scalar(self, scalar: Scalar) -> int:
        """Integers are declared without a sign: the instructions say how to read them."""
        if scalar.kind == "bool":
            return self._unique(Op.TypeBool)
        if scalar.is_float:
            if scalar.bits == 16:
                self.require(Capability.Float16)
                self._half = True
            return self._unique(Op.TypeFloat, scalar.bits)
        if scalar.bits in _INT_CAPABILITY:
            self.require(_INT_CAPABILITY[scalar.bits])
        return self._unique(Op.TypeInt, scalar.bits, 0)

    def vector(self, scalar: Scalar, lanes: int) -> int:
        """A vector type; of one lane it is the scalar."""
        element = self.scalar(scalar)
        return element if lanes == 1 else self._unique(Op.TypeVector, element, lanes)

    def void(self) -> int:
        return self._unique(Op.TypeVoid)

    def array(self, element: int, length: int) -> int:
        return self._unique(Op.TypeArray, element, self.constant(U32, length))

    def pointer(self, storage: Storage, element: int) -> int:
        return self._unique(Op.TypePointer, storage, element)

    def bfloat16(self) -> int:
        """The component of cooperative matrices; elsewhere bf16 is a uint16."""
        self.require(Capability.BFloat16TypeKHR, "SPV_KHR_bfloat16")
        self.require(Capability.BFloat16CooperativeMatrixKHR)
        return self._unique(Op.TypeFloat, 16, BFLOAT16_ENCODING)

    def cooperative_matrix(self, component: int, rows: int, columns: int, use: int) -> int:
        sizes = [self.constant(U32, n) for n in (Scope.Subgroup, rows, columns, use)]
        return self._unique(Op.TypeCooperativeMatrixKHR, component, *sizes)

    def block(self, members: Iterable[tuple[int, int]]) -> int:
        """A new struct type, laid out as (type, byte offset)."""
        listed = list(members)
        made = self._declare(Op.TypeStruct, *(type_ for type_, _ in listed))
        self.decorate(made, Decoration.Block)
        for i, (_, offset) in enumerate(listed):
            self.decorate_member(made, i, Decoration.Offset, offset)
        return made

    def runtime_array(self, element: int, stride: int) -> int:
        made = self._declare(Op.TypeRuntimeArray, element)
        self.decorate(made, Decoration.ArrayStride, stride)
        return made

    def constant(self, scalar: Scalar, value: float | int | bool) -> int:
        """A literal; integers are taken modulo their width."""
        type_ = self.scalar(scalar)
        if scalar.kind == "bool":
            return self._unique(Op.ConstantTrue if value else Op.ConstantFalse, type_, typed=True)
        made = self._unique(Op.Constant, type_, *_literal(scalar, value), typed=True)
        if scalar.is_int:
            self._integers[made] = int(value)
        return made

    def integer(self, value: int) -> int | None:
        """The literal that a result id stands for, if it is one."""
        return self._integers.get(value)

    def composite(self, type_: int, *parts: int) -> int:
        return self._unique(Op.ConstantComposite, type_, *parts, typed=True)

    def variable(self, storage: Storage, type_: int) -> int:
        """A new variable of the module."""
        made = self._declare(Op.Variable, self.pointer(storage, type_), storage, typed=True)
        self.interface.append(made)
        return made

    def builtin(self, which: BuiltIn, lanes: int = 1) -> int:
        """The input variable, of uint32 lanes."""
        if which not in self._builtins:
            made = self.variable(Storage.Input, self.vector(U32, lanes))
            self.decorate(made, Decoration.BuiltIn, which)
            self._builtins[which] = made
        return self._builtins[which]

    def assemble(self, local_size: int, variables: list[int], body: list[int]) -> bytes:
        """The module with one entry point `main`, whose first block starts with `variables`."""
        void = self.void()
        function, start = self.new_id(), self.new_id()
        signature = self._unique(Op.TypeFunction, void)
        modes = self._modes()
        out: list[int] = []
        for capability in self._capabilities:
            instruction(out, Op.Capability, capability)
        for extension in self._extensions:
            instruction(out, Op.Extension, *text(extension))
        instruction(out, Op.ExtInstImport, self.glsl, *text("GLSL.std.450"))
        memory = VULKAN_MEMORY if self.vulkan_memory else GLSL450_MEMORY
        instruction(out, Op.MemoryModel, 0, memory)
        instruction(out, Op.EntryPoint, GLCOMPUTE, function, *text("main"), *self.interface)
        instruction(out, Op.ExecutionMode, function, Mode.LocalSize, local_size, 1, 1)
        for mode, bits in modes:
            instruction(out, Op.ExecutionMode, function, mode, bits)
        out += self._decorations + self._declarations
        instruction(out, Op.Function, void, function, 0, signature)
        instruction(out, Op.Label, start)
        out += variables + body
        instruction(out, Op.Return)
        instruction(out, Op.FunctionEnd)
        head = (MAGIC, VERSION_1_5, 0, self._bound, 0)
        return struct.pack(f"<{5 + len(out)}I", *head, *out)

    def _modes(self) -> list[tuple[Mode, int]]:
        """Float behaviour to ask for, as far as the device offers it."""
        offered = (
            (Mode.SignedZeroInfNanPreserve, self.features.nan, Capability.SignedZeroInfNanPreserve),
            (Mode.DenormPreserve, self.features.denormals, Capability.DenormPreserve),
            (Mode.RoundingModeRTE, self.features.round_even, Capability.RoundingModeRTE),
        )
        widths = (16, 32) if self._half else (32,)
        chosen = [
            (mode, bits, need) for mode, have, need in offered for bits in widths if bits in have
        ]
        for _, _, need in chosen:
            self.require(need)
        return [(mode, bits) for mode, bits, _ in chosen]


def _literal(scalar: Scalar, value: float | int | bool) -> tuple[int, ...]:
    if scalar.is_float:
        with np.errstate(over="ignore"):
            return (int(np.array(value, f"f{scalar.nbytes}").view(f"u{scalar.nbytes}")),)
    bits = int(value) & ((1 << scalar.bits) - 1)
    return (bits,) if scalar.bits <= 32 else (bits & 0xFFFFFFFF, bits >> 32)


def instruction(words: list[int], op: Op, *operands: int) -> None:
    words.append((len(operands) + 1) << 16 | op)
    words.extend(operands)
