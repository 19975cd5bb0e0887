"""Sums over windows: Σ image[…, q·S + k·D + offset, …] · kernel[…, k, …], whatever it is for.

Recognised by the indices alone: an image read, 0 outside, at places that a kept axis q and a summed
axis k share, and a second factor that knows no q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..dsl import forms
from ..dsl.expr import Axis, Binary, Cast, Const, DimRef, Expr, Read, Size
from ..dsl.walk import free_axes, walk
from .group import Group, is_map, known

NEEDS = "needs a sum over windows of products, and one pointwise consumer at most"


@dataclass(frozen=True)
class Along:
    """One dim of the image: place = window · stride + tap · step + offset."""

    position: int
    size: int
    window: Axis
    stride: int
    tap: Axis
    step: int
    offset: int

    @property
    def windows(self) -> int:
        return known(self.window)

    @property
    def taps(self) -> int:
        return known(self.tap)

    @property
    def lowest(self) -> int:
        """The least place of the first window."""
        return self.offset + min(0, self.step * (self.taps - 1))

    @property
    def reach(self) -> int:
        """How far past its least place a window goes."""
        return abs(self.step) * (self.taps - 1)


@dataclass(frozen=True)
class Windows:
    """A sum over windows.

    `batch` are kept axes of the image alone, `rows` of the kernel alone. The kept axis `shared`, if
    there is one, chooses the channels too: `run` of its neighbours read the same ones. `channels`
    are summed axes that are no taps.

    The gradient of such a sum for its kernel is one too: the kernel's taps are its windows, few,
    and the windows of the gradient are its taps.
    """

    image: Read
    kernel: Expr
    along: tuple[Along, ...]
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    shared: Axis | None
    run: int
    channels: tuple[Axis, ...]

    @property
    def row_count(self) -> int:
        """Rows that read the same channels."""
        return self.run * math.prod(map(known, self.rows))

    @property
    def group_count(self) -> int:
        """How many such sets of rows there are."""
        return 1 if self.shared is None else known(self.shared) // self.run

    @property
    def is_static(self) -> bool:
        """Whether the number of summed channels is known."""
        return all(isinstance(a.extent, int) for a in self.channels)


def windows(node: Expr) -> Windows | None:
    """`node` as a sum over windows, or None."""
    if not isinstance(node, forms.Reduce) or node.op != "sum" or node.where is not None:
        return None
    body = node.body
    if not isinstance(body, Binary) or body.op != "mul":
        return None
    for image, kernel in ((body.a, body.b), (body.b, body.a)):
        read = image.a if isinstance(image, Cast) else image
        if isinstance(read, Read) and read.fill == 0:
            found = _Reading(node, read, kernel).windows()
            if found is not None:
                return found
    return None


def group_windows(group: Group) -> Windows | None:
    """The sum over windows of a group that has nothing else but a pointwise consumer."""
    head, *others = group.stages
    if len(others) > 1 or not all(map(is_map, others)):
        return None
    return windows(head.expr)


class _Reading:
    """Sorts the indices of an image read."""

    def __init__(self, node: forms.Reduce, image: Read, kernel: Expr) -> None:
        self.node, self.image, self.kernel = node, image, kernel
        self.own = set(free_axes(image))
        self.other = set(free_axes(kernel))

    def windows(self) -> Windows | None:
        over, kept = set(self.node.over), [a for a in free_axes(self.node.body)]
        kept = [a for a in kept if a not in over]
        along: list[Along] = []
        batch: list[Axis] = []
        plain: list[tuple[int, Expr]] = []
        for position, index in enumerate(self.image.index):
            size = self.image.tensor.shape[position]
            found = self._along(position, index, size)
            if found is not None:
                along.append(found)
            elif isinstance(index, Axis) and index not in self.other and index not in over:
                if not _same(index.extent, size):
                    return None
                batch.append(index)
            else:
                plain.append((position, index))
        taps = {a.tap for a in along}
        channels = tuple(a for a in self.node.over if a not in taps)
        both = [a for a in kept if a in self.own and a in self.other]
        rows = tuple(a for a in kept if a not in self.own)
        windowed = {a.window for a in along}
        inside = {a for _, i in plain for a in free_axes(i)}
        own = [a for a in kept if a in inside and a not in self.other]
        sorted_out = windowed | {*batch, *both, *rows, *own}
        if not along or len(both) > 1 or not set(kept) <= sorted_out or len(taps) != len(along):
            return None
        if (taps | windowed) & inside or windowed & self.other or len(windowed) != len(along):
            return None
        if not all(a in self.other for a in self.node.over):
            return None
        if any(not isinstance(a.extent, int) for a in (*both, *rows)):
            return None
        runs = [self._run(p, i, both) for p, i in plain]
        if any(r is None for r in runs):
            return None
        run = math.gcd(*(r for r in runs if r is not None)) or 1
        shared = both[0] if both else None
        return Windows(self.image, self.kernel, tuple(along), (*batch, *own), rows, shared, run,
                       channels)  # fmt: skip

    def _along(self, position: int, index: Expr, size: Size) -> Along | None:
        """A windowed dim: one kept axis of the image alone and one summed axis."""
        terms = affine(index)
        if terms is None or len(terms) != 2 + (None in terms) or not isinstance(size, int):
            return None
        axes = [a for a in terms if a is not None]
        kept = [a for a in axes if a not in self.node.over and a not in self.other]
        taps = [a for a in axes if a in self.node.over]
        if len(kept) != 1 or len(taps) != 1 or terms[kept[0]] < 1 or not terms[taps[0]]:
            return None
        if any(not isinstance(a.extent, int) for a in axes):
            return None
        return Along(position, size, kept[0], terms[kept[0]], taps[0], terms[taps[0]],
                     terms.get(None, 0))  # fmt: skip

    def _run(self, position: int, index: Expr, both: list[Axis]) -> int | None:
        """How many neighbours along the shared axis read the same; None if that may be outside."""
        from ..dsl.oracle import Evaluator

        size = self.image.tensor.shape[position]
        if isinstance(index, Axis) and index not in both and _same(index.extent, size):
            return known(both[0]) if both else 1
        axes = tuple(free_axes(index))
        if not isinstance(size, int) or any(not isinstance(a.extent, int) for a in axes):
            return None
        if not all(isinstance(n, (Axis, Binary, Const)) for n in walk(index)):
            return None
        others = [a for a in axes if a not in both]
        places = Evaluator({}, {}, False).eval(index).over((*both, *others))
        if places.size and (places.min() < 0 or places.max() >= size):
            return None
        if not both:
            return 1
        extent = known(both[0])
        if both[0] not in axes:
            return extent
        for run in range(extent, 0, -1):
            if extent % run == 0:
                blocks = places.reshape(extent // run, run, -1)
                if (blocks == blocks[:, :1]).all():
                    return run
        return None


def affine(node: Expr) -> dict[Axis | None, int] | None:
    """Coefficients of the axes in an index, and of None the constant; None if there are none."""
    if isinstance(node, Axis):
        return {node: 1}
    if isinstance(node, Const):
        return {None: int(node.value)}
    if not isinstance(node, Binary) or node.op not in ("add", "sub", "mul"):
        return None
    a, b = affine(node.a), affine(node.b)
    if a is None or b is None:
        return None
    if node.op == "mul":
        if set(a) != {None} and set(b) != {None}:
            return None
        factor, terms = (a[None], b) if set(a) == {None} else (b[None], a)
        return {k: v * factor for k, v in terms.items()}
    sign = 1 if node.op == "add" else -1
    return {k: a.get(k, 0) + sign * b.get(k, 0) for k in (*a, *b)}


def _same(a: Size, b: Size) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)
    return a is b or (isinstance(a, DimRef) and isinstance(b, DimRef) and a.name == b.name)
