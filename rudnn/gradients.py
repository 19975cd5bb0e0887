"""The part of the harness for differentiable operators: is the backward the forward's gradient?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .references import reference
from .samples import Array, Case, bind, dtypes_of, numbers_of, shape_of

if TYPE_CHECKING:
    from .check import Attempt, Harness, Row, Sample
    from .dsl.declare import Declaration

_STEP = 1e-5
_NUMERIC_TOLERANCE = 1e-5
_ROUNDED_RESULT = 4.0  # a backward that reads the rounded result is that much further off


def check_gradients(harness: Harness, plan: Sequence[Attempt]) -> list[Row]:
    """Numeric gradients at odd sizes, and torch's autograd in every dtype."""
    from .check import has_torch

    rows: list[Row] = []
    first = plan[0].dtype
    declaration = harness.declaration
    single = len(declaration.outputs) - len(declaration.asked) == 1
    for attempt in plan:
        if attempt.layout != "contiguous":
            continue
        if attempt.case.label == "odd" and attempt.dtype == first:
            rows += _guarded(harness, attempt, "numeric", _numeric)
        elif attempt.case.label == "typical" and single and has_torch():
            rows += _guarded(harness, attempt, "autograd", _autograd)
    return rows


def _guarded(harness: Harness, attempt: Attempt, against: str, compare: Any) -> list[Row]:
    from .check import Mismatch, Sample
    from .dsl.errors import RudnnError

    try:
        sample = Sample(harness.declaration, attempt, harness.seed, harness.device)
    except RudnnError as error:
        return [harness.row(attempt, against, "refused", detail=str(error))]
    try:
        return [harness.row(attempt, against, "pass", compare(sample))]
    except Mismatch as wrong:
        return [harness.row(attempt, against, "fail", float("inf"), str(wrong))]
    except Exception as error:  # as in the forward harness
        detail = f"{type(error).__name__}: {error}"
        return [harness.row(attempt, against, "fail", float("inf"), detail)]


def _wanted(sample: Sample) -> list[str]:
    """Inputs with a gradient."""
    links = sample.declaration.links()
    return [n for _, names in links for n in names if n in sample.given]


def _backward(sample: Sample, grad: Array, y: Array) -> dict[str, Array]:
    """The backwards' oracles in float64: gradients by input name."""
    known = {n: sample.full(n) for n in sample.given} | {"y": y} | sample.asked()
    found: dict[str, Array] = {}
    for backward, names in sample.declaration.links():
        if any(n in sample.given for n in names):
            found |= _linked(sample, backward, names, grad, known)
    return found


def _linked(
    sample: Sample, backward: Declaration, names: Sequence[str], grad: Array,
    known: dict[str, Array],
) -> dict[str, Array]:  # fmt: skip
    """The oracle of one backward in float64: gradients by input name."""
    from .dsl.oracle import evaluate

    first, *rest = backward.inputs
    known = {first: grad} | {n: known[n] for n in rest if n in known}
    case = sample.attempt.case
    dims = dict(case.dims)
    for name, array in known.items():  # dims that only a backward names
        own = zip(backward.inputs[name].dims, array.shape, strict=False)
        dims |= {d: n for d, n in own if d not in dims and not d.startswith("*")}
    shown = Case(
        case.label, dims, {n: v for n, v in case.options.items() if n in backward.options},
        frozenset(n for n in backward.inputs if n not in known),
    )  # fmt: skip
    dtypes = dtypes_of(backward, shown, sample.attempt.dtype)
    dtypes |= {n: t for n, t in sample.dtypes.items() if n in dtypes}
    bound = bind(backward, shown, dtypes)
    inputs = {
        n: np.broadcast_to(known[n], shape_of(backward.inputs[n], dims)).reshape(v.shape)
        for n, v in bound.views.items()
        if n in known
    }
    scalars = numbers_of(backward) | {n: v for n, v in sample.scalars.items()
                                      if n in backward.params}  # fmt: skip
    made = evaluate(bound.graph, inputs, dict(bound.sizes) | scalars, precision="float64")
    named = {r[0]: a.reshape(r[1]) for r, a in zip(bound.results, made, strict=True)}
    outputs = (o.name for o in backward.outputs)
    return {n: named[o] for n, o in zip(names, outputs, strict=True) if o in named}


def _numeric(sample: Sample) -> float:
    """Directional derivatives of the oracle against the backward's oracle, all in float64."""
    from .check import Mismatch

    random = np.random.default_rng(7)
    y = sample.oracle()[0]
    grad: Array = np.asarray(random.standard_normal(y.shape))
    found = _backward(sample, grad, y)
    worst = 0.0
    for name in _wanted(sample):
        base = sample.full(name).astype(np.float64)
        drawn: Array = np.asarray(random.standard_normal(base.shape))
        along = _direction(sample.declaration.name, name, base, drawn)
        up = sample.oracle({name: base + _STEP * along})[0]
        down = sample.oracle({name: base - _STEP * along})[0]
        slope = float((grad * (up - down)).sum()) / (2 * _STEP)
        claimed = float((found[name] * along).sum())
        size = max(abs(slope), float(np.sqrt((grad * grad).sum())), 1.0)
        error = abs(slope - claimed) / size
        if not error <= _NUMERIC_TOLERANCE:
            raise Mismatch(f"gradient of {name}: {claimed:.8g} along a direction where the "
                           f"oracle's slope is {slope:.8g}")  # fmt: skip
        worst = max(worst, error)
    return worst


def _direction(op: str, name: str, base: Array, along: Array) -> Array:
    """`along`, or what is left of it where a backward is the derivative for some directions only.

    That of CTC is, as torch's, for changes that keep Σ e^log_probs.
    """
    if (op, name) != ("ctc_loss", "log_probs"):
        return along
    weights = np.exp(base)
    return along - (weights * along).sum(-1, keepdims=True) / weights.sum(-1, keepdims=True)


def _autograd(sample: Sample) -> float:
    """A call on torch tensors that require grad, against the backward's oracle and torch."""
    from .check import difference, to_torch

    forward, dtype = sample.declaration, sample.attempt.dtype
    tensors = {n: to_torch(a) for n, a in sample.given.items()}
    wanted = _wanted(sample)
    passed = [n for n in forward.passes if n in tensors]
    for name in (*wanted, *passed):
        tensors[name].requires_grad_()
    result = forward(**tensors, **sample.others)
    native = dtype.numpy if result.dtype.is_floating_point else None
    grad = np.random.default_rng(8).standard_normal(tuple(result.shape)).astype(native)
    result.backward(to_torch(grad).to(result.dtype))
    y = result.detach().double().numpy()
    want = _backward(sample, grad, y)
    worst = 0.0
    for name in passed:  # the gradient itself, bit for bit
        got = tensors[name].grad.double().numpy()
        difference(f"d{name}", got, grad.astype(np.float64), sample.dtypes[name], 0.0)
    peers = _torch_gradients(sample, grad, wanted)
    for name in wanted:
        got = tensors[name].grad.double().numpy()
        kind = sample.dtypes[name]
        worst = max(worst, difference(f"d{name}", got, want[name], kind))
        if name in peers:
            difference(f"d{name} (torch)", got, peers[name], dtype, _ROUNDED_RESULT)
    return worst


def _torch_gradients(sample: Sample, grad: Array, wanted: Sequence[str]) -> dict[str, Array]:
    """torch's own gradients in float64, where the operator has a reference."""
    from .check import to_torch

    fn = reference(sample.declaration.name)
    if fn is None:
        return {}
    arguments = sample.torch_arguments()
    for name in wanted:
        arguments[name].requires_grad_()
    fn(arguments).backward(to_torch(grad, double=True))
    return {n: arguments[n].grad.numpy() for n in wanted}
