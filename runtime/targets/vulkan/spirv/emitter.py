"""The state of emitting one device function; `expressions` and `statements` do the work."""

from __future__ import annotations

from typing import Any

from .....dsl.errors import CompileError
from .body import Body
from .features import SpirvFeatures
from .matrix import Fragment
from .memory import Buffer, Memory, Parameter
from .module import Module
from .opcodes import BuiltIn, Capability, Op
from .types import U32, type_of

Lanes = tuple[int, ...]


def key(variable: Any) -> Any:
    """What tells variables and buffers apart."""
    return variable.__chandle__()


class Emitter:
    """Values are tuples of result ids, one a lane: shaders have no vectors worth keeping."""

    def __init__(self, features: SpirvFeatures) -> None:
        from tvm.sym import Analyzer

        self.module = Module(features)
        self.body = Body(self.module)
        self.memory = Memory(self.module, self.body, self.low32)
        self.analyzer = Analyzer()
        self.values: dict[Any, Lanes] = {}
        self.buffers: dict[Any, Buffer] = {}
        self.parameters: dict[Any, Parameter] = {}
        self.fragments: dict[Any, Fragment] = {}
        self.local_size = 1
        self.subgroup = False

    def value(self, node: Any) -> Lanes:
        """The lanes of a TIR expression. Raises CompileError for what has no meaning here."""
        from .expressions import EXPRESSIONS

        emit = EXPRESSIONS.get(type(node).__name__)
        if emit is None:
            raise CompileError(f"needs an expression known to the SPIR-V emitter, got {node}")
        return emit(self, node)

    def scalar(self, node: Any) -> int:
        """The value of an expression of one lane."""
        (value,) = self.value(node)
        return value

    def statement(self, node: Any) -> None:
        """Emit a TIR statement. Raises CompileError for what has no meaning here."""
        from .statements import STATEMENTS

        emit = STATEMENTS.get(type(node).__name__)
        if emit is None:
            raise CompileError(f"needs a statement known to the SPIR-V emitter, got {node}")
        emit(self, node)

    def thread(self) -> int:
        """The thread's number in its block.

        Where subgroups matter it is made of theirs, so that lane = thread % subgroup size, which
        Vulkan does not promise of its own numbering.
        """
        if not self.subgroup:
            return self._input(BuiltIn.LocalInvocationIndex)
        number, size = self._input(BuiltIn.SubgroupId), self._input(BuiltIn.SubgroupSize)
        return self.body.pure(Op.IAdd, U32, self.body.pure(Op.IMul, U32, number, size), self.lane())

    def lane(self) -> int:
        """The thread's number in its subgroup."""
        return self._input(BuiltIn.SubgroupLocalInvocationId)

    def _input(self, which: BuiltIn) -> int:
        if which != BuiltIn.LocalInvocationIndex:
            self.module.require(Capability.GroupNonUniform)
        return self.body.load(U32, self.module.builtin(which))

    def buffer(self, source: Any) -> Buffer:
        """The buffer that a load or store names."""
        found = self.buffers.get(key(source))
        if found is None:
            raise CompileError(f"needs a buffer that the kernel declares, got {source}")
        return found

    def bind(self, variable: Any, value: Any) -> None:
        """`variable` stands for the value of an expression from here on."""
        self.values[key(variable)] = self.value(value)
        scalar, lanes = type_of(value)
        if scalar.is_int and lanes == 1:
            # Not `bind`, which simplifies the value: 10 ms for the bits of an elementary function.
            for known in (self.analyzer.const_int_bound(value), self.analyzer.modular_set(value)):
                self.analyzer.update(variable, known, override=True)

    def low32(self, index: Any) -> int:
        """An integer expression modulo 2**32."""
        from .indices import low32

        return low32(self, index)
