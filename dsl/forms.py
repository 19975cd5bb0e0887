"""The forms that bind axes: reductions, weighted sums, `scan`, `top_k`, `scatter_add`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .dtypes import DType, bool_, f32, i64
from .errors import DeclarationError
from .expr import (
    Axis,
    Cast,
    Expr,
    Form,
    Read,
    Select,
    Size,
    Tensor,
    Value,
    as_expr,
    binary,
    cast,
    common,
    unary,
    widen,
)
from .walk import free_axes
from .weighted import LogSumExp, SoftmaxSum, WeightedSum


@dataclass(frozen=True, eq=False)
class Reduce(Form):
    """`op` of `body` over axes; where `where` is false the element does not take part.

    `nan`, for max and min: "carry" (a NaN among the elements is the result), "ignore" (they do not
    take part), or "any" (either, whichever is quicker).
    """

    op: str
    body: Expr
    over: tuple[Axis, ...]
    where: Expr | None
    nan: str
    dtype: DType

    def children(self) -> tuple[Expr, ...]:
        return (self.body,) if self.where is None else (self.body, self.where)

    def with_children(self, children: tuple[Expr, ...]) -> Reduce:
        where = None if self.where is None else children[1]
        return Reduce(self.op, children[0], self.over, where, self.nan, self.dtype)


@dataclass(frozen=True, eq=False)
class Scan(Form):
    """An ordered recurrence with a tensor-valued state.

    For t along `along`: state ← step(state); the result at t is emit(state).
    `state` is a placeholder tensor over `axes`; `step` and `emit` read it. `emit` may be None
    for a `final` scan, whose result is the last state.
    """

    along: Axis
    axes: tuple[Axis, ...]
    state: Tensor
    after: Tensor
    init: Expr
    step: Expr
    emit: Expr
    final: bool
    dtype: DType = f32

    @property
    def over(self) -> tuple[Axis, ...]:  # type: ignore[override]
        return (self.along,)

    def children(self) -> tuple[Expr, ...]:
        return (self.init, self.step, self.emit)

    def bound(self) -> tuple[Axis, ...]:
        emitted = free_axes(self.emit)
        hidden = tuple(a for a in self.axes if self.final is False and a not in emitted)
        return (self.along, *hidden) if self.final else hidden

    def added(self) -> tuple[Axis, ...]:
        return self.axes if self.final else (self.along,)

    def with_children(self, children: tuple[Expr, ...]) -> Scan:
        init, step, emit = children
        return Scan(
            self.along, self.axes, self.state, self.after, init, step, emit, self.final, self.dtype
        )


@dataclass(frozen=True, eq=False)
class TopK(Form):
    """The `rank`-th largest of `score` along an axis (ties to the lower index; NaN is largest).

    `take` is "value" or "index" (i64).
    """

    score: Expr
    along: Axis
    rank: Axis
    take: str
    dtype: DType

    @property
    def over(self) -> tuple[Axis, ...]:  # type: ignore[override]
        return (self.along,)

    def children(self) -> tuple[Expr, ...]:
        return (self.score,)

    def added(self) -> tuple[Axis, ...]:
        return (self.rank,)

    def with_children(self, children: tuple[Expr, ...]) -> TopK:
        return TopK(children[0], self.along, self.rank, self.take, self.dtype)


@dataclass(frozen=True, eq=False)
class ScatterAdd(Form):
    """out[s] = Σ value over the points of `over` whose `at` equals s, added in order.

    A point whose `at` is outside 0 … extent − 1 adds nowhere.
    """

    value: Expr
    target: Axis
    at: Expr
    over: tuple[Axis, ...]
    dtype: DType = f32

    def children(self) -> tuple[Expr, ...]:
        return (self.value, self.at)

    def added(self) -> tuple[Axis, ...]:
        return (self.target,)

    def with_children(self, children: tuple[Expr, ...]) -> ScatterAdd:
        return ScatterAdd(children[0], self.target, children[1], self.over)


Over = Axis | tuple[Axis, ...]


def axes_of(over: Over) -> tuple[Axis, ...]:
    """What is reduced over, as a tuple. Raises DeclarationError if that is nothing."""
    flat = over if isinstance(over, tuple) else (over,)
    if not flat:
        raise DeclarationError("needs at least one axis to reduce over")
    return flat


def _kept(where: Value | None) -> Expr | None:
    return None if where is None else cast(where, bool_)


def _reduce(op: str, body: Value, over: Over, where: Value | None, nan: str = "carry") -> Reduce:
    node = widen(as_expr(body, f32))
    dtype = {"any": bool_, "argmax": i64}.get(op, node.dtype)
    return Reduce(op, node, axes_of(over), _kept(where), nan, dtype)


def sum(body: Value, *, over: Over, where: Value | None = None) -> Expr:
    """Σ body over the axes; 0 when nothing takes part."""
    return _reduce("sum", body, over, where)


def prod(body: Value, *, over: Over, where: Value | None = None) -> Expr:
    """Π body over the axes; 1 when nothing takes part."""
    return _reduce("prod", body, over, where)


def max(body: Value, *, over: Over, where: Value | None = None, nan: str = "carry") -> Expr:
    """The greatest body; −inf when nothing takes part. `nan="ignore"` skips NaN, "any" may."""
    return _reduce("max", body, over, where, nan)


def min(body: Value, *, over: Over, where: Value | None = None, nan: str = "carry") -> Expr:
    """The least body; +inf when nothing takes part. `nan="ignore"` skips NaN, "any" may."""
    return _reduce("min", body, over, where, nan)


def any(body: Value, *, over: Over) -> Expr:
    """True where any body is."""
    return _reduce("any", cast(body, bool_), over, None)


def argmax(body: Value, *, over: Axis) -> Expr:
    """The first index of the greatest body (NaN is greatest), i64."""
    if isinstance(over, tuple):
        raise DeclarationError(f"needs one axis for argmax, got {len(over)}")
    return _reduce("argmax", body, over, None)


def mean(body: Value, *, over: Over) -> Expr:
    """Σ body / number of elements, in f32."""
    count: Value = 1
    for axis in axes_of(over):
        count = axis.extent * count
    return sum(body, over=over) / cast(count, f32)


def softmax_sum(
    score: Value, value: Value, *, over: Over, where: Value | None = None
) -> SoftmaxSum:
    """The exponential-weighted mean of `value`, weights softmax(score) over the kept elements."""
    return SoftmaxSum(cast(score, f32), cast(value, f32), axes_of(over), _kept(where))


def log_sum_exp(source: SoftmaxSum) -> Expr:
    """log Σ exp(score) of each row of a `softmax_sum`, natural base, f32."""
    return LogSumExp(source)


def weighted_sum(
    weight: Value, value: Value, *, over: Over, where: Value | None = None
) -> WeightedSum:
    """Σ weight · value over the kept elements, the weights never in memory, in f32."""
    return WeightedSum(cast(weight, f32), cast(value, f32), axes_of(over), _kept(where))


def scan(
    along: Axis,
    axes: tuple[Axis, ...],
    *,
    init: Value,
    step: Callable[[Tensor], Value],
    emit: Callable[[Tensor], Value] | None = None,
) -> tuple[Expr, Expr]:
    """An ordered recurrence along an axis with f32 state over `axes`.

    `step(previous)` is the new state at `axes`, `previous` readable at any state index;
    `emit(state)` is the result at each point of `along` (default: the state itself).
    Returns (emitted, final state).
    """
    shape: tuple[Size, ...] = tuple(a.extent for a in axes)
    previous = Tensor("previous", shape, f32)
    after = Tensor("state", shape, f32)
    stepped = cast(step(previous), f32)
    emitted = cast(emit(after), f32) if emit is not None else Read(after, axes, None, f32)
    start = cast(as_expr(init, f32), f32)

    def make(final: bool) -> Scan:
        return Scan(along, axes, previous, after, start, stepped, emitted, final)

    return make(False), make(True)


def top_k(score: Value, *, along: Axis, rank: Axis) -> tuple[Expr, Expr]:
    """(values, indices i64) of the `rank.extent` largest scores along an axis, descending."""
    node = as_expr(score, f32)
    return TopK(node, along, rank, "value", node.dtype), TopK(node, along, rank, "index", i64)


def scatter_add(value: Value, *, at: Mapping[Axis, Value], over: Over) -> Expr:
    """Sums of `value` grouped by an index expression: out[s] = Σ value where at = s."""
    if len(at) != 1:
        raise DeclarationError(f"needs one target axis, got {len(at)}")
    ((target, index),) = at.items()
    return ScatterAdd(cast(value, f32), target, cast(index, i64), axes_of(over))


def where(condition: Value, then: Value, otherwise: Value) -> Expr:
    """`then` where the condition holds, else `otherwise`; the other one has no influence."""
    if not isinstance(then, Expr) and not isinstance(otherwise, Expr):
        then = as_expr(then, f32 if isinstance(otherwise, float) else None)
    left, right = common(then, otherwise)
    return Select(cast(condition, bool_), left, right, left.dtype)


def maximum(a: Value, b: Value) -> Expr:
    """The greater; NaN if either is NaN."""
    return binary("max", a, b)


def minimum(a: Value, b: Value) -> Expr:
    """The lesser; NaN if either is NaN."""
    return binary("min", a, b)


def exp(x: Value) -> Expr:
    """e to the power x."""
    return unary("exp", x)


def log(x: Value) -> Expr:
    """The natural logarithm; −inf at 0, NaN below."""
    return unary("log", x)


def tanh(x: Value) -> Expr:
    """The hyperbolic tangent."""
    return unary("tanh", x)


def erf(x: Value) -> Expr:
    """The Gauss error function, 2/√π · ∫₀ˣ e^(−t²) dt."""
    return unary("erf", x)


def sigmoid(x: Value) -> Expr:
    """1 / (1 + e^(−x))."""
    return unary("sigmoid", x)


def sinpi(x: Value) -> Expr:
    """sin(πx): exactly 0 where x is whole."""
    return unary("sinpi", x)


def sqrt(x: Value) -> Expr:
    """The square root; NaN below 0."""
    return unary("sqrt", x)


def rsqrt(x: Value) -> Expr:
    """1 / √x."""
    return unary("rsqrt", x)


def abs(x: Value) -> Expr:
    """The magnitude."""
    return unary("abs", x)


def floor(x: Value) -> Expr:
    """The greatest whole number not above x."""
    return unary("floor", x)


def isnan(x: Value) -> Expr:
    """True for NaN."""
    return unary("isnan", x, bool_)


def finite(x: Value) -> Expr:
    """True for anything but NaN and the infinities."""
    return unary("finite", x, bool_)


__all__ = [
    "Cast", "LogSumExp", "Reduce", "Scan", "ScatterAdd", "SoftmaxSum", "TopK", "WeightedSum",
    "abs", "any", "argmax", "erf", "exp", "finite", "floor", "isnan", "log", "log_sum_exp", "max",
    "maximum", "mean", "min", "minimum", "prod", "rsqrt", "scan", "scatter_add", "sigmoid",
    "sinpi", "softmax_sum", "sqrt", "sum", "tanh", "top_k", "weighted_sum", "where",
]  # fmt: skip
