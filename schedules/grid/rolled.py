"""Loops of whose length compilers know nothing.

They would write all rounds out, move their loads to the front and run out of registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..terms import int32
from .nest import GridNest

Tir = Any


class Rolled:
    """Such loops of a launch; every thread comes here, where there is a barrier."""

    def __init__(self, nest: GridNest) -> None:
        zero, one = nest.number(0), nest.number(1)
        cell = nest.shared("one", [one], "int32")
        with nest.when(nest.thread.equal(zero)):
            nest.store(cell, [zero], int32(1))
        nest.barrier()
        self.nest = nest
        self.one = nest.private("one", [one], "int64")
        nest.store(self.one, [zero], cell[zero].astype("int64"))

    @contextmanager
    def loop(self, name: str, count: int) -> Iterator[Tir]:
        """`for name in 0 … count − 1`; yields the variable."""
        nest, zero = self.nest, self.nest.number(0)
        if count == 1:
            yield zero
        else:
            with nest.loop(name, self.one[zero] * nest.number(count)) as var:
                yield var
