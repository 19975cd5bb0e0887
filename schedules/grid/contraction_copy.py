"""Tiles of a contraction's factors: from global memory through registers to shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...dsl.expr import Axis, Cast, Expr, Read, Tensor
from ...dsl.lower import encode, storage
from ..capability import WIDE_BYTES
from ..nest import static
from ..roles import steps_through
from .contraction_view import Space, limited
from .intrinsics import address, call
from .nest import GridNest
from .vectors import MOST_LANES, Vectors

Tir = Any
Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Room:
    """Where the tiles of a factor lie in a flat shared buffer: one tile every `size` elements."""

    buffer: Tir
    first: int
    size: int


@dataclass(frozen=True)
class _Slot:
    """One vector that a thread moves for each tile.

    `own` and `k` are its place in the tile, `start` its first own index in the factor and `env`
    the axes there, `exists` whether the factor has all its own indices (None: it does).
    """

    number: int
    active: Tir | None
    own: Tir
    k: Tir
    start: Tir
    env: dict[Axis, Tir]
    exists: Tir | None


class Factor:
    """The tiles of one factor: `width` indices of its own axes by `depth` of k.

    With `raw`, a read or a cast of one, elements move as they are stored, and a tile lies as the
    tensor does; else the factor's values move, and a tile lies as [depth][width]. With `rowwise` it
    lies as [width][depth]. Neighbours in memory are moved together where the layout allows. Past
    the edges a tile holds zeros.
    """

    def __init__(self, view: Space, node: Expr, own: Axes, tile: tuple[int, int], threads: int,
                 raw: bool, rowwise: bool = False) -> None:  # fmt: skip
        self.view, self.nest, self.own = view, view.nest, own
        self.width, self.depth = tile
        self.threads, self.raw = threads, raw
        self.node = bare(node) if raw else node
        most = max(1, min(MOST_LANES, self.width * self.depth // threads))
        most = 1 << (most.bit_length() - 1)
        self.vectors, self.by_k = along(view, self.node, own, most)
        self.lanes = self.vectors.lanes if self.vectors is not None else 1
        self.dtype = storage(self.node.dtype) if raw else view.dtype
        self.bytes = int("".join(filter(str.isdigit, self.dtype))) // 8
        # Rows of 16 bytes more: threads that read down a column find different banks.
        pad = WIDE_BYTES // self.bytes
        self.rowwise = rowwise or raw and self.by_k
        self.stride = (self.depth if self.rowwise else self.width) + pad
        self.size = self.stride * (self.width if self.rowwise else self.depth)
        self.per_thread = -(-self.width * self.depth // (self.lanes * threads))

    def begin(self, first: Tir) -> None:
        """Tiles from here on start at `first` of the own axes."""
        from tvm import tirx

        view, nest = self.view, self.nest
        length = view.size(self.own)
        bounded = not _divides(self.width, length)
        count = self.width * self.depth // self.lanes
        run = (self.depth if self.by_k else self.width) // self.lanes
        self.slots = []
        for number in range(self.per_thread):
            item = nest.bind("item", nest.thread + nest.number(number * self.threads))
            row, vector = _split(nest, item, run)
            own, k = (row, vector) if self.by_k else (vector, row)
            own = own if self.by_k else own * nest.number(self.lanes)
            k = k * nest.number(self.lanes) if self.by_k else k
            start = first + own
            active = item < nest.number(count) if count < (number + 1) * self.threads else None
            last = start if self.by_k else start + nest.number(self.lanes - 1)
            near = start
            if bounded and len(self.own) > 1:
                near = tirx.min(start, length - nest.number(1))
            env = view.place(self.own, near)
            self.slots.append(_Slot(number, active, own, k, start, env,
                                    last < length if bounded else None))  # fmt: skip
        self.length = length

    def hold(self) -> None:
        """Registers for one tile."""
        count = self.nest.number(self.per_thread * self.lanes)
        self.held = self.nest.private("held", [count], self.dtype)

    def fetch(self, start: Tir) -> None:
        """The tile at `start` of k: from global memory to registers."""
        nest = self.nest
        for slot in self.slots:
            first = slot.number * self.lanes

            def keep(i: Tir, value: Tir, first: int = first) -> None:
                nest.store(self.held, [nest.number(first) + i], value)

            def load(place: dict[Axis, Tir], first: int = first) -> None:
                self._load(first, place)

            with self.view.maybe(slot.active):
                self._moved(slot, start, load, keep)

    def put(self, stage: Tir, room: Room) -> None:
        """The tile from registers to place `stage` of shared memory."""
        nest = self.nest
        for slot in self.slots:
            first = nest.number(slot.number * self.lanes)
            with self.view.maybe(slot.active):
                if self.rowwise is self.by_k:
                    step = min(self.lanes, WIDE_BYTES // self.bytes)
                    for chunk in range(0, self.lanes, step):
                        at = self.at(stage, room, slot.own, slot.k) + nest.number(chunk)
                        with self.view.lanes(step) as lane:
                            near = first + nest.number(chunk) + lane
                            nest.store(room.buffer, [at + lane], self.held[near])
                else:
                    for i in map(nest.number, range(self.lanes)):
                        own, k = (slot.own, slot.k + i) if self.by_k else (slot.own + i, slot.k)
                        at = self.at(stage, room, own, k)
                        nest.store(room.buffer, [at], self.held[first + i])

    def send(self, start: Tir, stage: Tir, room: Room) -> None:
        """The tile at `start` of k to shared memory, without waiting for it.

        Whole vectors go by asynchronous copies of 16 bytes, those at an edge element by element.
        """
        nest = self.nest
        for slot in self.slots:
            at = self.at(stage, room, slot.own, slot.k)

            def keep(i: Tir, value: Tir, at: Tir = at) -> None:
                nest.store(room.buffer, [at + i], value)

            def copy(place: dict[Axis, Tir], at: Tir = at) -> None:
                assert self.stored is not None, "what is sent lies in memory"
                call(
                    nest,
                    "rudnn_copy_async_16",
                    address(room.buffer[at]),
                    address(self._source(self.stored, place)),
                )

            with self.view.maybe(slot.active):
                self._moved(slot, start, copy, keep, rolled=True)

    @property
    def sendable(self) -> bool:
        """Whether `send` has something to gain."""
        return self.stored is not None and self.lanes * self.bytes == WIDE_BYTES

    @property
    def stored(self) -> Read | None:
        """The factor as a read, if its elements move as memory holds them."""
        plain = self.raw and isinstance(self.node, Read) and self.node.fill is None
        return self.node if plain and isinstance(self.node, Read) else None

    def at(self, stage: Tir, room: Room, own: Tir, k: Tir) -> Tir:
        """The index of an element in place `stage` of shared memory."""
        stride = self.nest.number(self.stride)
        inside = own * stride + k if self.rowwise else k * stride + own
        return self.nest.number(room.first) + stage * self.nest.number(room.size) + inside

    def _moved(
        self, slot: _Slot, start: Tir, whole: Callable[[dict[Axis, Tir]], None],
        keep: Callable[[Tir, Tir], None], rolled: bool = False,
    ) -> None:  # fmt: skip
        """`whole(place)` where all of a vector exists, else `keep(i, value or zero)` for each."""
        from tvm import tirx

        nest, depth = self.nest, self.view.size(self.view.k)
        k, lanes = start + slot.k, nest.number(self.lanes)
        inside = [] if slot.exists is None else [slot.exists]
        if not _divides(self.depth, depth):
            inside.append((k + lanes if self.by_k else k + nest.number(1)) <= depth)
        if not inside:
            whole(slot.env | self.view.place(self.view.k, k))
            return
        with nest.choice(tirx.all(*inside)) as otherwise:
            whole(slot.env | self.view.place(self.view.k, k))
            otherwise()
            with self._lanes(rolled) as each:
                for i in each:
                    self._single(slot, k, i, depth, keep)

    @contextmanager
    def _lanes(self, rolled: bool) -> Iterator[Sequence[Tir]]:
        """The lanes of a vector, in a loop or (for registers) one by one."""
        if rolled and self.lanes > 1:
            with self.nest.loop("lane", self.nest.number(self.lanes)) as lane:
                yield [lane]
        else:
            yield [self.nest.number(i) for i in range(self.lanes)]

    def _single(self, slot: _Slot, k: Tir, i: Tir, depth: Tir,
                keep: Callable[[Tir, Tir], None]) -> None:  # fmt: skip
        """Element i of a vector at an edge: its value, or zero where it does not exist."""
        from tvm import tirx

        nest = self.nest
        keep(i, tirx.const(0, self.dtype))
        if self.lanes == 1:
            return
        own, k = (slot.start, k + i) if self.by_k else (slot.start + i, k)
        with nest.when(tirx.all(own < self.length, k < depth)):
            here = slot.env if self.by_k else self.view.place(self.own, own)
            keep(i, self._value(here | self.view.place(self.view.k, k)))

    def _load(self, first: int, place: dict[Axis, Tir]) -> None:
        """A whole vector to registers from `first` on."""
        nest, env = self.nest, self.view.env | place
        if self.vectors is None:
            nest.store(self.held, [nest.number(first)], self._value(place))
            return
        axis = self.vectors.axis
        if self.stored is not None:
            self.vectors.fetch(self.stored, self.held, first, place[axis], env)
            return
        lane = iter(range(self.lanes))

        def keep(here: Tir, write: Any) -> None:
            value = self._value(place | {axis: here})
            nest.store(self.held, [nest.number(first + next(lane))], value)

        self.vectors.run(place[axis], env, keep)

    def _value(self, place: dict[Axis, Tir]) -> Tir:
        if self.stored is not None:
            return self._source(self.stored, place)
        value = self.nest.emitter.lowering.expr(self.node, self.view.env | place)
        return encode(value, self.node.dtype) if self.raw else value

    def _source(self, read: Read, place: dict[Axis, Tir]) -> Tir:
        """The element in global memory that a read takes."""
        index = self.nest.emitter.lowering.places(read, self.view.env | place)
        return self.nest.sources[id(read.tensor)][tuple(index)]


def bare(node: Expr) -> Expr:
    """A factor without the casts around it."""
    while isinstance(node, Cast):
        node = node.a
    return node


def along(view: Space, node: Expr, own: Axes, most: int) -> tuple[Vectors | None, bool]:
    """How neighbours of a factor are moved together, if at all, and whether they are along k."""
    for axes in (view.k, own):
        vectors = limited(Vectors(view.nest, axes[-1], [node], []), most)
        last = static(view.size(axes[-1:]))
        # A vector must not go on in the next of several outer axes.
        straight = len(axes) == 1 or (last is not None and last % vectors.lanes == 0)
        moved = {id(r.tensor) for r in vectors.reads} & {id(t) for t in _data(node)}
        if vectors.lanes > 1 and moved and straight:
            return vectors, axes is view.k
    return None, not steps_through(node, own, view.k)


def _data(node: Expr) -> Iterator[Tensor]:
    """The tensors a factor's values come from, those that only indices read left out."""
    if isinstance(node, Read):
        yield node.tensor
        return
    for child in node.children():
        yield from _data(child)


def _divides(step: int, length: Tir) -> bool:
    exact = static(length)
    return exact is not None and exact % step == 0


def _split(nest: GridNest, item: Tir, run: int) -> tuple[Tir, Tir]:
    from tvm import tirx

    step = nest.number(run)
    row, rest = tirx.truncdiv(item, step), tirx.truncmod(item, step)
    return nest.bind("row", row), nest.bind("rest", rest)
