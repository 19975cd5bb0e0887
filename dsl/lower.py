"""Expressions to TIR: the values that tensor-expression stages are made of.

bf16 and bool are stored as uint16 and uint8 and converted here, so that no target needs to know
them and the conversion of NaN is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .dtypes import DType, bf16, bool_, f32
from .errors import CompileError
from .expr import (
    Axis,
    Binary,
    Cast,
    Const,
    DimRef,
    Expr,
    Form,
    Input,
    Read,
    ScalarRef,
    Select,
    Size,
    Stage,
    Tensor,
    Unary,
)
from .graph import size
from .walk import walk

Tir = Any
Reader = Callable[..., Tir]
Keep = Callable[[str, Tir], Tir]  # a value under a name → what stands for it


class Lets:
    """Bindings in order of definition; `close` wraps a body in them.

    A value used twice must be bound: written twice it grows the code, and a binding inside it
    would be defined twice, which TVM refuses.
    """

    def __init__(self) -> None:
        self._bound: list[tuple[Tir, Tir]] = []

    def __call__(self, name: str, value: Tir) -> Tir:
        from tvm import tirx

        value = tirx.convert(value)  # an element of a te.Tensor is not an expression yet
        var = tirx.Var(name, value.ty)
        self._bound.append((var, value))
        return var

    def close(self, body: Tir) -> Tir:
        from tvm import tirx

        for var, value in reversed(self._bound):
            body = tirx.Let(var, value, body)
        return body


def storage(dtype: DType) -> str:
    """The element type a tensor has in memory, as TVM spells it."""
    return {"bfloat16": "uint16", "bool": "uint8"}.get(dtype.name, dtype.name)


def decode(value: Tir, dtype: DType) -> Tir:
    """A stored element as a value: bf16 gives f32, bool a condition."""
    from tvm import tirx

    if dtype == bf16:
        bits = tirx.shift_left(value.astype("uint32"), tirx.const(16, "uint32"))
        return tirx.reinterpret("float32", bits)
    if dtype == bool_:
        return value != tirx.const(0, "uint8")
    return value


def encode(value: Tir, dtype: DType) -> Tir:
    """A value as a stored element; f32 → bf16 rounds to nearest even and keeps NaN."""
    from tvm import tirx

    if dtype == bool_:
        return value.astype("uint8")
    if dtype != bf16:
        return value
    lets = Lets()
    bits = lets("bits", tirx.reinterpret("uint32", value))
    low = tirx.bitwise_and(tirx.shift_right(bits, tirx.const(16, "uint32")), _u32(1))
    rounded = tirx.shift_right(bits + _u32(0x7FFF) + low, _u32(16))
    quiet = tirx.bitwise_or(tirx.shift_right(bits, _u32(16)), _u32(0x40))
    magnitude = tirx.bitwise_and(bits, _u32(0x7FFFFFFF))
    is_nan = magnitude > _u32(0x7F800000)
    return lets.close(tirx.Select(is_nan, quiet, rounded).astype("uint16"))


def _u32(value: int) -> Tir:
    from tvm import tirx

    return tirx.const(value, "uint32")


@dataclass
class _Shared:
    """What one lowering of an expression knows of its nodes: uses, results, bindings."""

    uses: dict[int, int]
    lets: Keep
    split: bool = False
    done: dict[int, Tir] = field(default_factory=dict)


def _uses(node: Expr) -> dict[int, int]:
    """How often each node is an operand."""
    counts: dict[int, int] = {}
    for item in walk(node):
        # max, min and finite mention an operand more than once in TIR
        weight = 2 if getattr(item, "op", "") in ("max", "min", "finite") else 1
        for child in item.children():
            counts[id(child)] = counts.get(id(child), 0) + weight
    return counts


def _from_data(index: Expr) -> bool:
    return any(isinstance(n, Read) for n in walk(index))


def _from_caller(divisor: Expr) -> bool:
    """Whether it may be any number: dims have contracts, and so have rules' copies of them."""
    return any(
        isinstance(n, ScalarRef) or (isinstance(n, Read) and isinstance(n.tensor, (Input, Stage)))
        for n in walk(divisor)
    )


def _divides(*nodes: Expr) -> bool:
    """Whether they divide integers by what is not a number, or read pointwise stages that do."""
    rest, seen = list(nodes), set[Tensor]()
    while rest:
        for node in walk(rest.pop()):
            if isinstance(node, Binary) and node.op in ("floordiv", "mod"):
                if not isinstance(node.b, Const):
                    return True
            elif isinstance(node, Read) and isinstance(node.tensor, Stage):
                if node.tensor not in seen and not isinstance(node.tensor.expr, Form):
                    rest.append(node.tensor.expr)  # rules may write it in place of the read
                seen.add(node.tensor)
    return False


def select(condition: Tir, then: Tir, otherwise: Tir, *arms: Expr) -> Tir:
    """`then` where `condition` holds, else `otherwise`; `arms` are what they were made of.

    A branch where an arm divides integers: TVM simplifies an arm knowing the condition, and may so
    take away what keeps a divisor from being 0, yet a Select computes both of its arms.
    """
    from tvm import tirx

    if _divides(*arms):
        return tirx.if_then_else(condition, then, otherwise)
    return tirx.Select(condition, then, otherwise)


def _worth(node: Expr) -> bool:
    return isinstance(node, (Unary, Binary, Select))


@dataclass
class Lowering:
    """Where expressions find their leaves: readers of tensors, variables of dims and scalars.

    `math` maps names of elementary functions to TIR builders of one f32 argument.
    """

    dims: dict[str, Tir]
    scalars: dict[str, Tir]
    math: Mapping[str, Callable[[Tir], Tir]]
    readers: dict[int, Reader] = field(default_factory=dict)

    def size(self, value: Size) -> Tir:
        return self.expr(size(value), {})

    def expr(self, node: Expr, env: Mapping[Axis, Tir]) -> Tir:
        """`node` as TIR, axes taken from `env`; float results used more than once are bound."""
        lets = Lets()
        body = self._expr(node, env, _Shared(_uses(node), lets))
        return lets.close(body)

    def split(self, node: Expr, env: Mapping[Axis, Tir], keep: Keep) -> Tir:
        """`node` as TIR, what is used more than once and what elementary functions take and give
        put away by `keep`.

        Where such functions are nested, TVM's passes take minutes over bindings within bindings;
        what is read from memory they leave alone.
        """
        return self._expr(node, env, _Shared(_uses(node), keep, split=True))

    def _expr(self, node: Expr, env: Mapping[Axis, Tir], shared: _Shared) -> Tir:
        found = shared.done.get(id(node))
        if found is None:
            found = self._build(node, env, shared)
            if shared.uses.get(id(node), 0) > 1 and node.dtype.is_float and _worth(node):
                found = shared.lets("t", found)
            shared.done[id(node)] = found
        return found

    def _build(self, node: Expr, env: Mapping[Axis, Tir], shared: _Shared) -> Tir:

        def go(child: Expr) -> Tir:
            return self._expr(child, env, shared)

        if isinstance(node, Const):
            return constant(node.value, node.dtype)
        if isinstance(node, Axis):
            return env[node]
        if isinstance(node, DimRef):
            return self.dims[node.name]
        if isinstance(node, ScalarRef):
            return self.scalars[node.name]
        if isinstance(node, Cast):
            return convert(go(node.a), node.a.dtype, node.dtype)
        if isinstance(node, Unary):
            if node.op == "not":
                return _negation(node.a, go)
            if shared.split and node.op in self.math:
                operand = shared.lets(f"{node.op}_of", go(node.a))
                return shared.lets(node.op, self._unary(node, operand))
            return self._unary(node, go(node.a))
        if isinstance(node, Binary):
            if node.op in ("floordiv", "mod") and _from_caller(node.b):
                return _division(node, go(node.a), go(node.b), shared.lets)
            return _binary(node, go(node.a), go(node.b))
        if isinstance(node, Select):
            parts = (go(n) for n in node.children())
            return select(*parts, node.then, node.otherwise)
        if isinstance(node, Read):
            return self.read(node.tensor, self._places(node, go), node.fill)
        raise CompileError(f"needs a pointwise expression, got {type(node).__name__}")

    def places(self, node: Read, env: Mapping[Axis, Tir]) -> list[Tir]:
        """The indices of a read, within the tensor if it has no fill value."""
        return self._places(node, lambda i: self.expr(i, env))

    def place(self, node: Read, dim: int, env: Mapping[Axis, Tir]) -> Tir:
        """One of the indices of a read, as `places` gives them."""
        return self._place(node, dim, lambda i: self.expr(i, env))

    def _places(self, node: Read, go: Callable[[Expr], Tir]) -> list[Tir]:
        return [self._place(node, dim, go) for dim in range(len(node.index))]

    def _place(self, node: Read, dim: int, go: Callable[[Expr], Tir]) -> Tir:
        index = node.index[dim]
        if node.fill is not None or not _from_data(index):
            return go(index)
        return self._clamped(go(index), node.tensor.shape[dim])

    def _clamped(self, index: Tir, extent: Size) -> Tir:
        """An index that memory holds: whatever that is, the read stays within the tensor."""
        from tvm import tirx

        zero, last = tirx.const(0, "int64"), self.size(extent) - tirx.const(1, "int64")
        return tirx.max(tirx.min(index.astype("int64"), last), zero)

    def read(self, tensor: Tensor, index: list[Tir], fill: float | int | None = None) -> Tir:
        """The element of `tensor` at `index`, decoded; outside the shape it is `fill`."""
        from tvm import tirx

        reader = self.readers[id(tensor)]
        if fill is None:
            return decode(reader(*index), tensor.dtype)
        inside = tirx.const(True, "bool")
        for i, extent in zip(index, tensor.shape, strict=True):
            zero = tirx.const(0, "int64")
            inside = tirx.all(inside, i >= zero, i < self.size(extent))
        value_type = f32 if tensor.dtype == bf16 else tensor.dtype
        other = constant(fill, value_type)
        return tirx.if_then_else(inside, decode(reader(*index), tensor.dtype), other)

    def _unary(self, node: Unary, a: Tir) -> Tir:
        from tvm import tirx

        simple = {
            "neg": lambda x: -x, "abs": tirx.abs, "floor": tirx.floor, "isnan": tirx.isnan,
            "sqrt": tirx.sqrt,
            "rsqrt": lambda x: tirx.const(1.0, "float32") / tirx.sqrt(x),
            "finite": lambda x: tirx.abs(x) <= tirx.const(3.4028234663852886e38, "float32"),
        }  # fmt: skip
        fn = simple.get(node.op) or self.math.get(node.op)
        if fn is None:
            raise CompileError(f"needs an elementary function, got {node.op}")
        return fn(a)


_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _negation(node: Expr, go: Callable[[Expr], Tir]) -> Tir:
    """Not `node`.

    TVM turns the negation of a < b into b <= a, also for floats, where neither may hold.
    """
    from tvm import tirx

    if isinstance(node, Unary) and node.op == "not":
        return go(node.a)
    if isinstance(node, Binary) and node.op in ("and", "or"):
        join = tirx.any if node.op == "and" else tirx.all
        return join(_negation(node.a, go), _negation(node.b, go))
    if isinstance(node, Binary) and node.op in _OPPOSITE and node.a.dtype.is_float:
        a, b = go(node.a), go(node.b)
        opposite = _binary(replace(node, op=_OPPOSITE[node.op]), a, b)
        return tirx.any(tirx.isnan(a), tirx.isnan(b), opposite)
    return tirx.Not(go(node))


def constant(value: float | int | bool, dtype: DType) -> Tir:
    """A literal; infinities and NaN included."""
    from tvm import tirx

    if dtype == bool_:
        return tirx.const(bool(value), "bool")
    if dtype == bf16:
        return tirx.const(float(value), "float32")
    return tirx.const(float(value) if dtype.is_float else int(value), dtype.name)


def convert(value: Tir, source: DType, goal: DType) -> Tir:
    """A value of one type as another; bf16 values are held as f32 until stored."""
    if goal == bf16:
        return value if source in (bf16, f32) else value.astype("float32")
    if goal == bool_:
        from tvm import tirx

        return value != tirx.const(0, source.name if source != bf16 else "float32")
    if source == bf16 and goal == f32:
        return value
    return value.astype(goal.name)


def _division(node: Binary, a: Tir, b: Tir, lets: Keep) -> Tir:
    """Floor division or remainder by any integer: by 0 it is 0, and -x may wrap, as NumPy's.

    On a CPU x / 0 and the least integer / -1 end the process, on a device they are undefined.
    """
    from tvm import tirx

    zero, one = constant(0, node.dtype), constant(1, node.dtype)
    a, b = lets("dividend", a), lets("divisor", b)
    by_zero = b == zero
    odd, sign = by_zero, one
    if not node.dtype.name.startswith("u"):
        minus_one = constant(-1, node.dtype)
        odd, sign = tirx.any(by_zero, b == minus_one), tirx.Select(b == minus_one, minus_one, one)
    whole = tirx.Select(odd, one, b)
    if node.op == "mod":
        return tirx.floormod(a, whole)
    # A product: under the condition of a Select TVM would take the guard away, and divide anyway.
    return tirx.floordiv(a, whole) * tirx.Select(by_zero, zero, sign)


def _binary(node: Binary, a: Tir, b: Tir) -> Tir:
    from tvm import tirx

    op = node.op
    if op in ("max", "min") and node.dtype.is_float:
        picked = tirx.max(a, b) if op == "max" else tirx.min(a, b)
        return tirx.Select(tirx.any(tirx.isnan(a), tirx.isnan(b)), a + b, picked)
    table: dict[str, Callable[[Tir, Tir], Tir]] = {
        "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
        "div": lambda x, y: x / y, "floordiv": tirx.floordiv, "mod": tirx.floormod,
        "max": tirx.max, "min": tirx.min, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y, "eq": lambda x, y: x == y,
        "ne": lambda x, y: x != y, "and": tirx.all, "or": tirx.any,
    }  # fmt: skip
    return table[op](a, b)
