"""Matrix products of every kind on grids: a tile of the result a block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..nest import static
from ..roles import NEEDS, Roles, roles
from ..rule import Rejection
from . import contraction_short
from .contraction_config import ContractionConfig, configurations, default, rejection, variants
from .contraction_plain import Plain
from .contraction_view import View
from .matrix import Matrix
from .nest import GridNest

Tir = Any
_BAND = 8  # rows of tiles that blocks side by side share: what they read stays in the cache


class Contraction:
    """Σₖ a·b → tiles in shared memory, sums in registers, the epilogue on the way out."""

    name = "contraction"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return Rejection(NEEDS) if roles(group) is None else None

    def default(self, group: Group, caps: Capability) -> ContractionConfig:
        return default(_roles(group), caps)

    def space(self, group: Group, caps: Capability) -> Iterator[ContractionConfig]:
        found = _roles(group)
        candidates = [default(found, caps), *configurations(found, caps)]
        all_of_them = (v for c in candidates for v in variants(c, caps))
        yield from dict.fromkeys(c for c in all_of_them if rejection(c, caps) is None)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: ContractionConfig
    ) -> Any:
        nest = GridNest(emitter, caps)
        multiply(nest, group, config)
        return nest.finish()


def _roles(group: Group) -> Roles:
    found = roles(group)
    assert found is not None, "the rule matched"
    return found


def multiply(nest: GridNest, group: Group, config: ContractionConfig) -> None:
    """Launches that compute the contraction of a group, and its epilogue."""
    view = View(nest, group)
    runs = _short_launch(view, config.short)
    if runs is None:
        return
    tile = (*config.tile, config.depth)
    unit = next((u for u in nest.caps.matrix if u.intrinsic == config.unit), None)
    body: Plain | Matrix
    if unit is not None:
        body = Matrix(view, unit, tile, config.share, config.stages)
    else:
        body = Plain(view, tile, config.share)
    tiles(view, config.tile, body, runs)


def _short_launch(view: View, most: int) -> Tir | None:
    """A launch for products of at most `most` rows or columns, if there can be such.

    Returns how often the launch of tiles still has to run, 0 or 1; None: it never has to.
    """
    from tvm import tirx

    nest, one = view.nest, view.nest.number(1)
    sides = ((view.a, view.m), (view.b, view.n))
    for short, long in (sides, sides[::-1]):
        size = static(view.size(short[1]))
        if size is not None and size <= most:
            contraction_short.lower(view, short, long, most, one)
            return None
    rows = view.size(view.m)
    known = math.prod(a.extent for a in view.m if isinstance(a.extent, int))
    if static(rows) is not None or known > most:  # no rows at all, or more than `most`
        return one
    many = tirx.min(tirx.max(rows - nest.number(most), nest.number(0)), one)
    contraction_short.lower(view, *sides, most, one - many)
    return many


def tiles(view: View, tile: tuple[int, int], body: Plain | Matrix, runs: Tir) -> None:
    """A launch of one block for each tile of the result, `body` what it does.

    It takes place if `runs` is 1, not 0.
    """
    nest = view.nest
    down = nest.ceil_div(view.size(view.m), tile[0])
    across = nest.ceil_div(view.size(view.n), tile[1])
    blocks = nest.simple(view.size(view.batch) * down * across) * runs
    with nest.launch(blocks, body.threads) as (block, _):
        place = view.enter(block, nest.simple(down * across))
        i, j = _banded(view, place, down, across)
        body.lower((i * nest.number(tile[0]), j * nest.number(tile[1])))


def _banded(view: View, place: Tir, down: Tir, across: Tir) -> tuple[Tir, Tir]:
    """Row and column of a tile: column by column within bands of rows."""
    from tvm import tirx

    nest, rows = view.nest, static(down)
    if rows is not None and rows <= _BAND:
        return (view.fixed("row", tirx.truncmod(place, down)),
                view.fixed("column", tirx.truncdiv(place, down)))  # fmt: skip
    most = nest.number(_BAND)
    width = nest.simple(across * most)
    first = view.fixed("first", tirx.truncdiv(place, width) * most)
    inside = view.fixed("inside", tirx.truncmod(place, width))
    here = view.fixed("here", tirx.min(down - first, most))
    return (view.fixed("row", first + tirx.truncmod(inside, here)),
            view.fixed("column", tirx.truncdiv(inside, here)))  # fmt: skip
