"""Arguments for an operator, from its declaration: sizes to try, arrays in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .dsl.arguments import In
from .dsl.cost import flops
from .dsl.declare import Declaration
from .dsl.dtypes import DType
from .dsl.errors import RudnnError
from .dsl.host import evaluate, identifier
from .runtime.bind import Binder, Bound, View, contiguous
from .schedules.capability import WIDE_BYTES

Array = np.ndarray[Any, Any]
Dims = dict[str, Any]  # sizes by name; a pack's is a tuple, under its name without the star

LAYOUTS = ("contiguous", "strided", "broadcast")
POISON = 0xFF  # as bytes: NaN in every float, -1 in integers
_QUICK_FLOPS = 4_000_000
_STATIC_PRIMES = (67, 37, 23, 19, 53, 31)
_DYNAMIC_PRIMES = (13, 11, 7, 5, 17, 3)


@dataclass(frozen=True)
class Case:
    """One specialisation to try: `dims` and extents by name, options, and inputs left out.

    `numbers` are params that are not at their default.
    """

    label: str
    dims: Dims
    options: dict[str, Any] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    numbers: dict[str, float] = field(default_factory=dict)

    def describe(self) -> str:
        """`rows=3x5 H=67 activation=relu −bias`."""
        sizes = (f"{n}={'x'.join(map(str, s)) or '()'}" if isinstance(s, tuple) else f"{n}={s}"
                 for n, s in self.dims.items())  # fmt: skip
        chosen = (f"{n}={v}" for n, v in self.options.items())
        params = (f"{n}={v}" for n, v in self.numbers.items())
        return " ".join((*sizes, *chosen, *params, *(f"−{n}" for n in sorted(self.absent))))


def example_dims(declaration: Declaration) -> Dims:
    """The declared example, packs as tuples."""
    packs = pack_names(declaration)
    return {
        n: (s if isinstance(s, tuple) else (s,)) if n in packs else s
        for n, s in ((n.lstrip("*"), s) for n, s in declaration.example.items())
        if n not in declaration.params and n not in declaration.options
    } | {
        n: e.default if e.default is not None else 1
        for n, e in declaration.extents.items()
        if n not in declaration.example
    }  # fmt: skip


def pack_names(declaration: Declaration) -> set[str]:
    """Names of the packs, without their star."""
    return {d[1:] for i in declaration.inputs.values() for d in i.dims if d.startswith("*")}


def numbers_of(declaration: Declaration, case: Case | None = None) -> dict[str, int | float]:
    """A value for each scalar: the case's, the example's, its default, or 0.5 (integers 1)."""
    made: dict[str, int | float] = {}
    for name, param in declaration.params.items():
        value = declaration.example.get(name, param.default)
        made[name] = value if value is not None else (0.5 if param.dtype.is_float else 1)
    return made | ({} if case is None else case.numbers)


def shape_of(declared: In, dims: Mapping[str, Any]) -> tuple[int, ...]:
    """The full shape of an input."""
    shape: list[int] = []
    for dim in declared.dims:
        if dim.startswith("*"):
            shape += dims[dim[1:]]
        else:
            shape.append(int(dim) if dim.isdigit() else dims[dim])
    return tuple(shape)


def dtypes_of(declaration: Declaration, case: Case, own: DType, turn: int = 0) -> dict[str, DType]:
    """A dtype for each input that is present; `turn` chooses where several are allowed."""
    made = {}
    for name, declared in declaration.inputs.items():
        if name in case.absent:
            continue
        choices = declared.accepts((own,))
        made[name] = choices[turn % len(choices)]
    return made


def bind(declaration: Declaration, case: Case, dtypes: Mapping[str, DType]) -> Bound:
    """The specialisation for contiguous arrays. Raises the operator's error."""
    views = {}
    for name, dtype in dtypes.items():
        shape = shape_of(declaration.inputs[name], case.dims)
        views[name] = View(dtype, shape, contiguous(shape))
    options = {n: o.default for n, o in declaration.options.items()} | case.options
    extents = {n: case.dims[n] for n in declaration.extents}
    return Binder(declaration).bind(views, numbers_of(declaration, case), options, extents, {})


def specialise(
    declaration: Declaration, dims: Mapping[str, Any] | None = None, dtype: DType | None = None,
    options: Mapping[str, Any] | None = None,
) -> Bound:  # fmt: skip
    """The specialisation at the example dims, some of them replaced."""
    case = Case("example", example_dims(declaration) | dict(dims or {}), dict(options or {}))
    return bind(declaration, case, dtypes_of(declaration, case, dtype or declaration.dtypes[0]))


# --- sizes ---


def cases(declaration: Declaration, pinned: Mapping[str, Any] | None = None) -> Iterator[Case]:
    """Sizes to try: typical, odd, 1, no leading dims, and each dynamic dim empty in turn."""
    fixed = dict(pinned or {})
    typical = _quick(declaration, example_dims(declaration) | fixed, frozenset(fixed))
    yield Case("typical", typical)
    odd = _odd(declaration, typical, fixed)
    yield Case("odd", odd)
    packs = pack_names(declaration)
    yield Case("one", {n: (1, 1) if n in packs else 1 for n in typical} | fixed)
    if packs:
        yield Case("no rows", odd | {n: () for n in packs} | fixed)
    for name in odd:
        if name not in declaration.static and name not in fixed:
            yield Case("empty", odd | {name: (2, 0, 3) if name in packs else 0})


def variants(declaration: Declaration, base: Case) -> Iterator[Case]:
    """`base` with each optional input left out, and each option set otherwise."""
    optional = [n for n, i in declaration.inputs.items() if i.optional]
    # A number that only counts with some option may have a default which that option refuses.
    positive = {n: 1.5 for n, p in declaration.params.items() if p.dtype.is_float and not p.default}
    for name in optional:
        yield replace(base, absent=frozenset({name}))
    if len(optional) > 1:
        yield replace(base, absent=frozenset(optional))
    for name, option in declaration.options.items():
        for choice in option.choices:
            if choice != option.default:
                case = replace(base, options={name: choice})
                yield case if accepted(declaration, case) else replace(case, numbers=positive)


def admissible(declaration: Declaration, dims: Dims) -> bool:
    """Whether the operator's contract allows these sizes."""
    return accepted(declaration, Case("", dims))


def accepted(declaration: Declaration, case: Case) -> bool:
    """Whether the operator's contract allows the case."""
    try:
        bind(declaration, case, dtypes_of(declaration, case, declaration.dtypes[0]))
    except RudnnError:
        return False
    return True


def _quick(declaration: Declaration, dims: Dims, fixed: frozenset[str]) -> Dims:
    """The sizes, the largest halved until the work is small."""
    free = [n for n in dims if n not in fixed]  # no set, whose order differs from run to run
    while True:
        case = Case("", dims)
        try:
            bound = bind(declaration, case, dtypes_of(declaration, case, declaration.dtypes[0]))
        except RudnnError:
            return dims
        work = flops(bound.graph, bound.sizes)
        volume = sum(math.prod(v.shape) for v in bound.views.values())
        if max(work, 8 * volume) <= _QUICK_FLOPS:
            return dims
        smaller = None
        for name in sorted(free, key=lambda n: -_largest(dims[n])):
            tried = dims | {name: _halved(dims[name])}
            if _largest(dims[name]) > 32 and admissible(declaration, tried):
                smaller = tried
                break
        if smaller is None:
            return dims
        dims = smaller


def _largest(size: Any) -> int:
    return max(size, default=0) if isinstance(size, tuple) else int(size)


def _halved(size: Any) -> Any:
    if not isinstance(size, tuple):
        return size // 2
    top = size.index(max(size))
    return (*size[:top], size[top] // 2, *size[top + 1 :])


def _odd(declaration: Declaration, typical: Dims, fixed: Dims) -> Dims:
    """Prime sizes, no larger than the typical ones; where the contract wants one dim to divide
    another, the multiple of a prime."""
    static, dynamic = iter(_STATIC_PRIMES * 4), iter(_DYNAMIC_PRIMES * 4)
    odd: Dims = {}
    for name, size in typical.items():
        if isinstance(size, tuple):
            odd[name] = (3, 5) if len(size) < 3 else (3, 5, 2, 1)[: len(size)]
            continue
        prime = next(static if name in declaration.static else dynamic)
        while prime > size > 1:
            prime = _prime_below(prime)
        odd[name] = prime if size > 1 else size
    odd |= fixed
    if admissible(declaration, odd):
        return odd
    plain = [n for n in odd if not isinstance(odd[n], tuple) and n not in fixed]
    for a in plain:
        for b in plain:
            if a != b and typical[b] and typical[a] % typical[b] == 0:
                tried = odd | {a: odd[b] * (typical[a] // typical[b])}
                if admissible(declaration, tried):
                    return tried
    return odd


def _prime_below(value: int) -> int:
    candidates = range(value - 1, 1, -1)
    return next((c for c in candidates if all(c % d for d in range(2, c))), 2)


# --- arrays ---


def values(
    declaration: Declaration, case: Case, bound: Bound, dtypes: Mapping[str, DType], layout: str,
    random: np.random.Generator,
) -> dict[str, Array]:  # fmt: skip
    """Random arguments by name: floats normal, indices valid, bools mostly true.

    In the layout "broadcast" a dim of each array has one value only, seen through a stride of 0,
    and inputs that broadcast are given smaller.
    """
    names = {identifier(n): s for n, s in bound.sizes.items()}
    below = {n: int(case.dims[d.below]) for n, d in declaration.inputs.items() if d.below}
    below |= {t.name: int(evaluate(size, names)) for t, size in bound.graph.index_checks}
    for name, limit in below.items():
        if not limit and 0 not in shape_of(declaration.inputs[name], case.dims):
            raise declaration.error(f"{declaration.name} has no valid {name} at these sizes")
    made: dict[str, Array] = {}
    for name, dtype in dtypes.items():
        declared = declaration.inputs[name]
        shape = shape_of(declared, case.dims)
        drawn = _stretched(shape) if layout == "broadcast" else shape
        array = _draw(drawn, dtype, below.get(name), random)
        meant = _MEANT.get((_forward_name(declaration), name))
        if meant is not None:
            array = meant(array, made)
        if not (made and declared.broadcast):
            array = np.broadcast_to(array, shape)
        elif case.label == "odd":
            while array.ndim and array.shape[0] == 1:
                array = array[0]
        made[name] = array
    return made


def _forward_name(declaration: Declaration) -> str:
    return declaration.name.removesuffix("_backward")


def log_softmax(x: Array) -> Array:
    """Logarithms of probabilities along the last axis."""
    top = x.max(-1, keepdims=True, initial=-np.inf)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


# What random numbers become where a family's inputs have a meaning together; `made` are the inputs
# before: an aligned target is at most half as long as its frames, and has no blank.
_MEANT: dict[tuple[str, str], Callable[[Array, dict[str, Array]], Array]] = {
    ("ctc_loss", "log_probs"): lambda x, made: log_softmax(x.astype(np.float32)).astype(x.dtype),
    ("ctc_loss", "targets"): lambda x, made: np.maximum(x, min(made["log_probs"].shape[2] - 1, 1)),
    ("ctc_loss", "target_lengths"): lambda x, made: np.minimum(x, made["input_lengths"] // 2),
}


def _stretched(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its first dim of size > 1, the last apart, set to 1."""
    for i, size in enumerate(shape[:-1]):
        if size > 1:
            return (*shape[:i], 1, *shape[i + 1 :])
    return shape


def _draw(
    shape: tuple[int, ...], dtype: DType, below: int | None, random: np.random.Generator
) -> Array:
    if dtype.kind == "bool":
        return random.random(shape) < 0.7
    if dtype.is_float:
        return random.standard_normal(shape, np.float32).astype(dtype.numpy)
    top = 8 if below is None else max(below, 1)
    return random.integers(0, top, shape).astype(dtype.numpy)


@dataclass(frozen=True)
class Placed:
    """An array inside a larger buffer whose other bytes are poison."""

    view: Array
    base: Array

    def untouched(self) -> bool:
        """Whether everything around the array is still poison; the array itself is lost."""
        self.view[...] = _poisoned((), self.view.dtype)
        return bool((self.base.view(np.uint8) == POISON).all())


def _poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    flat = np.full(max(1, math.prod(shape)) * dtype.itemsize, POISON, np.uint8).view(dtype)
    return flat[: math.prod(shape)].reshape(shape)


def place(shape: tuple[int, ...], dtype: DType, layout: str, turn: int) -> Placed:
    """A poisoned array: guarded by some elements at both ends, at every other `turn` 16 bytes, so
    that it can be aligned; or, "strided", with steps of 2, reversed dims and, at every other
    `turn`, Fortran order."""
    native = dtype.numpy
    count = math.prod(shape)
    if layout != "strided" or not shape:
        guard = 1 if turn % 2 else WIDE_BYTES // native.itemsize
        base = _poisoned((count + 2 * guard,), native)
        return Placed(base[guard : guard + count].reshape(shape), base)
    steps = [2 if axis >= len(shape) - 2 else 1 for axis in range(len(shape))]
    padded = tuple(n * step + 1 for n, step in zip(shape, steps, strict=True))
    order = tuple(range(len(shape)))
    if turn % 2:
        order = order[::-1]
    base = _poisoned(tuple(padded[i] for i in order), native)
    view = base.transpose(np.argsort(order))
    index = tuple(slice(1, n * step + 1, step) for n, step in zip(shape, steps, strict=True))
    view = view[index]
    if turn % 2 == 0:
        view = view[tuple(slice(None, None, -1 if i % 2 == 0 else 1) for i in range(len(shape)))]
    return Placed(view, base.reshape(-1) if base.flags.c_contiguous else base)


def placed(array: Array, dtype: DType, layout: str, turn: int) -> Array:
    """`array` copied into a poisoned buffer of the given layout; strides of 0 are kept."""
    if 0 in array.strides and array.size:
        index = tuple(slice(0, 1) if s == 0 else slice(None) for s in array.strides)
        inner = placed(np.array(array[index]), dtype, layout, turn)
        return np.broadcast_to(inner, array.shape)
    spot = place(array.shape, dtype, layout, turn)
    spot.view[...] = array
    return spot.view
