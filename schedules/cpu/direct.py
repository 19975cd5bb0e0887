"""Loop nests for cores: ranges of columns a task, vectors of elements a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..nest import Nest, static

Tir = Any


class CoreNest(Nest):
    """A nest whose innermost loops are vectors."""

    # Inside a vector: its element, how many it has, and the statements around its loop.
    lane: Tir | None = None
    wide = 1
    outside: list[Tir]

    def lay_by(self, name: str, value: Tir) -> Tir:
        """As `Nest.lay_by`; inside a vector, an element of one that lies outside its loop, where
        TVM would take an allocation for one of a single element."""
        from tvm import tirx

        if self.lane is None:
            return super().lay_by(name, value)
        shape, dtype = [self.number(self.wide)], str(value.ty.dtype)
        cell = tirx.decl_buffer(shape, dtype, self.emitter.name(name))
        self.outside.append(tirx.AllocBuffer(cell))
        self.store(cell, [self.lane], value)
        return cell[self.lane]

    def lanes(
        self, width: Tir, lanes: int, unroll: int, body: Callable[[Tir], None],
        around: Callable[[Callable[[], None]], None] = lambda then: then(), twice: bool = False,
    ) -> None:  # fmt: skip
        """`for j in width: body(j)` → unrolled vectors, single vectors, then single elements.

        `around` may open loops between those over groups of vectors and the vectors of a group.
        Where `twice` says that an element may be done again, the last ones are a vector too, if
        there are as many, which begins within the one before.
        """
        from tvm import tirx

        done: Tir = self.number(0)
        for groups, vector in dict.fromkeys(((unroll, lanes), (1, lanes), (1, 1))):
            if twice and vector == 1 < lanes and static(width - done) != 0:
                full = self.number(lanes)
                start = self.opaque("start", width - full)
                with self.when((done < width) & (width >= full)):
                    around(partial(self._group, start, 1, lanes, body))
                done = self.opaque("done", tirx.Select(width >= full, width, done))
            step = self.number(groups * vector)
            count = self.opaque("count", (width - done) // step)
            if static(count) == 0:
                continue
            with self.loop("lane", count) as outer:
                around(partial(self._group, done + outer * step, groups, vector, body))
            done = self.opaque("done", done + count * step)

    def _group(self, start: Tir, groups: int, lanes: int, body: Callable[[Tir], None]) -> None:
        """`groups` vectors from `start`, side by side."""
        if lanes == 1:
            body(start)
            return
        with (
            self.loop("group", self.number(groups), "unroll") as group,
            self.loop("vector", self.number(lanes), "vector") as lane,
        ):
            self.lane, self.wide, self.outside = lane, lanes, self.blocks[-2]
            body(start + group * self.number(lanes) + lane)
            self.lane = None

    def columns(self, total: Tir, rows: Tir, most: int, cores: int) -> tuple[Tir, Tir]:
        """(number, width) of the ranges that `total` columns are cut in, bound here.

        As wide as `most`, narrower only to give each core two tasks over `rows` rows.
        """
        from tvm import tirx

        one, line = self.number(1), self.number(64)
        limit = min(static(total) or most, most)
        width: Tir = self.number(limit)
        if limit > 64 and cores > 1:
            tasks = self.number(2 * cores)
            wanted = self.opaque(
                "wanted", tirx.max(tirx.truncdiv(tasks + rows - one, tirx.max(rows, one)), one)
            )
            share = tirx.truncdiv(total + wanted - one, wanted)
            share = tirx.max((share + line - one) // line * line, line)
            width = self.opaque("width", tirx.min(width, share))
        return self.opaque("ranges", tirx.truncdiv(total + width - one, width)), width
