"""Buffers: where they lie, and how elements and runs of elements are read and written.

A parameter is a descriptor, `Block { T elements[]; }`. A run of elements that provably starts at a
multiple of its length is moved as one vector of uint32 through a second view of the same binding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .....dsl.errors import CompileError
from .body import Body
from .module import Module
from .opcodes import (
    NON_PRIVATE_POINTER,
    Capability,
    Decoration,
    Op,
    Storage,
)
from .types import BOOL, U8, U32, Scalar

_WORD_BITS = 32
_MOST_WORDS = 4  # of one move: 16 bytes


@dataclass
class Parameter:
    """A pointer parameter: binding number `binding`, elements `scalar`."""

    binding: int
    scalar: Scalar
    read: bool = False
    written: bool = False
    offset: int = 0  # the value of its element offset
    views: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Buffer:
    """A buffer in the function. `scalar` is what memory holds, `value` what loads give.

    Of a parameter's buffer, `alignment` is the bytes that its address is a multiple of; of others
    `variable` is the array.
    """

    value: Scalar
    scalar: Scalar
    storage: Storage
    parameter: Parameter | None = None
    alignment: int = 0
    variable: int = 0


class Memory:
    """Access to buffers within one function.

    `low32(index)` gives an index modulo 2**32: the bytes of a descriptor are numbered by uint32.
    """

    def __init__(self, module: Module, body: Body, low32: Callable[[Any], int]) -> None:
        self.module, self.body, self._low32 = module, body, low32
        self.coherent = False

    def parameter_view(self, parameter: Parameter, scalar: Scalar, lanes: int) -> int:
        """The variable that shows a binding as an array of vectors of `lanes` scalars."""
        element = self.module.vector(scalar, lanes)
        key = (element, lanes)
        if key not in parameter.views:
            if scalar.bits == 16:
                self.module.require(Capability.StorageBuffer16BitAccess)
            if scalar.bits == 8:
                self.module.require(Capability.StorageBuffer8BitAccess)
            array = self.module.runtime_array(element, scalar.nbytes * lanes)
            block = self.module.block([(array, 0)])
            made = self.module.variable(Storage.StorageBuffer, block)
            self.module.decorate(made, Decoration.DescriptorSet, 0)
            self.module.decorate(made, Decoration.Binding, parameter.binding)
            parameter.views[key] = made
        return parameter.views[key]

    def finish(self, parameters: Sequence[Parameter]) -> None:
        """Say of each view how its binding is used, now that all views are known."""
        for parameter in parameters:
            for view in parameter.views.values():
                if not parameter.written:
                    self.module.decorate(view, Decoration.NonWritable)
                elif self.coherent and parameter.read and not self.module.vulkan_memory:
                    self.module.decorate(view, Decoration.Coherent)
                if len(parameter.views) > 1:
                    self.module.decorate(view, Decoration.Aliased)

    def pointer(self, buffer: Buffer, index: int, view: tuple[Scalar, int] | None = None) -> int:
        """To element `index` (uint32), counted from the start of the binding or array.

        `view` are the scalar type and lanes of a parameter's elements, if not its own.
        """
        scalar, lanes = view or (buffer.scalar, 1)
        pointer = self.module.pointer(buffer.storage, self.module.vector(scalar, lanes))
        if buffer.parameter is None:
            return self.body.pure_typed(Op.AccessChain, pointer, buffer.variable, index)
        variable = self.parameter_view(buffer.parameter, scalar, lanes)
        return self.body.pure_typed(Op.AccessChain, pointer, variable, self.body.index(0), index)

    def element(self, buffer: Buffer, index: Any, lane: int = 0) -> int:
        """Pointer to the element `lane` past a scalar TIR index."""
        at = self._low32(index)
        if buffer.parameter is not None:
            at = self.body.pure(Op.IAdd, U32, buffer.parameter.offset, at)
        if lane:
            at = self.body.pure(Op.IAdd, U32, at, self.body.index(lane))
        return self.pointer(buffer, at)

    def word(self, buffer: Buffer, index: Any) -> int:
        """Pointer to a 32-bit element of a parameter as a uint32."""
        assert buffer.parameter is not None
        at = self.body.pure(Op.IAdd, U32, buffer.parameter.offset, self._low32(index))
        return self.pointer(buffer, at, (U32, 1))

    def load(self, buffer: Buffer, index: Any, lane: int = 0) -> int:
        """One element."""
        type_ = self.module.scalar(buffer.scalar)
        made = self.body.result(
            Op.Load, type_, self.element(buffer, index, lane), *self._operands(buffer)
        )
        if buffer.value != BOOL:
            return made
        return self.body.pure(Op.INotEqual, BOOL, made, self.body.constant(buffer.scalar, 0))

    def store(self, buffer: Buffer, index: Any, value: int, lane: int = 0) -> None:
        """One element."""
        if buffer.value == BOOL:
            one, zero = (self.body.constant(buffer.scalar, v) for v in (1, 0))
            value = self.body.select(buffer.scalar, value, one, zero)
        pointer = self.element(buffer, index, lane)
        self.body.effect(Op.Store, pointer, value, *self._operands(buffer))

    def _operands(self, buffer: Buffer) -> tuple[int, ...]:
        """Under the Vulkan memory model only such accesses are ordered by barriers."""
        shared = self.module.vulkan_memory and buffer.storage != Storage.Function
        return (NON_PRIVATE_POINTER,) if shared else ()

    def run_words(self, buffer: Buffer, lanes: int, multiple: Callable[[int], bool]) -> int:
        """uint32 words to move at a time in a run of `lanes` elements; 0: move elements.

        `multiple(n)` tells whether the run starts at a multiple of n elements.
        """
        if buffer.parameter is None or buffer.value == BOOL:
            return 0
        bits = lanes * buffer.scalar.bits
        words = min(bits // _WORD_BITS, _MOST_WORDS)
        whole = words in (1, 2, _MOST_WORDS) and bits % (_WORD_BITS * words) == 0
        if not whole or (words == 1 and buffer.scalar.bits == _WORD_BITS):
            return 0
        aligned = buffer.alignment % (4 * words) == 0
        return words if aligned and multiple(words * _WORD_BITS // buffer.scalar.bits) else 0

    def load_run(self, buffer: Buffer, base: Any, lanes: int, words: int) -> tuple[int, ...]:
        """Elements from `base` on, in moves of `words` words."""
        values: list[int] = []
        for pointer in self._run_pointers(buffer, base, lanes, words):
            type_ = self.module.vector(U32, words)
            moved = self.body.result(Op.Load, type_, pointer, *self._operands(buffer))
            parts = [
                self.body.pure(Op.CompositeExtract, U32, moved, i) if words > 1 else moved
                for i in range(words)
            ]
            values += _unpacked(self.body, parts, buffer.scalar)
        return tuple(values)

    def store_run(self, buffer: Buffer, base: Any, values: Sequence[int], words: int) -> None:
        """Inverse of `load_run`."""
        per = words * _WORD_BITS // buffer.scalar.bits
        pointers = self._run_pointers(buffer, base, len(values), words)
        type_ = self.module.vector(U32, words)
        for i, pointer in enumerate(pointers):
            parts = _packed(self.body, values[i * per : (i + 1) * per], buffer.scalar)
            moved = parts[0]
            if words > 1:
                moved = self.body.pure_typed(Op.CompositeConstruct, type_, *parts)
            self.body.effect(Op.Store, pointer, moved, *self._operands(buffer))

    def _run_pointers(self, buffer: Buffer, base: Any, lanes: int, words: int) -> list[int]:
        """The alignment of the address makes the offset a multiple of a move as well."""
        assert buffer.parameter is not None
        per = words * _WORD_BITS // buffer.scalar.bits
        shift = self.body.index(per.bit_length() - 1)
        start = self.body.pure(Op.IAdd, U32, buffer.parameter.offset, self._low32(base))
        first = self.body.pure(Op.ShiftRightLogical, U32, start, shift)
        found = []
        for i in range(lanes // per):
            at = self.body.pure(Op.IAdd, U32, first, self.body.index(i)) if i else first
            found.append(self.pointer(buffer, at, (U32, words)))
        return found


def _unpacked(body: Body, words: Sequence[int], scalar: Scalar) -> list[int]:
    """Elements out of uint32 words, the lowest bits first."""
    if scalar.bits == _WORD_BITS:
        return [body.pure(Op.Bitcast, scalar, w) if scalar.is_float else w for w in words]
    if scalar.bits == 2 * _WORD_BITS:
        pair = body.module.vector(U32, 2)
        pairs = zip(words[::2], words[1::2], strict=True)
        return [
            body.pure(Op.Bitcast, scalar, body.pure_typed(Op.CompositeConstruct, pair, *p))
            for p in pairs
        ]
    count = _WORD_BITS // scalar.bits
    type_ = body.module.vector(scalar, count)
    split = [body.pure_typed(Op.Bitcast, type_, w) for w in words]
    return [body.pure(Op.CompositeExtract, scalar, v, i) for v in split for i in range(count)]


def _packed(body: Body, values: Sequence[int], scalar: Scalar) -> list[int]:
    """Inverse of `_unpacked`."""
    if scalar.bits == _WORD_BITS:
        return [body.pure(Op.Bitcast, U32, v) if scalar.is_float else v for v in values]
    if scalar.bits == 2 * _WORD_BITS:
        pair = body.module.vector(U32, 2)
        pairs = [body.pure_typed(Op.Bitcast, pair, v) for v in values]
        return [body.pure(Op.CompositeExtract, U32, p, i) for p in pairs for i in range(2)]
    count = _WORD_BITS // scalar.bits
    type_ = body.module.vector(scalar, count)
    groups = [values[i : i + count] for i in range(0, len(values), count)]
    return [
        body.pure(Op.Bitcast, U32, body.pure_typed(Op.CompositeConstruct, type_, *g))
        for g in groups
    ]


def stored(value: Scalar, parameter: bool) -> Scalar:
    """How values lie in memory: a bool is a byte in a parameter, a word elsewhere."""
    if value != BOOL:
        return value
    return U8 if parameter else U32


def static_size(buffer: Any) -> int:
    """Elements of a buffer that a kernel allocates."""
    count = 1
    for extent in buffer.shape:
        if not isinstance(getattr(extent, "value", None), int):
            raise CompileError(f"needs arrays of static size in kernels, got {buffer.shape}")
        count *= extent.value
    return count
