"""The body of a function in the making: instructions, blocks, structured control flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .module import Module, instruction
from .opcodes import Decoration, Glsl, LoopControl, Op, Storage
from .types import BOOL, I32, I64, U32, Scalar

_ROUNDS = (Op.FAdd, Op.FSub, Op.FMul, Op.FDiv)


class Body:
    """Values are result ids. A pure instruction with known operands is emitted once a scope."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.words: list[int] = []
        self.variables: list[int] = []
        self._extended: dict[int, int] = {}
        self._known: list[dict[tuple[int, ...], int]] = [{}]
        self._block = 0  # the label of the block being written; 0 is the function's first

    def effect(self, op: Op, *operands: int) -> None:
        """An instruction without a result."""
        instruction(self.words, op, *operands)

    def result(self, op: Op, type_: int, *operands: int) -> int:
        """An instruction whose result may change from one time to the next, such as a load."""
        made = self.module.new_id()
        instruction(self.words, op, type_, made, *operands)
        return made

    def pure(self, op: Op, scalar: Scalar, *operands: int) -> int:
        """An instruction that depends on nothing but its operands, with a scalar result."""
        return self.pure_typed(op, self.module.scalar(scalar), *operands)

    def pure_typed(self, op: Op, type_: int, *operands: int) -> int:
        key = (op, type_, *operands)
        for scope in reversed(self._known):
            if key in scope:
                return scope[key]
        made = self.result(op, type_, *operands)
        if op in _ROUNDS:
            # Else a driver may reassociate, and x + 1.5 * 2**23 - 1.5 * 2**23 becomes x.
            self.module.decorate(made, Decoration.NoContraction)
        self._known[-1][key] = made
        return made

    def glsl(self, which: Glsl, scalar: Scalar, *operands: int) -> int:
        return self.pure(Op.ExtInst, scalar, self.module.glsl, which, *operands)

    def constant(self, scalar: Scalar, value: float | int | bool) -> int:
        return self.module.constant(scalar, value)

    def sign_extended(self, value: int) -> int:
        """int32 → int64."""
        made = self.pure(Op.SConvert, I64, value)
        self._extended[made] = value
        return made

    def narrowed(self, value: int) -> int | None:
        """The int32 that an int64 was made of, or None."""
        literal = self.module.integer(value)
        if literal is not None and -(2**31) <= literal < 2**31:
            return self.constant(I32, literal)
        return self._extended.get(value)

    def select(self, scalar: Scalar, condition: int, yes: int, no: int) -> int:
        return yes if yes == no else self.pure(Op.Select, scalar, condition, yes, no)

    def load(self, scalar: Scalar, pointer: int) -> int:
        return self.result(Op.Load, self.module.scalar(scalar), pointer)

    def local_variable(self, type_: int) -> int:
        """A variable of the function; SPIR-V wants them all in the first block."""
        made = self.module.new_id()
        pointer = self.module.pointer(Storage.Function, type_)
        instruction(self.variables, Op.Variable, pointer, made, Storage.Function)
        return made

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """What is computed within is not known after."""
        self._known.append({})
        yield
        self._known.pop()

    def _start(self, label: int) -> None:
        self.effect(Op.Label, label)
        self._block = label

    def _current(self) -> int:
        """The block being written, as a phi names it."""
        if not self._block:
            self._block = self.module.new_id()
            self.effect(Op.Branch, self._block)
            self.effect(Op.Label, self._block)
        return self._block

    def branch(
        self,
        condition: int,
        then: Callable[[], Sequence[int]],
        otherwise: Callable[[], Sequence[int]] | None = None,
        scalar: Scalar | None = None,
    ) -> tuple[int, ...]:
        """Run one side only. With `scalar`, both sides give values of it, which are merged."""
        yes, no, merge = (self.module.new_id() for _ in range(3))
        if otherwise is None:
            no = merge
        self.effect(Op.SelectionMerge, merge, 0)
        self.effect(Op.BranchConditional, condition, yes, no)
        sides = []
        for label, write in ((yes, then), (no, otherwise)):
            if write is None:
                continue
            self._start(label)
            with self._scope():
                values = write()
            sides.append((values, self._current()))
            self.effect(Op.Branch, merge)
        self._start(merge)
        if scalar is None:
            return ()
        (left, first), (right, second) = sides
        type_ = self.module.scalar(scalar)
        return tuple(
            self.result(Op.Phi, type_, a, first, b, second)
            for a, b in zip(left, right, strict=True)
        )

    def loop(
        self,
        scalar: Scalar,
        bounds: tuple[int, int, int],
        write: Callable[[int], None],
        control: LoopControl,
    ) -> None:
        """`write(i)` for i from first up to last in steps, of `bounds` = (first, last, step)."""
        first, last, step = bounds
        before = self._current()
        type_, following, i = self.module.scalar(scalar), *self._new(2)
        less = Op.SLessThan if scalar.kind == "int" else Op.ULessThan

        def head(continuing: int) -> None:
            self.effect(Op.Phi, type_, i, first, before, following, continuing)

        def advance() -> None:
            self.effect(Op.IAdd, type_, following, i, step)

        self._loop(head, lambda: self.pure(less, BOOL, i, last), lambda: write(i), advance, control)

    def while_loop(self, condition: Callable[[], int], write: Callable[[], None]) -> None:
        """`write()` as long as `condition()` holds."""
        self._loop(lambda _: None, condition, write, lambda: None, LoopControl.Nothing)

    def _loop(
        self,
        head: Callable[[int], None],
        condition: Callable[[], int],
        write: Callable[[], None],
        advance: Callable[[], None],
        control: LoopControl,
    ) -> None:
        start, test, inside, continuing, merge = self._new(5)
        self.effect(Op.Branch, start)
        self._start(start)
        head(continuing)
        self.effect(Op.LoopMerge, merge, continuing, control)
        self.effect(Op.Branch, test)
        self._start(test)
        with self._scope():
            self.effect(Op.BranchConditional, condition(), inside, merge)
            self._start(inside)
            write()
            self.effect(Op.Branch, continuing)
            self._start(continuing)
            advance()
            self.effect(Op.Branch, start)
        self._start(merge)

    def _new(self, count: int) -> list[int]:
        return [self.module.new_id() for _ in range(count)]

    def index(self, value: int) -> int:
        """A uint32 literal."""
        return self.constant(U32, value)
