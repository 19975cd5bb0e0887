"""Working out a call: everything that depends on layouts, scalars and options but not on data."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

import numpy as np

from ..dsl.declare import Declaration
from ..dsl.errors import DeviceError
from ..dsl.host import compiled, evaluate, identifier
from .arrays import Kind
from .bind import Binder, Bound, View, elements
from .compiler import Layouts, executable
from .device import Queue
from .driver import Driver
from .plan import SMALL_WORK, LaunchPlan
from .settings import NOT_ONE, choice, number
from .workspace import budget, check_budget


@dataclass(frozen=True)
class Arguments:
    """A call's arguments: arrays with their kinds (None where absent), numbers, result arrays."""

    arrays: tuple[Any, ...]
    kinds: tuple[Kind | None, ...]
    settings: dict[str, Any]
    outs: tuple[Any, ...]
    out_kinds: tuple[Kind, ...]


@dataclass(frozen=True)
class CallPlan:
    """A call reduced to: allocate, pack the pointers, launch.

    `head` and `tail` are the packed arguments before and after the pointers of `inputs` (positions
    among the array arguments) and of the results; `results` are (name, shape, native dtype).
    `launch` is None where there is nothing to compute. `workspace` are its bytes, None where the
    kernel takes none. `scratch` gives the address of a workspace
    of that many bytes; `last_error` tells why a launch failed. `queue` is where it runs: kept
    plans keep no queue alive. `starting` is held while the workspace is this call's.
    """

    name: str
    launch: Callable[[bytes, int], int] | None
    head: bytes
    pack: Callable[..., bytes]
    tail: bytes
    inputs: tuple[int, ...]
    kind: Kind
    queue: ReferenceType[Queue]
    results: tuple[tuple[str, tuple[int, ...], Any], ...]
    workspace: int | None
    threads: int
    index_checks: tuple[tuple[int, str, int], ...]
    scratch: Callable[[int], int] = int
    last_error: Callable[[], str] = str
    starting: AbstractContextManager[None] = field(default_factory=nullcontext)


def make_plan(declaration: Declaration, args: Arguments) -> CallPlan:
    """Check and bind a call, and find or compile its kernel.

    Raises the operator's error, DeviceError, WorkspaceError or CompileError.
    """
    _check_place(declaration, args)
    bound, numbers = bind(declaration, args)
    arrays = tuple(declaration.inputs)
    names = [t.name for t in bound.graph.inputs]
    sizes = {identifier(n): v for n, v in bound.sizes.items()}
    checks = tuple(
        (arrays.index(t.name), t.name, int(evaluate(below, sizes)))
        for t, below in bound.graph.index_checks
    )
    kind, like = next((k, a) for k, a in zip(args.kinds, args.arrays, strict=True) if k is not None)
    for name, shape, dtype in bound.results:
        if elements(shape) * dtype.bytes >= 2**63:
            raise declaration.error(
                f"{declaration.name} needs {name} of fewer than 2⁶³ bytes, got shape {list(shape)}"
            )
    results = tuple((n, shape, kind.native(dtype, like)) for n, shape, dtype in bound.results)
    if len(args.outs) > len(results):
        raise declaration.error(
            f"{declaration.name} needs at most {len(results)} results in out, got {len(args.outs)}"
        )
    device = kind.device(like)
    queue = kind.queue(like) or device.default_queue
    if all(elements(shape) == 0 for _, shape, _ in bound.results):
        nothing = struct.Struct("").pack
        return CallPlan(declaration.name, None, b"", nothing, b"", (), kind,
                        queue.reference, results, 0, 1, checks)  # fmt: skip
    wide = frozenset[str]() if device.driver.host else bound.wide  # of no use to the CPU
    ready = executable(bound.graph, Layouts(bound.unit, wide), device)
    head, tail = pack(ready.plan, bound, numbers)
    workspace: int | None = None
    if any(slot.kind == "workspace" for slot in ready.plan.slots):
        workspace = int(compiled(ready.plan.workspace)(sizes))
        check_budget(workspace, budget(), declaration.name)
    threads = 1 if compiled(ready.plan.work)(sizes) < SMALL_WORK else 0
    pointers = struct.Struct(f"<{len(names) + len(results)}q")
    return CallPlan(
        declaration.name, ready.loaded.on(queue), head, pointers.pack, tail,
        tuple(arrays.index(n) for n in names), kind, queue.reference, results, workspace,
        threads, checks, _scratch(device.driver, queue.reference), device.driver.last_error,
        nullcontext() if device.driver.host else queue.starting,  # host: one a thread
    )  # fmt: skip


def _scratch(driver: Driver, queue: ReferenceType[Queue]) -> Callable[[int], int]:
    """The workspace of a queue; it lives while a call with its tensors does."""

    def address(nbytes: int) -> int:
        alive = queue()
        assert alive is not None
        return driver.arena(alive, nbytes)

    return address


def _check_place(declaration: Declaration, args: Arguments) -> None:
    """All tensors on one device and one queue; the elements of a result apart.

    Plain host arrays have no queue: they go with any of the host's.
    """
    pairs = [(k, a) for k, a in zip(args.kinds, args.arrays, strict=True) if k is not None]
    pairs += list(zip(args.out_kinds, args.outs, strict=True))
    devices = sorted({str(k.device(a)) for k, a in pairs})
    if len(devices) > 1:
        raise DeviceError(f"needs all tensors on one device, got {' and '.join(devices)}")
    queues = {q for q in (k.queue(a) for k, a in pairs) if q is not None}
    if len(queues) > 1:
        raise DeviceError(f"needs all tensors on one queue, got {len(queues)} of {devices[0]}")
    for kind, array in zip(args.out_kinds, args.outs, strict=True):
        strides, shape = kind.strides(array), tuple(array.shape)
        if strides is None or not _apart(shape, strides):
            raise declaration.error(
                f"{declaration.name} needs an out whose elements do not share memory, "
                f"got shape {list(shape)} and strides {strides}"
            )


def _apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether each dim steps over all that the quicker ones span."""
    reach = 0
    for step, size in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if step <= reach:
            return 0 in shape
        reach += step * (size - 1)
    return True


def check_outs(declaration: Declaration, kinds: Sequence[Kind], outs: Sequence[Any]) -> None:
    """Raise the operator's error unless results may be stored in `outs`, apart from each other."""
    spans = []
    for kind, array in zip(kinds, outs, strict=True):
        if not kind.writeable(array):
            raise declaration.error(
                "needs a writeable out, got a read-only array or one that requires grad"
            )
        spans.append(kind.bounds(array))
    for i, (low, high) in enumerate(spans):
        if any(start < high and low < end for start, end in spans[i + 1 :]):
            raise declaration.error("needs results that do not overlap in out, got two that do")


def _view(declaration: Declaration, name: str, kind: Kind, array: Any) -> View:
    native, shape, _ = kind.layout(array)
    dtype = kind.dtype(native)
    if dtype is None:
        raise declaration.error(f"needs {name} of a dtype known here, got {native}")
    strides = kind.strides(array)
    assert strides is not None
    return View(dtype, tuple(shape), tuple(strides), kind.aligned(native))


def bind(declaration: Declaration, args: Arguments) -> tuple[Bound, dict[str, int | float]]:
    """The specialisation of a call, and its numbers."""
    d = declaration
    views = {
        n: _view(d, n, k, a)
        for n, k, a in zip(d.inputs, args.kinds, args.arrays, strict=True)
        if k is not None
    }
    for name, declared in d.inputs.items():
        if name not in views and not declared.optional:
            raise d.error(f"{d.name} needs {name}, got None")
    options = {n: choice(args.settings[n], o.choices) for n, o in d.options.items()}
    for name, value in options.items():
        if value is NOT_ONE:
            choices, got = d.options[name].choices, args.settings[name]
            raise d.error(f"{d.name} needs {name} among {list(choices)}, got {got!r}")
    numbers = {n: _number(d, n, args.settings[n]) for n in d.params}
    extents = {n: args.settings[n] for n in d.extents}
    named = [o.name for o in d.outputs]
    if len(args.outs) > len(named):
        raise d.error(f"{d.name} needs at most {len(named)} results in out, got {len(args.outs)}")
    outs = {
        n: _view(d, "out", k, o) for n, k, o in zip(named, args.out_kinds, args.outs, strict=False)
    }
    return Binder(d).bind(views, numbers, options, extents, outs), numbers


def _number(declaration: Declaration, name: str, value: Any) -> int | float:
    """A param as a Python number."""
    integer = declaration.params[name].dtype.is_int
    plain = number(value)
    if isinstance(plain, int):
        if integer and not -(2**63) <= plain < 2**63:
            raise declaration.error(f"{declaration.name} needs {name} in 64 bits, got {plain}")
        return plain if integer else _as_f32(plain)
    if isinstance(plain, float) and not integer:
        return _as_f32(plain)
    wanted = "an integer" if integer else "a number"
    raise declaration.error(f"{declaration.name} needs {name} {wanted}, got {value!r}")


def _as_f32(value: int | float) -> float:
    """The number as the kernel will see it, so that contract checks see the same."""
    try:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(value))
    except OverflowError:  # an int past any float
        return float("inf") if value > 0 else float("-inf")


def pack(plan: LaunchPlan, bound: Bound, numbers: dict[str, int | float]) -> tuple[bytes, bytes]:
    """The packed arguments before and after the pointers."""
    head, tail = [], []
    for slot in plan.slots:
        if slot.kind == "dim":
            head.append(struct.pack("<q", bound.sizes[slot.name]))
        elif slot.kind == "stride":
            view = bound.views[slot.name]
            tail.append(struct.pack("<q", view.strides[slot.axis] // slot.scale))
        elif slot.kind == "scalar":
            tail.append(_scalar(numbers[slot.name], slot.dtype))
    return b"".join(head), b"".join(tail)


def _scalar(value: int | float, dtype: str) -> bytes:
    """A scalar's slot: an int64, or the bits of a float32 and four zero bytes."""
    if dtype != "float32":
        return struct.pack("<q", int(value))
    return np.float32(value).tobytes() + b"\0\0\0\0"


def check_indices(declaration: Declaration, name: str, kind: Kind, array: Any, below: int) -> None:
    """Raise the operator's error unless all values are in 0 … below − 1."""
    values = kind.numpy(array)
    if values.size == 0:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= below:
        bad = low if low < 0 else high
        raise declaration.error(f"{declaration.name} needs {name} in 0 … {below - 1}, got {bad}")


def plain_strides(kinds: Sequence[Kind | None], arrays: Sequence[Any]) -> int | None:
    """Position of an array whose strides are no whole elements: only a copy can be read."""
    for i, (kind, array) in enumerate(zip(kinds, arrays, strict=True)):
        if kind is not None and kind.strides(array) is None:
            return i
    return None
