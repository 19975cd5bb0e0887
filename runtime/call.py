"""Calling an operator: bind, find the kernel, launch. A repeated call is a dict look-up away.

What a call needs beyond pointers depends on layouts, scalars and options alone; it is worked out
once, as a `CallPlan`, and kept.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..dsl.declare import Declaration, set_runner
from ..dsl.dtypes import DType
from ..dsl.errors import DeviceError, LaunchError, OperatorError
from ..dsl.host import compiled, identifier
from .arrays import Kind, kind_of
from .bind import Binder, Bound, View, elements
from .compiler import executable
from .plan import LaunchPlan
from .workspace import arena, budget, check_budget

PLANS_KEPT = 1024
SMALL_WORK = 32768
_MISSING: Any = object()


@dataclass(frozen=True)
class CallPlan:
    """A call reduced to: allocate, pack the pointers, launch.

    `head` and `tail` are the packed arguments before and after the pointers of `inputs` (by
    position among the array arguments) and of the results.
    """

    name: str
    launch: Callable[[bytes, int], int] | None
    head: bytes
    pointers: struct.Struct
    tail: bytes
    inputs: tuple[int, ...]
    results: tuple[tuple[str, tuple[int, ...], DType], ...]
    workspace: int
    threads: int
    index_checks: tuple[tuple[int, str, int], ...]


class Caller:
    """Runs one declaration."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        d = declaration
        self.arrays = tuple(d.inputs)
        self.names = (*d.inputs, *d.params, *d.options, *d.extents)
        self.order = tuple(_signature(d))
        self.defaults = {n: None for n, i in d.inputs.items() if i.optional}
        self.defaults |= {n: p.default for n, p in d.params.items() if p.default is not None}
        self.defaults |= {n: o.default for n, o in d.options.items()}
        self.defaults |= {n: e.default for n, e in d.extents.items() if e.default is not None}
        self.plans: OrderedDict[Any, CallPlan] = OrderedDict()
        fields = [o.name for o in d.outputs]
        self.result_type = namedtuple(f"{d.name}_result", fields) if len(fields) > 1 else None

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Argument values by name, defaults filled in. Raises TypeError as Python does."""
        if len(args) > len(self.order):
            raise TypeError(
                f"{self.declaration.name} takes {len(self.order)} arguments, got {len(args)}"
            )
        given = dict(zip(self.order, args, strict=False))
        for name, value in kwargs.items():
            if name in given or name not in self.names:
                raise TypeError(f"{self.declaration.name} got an unexpected argument {name!r}")
            given[name] = value
        for name in self.names:
            if name not in given:
                value = self.defaults.get(name, _MISSING)
                if value is _MISSING:
                    raise TypeError(f"{self.declaration.name} is missing the argument {name!r}")
                given[name] = value
        return given

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        given = self.arguments(args, kwargs)
        if "torch" in sys.modules:
            from .autograd import tracked

            if tracked(self, given):
                from .autograd import apply

                return apply(self, given, out)
        return self.launch(given, out)

    def launch(self, given: dict[str, Any], out: Any = None) -> Any:
        """Run on arguments by name; gradients are not recorded."""
        arrays = [given[n] for n in self.arrays]
        kinds = [None if a is None else kind_of(a, n) for a, n in zip(arrays, self.arrays)]  # noqa: B905
        outs = () if out is None else out if isinstance(out, tuple) else (out,)
        out_kinds = [kind_of(o, "out") for o in outs]
        key = (
            tuple([None if k is None else k.layout(a) for k, a in zip(kinds, arrays)]),  # noqa: B905
            tuple([given[n] for n in self.names[len(arrays) :]]),
            tuple([k.layout(o) for k, o in zip(out_kinds, outs)]) if outs else (),  # noqa: B905
        )
        plan = self.plans.get(key)
        if plan is None:
            return self.first(key, given, arrays, kinds, outs, out_kinds)
        return self.execute(plan, arrays, kinds, outs, out_kinds)

    def first(
        self, key: Any, given: dict[str, Any], arrays: list[Any], kinds: list[Kind | None],
        outs: tuple[Any, ...], out_kinds: list[Kind],
    ) -> Any:  # fmt: skip
        """A call not seen before: check, compile, keep the plan."""
        for i, (kind, array) in enumerate(zip(kinds, arrays, strict=True)):
            if kind is not None and kind.strides(array) is None:
                # No whole number of elements between neighbours: only a copy can be read.
                arrays[i] = kind.contiguous(array)
                return self.launch(given | {self.arrays[i]: arrays[i]}, outs or None)
        self.check_place(arrays, kinds, outs, out_kinds)
        plan = self.plan(given, arrays, kinds, outs, out_kinds)
        self.plans[key] = plan
        if len(self.plans) > PLANS_KEPT:
            self.plans.popitem(last=False)
        return self.execute(plan, arrays, kinds, outs, out_kinds)

    def check_place(
        self, arrays: list[Any], kinds: list[Kind | None], outs: tuple[Any, ...],
        out_kinds: list[Kind],
    ) -> None:  # fmt: skip
        """All tensors on one device and one queue; results writeable."""
        pairs = [(k, a) for k, a in zip(kinds, arrays, strict=True) if k is not None]
        pairs += list(zip(out_kinds, outs, strict=True))
        places = {(str(k.device(a)), k.queue(a)) for k, a in pairs}
        if len({d for d, _ in places}) > 1:
            raise DeviceError(
                f"needs all tensors on one device, got {' and '.join(sorted({d for d, _ in places}))}"
            )
        if len(places) > 1:
            raise DeviceError(f"needs all tensors on one queue, got two of {next(iter(places))[0]}")
        for kind, array in zip(out_kinds, outs, strict=True):
            if not kind.writeable(array):
                raise self.declaration.error("needs a writeable out, got a read-only array")

    def view(self, name: str, kind: Kind, array: Any) -> View:
        native, shape, _ = kind.layout(array)
        dtype = kind.dtype(native)
        if dtype is None:
            raise self.declaration.error(f"needs {name} of a dtype known here, got {native}")
        strides = kind.strides(array)
        assert strides is not None
        return View(dtype, tuple(shape), tuple(strides))

    def bind(
        self, given: dict[str, Any], arrays: list[Any], kinds: list[Kind | None],
        outs: tuple[Any, ...], out_kinds: list[Kind],
    ) -> tuple[Bound, dict[str, int | float]]:  # fmt: skip
        d = self.declaration
        views = {
            n: self.view(n, k, a)
            for n, k, a in zip(self.arrays, kinds, arrays, strict=True)
            if k is not None
        }
        for name in self.arrays:
            if name not in views and not d.inputs[name].optional:
                raise d.error(f"{d.name} needs {name}, got None")
        options = {n: given[n] for n in d.options}
        for name, value in options.items():
            choices = d.options[name].choices
            if value not in choices:
                raise d.error(f"{d.name} needs {name} among {list(choices)}, got {value!r}")
        numbers = {n: _number(d, n, given[n]) for n in d.params}
        extents = {n: given[n] for n in d.extents}
        named = [o.name for o in d.outputs]
        if outs and len(outs) > len(named):
            raise d.error(f"{d.name} needs at most {len(named)} results in out, got {len(outs)}")
        out_views = {
            n: self.view("out", k, o) for n, k, o in zip(named, out_kinds, outs, strict=False)
        }
        return Binder(d).bind(views, numbers, options, extents, out_views), numbers

    def plan(
        self, given: dict[str, Any], arrays: list[Any], kinds: list[Kind | None],
        outs: tuple[Any, ...], out_kinds: list[Kind],
    ) -> CallPlan:  # fmt: skip
        bound, numbers = self.bind(given, arrays, kinds, outs, out_kinds)
        names = [t.name for t in bound.graph.inputs]
        inputs = tuple(self.arrays.index(n) for n in names)
        checks = tuple(
            (self.arrays.index(t.name), t.name, _host_size(below, bound))
            for t, below in bound.graph.index_checks
        )
        if all(elements(shape) == 0 for _, shape, _ in bound.results):
            empty = struct.Struct("")
            return CallPlan(self.declaration.name, None, b"", empty, b"", (), bound.results, 0, 1,
                            checks)  # fmt: skip
        ready = executable(bound.graph, bound.unit)
        dims = {identifier(n): v for n, v in bound.sizes.items()}
        head, tail = pack(ready.plan, bound, numbers)
        workspace = int(compiled(ready.plan.workspace)(dims))
        check_budget(workspace, budget(), self.declaration.name)
        threads = 1 if compiled(ready.plan.work)(dims) < SMALL_WORK else 0
        count = len(names) + len(bound.results)
        return CallPlan(
            self.declaration.name, ready.launch, head, struct.Struct(f"<{count}q"), tail, inputs,
            bound.results, workspace, threads, checks,
        )  # fmt: skip

    def execute(
        self, plan: CallPlan, arrays: list[Any], kinds: list[Kind | None], outs: tuple[Any, ...],
        out_kinds: list[Kind],
    ) -> Any:  # fmt: skip
        """Launch a planned call."""
        for position, name, below in plan.index_checks:
            _check_indices(self.declaration, name, kinds[position], arrays[position], below)
        first = next(k for k in kinds if k is not None)
        if outs:
            targets = [self.target(o, k, arrays, kinds) for o, k in zip(outs, out_kinds)]  # noqa: B905
            for name, shape, dtype in plan.results[len(outs) :]:
                del name
                targets.append(first.empty(shape, dtype))
                outs, out_kinds = (*outs, targets[-1]), [*out_kinds, first]
        else:
            targets = [first.empty(shape, dtype) for _, shape, dtype in plan.results]
            out_kinds = [first] * len(targets)
        if plan.launch is not None:
            addresses = [kinds[i].pointer(arrays[i]) for i in plan.inputs]  # type: ignore[union-attr]
            addresses += [k.pointer(t) for k, t in zip(out_kinds, targets)]  # noqa: B905
            packed = plan.head + plan.pointers.pack(*addresses) + plan.tail
            if plan.workspace:
                scratch = arena(plan.workspace)
                packed += scratch.ctypes.data.to_bytes(8, "little")
            status = plan.launch(packed, plan.threads)
            if status != 0:
                raise LaunchError(f"the kernel of {plan.name} failed with status {status}")
        for given, made, kind in zip(outs, targets, out_kinds, strict=False):
            if given is not made:
                kind.assign(given, made)
        return self.pack_results(plan, list(outs) or targets)

    def target(self, out: Any, kind: Kind, arrays: list[Any], kinds: list[Kind | None]) -> Any:
        """`out` itself, or a stand-in where it overlaps an input."""
        low, high = kind.bounds(out)
        for array, other in zip(arrays, kinds, strict=True):
            if other is not None:
                start, end = other.bounds(array)
                if start < high and low < end:
                    native, shape, _ = kind.layout(out)
                    dtype = kind.dtype(native)
                    assert dtype is not None
                    return kind.empty(tuple(shape), dtype)
        return out

    def pack_results(self, plan: CallPlan, made: list[Any]) -> Any:
        if len(self.declaration.outputs) == 1:
            return made[0]
        if len(made) == 1:
            return made[0]
        assert self.result_type is not None
        by_name = {r[0]: m for r, m in zip(plan.results, made, strict=True)}
        return self.result_type(*(by_name.get(f) for f in self.result_type._fields))


def _signature(declaration: Declaration) -> list[str]:
    import inspect

    return list(inspect.signature(declaration.fn).parameters)


def _number(declaration: Declaration, name: str, value: Any) -> int | float:
    integer = declaration.params[name].dtype.is_int
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        try:
            value = value.item()
        except AttributeError:
            kind = "an integer" if integer else "a number"
            got = f"{value!r}"
            raise declaration.error(f"{declaration.name} needs {name} {kind}, got {got}") from None
    if integer and not isinstance(value, int):
        raise declaration.error(f"{declaration.name} needs {name} an integer, got {value!r}")
    return value if integer else float(value)


def _host_size(size: Any, bound: Bound) -> int:
    from ..dsl.host import evaluate

    return int(evaluate(size, {identifier(n): v for n, v in bound.sizes.items()}))


def _check_indices(
    declaration: Declaration, name: str, kind: Kind | None, array: Any, below: int
) -> None:
    if kind is None:
        return
    values = kind.numpy(array)
    if values.size == 0:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= below:
        got = low if low < 0 else high
        raise declaration.error(
            f"{declaration.name} needs {name} in 0 … {below - 1}, got {got}"
        )


def pack(plan: LaunchPlan, bound: Bound, numbers: dict[str, int | float]) -> tuple[bytes, bytes]:
    """The packed arguments before and after the pointers."""
    head, tail = [], []
    for slot in plan.slots:
        if slot.kind == "dim":
            head.append(struct.pack("<q", bound.sizes[slot.name]))
        elif slot.kind == "stride":
            view = bound.views[slot.name]
            tail.append(struct.pack("<q", view.strides[slot.axis]))
        elif slot.kind == "scalar":
            value = numbers[slot.name]
            if slot.dtype == "float32":
                tail.append(struct.pack("<f", _to_f32(float(value))) + b"\0\0\0\0")
            else:
                tail.append(struct.pack("<q", int(value)))
    return b"".join(head), b"".join(tail)


def _to_f32(value: float) -> float:
    """`value` rounded to f32, past its range to infinity (struct refuses that)."""
    import numpy as np

    with np.errstate(over="ignore"):
        return float(np.float32(value))


_CALLERS: dict[int, Caller] = {}


def caller(declaration: Declaration) -> Caller:
    """The (kept) caller of a declaration."""
    found = _CALLERS.get(id(declaration))
    if found is None:
        found = _CALLERS[id(declaration)] = Caller(declaration)
    return found


def run(
    declaration: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    """Run an operator on arrays."""
    return caller(declaration).run(args, kwargs, out)


set_runner(run)

__all__ = ["Caller", "OperatorError", "caller", "run"]
