"""Operator declarations: `@op`, its arguments, and the trace that makes a `Graph` of one.

A declaration is a Python function over symbolic tensors. Its keyword defaults say what each
argument is: `In` a tensor, `Param` a number known at launch, `Option` a compile-time choice,
`Extent` the size of a dim, `Shared` several of them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from .arguments import Extent, In, Option, Out, Param, Shared
from .dtypes import FLOATS, DType, f32
from .errors import DeclarationError, OperatorError, RudnnError
from .expr import Axis, DimRef, Expr, Input, ScalarRef, Size, Stage, Value, as_expr
from .graph import Constraint, Graph, Hoister, Names, Requirement, needed
from .walk import free_axes


@dataclass(frozen=True)
class Spec:
    """What a graph is specialised for; hashable, the compile cache's key part.

    `dtypes` by input name (absent inputs left out); `ranks` of the packs; `static` dim sizes;
    `options` values.
    """

    dtypes: tuple[tuple[str, DType], ...]
    ranks: tuple[tuple[str, int], ...] = ()
    static: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


@dataclass
class Declaration:
    """An operator: arguments, results, example dims, and the function that declares it.

    `order` are the arguments as callers pass them, `shared` those of each record.
    """

    name: str
    fn: Callable[..., Any]
    order: tuple[str, ...]
    shared: dict[str, tuple[str, ...]]
    inputs: dict[str, In]
    params: dict[str, Param]
    options: dict[str, Option]
    extents: dict[str, Extent]
    outputs: tuple[Out, ...]
    static: frozenset[str]
    example: dict[str, Any]
    error: type[RudnnError]
    dtypes: tuple[DType, ...]
    doc: str
    module: str
    backward: Declaration | None = None
    grads: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    asked: Mapping[str, str] = field(default_factory=dict)
    further: tuple[tuple[Declaration, tuple[str, ...]], ...] = ()
    _graphs: dict[Spec, Graph] = field(default_factory=dict, repr=False)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the operator on arrays; returns the kind it was given.

        `out` receives the result (a tuple where there are several). Raises the operator's own
        error on bad arguments, before anything is launched.
        """
        return runner()(self, args, kwargs, out)

    def differentiable(
        self,
        backward: Declaration,
        *grads: str,
        passes: tuple[str, ...] = (),
        asked: Mapping[str, str] | None = None,
    ) -> None:
        """Link the backward operator; `grads` names the inputs its results belong to, in order.

        The backward's first input is the gradient of the result; its other inputs and params are
        those of the forward by name, or `y` for the forward's result. The gradient of an input
        in `passes` is that of the result. `asked` gives further results that the backward reads,
        and for each the option that asks the forward for it; `grad_NAME` is such a one's gradient.
        """
        self.backward, self.grads, self.passes = backward, grads, passes
        self.asked = dict(asked or {})

    def also_differentiable(self, backward: Declaration, *grads: str) -> None:
        """Link a further backward operator, run only where one of its inputs wants a gradient."""
        self.further = (*self.further, (backward, grads))

    def links(self) -> tuple[tuple[Declaration, tuple[str, ...]], ...]:
        """The backward operators, and the inputs that the results of each belong to."""
        first = () if self.backward is None else ((self.backward, self.grads),)
        return (*first, *self.further)

    def own_dtype(self, dtypes: Mapping[str, DType]) -> DType:
        """The operator's own float type, given those of its inputs: that of the first one declared
        without a type, else of the first float one."""
        floats = [n for n, t in dtypes.items() if t.is_float]
        named = [n for n in self.inputs if n in floats and self.inputs[n].dtype is None]
        first = next(iter(named or floats), None)
        return f32 if first is None else dtypes[first]

    def dim_names(self) -> tuple[str, ...]:
        """Declared dims in order of first appearance; packs keep their star."""
        names: dict[str, None] = {}
        for spec in self.inputs.values():
            names |= dict.fromkeys(d for d in spec.dims if not d.isdigit())
        for key in self.example:
            star, number = f"*{key}", key in self.params or key in self.options
            if key not in names and star not in names and not number:
                names[key] = None
        return tuple(names)

    def names(self) -> tuple[str, ...]:
        """Every name that arguments, results and dims have."""
        dims = (d.lstrip("*") for d in self.dim_names())
        results = (o.name for o in self.outputs)
        return (*self.inputs, *self.params, *self.options, *self.extents, *results, *dims)

    def trace(self, spec: Spec) -> Graph:
        """The graph for one specialisation (kept)."""
        graph = self._graphs.get(spec)
        if graph is None:
            graph = self._graphs[spec] = _Trace(self, spec).run()
        return graph


def op(
    *,
    out: Out | tuple[Out, ...],
    example: Mapping[str, Any],
    static: tuple[str, ...] = (),
    error: type[RudnnError] = OperatorError,
    dtypes: tuple[DType, ...] = FLOATS,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Declaration]:
    """Make a `Declaration` of a function.

    `static` dims are compiled in; all others are dynamic. `example` gives every dim (and a
    tuple for a pack) a value used by `check`, `compile` and the docs. Operators in modules under
    `rudnn.ops` and a user's own go through the same call.
    """

    def wrap(fn: Callable[..., Any]) -> Declaration:
        inputs: dict[str, In] = {}
        params: dict[str, Param] = {}
        options: dict[str, Option] = {}
        extents: dict[str, Extent] = {}
        kinds = {In: inputs, Param: params, Option: options, Extent: extents}
        shared: dict[str, tuple[str, ...]] = {}
        order: list[str] = []
        for argument, parameter in inspect.signature(fn).parameters.items():
            members = {argument: parameter.default}
            if isinstance(parameter.default, Shared):
                members = dict(parameter.default.members)
                shared[argument] = tuple(members)
            order += members
            for key, declared in members.items():
                table = kinds.get(type(declared))
                if table is None:
                    raise DeclarationError(
                        f"needs an In, Param, Option, Extent or Shared as the default of {key}"
                    )
                table[key] = declared  # type: ignore[index]
        outputs = out if isinstance(out, tuple) else (out,)
        _require_once("argument", order)
        _require_once("tensor", [*inputs, *(o.name for o in outputs)])
        return Declaration(
            name or fn.__name__, fn, tuple(order), shared, inputs, params, options, extents,
            outputs, frozenset(static), dict(example), error, dtypes, inspect.getdoc(fn) or "",
            fn.__module__,
        )  # fmt: skip

    return wrap


def _require_once(kind: str, names: list[str]) -> None:
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise DeclarationError(f"needs a name of its own for each {kind}, got {twice} twice")


Runner = Callable[[Declaration, tuple[Any, ...], dict[str, Any], Any], Any]
_RUNNER: list[Runner] = []
_ACTIVE = threading.local()


def set_runner(run: Runner) -> None:
    """Say how a declaration is called; the runtime does, so that the language need not know it."""
    _RUNNER[:] = [run]


def runner() -> Runner:
    """What calls a declaration. Raises DeclarationError before the runtime is imported."""
    if not _RUNNER:
        raise DeclarationError("needs the runtime to call an operator: import rudnn")
    return _RUNNER[0]


def _current() -> _Trace:
    trace = getattr(_ACTIVE, "trace", None)
    if trace is None:
        raise DeclarationError("axes, dim, require and tensor work only inside an @op function")
    return trace


class _Trace:
    """One run of a declaration's function on symbolic arguments."""

    def __init__(self, declaration: Declaration, spec: Spec) -> None:
        self.declaration = declaration
        self.spec = spec
        self.static = dict(spec.static)
        self.ranks = dict(spec.ranks)
        self.dims: dict[str, DimRef] = {}
        self.hoister = Hoister(Names(declaration.names()))
        self.requirements: list[Requirement] = []
        self.index_checks: list[tuple[Input, Size]] = []
        self.constraint: Constraint | None = None

    def expand(self, dim: str) -> tuple[str, ...]:
        """A declared dim as concrete names: a pack gives one for each of its ranks."""
        if not dim.startswith("*"):
            return (dim,)
        return tuple(f"{dim[1:]}.{i}" for i in range(self.ranks[dim[1:]]))

    def size(self, name: str) -> Size:
        if name.isdigit():
            return int(name)
        if name in self.static:
            return self.static[name]
        return self.dims.setdefault(name, DimRef(name))

    def run(self) -> Graph:
        declaration = self.declaration
        dtypes = dict(self.spec.dtypes)
        inputs: dict[str, Input | None] = {}
        for name, declared in declaration.inputs.items():
            if name not in dtypes:
                inputs[name] = None
                continue
            dims = tuple(d for dim in declared.dims for d in self.expand(dim))
            shape = tuple(self.size(d) for d in dims)
            inputs[name] = Input(name, shape, dtypes[name], dims=dims)
        scalars = {n: ScalarRef(n, p.dtype) for n, p in declaration.params.items()}
        previous = getattr(_ACTIVE, "trace", None)
        _ACTIVE.trace = self
        try:
            extents = {n: self.size(n) for n in declaration.extents}
            options = {n: o.default for n, o in declaration.options.items()}
            options |= dict(self.spec.options)
            given = {**inputs, **scalars, **extents, **options}
            for name, members in declaration.shared.items():
                given[name] = SimpleNamespace(**{m: given.pop(m) for m in members})
            result = declaration.fn(**given)
        finally:
            _ACTIVE.trace = previous
        outputs = self.finish(result if isinstance(result, tuple) else (result,), dtypes)
        present = tuple(i for i in inputs.values() if i is not None)
        return Graph(
            declaration.name, present, tuple(scalars.values()), tuple(self.dims.values()),
            needed(self.hoister.stages, outputs), outputs, tuple(self.requirements),
            tuple(self.index_checks), self.constraint,
        )  # fmt: skip

    def finish(self, results: tuple[Any, ...], dtypes: dict[str, DType]) -> tuple[Stage, ...]:
        declared = [o for o in self.declaration.outputs]
        if len(results) != len(declared):
            raise DeclarationError(f"needs {len(declared)} results, got {len(results)}")
        own = self.declaration.own_dtype(dtypes)
        stages = []
        for out, result in zip(declared, results, strict=True):
            if result is None:
                continue
            dtype = out.dtype or own
            if isinstance(result, Stage) and result not in self.hoister.stages:
                raise DeclarationError(f"needs a tensor of this declaration as {out.name}")
            if isinstance(result, Stage):
                result = result[result.axes]
            axes = self.match(out, as_expr(result, f32))
            stages.append(self.hoister.define_output(out.name, axes, as_expr(result, f32), dtype))
        return tuple(stages)

    def match(self, out: Out, expr: Expr) -> tuple[Axis, ...]:
        """The free axes of a result in the order its `Out` names them."""
        free = list(free_axes(expr))
        axes: list[Axis] = []
        for name in (d for dim in out.dims for d in self.expand(dim)):
            hits = [a for a in free if a.name == name]
            if len(hits) > 1:
                raise DeclarationError(
                    f"needs one axis named {name} in {out.name}, got {len(hits)}: rename one"
                )
            axes.append(hits[0] if hits else Axis(name, self.size(name)))
            free = [a for a in free if a.name != name]
        if free:
            raise DeclarationError(
                f"needs every free axis among the dims of {out.name}, "
                f"got {', '.join(a.name for a in free)} besides"
            )
        return tuple(axes)


def axes(*names: str) -> Any:
    """One axis for each dim name; a pack `"*rows"` gives a tuple of axes. One name, one result."""
    trace = _current()
    made: list[Any] = []
    for dim in names:
        expanded = tuple(Axis(n, trace.size(n)) for n in trace.expand(dim))
        made.append(expanded if dim.startswith("*") else expanded[0])
    return made[0] if len(made) == 1 else tuple(made)


def axis(name: str, extent: Size) -> Axis:
    """An axis of any extent, such as a window's."""
    return Axis(name, extent)


def dim(name: str) -> Any:
    """The size of a dim: an int where it is static, else an expression."""
    return _current().size(name)


def tensor(name: str, over: tuple[Any, ...], expr: Value, dtype: DType | None = None) -> Stage:
    """A named intermediate: `expr` over `axes`, kept and readable at any index."""
    trace = _current()
    flat: list[Axis] = []
    for part in over:
        flat.extend(part if isinstance(part, tuple) else (part,))
    return trace.hoister.define(name, tuple(flat), as_expr(expr, f32), dtype)


def require(condition: Expr | bool, needs: str, **got: Any) -> None:
    """A contract check, made on the host before anything is launched.

    A condition over dims and params is kept for launch time; over static dims it is checked now.
    """
    trace = _current()
    if condition is True:
        return
    if condition is False:
        shown = ", ".join(f"{k}={v}" for k, v in got.items())
        raise trace.declaration.error(f"needs {needs}, got {shown}")
    trace.requirements.append(Requirement(condition, needs, tuple(got.items())))


def constrain(strategy: str, *, form: str = "", units: str = "") -> None:
    """Compute the operator as `strategy` says: see `Constraint`.

    Where a device cannot, a call raises the operator's error.
    """
    trace = _current()
    trace.constraint = Constraint(strategy, form, units, trace.declaration.error)


def require_indices(tensor: Input, below: Size) -> None:
    """Values of an integer input must lie in 0 … below − 1; checked on the host at each call."""
    _current().index_checks.append((tensor, below))
