"""Calling an operator: bind, find the kernel, launch. A repeated call is a dict look-up away."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from typing import Any

from ..dsl.declare import Declaration, set_runner
from ..dsl.errors import LaunchError
from .arrays import Kind, kind_of
from .callplan import (
    Arguments,
    CallPlan,
    check_indices,
    check_outs,
    make_plan,
    plain_strides,
)

PLANS_KEPT = 1024
_MISSING: Any = object()


class Caller:
    """Runs one declaration. Values are kept as a tuple in the order of `names`."""

    def __init__(self, declaration: Declaration) -> None:
        d = self.declaration = declaration
        self.arrays = tuple(d.inputs)
        self.names = (*d.inputs, *d.params, *d.options, *d.extents)
        self.count = len(self.arrays)
        self.order = d.order
        self.in_order = self.order == self.names
        defaults: dict[str, Any] = {n: None for n, i in d.inputs.items() if i.optional}
        defaults |= {n: p.default for n, p in d.params.items() if p.default is not None}
        defaults |= {n: o.default for n, o in d.options.items()}
        defaults |= {n: e.default for n, e in d.extents.items() if e.default is not None}
        self.defaults = tuple(defaults.get(n, _MISSING) for n in self.names)
        self.plans: OrderedDict[Any, CallPlan] = OrderedDict()
        fields = [o.name for o in d.outputs]
        self.result_type: Any = namedtuple(f"{d.name}_result", fields) if len(fields) > 1 else None

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Argument values in the order of `names`, defaults filled in.

        Raises TypeError for missing, repeated and unknown arguments, as Python does.
        """
        name = self.declaration.name
        if len(args) > len(self.order):
            raise TypeError(f"{name} takes {len(self.order)} arguments, got {len(args)}")
        if self.in_order and not kwargs:
            filled = args + self.defaults[len(args) :]
        else:
            given = dict(zip(self.order, args, strict=False))
            for key, value in kwargs.items():
                if key in given or key not in self.names:
                    raise TypeError(f"{name} got an unexpected argument {key!r}")
                given[key] = value
            pairs = zip(self.names, self.defaults, strict=True)
            filled = tuple([given.get(n, default) for n, default in pairs])
        for key, value in zip(self.names, filled):  # noqa: B905  (hot)
            if value is _MISSING:
                raise TypeError(f"{name} is missing the argument {key!r}")
        return filled

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """A call as the user makes it; torch gets its gradients."""
        values = self.values(args, kwargs)
        if "torch" in sys.modules:
            from . import autograd

            if autograd.tracked(values[: self.count]):
                return autograd.apply(self, values, out)
        return self.launch(values, out)

    def launch(self, values: tuple[Any, ...], out: Any = None) -> Any:
        """Run on values in the order of `names`; gradients are not recorded."""
        arrays, settings = values[: self.count], values[self.count :]
        kinds = [None if a is None else kind_of(a, n) for a, n in zip(arrays, self.arrays)]  # noqa: B905
        layouts = [None if k is None else k.layout(a) for k, a in zip(kinds, arrays)]  # noqa: B905
        if out is None:
            outs: tuple[Any, ...] = ()
            out_kinds: tuple[Kind, ...] = ()
            key: Any = (*layouts, settings, _sorts(settings))
        else:
            outs = out if isinstance(out, tuple) else (out,)
            out_kinds = tuple([kind_of(o, "out") for o in outs])
            places = [k.layout(o) for k, o in zip(out_kinds, outs)]  # noqa: B905
            key = (*layouts, settings, _sorts(settings), *places)
        try:
            plan = self.plans.get(key)
        except TypeError:  # a setting that cannot be hashed; the checks will say what is wrong
            plan, key = None, None
        if plan is None:
            odd = plain_strides(kinds, arrays)
            if odd is not None:
                copied = list(values)
                copied[odd] = kinds[odd].contiguous(arrays[odd])  # type: ignore[union-attr]
                return self.launch(tuple(copied), out)
            named = dict(zip(self.names[self.count :], settings, strict=True))
            plan = make_plan(
                self.declaration, Arguments(arrays, tuple(kinds), named, outs, out_kinds)
            )
            self.keep(key, plan)
        if plan.index_checks:
            for i, name, below in plan.index_checks:
                check_indices(self.declaration, name, kinds[i], arrays[i], below)  # type: ignore[arg-type]
        if outs:
            return self.launch_into(plan, arrays, kinds, outs, out_kinds)
        made = [plan.kind.empty(shape, native) for _, shape, native in plan.results]
        if plan.launch is not None:
            addresses = [kinds[i].pointer(arrays[i]) for i in plan.inputs]  # type: ignore[union-attr]
            addresses += [plan.kind.pointer(m) for m in made]
            _start(plan, addresses)
        return made[0] if len(made) == 1 else self.named(plan, made)

    def keep(self, key: Any, plan: CallPlan) -> None:
        if key is not None:
            for other, kept in list(self.plans.items()):
                if kept.queue() is None:
                    self.plans.pop(other, None)
            self.plans[key] = plan
            if len(self.plans) > PLANS_KEPT:
                self.plans.popitem(last=False)

    def launch_into(
        self, plan: CallPlan, arrays: tuple[Any, ...], kinds: list[Kind | None],
        outs: tuple[Any, ...], out_kinds: tuple[Kind, ...],
    ) -> Any:  # fmt: skip
        """Launch with results stored in the caller's arrays, even where they overlap inputs."""
        check_outs(self.declaration, out_kinds, outs)
        targets = [
            k.similar(o) if _overlaps(o, k, arrays, kinds) else o
            for k, o in zip(out_kinds, outs, strict=True)
        ]
        more = [plan.kind.empty(s, native) for _, s, native in plan.results[len(outs) :]]
        if plan.launch is not None:
            addresses = [kinds[i].pointer(arrays[i]) for i in plan.inputs]  # type: ignore[union-attr]
            addresses += [k.pointer(t) for k, t in zip(out_kinds, targets, strict=True)]
            addresses += [plan.kind.pointer(m) for m in more]
            _start(plan, addresses)
        for kind, given, target in zip(out_kinds, outs, targets, strict=True):
            if target is not given:
                kind.assign(given, target)
            kind.wrote(given)
        made = [*outs, *more]
        return made[0] if len(made) == 1 else self.named(plan, made)

    def named(self, plan: CallPlan, made: list[Any]) -> Any:
        """Several results as a named tuple; one that this call does not have is None."""
        found = {name: m for (name, _, _), m in zip(plan.results, made, strict=True)}
        return self.result_type(*(found.get(f) for f in self.result_type._fields))


def _sorts(settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `==` between settings does not tell apart: 1, 1.0 and True, and the zeros."""
    return tuple([str(s) if type(s) is float and s == 0 else type(s) for s in settings])


def _start(plan: CallPlan, addresses: list[int]) -> None:
    """Launch on the given addresses. Raises LaunchError."""
    packed = plan.head + plan.pack(*addresses) + plan.tail
    if plan.workspace is None:
        status = plan.launch(packed, plan.threads)  # type: ignore[misc]
    else:
        with plan.starting:  # no other thread's call in between, which would use it too
            packed += plan.scratch(plan.workspace).to_bytes(8, "little")
            status = plan.launch(packed, plan.threads)  # type: ignore[misc]
    if status != 0:
        why = plan.last_error() or f"status {status}"
        raise LaunchError(f"the kernel of {plan.name} failed: {why}")


def _overlaps(out: Any, kind: Kind, arrays: tuple[Any, ...], kinds: list[Kind | None]) -> bool:
    """Whether writing `out` could change an input that is still to be read."""
    low, high = kind.bounds(out)
    for array, other in zip(arrays, kinds, strict=True):
        if other is not None:
            start, end = other.bounds(array)
            if start < high and low < end:
                return True
    return False


_CALLERS: dict[int, tuple[Declaration, Caller]] = {}


def caller(declaration: Declaration) -> Caller:
    """The (kept) caller of a declaration."""
    found = _CALLERS.get(id(declaration))
    if found is None:
        found = _CALLERS[id(declaration)] = (declaration, Caller(declaration))
    return found[1]


def run(declaration: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Run an operator on arrays."""
    return caller(declaration).run(args, kwargs, out)


set_runner(run)
