"""TIR expressions to SPIR-V, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .....dsl.errors import CompileError
from .body import Body
from .calls import call
from .convert import cast
from .emitter import key
from .indices import small, without_64_bits
from .opcodes import Glsl, Op
from .types import BOOL, F16, F32, I32, I64, U32, Scalar, type_of

if TYPE_CHECKING:
    from .emitter import Emitter, Lanes

_FLOAT = {"Add": Op.FAdd, "Sub": Op.FSub, "Mul": Op.FMul, "Div": Op.FDiv}
_INT = {"Add": Op.IAdd, "Sub": Op.ISub, "Mul": Op.IMul, "BitwiseAnd": Op.BitwiseAnd,
        "BitwiseOr": Op.BitwiseOr, "BitwiseXor": Op.BitwiseXor,
        "LShift": Op.ShiftLeftLogical}  # fmt: skip
_SIGNED = {"Div": Op.SDiv, "RShift": Op.ShiftRightArithmetic}
_UNSIGNED = {"Div": Op.UDiv, "Mod": Op.UMod, "RShift": Op.ShiftRightLogical}
_LOGICAL = {"And": Op.LogicalAnd, "Or": Op.LogicalOr}
# Comparisons are false for NaN, but for "differs".
_COMPARE = {
    "float": {"EQ": Op.FOrdEqual, "NE": Op.FUnordNotEqual, "LT": Op.FOrdLessThan,
              "LE": Op.FOrdLessThanEqual, "GT": Op.FOrdGreaterThan,
              "GE": Op.FOrdGreaterThanEqual},
    "int": {"EQ": Op.IEqual, "NE": Op.INotEqual, "LT": Op.SLessThan, "LE": Op.SLessThanEqual,
            "GT": Op.SGreaterThan, "GE": Op.SGreaterThanEqual},
    "uint": {"EQ": Op.IEqual, "NE": Op.INotEqual, "LT": Op.ULessThan, "LE": Op.ULessThanEqual,
             "GT": Op.UGreaterThan, "GE": Op.UGreaterThanEqual},
    "bool": {"EQ": Op.LogicalEqual, "NE": Op.LogicalNotEqual},
}  # fmt: skip


def binary(body: Body, name: str, scalar: Scalar, a: int, b: int) -> int:
    """One lane of an operation of TIR, named as its node. Raises CompileError."""
    if scalar == F16:  # exact in f32 but for the last rounding, and right on every device
        wide = binary(body, name, F32, cast(body, a, F16, F32), cast(body, b, F16, F32))
        return cast(body, wide, F32, F16)
    if name in ("Div", "Mod", "RShift", "LShift") and scalar.is_int and scalar.bits < 32:
        return _narrow(body, name, scalar, a, b)
    if name in ("Min", "Max"):
        return _extremum(body, name, scalar, a, b)
    if name == "Mod" and scalar.kind == "int":
        # SPIR-V's own remainders are undefined for negative operands.
        quotient = body.pure(Op.SDiv, scalar, a, b)
        return body.pure(Op.ISub, scalar, a, body.pure(Op.IMul, scalar, quotient, b))
    table = {"float": _FLOAT, "int": _SIGNED, "uint": _UNSIGNED, "bool": _LOGICAL}[scalar.kind]
    op = table.get(name) or (_INT.get(name) if scalar.is_int else None)
    if op is None:
        raise CompileError(f"needs an operation that SPIR-V has, got {name} of {scalar}")
    return body.pure(op, scalar, a, b)


def _narrow(body: Body, name: str, scalar: Scalar, a: int, b: int) -> int:
    """In 32 bits, where drivers get it right."""
    wide = Scalar(scalar.kind, 32)
    result = binary(body, name, wide, cast(body, a, scalar, wide), cast(body, b, scalar, wide))
    return cast(body, result, wide, scalar)


def compare(body: Body, name: str, scalar: Scalar, a: int, b: int) -> int:
    """One lane of a comparison."""
    if scalar == F16:
        a, b, scalar = cast(body, a, F16, F32), cast(body, b, F16, F32), F32
    if scalar == I64:
        left, right = body.narrowed(a), body.narrowed(b)
        # Not for speed alone: Mesa 22.3 gets an extended int32 against a literal wrong.
        if left is not None and right is not None:
            a, b, scalar = left, right, I32
        elif (body.module.integer(a) is None) != (body.module.integer(b) is None):
            return _compare_halves(body, name, a, b)  # the extension may lie behind a variable
    if name == "NE" and scalar.is_float and a == b:
        return is_nan(body, scalar, a)
    op = _COMPARE[scalar.kind].get(name)
    if op is None:
        raise CompileError(f"needs a comparison that SPIR-V has, got {name} of {scalar}")
    return body.pure(op, BOOL, a, b)


def _compare_halves(body: Body, name: str, a: int, b: int) -> int:
    """A comparison of 64-bit integers by those of their upper and lower 32 bits."""

    def halves(value: int) -> tuple[int, int]:
        upper = binary(body, "RShift", I64, value, body.constant(I64, 32))
        return cast(body, upper, I64, I32), cast(body, value, I64, U32)

    (upper, lower), (other_upper, other_lower) = halves(a), halves(b)
    below = compare(body, name, U32, lower, other_lower)
    if name in ("EQ", "NE"):
        first = compare(body, name, I32, upper, other_upper)
        return body.pure(_LOGICAL["And" if name == "EQ" else "Or"], BOOL, first, below)
    strict = compare(body, name[0] + "T", I32, upper, other_upper)
    level = compare(body, "EQ", I32, upper, other_upper)
    return body.pure(Op.LogicalOr, BOOL, strict, body.pure(Op.LogicalAnd, BOOL, level, below))


def is_nan(body: Body, scalar: Scalar, value: int) -> int:
    """Told by the bits where the device does not promise to respect NaN."""
    value = cast(body, value, scalar, F32)
    if 32 in body.module.features.nan:
        return body.pure(Op.IsNan, BOOL, value)
    bits = body.pure(Op.Bitcast, U32, value)
    magnitude = body.pure(Op.BitwiseAnd, U32, bits, body.index(0x7FFFFFFF))
    return body.pure(Op.UGreaterThan, BOOL, magnitude, body.index(0x7F800000))


def _extremum(body: Body, name: str, scalar: Scalar, a: int, b: int) -> int:
    """`a < b ? a : b`, as on the CPU: SPIR-V's own may give either operand when one is NaN."""
    if scalar.kind == "bool":
        raise CompileError(f"needs numbers, got {name} of bool")
    return body.select(scalar, compare(body, "LT" if name == "Min" else "GT", scalar, a, b), a, b)


def _binary(e: Emitter, node: Any) -> Lanes:
    scalar, lanes = type_of(node)
    name = type(node).__name__
    if scalar == F32 and name in ("Add", "Sub") and _product(node.a, node.b) is not None:
        return _fused(e, node)
    if scalar == I64 and lanes == 1 and small(e, node):
        narrow = without_64_bits(e, node)
        if narrow is not None:
            return (e.body.sign_extended(narrow),)
    pairs = zip(e.value(node.a), e.value(node.b), strict=True)
    return tuple(binary(e.body, name, scalar, a, b) for a, b in pairs)


def _product(*nodes: Any) -> Any:
    """The first multiplication among the nodes, or None."""
    return next((n for n in nodes if type(n).__name__ == "Mul"), None)


def _fused(e: Emitter, node: Any) -> Lanes:
    """a * b ± c and c ± a * b, in one instruction: others are not contracted by drivers."""
    product = _product(node.a, node.b)
    leads = product.same_as(node.a)
    addend = e.value(node.b if leads else node.a)
    factors = e.value(product.a)
    if type(node).__name__ == "Sub":
        minus = addend if leads else factors
        negated = tuple(e.body.pure(Op.FNegate, F32, value) for value in minus)
        addend, factors = (negated, factors) if leads else (addend, negated)
    lanes = zip(factors, e.value(product.b), addend, strict=True)
    return tuple(e.body.glsl(Glsl.Fma, F32, *lane) for lane in lanes)


def _compare(e: Emitter, node: Any) -> Lanes:
    scalar, _ = type_of(node.a)
    pairs = zip(e.value(node.a), e.value(node.b), strict=True)
    return tuple(compare(e.body, type(node).__name__, scalar, a, b) for a, b in pairs)


def _not(e: Emitter, node: Any) -> Lanes:
    return tuple(e.body.pure(Op.LogicalNot, BOOL, a) for a in e.value(node.a))


def _bitwise_not(e: Emitter, node: Any) -> Lanes:
    scalar, _ = type_of(node)
    return tuple(e.body.pure(Op.Not, scalar, a) for a in e.value(node.a))


def _constant(e: Emitter, node: Any) -> Lanes:
    return (e.body.constant(type_of(node)[0], node.value),)


def _variable(e: Emitter, node: Any) -> Lanes:
    found = e.values.get(key(node))
    if found is None:
        raise CompileError(f"needs a variable that has a value, got {node}")
    return found


def _select(e: Emitter, node: Any) -> Lanes:
    scalar, _ = type_of(node)
    parts = (e.value(p) for p in (node.condition, node.true_value, node.false_value))
    return tuple(e.body.select(scalar, *lane) for lane in zip(*parts, strict=True))


def _cast(e: Emitter, node: Any) -> Lanes:
    source, goal = type_of(node.value)[0], type_of(node)[0]
    return tuple(cast(e.body, value, source, goal) for value in e.value(node.value))


def _let(e: Emitter, node: Any) -> Lanes:
    e.bind(node.var, node.value)
    return e.value(node.body)


def _ramp(e: Emitter, node: Any) -> Lanes:
    scalar, lanes = type_of(node)
    made, stride = [e.scalar(node.base)], e.scalar(node.stride)
    while len(made) < lanes:
        made.append(e.body.pure(Op.IAdd, scalar, made[-1], stride))
    return tuple(made)


def _broadcast(e: Emitter, node: Any) -> Lanes:
    return (e.scalar(node.value),) * type_of(node)[1]


def _shuffle(e: Emitter, node: Any) -> Lanes:
    joined = [lane for vector in node.vectors for lane in e.value(vector)]
    return tuple(joined[index.value] for index in node.indices)


def _load(e: Emitter, node: Any) -> Lanes:
    buffer, (index,) = e.buffer(node.source), node.indices
    if buffer.parameter is not None:
        buffer.parameter.read = True
    _, lanes = type_of(node)
    if lanes == 1:
        return (e.memory.load(buffer, index),)
    base = contiguous(index)
    if base is None:
        return tuple(e.memory.load(buffer, lane) for lane in lane_indices(index))
    words = e.memory.run_words(buffer, lanes, lambda n: is_multiple(e, base, n))
    if words:
        return e.memory.load_run(buffer, base, lanes, words)
    return tuple(e.memory.load(buffer, base, lane) for lane in range(lanes))


def contiguous(index: Any) -> Any:
    """The first index of a run of neighbours, or None."""
    if type(index).__name__ != "Ramp":
        return None
    return index.base if getattr(index.stride, "value", 0) == 1 else None


def lane_indices(index: Any) -> list[Any]:
    """The index of each lane as an expression. Raises CompileError."""
    kind, (scalar, lanes) = type(index).__name__, type_of(index)
    if kind == "Broadcast":
        return [index.value] * lanes
    if kind != "Ramp":
        raise CompileError(f"needs a vector index of equal steps, got {index}")
    from tvm import tirx

    return [index.base + index.stride * tirx.const(i, str(scalar)) for i in range(lanes)]


def is_multiple(e: Emitter, value: Any, of: int) -> bool:
    """Whether an index provably is a multiple of `of`."""
    known = e.analyzer.modular_set(value)
    return known.coeff % of == 0 and known.base % of == 0


EXPRESSIONS: dict[str, Callable[[Emitter, Any], Lanes]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "And", "Or"), _binary),
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LShift", "RShift"), _binary),
    **dict.fromkeys(("EQ", "NE", "LT", "LE", "GT", "GE"), _compare),
    **dict.fromkeys(("IntImm", "FloatImm"), _constant),
    "Not": _not,
    "BitwiseNot": _bitwise_not,
    "Var": _variable,
    "Select": _select,
    "Cast": _cast,
    "Let": _let,
    "Ramp": _ramp,
    "Broadcast": _broadcast,
    "Shuffle": _shuffle,
    "TensorLoad": _load,
    "Call": call,
}
