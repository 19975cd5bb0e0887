"""Weighted sums by tiles: a launch for those that keep rows, one for those that keep keys.

    block (batch.., tile of the kept axis):
        factors of the kept side → shared                           # the subclass
        for tile of the summed side (those that no mask rules out):
            factors of the summed side → shared; barrier            # the subclass
            products[kept, summed] → shared; barrier                # the subclass
            weights[kept, summed] → shared; barrier
            sums[kept, column] += Σ_summed weights · values         # the subclass
        results

No result is shared by two blocks, so that nothing depends on their order. Masks select: a tile
with values that are not all finite takes a path that leaves out what is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ...dsl.expr import Axis
from ..bounds import upper_bounds
from ..group import is_map
from ..rule import Config
from ..terms import both, least
from ..weighted import Roles, Sum, steps
from .nest import GridNest

Tir = Any


@dataclass(frozen=True)
class TiledConfig(Config):
    """`kept` × `summed` weights are a tile, computed by `threads`.

    `unit` is the matrix unit's id, "" for plain arithmetic.
    """

    kept: int = 32
    summed: int = 16
    threads: int = 128
    unit: str = ""


class Tiles:
    """One launch: sums that keep the axis `kept`. A subclass computes the products and the sums."""

    def __init__(
        self, nest: GridNest, roles: Roles, config: TiledConfig, sums: Sequence[Sum], kept: Axis,
        summed: Axis,
    ) -> None:  # fmt: skip
        self.nest, self.roles, self.config, self.sums = nest, roles, config, sums
        self.kept, self.summed = kept, summed
        self.by_row = kept is roles.row
        self.readers = nest.emitter.lowering.readers
        self.lower = nest.emitter.lowering.expr
        self.size = nest.emitter.size
        self.where = sums[0].node.where
        weights = [s.node.weight for s in sums]
        self.steps = steps(weights, nest.emitter.lowering.math)
        # Sums may share a weight.
        self.final = {w: n for n, w in enumerate(dict.fromkeys(map(id, weights)))}

    # --- what a subclass says ---

    def begin(self) -> None:
        """Before the loops: registers, shared memory, the kept side's factors."""
        raise NotImplementedError

    def tile(self) -> None:
        """What the places from `self.start` on add to the sums."""
        raise NotImplementedError

    def product(self, number: int, i: Tir, j: Tir) -> Tir:
        """Product `number` at a place of the tile."""
        raise NotImplementedError

    def leave_out(self, i: Tir, j: Tir) -> None:
        """Let no weight count at a place of the tile, until one is kept there."""
        raise NotImplementedError

    def keep(self, number: int, i: Tir, j: Tir, weight: Tir) -> None:
        """Keep weight `number` at a place of the tile."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write the results."""
        raise NotImplementedError

    # --- the launch ---

    def launch(self) -> None:
        nest, cfg, roles = self.nest, self.config, self.roles
        outer = (*roles.batch, *(roles.turns if self.by_row else ()))
        extents = [self.size(a.extent) for a in outer]
        tiles = nest.ceil_div(self.size(self.kept.extent), cfg.kept)
        blocks = nest.simple(nest.product([*extents, tiles]))
        with nest.launch(blocks, cfg.threads) as (block, thread):
            *index, tile = nest.unflatten(block, [*extents, tiles])
            self.env = {a: nest.opaque(a.name, i) for a, i in zip(outer, index, strict=True)}
            self.thread = thread
            self.total = nest.opaque("total", self.size(self.kept.extent))
            self.first = nest.opaque("first", tile * nest.number(cfg.kept))
            self.here = nest.opaque("here", least(self.total - self.first, nest.number(cfg.kept)))
            self.begin()
            self._turns(() if self.by_row else roles.turns)
            self.finish()

    def _turns(self, rest: Sequence[Axis]) -> None:
        if not rest:
            self._tiles()
            return
        with self.nest.loop(rest[0].name, self.size(rest[0].extent)) as turn:
            self.env = self.env | {rest[0]: turn}
            self._turns(rest[1:])

    def _tiles(self) -> None:
        """The tiles of the summed axis that some place of the kept tile counts in."""
        nest, cfg = self.nest, self.config
        count = nest.opaque("summed", self.size(self.summed.extent))
        key, row = self.roles.key, self.roles.row
        bounds = list(upper_bounds(self.where, key, row, set(self.env)))
        end = count
        if self.by_row:
            last = least(self.first + nest.number(cfg.kept), self.total) - nest.number(1)
            for bound in bounds:
                end = least(end, self.lower(bound, self.env | {row: last}))
            end = nest.opaque("end", end)
        with nest.loop("tile", nest.ceil_div(end, cfg.summed)) as tile, ExitStack() as stack:
            self.start = nest.opaque("start", tile * nest.number(cfg.summed))
            self.end = count
            if not self.by_row:
                last = least(self.start + nest.number(cfg.summed), count) - nest.number(1)
                for bound in bounds:
                    reach = self.lower(bound, self.env | {row: last})
                    stack.enter_context(nest.when(self.first < reach))
            self.tile()

    def weigh(self) -> None:
        """The weights of the tile from the products, at all kept places that there are."""
        nest, cfg, zero = self.nest, self.config, self.nest.number(0)
        places = self.here * nest.number(cfg.summed)
        with nest.loop("turn", nest.ceil_div(places, cfg.threads)) as turn:
            flat = nest.bind("flat", turn * nest.number(cfg.threads) + self.thread)
            i, j = nest.unflatten(flat, [nest.number(cfg.kept), nest.number(cfg.summed)])
            i, j = nest.bind("i", i), nest.bind("j", j)
            env = self.env | {self.kept: self.first + i, self.summed: self.start + j}
            for number, factor in enumerate(self.roles.factors):
                held = self._number("product", self.product(number, i, j))
                self.readers[id(factor.stage)] = lambda *_, h=held: h[zero]
            self.leave_out(i, j)
            with ExitStack() as stack:
                here = both(env[self.kept] < self.total, env[self.summed] < self.end)
                stack.enter_context(nest.when(here))
                if self.where is not None:
                    stack.enter_context(nest.when(self.lower(self.where, env)))
                for step in self.steps:
                    held = self._number("step", self.lower(step.node, env))
                    self.readers[id(step.proxy)] = lambda *_, h=held: h[zero]
                    if id(step.origin) in self.final:
                        self.keep(self.final[id(step.origin)], i, j, held[zero])

    def _number(self, name: str, value: Tir) -> Tir:
        held = self.nest.private(name, [], "float32")
        self.nest.store(held, [self.nest.number(0)], value)
        return held

    def write(self, each: Sum, at: dict[Axis, Tir], total: Tir) -> None:
        """A result from its finished sum."""
        nest, result = self.nest, each.result
        value = total
        if is_map(result):
            self.readers[id(each.stage)] = lambda *_: total
            value = self.lower(result.expr, at)
        nest.write(result, [at[a] for a in result.axes], value)
