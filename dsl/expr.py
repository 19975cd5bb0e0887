"""Expressions: scalar values over named axes, and the tensors they read.

An expression is a tree of frozen nodes. Its *free axes* are the axes it still depends on; a
reduction removes some of them. Identity is object identity, so a subexpression used twice is
shared. Arithmetic on f16 and bf16 happens in f32: operands are widened as the tree is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Union

from .dtypes import DType, bool_, f32, i64
from .errors import DeclarationError

Value = Union["Expr", int, float, bool]
Size = Union["Expr", int]

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
LOGICAL = ("and", "or")


class Expr:
    """Base of all nodes: a scalar of `dtype` for each point of its free axes."""

    dtype: DType

    def children(self) -> tuple[Expr, ...]:
        return ()

    def __add__(self, other: Value) -> Expr:
        return binary("add", self, other)

    def __radd__(self, other: Value) -> Expr:
        return binary("add", other, self)

    def __sub__(self, other: Value) -> Expr:
        return binary("sub", self, other)

    def __rsub__(self, other: Value) -> Expr:
        return binary("sub", other, self)

    def __mul__(self, other: Value) -> Expr:
        return binary("mul", self, other)

    def __rmul__(self, other: Value) -> Expr:
        return binary("mul", other, self)

    def __truediv__(self, other: Value) -> Expr:
        return binary("div", self, other)

    def __rtruediv__(self, other: Value) -> Expr:
        return binary("div", other, self)

    def __floordiv__(self, other: Value) -> Expr:
        return binary("floordiv", self, other)

    def __rfloordiv__(self, other: Value) -> Expr:
        return binary("floordiv", other, self)

    def __mod__(self, other: Value) -> Expr:
        return binary("mod", self, other)

    def __rmod__(self, other: Value) -> Expr:
        return binary("mod", other, self)

    def __neg__(self) -> Expr:
        return unary("neg", self)

    def __pow__(self, exponent: int) -> Expr:
        if exponent != 2:
            raise DeclarationError(f"needs the exponent 2 (write other powers out), got {exponent}")
        return self * self

    def __lt__(self, other: Value) -> Expr:
        return binary("lt", self, other)

    def __le__(self, other: Value) -> Expr:
        return binary("le", self, other)

    def __gt__(self, other: Value) -> Expr:
        return binary("gt", self, other)

    def __ge__(self, other: Value) -> Expr:
        return binary("ge", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return binary("eq", self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return binary("ne", self, other)  # type: ignore[arg-type]

    def __and__(self, other: Value) -> Expr:
        return binary("and", self, other)

    def __rand__(self, other: Value) -> Expr:
        return binary("and", other, self)

    def __or__(self, other: Value) -> Expr:
        return binary("or", self, other)

    def __ror__(self, other: Value) -> Expr:
        return binary("or", other, self)

    def __invert__(self) -> Expr:
        return unary("not", self)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        # `axis in axes` and comparing tuples of axes ask for this: there axes are identities.
        if isinstance(self, Binary) and isinstance(self.a, Axis) and isinstance(self.b, Axis):
            if self.op == "eq":
                return self.a is self.b
            if self.op == "ne":
                return self.a is not self.b
        raise DeclarationError(
            "the truth of an expression is not known while declaring: "
            "use where(…), require(…), & and |, or an Option for a compile-time choice"
        )


@dataclass(frozen=True, eq=False)
class Const(Expr):
    value: float | int | bool
    dtype: DType


@dataclass(frozen=True, eq=False)
class Axis(Expr):
    """An index running over 0 … extent − 1."""

    name: str
    extent: Size
    dtype: DType = i64


@dataclass(frozen=True, eq=False)
class DimRef(Expr):
    """The size of a dynamic dim, known at launch."""

    name: str
    dtype: DType = i64


@dataclass(frozen=True, eq=False)
class ScalarRef(Expr):
    """A scalar argument, known at launch."""

    name: str
    dtype: DType = f32


@dataclass(frozen=True, eq=False, repr=False)
class Tensor:
    """Something that can be read: an input or a stage. `t[i, j]` reads it."""

    name: str
    shape: tuple[Size, ...]
    dtype: DType

    def __repr__(self) -> str:
        # Its expression names other tensors, theirs yet others: the whole would be endless.
        return f"<{type(self).__name__.lower()} {self.name} {self.dtype}>"

    def __getitem__(self, index: Any) -> Read:
        return self.at(*(index if isinstance(index, tuple) else (index,)))

    def at(self, *index: Any, fill: float | int | None = None) -> Read:
        """The element at `index`; with `fill`, an index outside the shape gives `fill`."""
        flat: list[Expr] = []
        for part in index:
            flat.extend(part if isinstance(part, tuple) else (as_expr(part, i64),))
        if len(flat) != len(self.shape):
            raise DeclarationError(
                f"needs {len(self.shape)} indices to read {self.name}, got {len(flat)}"
            )
        return Read(self, tuple(flat), fill, self.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Input(Tensor):
    """A tensor argument. `dims` are the declared names, packs expanded."""

    dims: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Stage(Tensor):
    """A tensor defined by an expression over `axes`."""

    axes: tuple[Axis, ...] = ()
    expr: Expr = field(default_factory=lambda: Const(0.0, f32))


@dataclass(frozen=True, eq=False)
class Read(Expr):
    tensor: Tensor
    index: tuple[Expr, ...]
    fill: float | int | None
    dtype: DType

    def children(self) -> tuple[Expr, ...]:
        return self.index


@dataclass(frozen=True, eq=False)
class Unary(Expr):
    op: str
    a: Expr
    dtype: DType

    def children(self) -> tuple[Expr, ...]:
        return (self.a,)


@dataclass(frozen=True, eq=False)
class Binary(Expr):
    op: str
    a: Expr
    b: Expr
    dtype: DType

    def children(self) -> tuple[Expr, ...]:
        return (self.a, self.b)


@dataclass(frozen=True, eq=False)
class Select(Expr):
    condition: Expr
    then: Expr
    otherwise: Expr
    dtype: DType

    def children(self) -> tuple[Expr, ...]:
        return (self.condition, self.then, self.otherwise)


@dataclass(frozen=True, eq=False)
class Cast(Expr):
    a: Expr
    dtype: DType

    def children(self) -> tuple[Expr, ...]:
        return (self.a,)


class Form(Expr):
    """A node that removes or orders axes: a reduction, a scan, … It becomes a stage."""

    over: tuple[Axis, ...]

    def with_children(self, children: tuple[Expr, ...]) -> Form:
        """The same form over other operands."""
        raise NotImplementedError

    def bound(self) -> tuple[Axis, ...]:
        """Axes that are not free in the result."""
        return self.over

    def added(self) -> tuple[Axis, ...]:
        """Axes that are free in the result though no child mentions them."""
        return ()


def as_expr(value: Value, like: DType | None = None) -> Expr:
    """`value` as a node; a Python number takes the type `like`."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, bool):
        return Const(value, bool_)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise DeclarationError(f"needs an integer that fits 64 bits, got {value}")
        return Const(value, like if like is not None else i64)
    if isinstance(value, float):
        return Const(value, like if like is not None and like.is_float else f32)
    raise DeclarationError(f"needs a number or an expression, got {type(value).__name__}")


def cast(value: Value, dtype: DType) -> Expr:
    """`value` converted to `dtype` (no node if it already has it)."""
    node = as_expr(value, dtype)
    if node.dtype == dtype:
        return node
    if isinstance(node, Const):
        return Const(float(node.value) if dtype.is_float else int(node.value), dtype)
    return Cast(node, dtype)


def widen(node: Expr) -> Expr:
    """f16 and bf16 become f32; anything else stays."""
    return cast(node, f32) if node.dtype.is_narrow_float else node


def common(a: Value, b: Value) -> tuple[Expr, Expr]:
    """Both operands in one type: numbers follow nodes, ints follow floats, narrow floats widen."""
    left = a if isinstance(a, Expr) else None
    right = b if isinstance(b, Expr) else None
    if left is None and right is None:
        raise DeclarationError("needs at least one expression")
    if left is not None and right is not None:
        left, right = widen(left), widen(right)
    elif left is not None:
        left = widen(left)
        right = widen(as_expr(b, left.dtype))
    else:
        assert right is not None
        right = widen(right)
        left = widen(as_expr(a, right.dtype))
    if left.dtype == right.dtype:
        return left, right
    if left.dtype.is_float != right.dtype.is_float:
        goal = left.dtype if left.dtype.is_float else right.dtype
    else:
        goal = left.dtype if left.dtype.bits >= right.dtype.bits else right.dtype
    return cast(left, goal), cast(right, goal)


def binary(op: str, a: Value, b: Value) -> Expr:
    """A two-operand node, operands brought to one type; integer constants fold."""
    left, right = common(a, b)
    if op in ("floordiv", "mod"):
        if not left.dtype.is_int:
            raise DeclarationError(f"needs integers for // and %, got {left.dtype}")
        if _is(right, 0):
            raise DeclarationError("needs a divisor other than 0, got 0")
    if isinstance(left, Const) and isinstance(right, Const) and left.dtype.is_int:
        folded = _FOLD.get(op)
        if folded is not None:
            return Const(folded(left.value, right.value), left.dtype)
    if op in ("add", "sub") and _is(right, 0) and left.dtype.is_int:
        return left
    if op == "add" and _is(left, 0) and left.dtype.is_int:
        return right
    if op in ("mul", "floordiv") and _is(right, 1) and left.dtype.is_int:
        return left
    if op == "div" and not left.dtype.is_float:
        left, right = cast(left, f32), cast(right, f32)
    dtype = bool_ if op in COMPARISONS or op in LOGICAL else left.dtype
    return Binary(op, left, right, dtype)


def _is(node: Expr, value: int) -> bool:
    return isinstance(node, Const) and node.value == value


_FOLD: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": max,
    "min": min,
}


def unary(op: str, a: Value, result: DType | None = None) -> Expr:
    """A one-operand node on a widened operand."""
    node = widen(as_expr(a, f32))
    return Unary(op, node, result or node.dtype)
