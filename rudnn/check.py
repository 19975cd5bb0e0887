"""The harness: an operator against its oracle, in every dtype, layout and size.

Every call writes into a poisoned result with guards around it, with poisoned workspaces, and is
compared with the oracle in float64, with torch where a reference is registered, and, for a
differentiable operator, its backward with numeric gradients and torch's autograd.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .dsl.declare import Declaration
from .dsl.dtypes import DType, f32
from .dsl.errors import RudnnError, TargetError
from .dsl.forms import SoftmaxSum
from .dsl.oracle import evaluate
from .dsl.weighted import WeightedSum
from .mirror import Mirror
from .references import reference
from .runtime import call as _call  # noqa: F401  (makes declarations callable)
from .runtime.bind import Bound
from .runtime.device import Device, device
from .runtime.targets import parse
from .samples import (
    LAYOUTS,
    Array,
    Case,
    bind,
    cases,
    dtypes_of,
    numbers_of,
    place,
    placed,
    shape_of,
    values,
    variants,
)

# Greatest |got − want| / (|want| + mean |want|). Integers and bools are exact.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
LEAST_MAGNITUDE = 1e-2


@dataclass(frozen=True)
class Row:
    """One comparison. `status` is "pass", "fail" or "refused" (by the operator's contract).

    `against` is "oracle", "torch", "numeric" (gradients of the oracle) or "autograd";
    `error` is relative, see `TOLERANCE`.
    """

    op: str
    target: str
    against: str
    dtype: str
    layout: str
    sizes: str
    dims: str
    status: str
    error: float
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Attempt:
    """One call to make; `turn` seeds its numbers and alternates what may vary."""

    case: Case
    dtype: DType
    layout: str
    turn: int


class Mismatch(Exception):
    """A result that is wrong; the message says how."""


def check(
    declaration: Declaration,
    target: str = "llvm",
    dims: Mapping[str, Any] | None = None,
    dtypes: Sequence[DType] | None = None,
    seed: int = 0,
    *,
    backward: bool = True,
    report: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Run the harness; one row for each comparison, failures included.

    Parameters
    ----------
    dims : sizes by name, kept in every case (a pack's is a tuple)
    dtypes : the operator's float types to try; default: all it takes
    backward : whether to run the linked backward through the harness too
    report : called with (attempts done, attempts in all)

    Raises
    ------
    TargetError
        On a target that has no device here: the calls are made on its first one.
    """
    _require_runnable(target)
    harnesses = [Harness(declaration, target, seed)]
    if backward and declaration.backward is not None:
        harnesses.append(Harness(declaration.backward, target, seed))
    plans = [(h, h.plan(dims, dtypes)) for h in harnesses]
    total = sum(len(plan) for _, plan in plans)
    rows: list[Row] = []
    done = 0
    for harness, plan in plans:
        for attempt in plan:
            rows += harness.forward(attempt)
            done += 1
            if report is not None:
                report(done, total)
    if declaration.backward is not None and harnesses[0].device.driver.host:
        # Elsewhere too the backward is held to its oracle, which is the same on every target.
        from .gradients import check_gradients

        rows += check_gradients(harnesses[0], plans[0][1])
    return rows


def failures(rows: Sequence[Row]) -> list[Row]:
    """The rows that are wrong."""
    return [r for r in rows if r.status == "fail"]


def _require_runnable(target: str) -> None:
    kind, arch = parse(target)
    if arch:
        raise TargetError(f"needs the device at hand, {kind.name}, to check on, got {target}")
    status = kind.status()
    if not status.can_run:
        raise TargetError(f"needs a device for {target}, got {status.detail}: {status.hint}")


class Harness:
    """The comparisons of one operator."""

    def __init__(self, declaration: Declaration, target: str, seed: int) -> None:
        self.declaration, self.target, self.seed = declaration, target, seed
        self.device = device(target)

    def plan(self, dims: Mapping[str, Any] | None, dtypes: Sequence[DType] | None) -> list[Attempt]:
        """Every dtype in every layout and size; variants of options at odd sizes only."""
        d = self.declaration
        own = any(i.dtype is None for i in d.inputs.values())
        chosen = list(dtypes or d.dtypes)[: None if own else 1]
        known = {n: s for n, s in (dims or {}).items() if n in _names(d)}
        made: list[Attempt] = []
        sizes = list(cases(d, known))
        odd = next(c for c in sizes if c.label == "odd")
        for dtype in chosen:
            for case in sizes:
                for layout in LAYOUTS:
                    made.append(Attempt(case, dtype, layout, len(made)))
            for i, case in enumerate(variants(d, odd)):
                made.append(Attempt(case, dtype, LAYOUTS[i % 2], len(made)))
        return made

    def row(self, attempt: Attempt, against: str, status: str, error: float = 0.0,
            detail: str = "") -> Row:  # fmt: skip
        return Row(self.declaration.name, self.target, against, attempt.dtype.short,
                   attempt.layout, attempt.case.label, attempt.case.describe(), status, error,
                   detail)  # fmt: skip

    def forward(self, attempt: Attempt) -> list[Row]:
        """One call, compared."""
        against = "oracle"
        rows: list[Row] = []
        try:
            sample = Sample(self.declaration, attempt, self.seed, self.device)
        except RudnnError as error:
            # What the contract refuses at sizes of ours is no fault; at its own example it is.
            status = "fail" if attempt.case.label == "typical" else "refused"
            return [self.row(attempt, against, status, detail=str(error))]
        try:
            got = sample.run()
            rows.append(self.row(attempt, against, "pass", sample.compare(got, sample.oracle())))
            if attempt.layout == "contiguous" and reference(self.declaration.name) and has_torch():
                against = "torch"
                rows.append(self.row(attempt, against, "pass", sample.compare(got, sample.torch())))
        except Mismatch as wrong:
            rows.append(self.row(attempt, against, "fail", float("inf"), str(wrong)))
        except Exception as error:  # a wrong operator may raise anything: it is a row, no crash
            asked = sample.bound.graph.constraint
            refused = asked is not None and isinstance(error, asked.error)  # by the device
            status, error_size = ("refused", 0.0) if refused else ("fail", float("inf"))
            detail = f"{type(error).__name__}: {error}"
            rows.append(self.row(attempt, against, status, error_size, detail))
        return rows


class Sample:
    """The arguments of one attempt. Raises the operator's error where its contract refuses them.

    `given` are compact arrays by name, as drawn; `placed` the same in the attempt's layout.
    """

    def __init__(
        self, declaration: Declaration, attempt: Attempt, seed: int, device: Device
    ) -> None:
        case = attempt.case
        self.declaration, self.attempt, self.device = declaration, attempt, device
        self.dtypes = dtypes_of(declaration, case, attempt.dtype, attempt.turn)
        self.bound: Bound = bind(declaration, case, self.dtypes)
        random = np.random.default_rng([seed, attempt.turn])
        self.given = values(declaration, case, self.bound, self.dtypes, attempt.layout, random)
        self.placed = {
            n: placed(a, self.dtypes[n], attempt.layout, i)
            for i, (n, a) in enumerate(self.given.items())
        }
        self.scalars = numbers_of(declaration, case)
        self.others = self.scalars | {n: case.dims[n] for n in declaration.extents} | case.options

    def run(self) -> list[Array]:
        """The results, from a call into poisoned memory; raises Mismatch if it strays."""
        results = self.bound.results
        inputs = {n: Mirror(a, self.dtypes[n], self.device) for n, a in self.placed.items()}
        kept = {n: a.copy() for n, a in self.placed.items()}
        spots = [place(shape, dtype, self.attempt.layout, len(kept) + i)
                 for i, (_, shape, dtype) in enumerate(results)]  # fmt: skip
        outs = [Mirror(s.view, t, self.device) for s, (_, _, t) in zip(spots, results, strict=True)]
        with_out = len(results) == len(self.declaration.outputs)
        out = tuple(o.there for o in outs) if with_out else None
        arguments = {n: m.there for n, m in inputs.items()} | self.others
        self.device.driver.poison(True)
        try:
            made = self.declaration(**arguments, out=out)
            again = self.attempt.layout == "contiguous"
            fresh = self.declaration(**arguments) if again else made
        finally:
            self.device.driver.poison(False)
        got = [np.array(a) for a in _listed(made)]
        for a, b in zip(got, _listed(fresh), strict=True):
            if not np.array_equal(a, b, equal_nan=a.dtype.kind != "b" and a.dtype.kind != "V"):
                _require(a.tobytes() == np.array(b).tobytes(), "out= and a new result differ")
        for name, before in kept.items():
            now = inputs[name].refresh()
            _require(before.tobytes() == now.tobytes(), f"input {name} was changed")
        if with_out:
            returned = all(a is o.there for a, o in zip(_listed(made), outs, strict=True))
            _require(returned, "needs out itself returned")
            for mirror in outs:
                mirror.refresh()
            _require(all(s.untouched() for s in spots), "memory around the result was written")
        return got

    def compare(self, got: Sequence[Array], want: Sequence[Array]) -> float:
        """The greatest error of the results; raises Mismatch if one is wrong."""
        _require(len(got) >= len(want), f"needs {len(want)} results, got {len(got)}")
        worst = 0.0
        for (name, shape, dtype), a, b in zip(self.bound.results, got, want, strict=False):
            _require(a.shape == shape, f"{name} needs shape {shape}, got {a.shape}")
            _require(a.dtype == dtype.numpy, f"{name} needs {dtype}, got {a.dtype}")
            want_ = np.asarray(b).reshape(shape)
            slack = self.slack(name, dtype)
            worst = max(worst, difference(name, a, want_, dtype, slack, self.least()))
        return worst

    def slack(self, name: str, dtype: DType) -> float:
        """How much wider the tolerance of a result is than its dtype's.

        Matrix units take weights as narrow as the values: those of a softmax_sum are 1 at most,
        those of a weighted_sum may cancel.
        """
        if not self.device.capability.matrix:
            return 1.0
        stages = self.bound.graph.stages
        if dtype != f32 and any(isinstance(s.expr, WeightedSum) for s in stages):
            return 2.0
        stage = next((s for s in self.bound.graph.outputs if s.name == name), None)
        if stage is None or not isinstance(stage.expr, SoftmaxSum):
            return 1.0
        return max(1.0, TOLERANCE[self.attempt.dtype.name] / TOLERANCE[dtype.name])

    def least(self) -> float:
        """The magnitude below which errors are absolute: at size 1 results may cancel to 0."""
        return 1.0 if self.attempt.case.label == "one" else LEAST_MAGNITUDE

    def full(self, name: str) -> Array:
        """An input at its whole declared shape."""
        shape = shape_of(self.declaration.inputs[name], self.attempt.case.dims)
        return np.broadcast_to(self.given[name], shape)

    def oracle(self, replaced: Mapping[str, Array] | None = None) -> list[Array]:
        """The oracle's results in float64; `replaced` are inputs by name, at their full shape."""
        known = {n: self.full(n) for n in self.given} | dict(replaced or {})
        inputs = {n: known[n].reshape(self.bound.views[n].shape) for n in known
                  if n in self.bound.views}  # fmt: skip
        numbers = dict(self.bound.sizes) | self.scalars
        made = evaluate(self.bound.graph, inputs, numbers, precision="float64")
        return [a.reshape(shape) for a, (_, shape, _) in zip(made, self.bound.results, strict=True)]

    def asked(self) -> dict[str, Array]:
        """The oracle of the further results that the backward reads, by name."""
        declaration, case = self.declaration, self.attempt.case
        options = case.options | dict.fromkeys(declaration.asked.values(), True)
        bound = bind(declaration, replace(case, options=options), self.dtypes)
        inputs = {n: self.full(n).reshape(v.shape) for n, v in bound.views.items()
                  if n in self.given}  # fmt: skip
        numbers = dict(bound.sizes) | self.scalars
        made = evaluate(bound.graph, inputs, numbers, precision="float64")
        named = {n: a.reshape(s) for a, (n, s, _) in zip(made, bound.results, strict=True)}
        return {n: named[n] for n in declaration.asked}

    def torch_arguments(self) -> dict[str, Any]:
        """Arguments of the torch reference: floats in float64, absent inputs None."""
        options = {n: o.default for n, o in self.declaration.options.items()}
        made: dict[str, Any] = dict.fromkeys(self.declaration.inputs) | options | self.others
        for name in self.given:
            made[name] = to_torch(self.full(name), double=True)
        return made

    def torch(self) -> list[Array]:
        """What torch computes in float64."""
        fn = reference(self.declaration.name)
        assert fn is not None
        made = fn(self.torch_arguments())
        return [t.numpy() for t in (made if isinstance(made, tuple) else (made,))]


def difference(name: str, got: Array, want: Array, dtype: DType, slack: float = 1.0,
               least: float = LEAST_MAGNITUDE) -> float:  # fmt: skip
    """The greatest relative error; raises Mismatch past `slack` times the dtype's tolerance."""
    if not dtype.is_float:
        wrong = int(np.count_nonzero(got != want))
        _require(not wrong, f"{name}: {wrong} of {got.size} elements differ")
        return 0.0
    if not got.size:
        return 0.0
    with np.errstate(all="ignore"):
        a = got.astype(np.float64)
        b = np.asarray(want, np.float64).astype(dtype.numpy).astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(b)
        alike = (a == b) | (np.isnan(a) & np.isnan(b))
        _require(bool((alike | finite).all()), f"{name}: {_first(~(alike | finite), a, b)}")
        size = np.abs(np.where(np.isfinite(b), b, 0))
        scale = size + max(float(size.mean()), least)
        error = np.where(alike, 0.0, np.abs(a - b) / scale)
    worst = float(error.max())
    limit = TOLERANCE[dtype.name] * slack
    told = f"{name}: {_first(error > limit, a, b)}, error {worst:.1e} > {limit:.0e}"
    _require(worst <= limit, told)
    return worst


def _first(wrong: Array, got: Array, want: Array) -> str:
    """`3 of 64 elements differ, first at [0, 5]: got 1.0, want 2.0`."""
    if not wrong.any():
        return "none differ"
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    count = f"{int(wrong.sum())} of {wrong.size} elements differ"
    return f"{count}, first at {list(at)}: got {got[at]:.6g}, want {want[at]:.6g}"


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Mismatch(otherwise)


def _listed(result: Any) -> list[Any]:
    items = result if isinstance(result, tuple) else (result,)
    return [a for a in items if a is not None]


def _names(declaration: Declaration) -> set[str]:
    return {n.lstrip("*") for n in (*declaration.dim_names(), *declaration.extents)}


def has_torch() -> bool:
    """Whether torch can be imported."""
    return importlib.util.find_spec("torch") is not None


def to_torch(array: Array, double: bool = False) -> Any:
    """A torch tensor with a copy of `array`; bf16 by way of f32, which holds it exactly."""
    import torch

    if array.dtype.name == "bfloat16":
        wide = torch.from_numpy(array.astype(np.float32))
        return wide.double() if double else wide.to(torch.bfloat16)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch indexes by signed types only
        array = array.astype(np.int64)
    made = torch.from_numpy(np.array(array, order="C"))
    return made.double() if double and made.is_floating_point() else made
