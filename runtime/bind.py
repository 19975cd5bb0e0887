"""From the layouts of a call's arrays to a specialisation and its dims: no data is looked at."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dsl.declare import Declaration, Spec
from ..dsl.dtypes import DType
from ..dsl.graph import Graph
from ..dsl.host import evaluate, identifier
from ..schedules.capability import WIDE_BYTES


@dataclass(frozen=True)
class View:
    """One array as the kernel will see it: strides in elements.

    `aligned`: the first element is at a multiple of 16 bytes.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool = False


@dataclass(frozen=True)
class Bound:
    """A call's specialisation.

    `unit` are the tensors whose last stride is 1, `wide` those of them all of whose rows start at
    multiples of 16 bytes. `sizes` are dims by name (packs expanded after coalescing); `views` the
    arrays by name; `results` the outputs' shapes and dtypes as the caller sees them, by position.
    """

    spec: Spec
    graph: Graph
    unit: frozenset[str]
    wide: frozenset[str]
    sizes: dict[str, int]
    views: dict[str, View]
    results: tuple[tuple[str, tuple[int, ...], DType], ...]


def _names(items: Any) -> str:
    texts = [str(i) for i in items]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


class Binder:
    """Works out one call of a declaration; raises the declaration's error."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.error = declaration.error
        self.sizes: dict[str, int] = {}
        self.packs: dict[str, tuple[int, ...]] = {}
        self.owner: dict[str, str] = {}

    def fail(self, needs: str, got: Any) -> None:
        raise self.error(f"{self.declaration.name} needs {needs}, got {got}")

    def bind(
        self,
        views: Mapping[str, View],
        numbers: Mapping[str, int | float],
        options: Mapping[str, Any],
        extents: Mapping[str, int],
        outs: Mapping[str, View],
    ) -> Bound:
        """The whole binding; `outs` are the caller's result arrays, if given."""
        self.check_dtypes(views)
        for name, value in extents.items():
            try:
                size = -1 if isinstance(value, bool) else operator.index(value)
            except TypeError:
                size = -1
            if size < 0:
                self.fail(f"{name} a size ≥ 0", repr(value))
            self.sizes[name] = size
        for name, view in views.items():
            if not self.declaration.inputs[name].broadcast:
                self.match(name, view)
        expanded = self.broadcast(views)
        results = self.results(views, options)
        for name, shape, dtype in results:
            given = outs.get(name)
            if given is None:
                expanded[name] = View(dtype, shape, contiguous(shape), aligned=True)
            elif given.shape != shape or given.dtype != dtype:
                self.fail(f"out of shape {list(shape)} {dtype}",
                          f"{list(given.shape)} {given.dtype}")  # fmt: skip
            else:
                expanded[name] = given
        flat = self.coalesce(expanded, [n for n, _, _ in results])
        spec = self.spec(views, options)
        graph = self.declaration.trace(spec)
        self.check_requirements(graph, numbers)
        wanted = {t.name for t in (*graph.inputs, *graph.outputs)}
        flat = {n: v for n, v in flat.items() if n in wanted}
        unit = frozenset(n for n, v in flat.items() if unit_stride(v))
        wide = frozenset(n for n in unit if flat[n].aligned and rows_aligned(flat[n]))
        results = tuple(r for r in results if r[0] in wanted)
        return Bound(spec, graph, unit, wide, dict(self.sizes), flat, results)

    def check_dtypes(self, views: Mapping[str, View]) -> None:
        own: tuple[str, DType] | None = None
        for name, view in views.items():
            declared = self.declaration.inputs[name]
            allowed = declared.accepts(self.declaration.dtypes)
            if view.dtype not in allowed:
                self.fail(f"{name} of dtype {_names(allowed)}", view.dtype)
            if declared.dtype is None:
                if own is not None and own[1] != view.dtype:
                    self.fail(f"{own[0]} and {name} of one dtype", f"{own[1]} and {view.dtype}")
                own = own or (name, view.dtype)

    def match(self, name: str, view: View) -> None:
        """Bind the dims of one input to its shape."""
        dims = self.declaration.inputs[name].dims
        star = next((i for i, d in enumerate(dims) if d.startswith("*")), None)
        spare = len(view.shape) - len(dims) + (star is not None)
        if spare < 0 or (star is None and spare != 0):
            self.fail(f"{name} of shape [{', '.join(dims)}]", f"{list(view.shape)}")
        at = 0
        for dim in dims:
            if dim.startswith("*"):
                sizes = view.shape[at : at + spare]
                known = self.packs.setdefault(dim[1:], sizes)
                if known != sizes:
                    have = f"{list(known)} in {self.owner[dim]} and {list(sizes)} in {name}"
                    self.fail(f"the same leading dims ({dim})", have)
                self.owner.setdefault(dim, name)
                at += spare
                continue
            size = view.shape[at]
            at += 1
            if dim.isdigit():
                if size != int(dim):
                    self.fail(f"a dim of {dim} in {name}", f"{list(view.shape)}")
                continue
            known_size = self.sizes.setdefault(dim, size)
            if known_size != size:
                have = f"{dim}={known_size} in {self.owner.get(dim, 'the arguments')}"
                self.fail(f"one size of {dim}", f"{have} and {size} in {name}")
            self.owner.setdefault(dim, name)

    def broadcast(self, views: Mapping[str, View]) -> dict[str, View]:
        """All views, broadcast inputs expanded to their full dims by strides of 0."""
        inputs = self.declaration.inputs
        for name, view in views.items():
            if inputs[name].broadcast and len(inputs[name].dims) == 1:
                pack = inputs[name].dims[0][1:]
                known = self.packs.get(pack, ())
                try:
                    wide = _broadcast_shapes(known, view.shape)
                except ValueError:
                    self.fail("shapes that broadcast", f"{list(known)} and {list(view.shape)}")
                fixed = self.owner.get(f"*{pack}")
                if fixed is not None and wide != known:
                    self.fail(
                        f"{name} broadcastable to {list(known)}, the shape of {fixed}",
                        f"{list(view.shape)}",
                    )
                self.packs[pack] = wide
        expanded = {}
        for name, view in views.items():
            if not inputs[name].broadcast:
                expanded[name] = view
                continue
            full = tuple(s for d in inputs[name].dims for s in self.shape_of(d, name))
            expanded[name] = self.expand(name, view, full)
        return expanded

    def expand(self, name: str, view: View, full: tuple[int, ...]) -> View:
        missing = len(full) - len(view.shape)
        fits = missing >= 0 and all(
            have in (1, want)
            for have, want in zip(view.shape, full[max(missing, 0) :], strict=True)
        )
        if not fits:
            self.fail(f"{name} broadcastable to {list(full)}", f"{list(view.shape)}")
        strides = [0] * missing
        for have, want, stride in zip(view.shape, full[missing:], view.strides, strict=True):
            strides.append(stride if have == want else 0)
        return View(view.dtype, full, tuple(strides), view.aligned)

    def shape_of(self, dim: str, name: str) -> tuple[int, ...]:
        if dim.startswith("*"):
            return self.packs.get(dim[1:], ())
        if dim.isdigit():
            return (int(dim),)
        if dim not in self.sizes:
            self.fail(f"an argument that gives {dim}", f"only {name}")
        return (self.sizes[dim],)

    def results(
        self, views: Mapping[str, View], options: Mapping[str, Any]
    ) -> tuple[tuple[str, tuple[int, ...], DType], ...]:
        own = self.declaration.own_dtype({n: v.dtype for n, v in views.items()})
        return tuple(
            (o.name, tuple(s for d in o.dims for s in self.shape_of(d, o.name)), o.dtype or own)
            for o in self.declaration.outputs
        )

    def coalesce(self, views: dict[str, View], results: list[str]) -> dict[str, View]:
        """Packs with as few dims as the strides of all arrays allow, at least one."""
        spans = {n: self.spans(n, views[n]) for n in views}
        for pack, sizes in self.packs.items():
            users = [n for n in views if pack in spans[n]]
            strides = {
                n: views[n].strides[spans[n][pack] : spans[n][pack] + len(sizes)] for n in users
            }
            merged, kept = merge(sizes, strides)
            for n in users:
                at, view = spans[n][pack], views[n]
                tail = at + len(sizes)
                views[n] = View(
                    view.dtype,
                    view.shape[:at] + merged + view.shape[tail:],
                    view.strides[:at] + kept[n] + view.strides[tail:],
                    view.aligned,
                )
            self.packs[pack] = merged
            spans = {n: self.spans(n, views[n]) for n in views}
            for i, size in enumerate(merged):
                self.sizes[f"{pack}.{i}"] = size
        return views

    def spans(self, name: str, view: View) -> dict[str, int]:
        """Where each pack of a tensor starts."""
        declared = self.declaration.inputs.get(name)
        dims = declared.dims if declared is not None else next(
            o.dims for o in self.declaration.outputs if o.name == name
        )  # fmt: skip
        starts, at = {}, 0
        for dim in dims:
            if dim.startswith("*"):
                starts[dim[1:]] = at
                at += len(self.packs.get(dim[1:], ()))
            else:
                at += 1
        return starts

    def spec(self, views: Mapping[str, View], options: Mapping[str, Any]) -> Spec:
        # A tensor's size of 0 is left to launch time: loops of no iterations cannot be scheduled.
        dims = {d for i in self.declaration.inputs.values() for d in i.dims}
        dims |= {d for o in self.declaration.outputs for d in o.dims}
        static = tuple(
            (n, s) for n, s in self.sizes.items()
            if n in self.declaration.static and (s or n not in dims)
        )  # fmt: skip
        return Spec(
            tuple((n, views[n].dtype) for n in self.declaration.inputs if n in views),
            tuple((n, len(s)) for n, s in self.packs.items()),
            static,
            tuple((n, options[n]) for n in self.declaration.options),
        )

    def check_requirements(self, graph: Graph, numbers: Mapping[str, int | float]) -> None:
        names = {identifier(n): v for n, v in self.sizes.items()} | dict(numbers)
        for item in graph.requirements:
            if not evaluate(item.condition, names):
                got = ", ".join(f"{k}={evaluate(v, names)}" for k, v in item.got)
                self.fail(item.needs, got)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def unit_stride(view: View) -> bool:
    """Whether neighbours along the last dim are neighbours in memory."""
    return not view.shape or view.shape[-1] == 1 or view.strides[-1] == 1


def rows_aligned(view: View) -> bool:
    """Whether rows of an aligned array start at multiples of 16 bytes.

    A dim of 1, which no index goes along, does not count, whatever its stride.
    """
    steps = zip(view.shape[:-1], view.strides[:-1], strict=True)
    return not any(n > 1 and s * view.dtype.bytes % WIDE_BYTES for n, s in steps)


def merge(
    sizes: tuple[int, ...], strides: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Adjacent dims joined wherever every array steps evenly across them; dims of 1 vanish."""
    keep = [i for i, s in enumerate(sizes) if s != 1]
    merged: list[int] = []
    kept: dict[str, list[int]] = {n: [] for n in strides}
    for i in keep:
        joins = bool(merged) and all(kept[n][-1] == strides[n][i] * sizes[i] for n in strides)
        if joins:
            merged[-1] *= sizes[i]
            for n in strides:
                kept[n][-1] = strides[n][i]
        else:
            merged.append(sizes[i])
            for n in strides:
                kept[n].append(strides[n][i])
    if not merged:
        return (1,), {n: (1,) for n in strides}
    return tuple(merged), {n: tuple(s) for n, s in kept.items()}


def _broadcast_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    out = []
    for x, y in zip(left, right, strict=True):
        if x != y and 1 not in (x, y):
            raise ValueError
        out.append(y if x == 1 else x)
    return tuple(out)


def elements(shape: tuple[int, ...]) -> int:
    """Number of elements."""
    return math.prod(shape)
