"""Loops over the tiles of k: the next tiles are on their way while one is multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..nest import static
from .contraction_copy import Factor, Room
from .contraction_view import View
from .intrinsics import call

Tir = Any
Factors = tuple[Factor, Factor]
Rooms = tuple[Room, ...]


def through_registers(
    view: View, depth: int, factors: Factors, rooms: Rooms, spare: Tir,
    multiply: Callable[[Tir, Tir], None], pieces: int = 1,
) -> None:  # fmt: skip
    """Two places in shared memory: loads of a tile end when the one before is multiplied.

    `multiply(place, i)` does a tile's piece i of `pieces`: the loop is one over all pieces of all
    tiles. `spare` is an element of shared memory that nothing else uses meanwhile.
    """
    from tvm import tirx

    nest, tiles = view.nest, view.nest.ceil_div(view.size(view.k), depth)
    if static(tiles) == 0:
        return
    one, two = nest.number(1), nest.number(2)
    for factor in factors:
        factor.hold()

    def fetch(index: Tir) -> None:
        for factor in factors:
            factor.fetch(index * nest.number(depth))

    def put(index: Tir) -> None:
        for factor, room in zip(factors, rooms, strict=True):
            factor.put(tirx.truncmod(index, two), room)

    fetch(nest.number(0))
    put(nest.number(0))
    with _rolled(view, tiles * nest.number(pieces), spare) as step:
        tile, piece = nest.unflatten(step, [tiles, nest.number(pieces)])
        following = tile + one < tiles
        with nest.when(tirx.all(piece.equal(nest.number(0)), following)):
            fetch(tile + one)
        multiply(tirx.truncmod(tile, two), piece)
        with nest.when(piece.equal(nest.number(pieces - 1))):
            with nest.when(following):
                put(tile + one)
            nest.barrier()


@contextmanager
def _rolled(view: View, count: Tir, spare: Tir) -> Iterator[Tir]:
    """A barrier and a loop, whose length compilers do not know.

    LLVM would write all rounds out, move their loads to the front and run out of registers. The
    length comes from shared memory, past the barrier.
    """
    nest = view.nest
    if static(count) is None:
        nest.barrier()
        with nest.loop("step", count) as step:
            yield step
        return
    with nest.when(nest.thread.equal(nest.number(0))):
        nest.store(spare.source, spare.indices, count.astype(str(spare.ty.dtype)))
    nest.barrier()
    length = nest.private("length", [], "int64")
    nest.store(length, [nest.number(0)], spare.astype("int64"))
    with nest.loop("step", length[nest.number(0)]) as step:
        yield step


def through_memory(view: View, depth: int, factors: Factors, rooms: Rooms, stages: int,
                   multiply: Callable[[Tir, Tir], None]) -> None:  # fmt: skip
    """`stages` places in shared memory, all but one of them with copies under way."""
    from tvm import tirx

    nest, tiles = view.nest, view.nest.ceil_div(view.size(view.k), depth)
    if static(tiles) == 0:
        return
    ahead, places = nest.number(stages - 1), nest.number(stages)

    def send(index: Tir) -> None:
        with nest.when(index < tiles):
            for factor, room in zip(factors, rooms, strict=True):
                factor.send(index * nest.number(depth), tirx.truncmod(index, places), room)
        call(nest, "rudnn_copy_async_commit")  # an empty group keeps the count at the end

    for early in range(stages - 1):
        send(nest.number(early))
    with nest.loop("tile", tiles) as tile:
        call(nest, f"rudnn_copy_async_wait_{stages - 2}")
        nest.barrier()  # everybody's copies have arrived, and the oldest place is read no more
        send(tile + ahead)
        multiply(tirx.truncmod(tile, places), nest.number(0))
