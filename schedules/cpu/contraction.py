"""Matrix products of every kind: which axes play m, n and k, and the packed nest that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...dsl.dtypes import i64
from ...dsl.expr import Axis, Binary, Const, Expr, Read, Stage, Tensor, as_expr, binary
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..roles import NEEDS, Roles, roles, steps_through
from ..rule import Config, Rejection, check, first_rejection
from . import packed


class Contraction:
    """Σₖ a·b → packed panels of one factor, a register tile, and the epilogue on the tile."""

    name = "contraction"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        found = roles(group)
        if found is None:
            return Rejection(NEEDS)
        # All loops of a nest of single elements are of one iteration: none is left to schedule.
        single = _known(found.m) == 1 and _known(found.n) == 1
        return first_rejection(
            check(found.n is group.stages[-1].axes[-1], "needs the last axis in one factor only"),
            check(not single, "needs more than one element in a product"),
        )

    def default(self, group: Group, caps: Capability) -> packed.PackedConfig:
        found = roles(group)
        assert found is not None
        k = _known(found.k[0]) if len(found.k) == 1 else None
        rows = _known(found.m)
        return packed.PackedConfig.default(caps, m=rows, n=_known(found.n), k=k)

    def space(self, group: Group, caps: Capability) -> Iterator[Config]:
        base = self.default(group, caps)
        yield base
        lanes = caps.lanes()
        for mr, nr in ((8, 3 * lanes), (12, 2 * lanes), (14, 2 * lanes), (6, 2 * lanes)):
            for mc in (64, 128):
                yield replace(base, mr=mr, nr=nr, mc=mc // mr * mr)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: packed.PackedConfig
    ) -> Any:
        head, out = group.stages[0], group.stages[-1]
        found = roles(group)
        assert found is not None
        ready = _ready_panels(found, config)
        nest = packed.contraction(
            _reader(emitter, found, found.a, found.m),
            _placeholder(emitter, ready) if ready else _reader(emitter, found, found.b, found.n),
            emitter.size(found.m.extent),
            emitter.size(found.n.extent),
            _depth(emitter, found),
            _epilogue(emitter, head, out, found),
            config,
            batch=[emitter.size(a.extent) for a in found.batch],
            b_batch=() if ready else found.b_batch,
            shape=[emitter.size(e) for e in out.shape],
            where=_where(out, found),
            a_by_columns=steps_through(found.a, (found.m,), found.k),
            b_by_columns=steps_through(found.b, (found.n,), found.k),
            name=emitter.name(out.name),
        )
        emitter.lowering.readers[id(out)] = lambda *i: nest.out(*i)
        emitter.publish(out, nest.out)
        if nest.panels is not None:
            emitter.keep_in_workspace(nest.panels, "panels", _panel_sizes(found, config))
        sch = emitter.schedule()
        packed.schedule(sch, nest)
        return sch


def _known(axis: Axis) -> int | None:
    return axis.extent if isinstance(axis.extent, int) else None


def _ready_panels(roles: Roles, config: packed.PackedConfig) -> Tensor | None:
    """The tensor behind `b` if it is packed already: read at [n // nr, k, n % nr] with our nr."""
    node = roles.b
    if not isinstance(node, Read) or len(node.index) != 3 or len(roles.k) != 1:
        return None
    panel, k, lane = node.index
    fits = (
        k is roles.k[0]
        and _is_division(panel, "floordiv", roles.n, config.nr)
        and _is_division(lane, "mod", roles.n, config.nr)
    )
    return node.tensor if fits and node.dtype.name == "float32" else None


def _is_division(node: Expr, op: str, axis: Axis, by: int) -> bool:
    return (
        isinstance(node, Binary)
        and node.op == op
        and node.a is axis
        and isinstance(node.b, Const)
        and node.b.value == by
    )


def _placeholder(emitter: Emitter, tensor: Tensor) -> Any:
    return next(p for t, p in emitter.placeholders if t is tensor)


def _depth(emitter: Emitter, roles: Roles) -> Any:
    total = emitter.size(roles.k[0].extent)
    for axis in roles.k[1:]:
        total = total * emitter.size(axis.extent)
    return total


def _split_k(emitter: Emitter, roles: Roles, k: Any) -> dict[Axis, Any]:
    """The reduced axes at a point of their fused range."""
    from tvm import tirx

    found: dict[Axis, Any] = {}
    for axis in reversed(roles.k[1:]):
        extent = emitter.size(axis.extent)
        found[axis] = tirx.floormod(k, extent)
        k = tirx.floordiv(k, extent)
    found[roles.k[0]] = k
    return found


def _reader(emitter: Emitter, roles: Roles, node: Expr, own: Axis) -> Any:
    """`node` as a function of (batch, own axis, k); b is given only the batch axes it has."""
    batch = roles.batch if own is roles.m else tuple(roles.batch[i] for i in roles.b_batch)

    def read(at: Sequence[Any], index: Any, k: Any) -> Any:
        env = dict(zip(batch, at, strict=True)) | {own: index} | _split_k(emitter, roles, k)
        return emitter.lowering.expr(node, env)

    return read


def _epilogue(emitter: Emitter, head: Stage, out: Stage, roles: Roles) -> Any:
    """The result's element from the accumulated sum."""
    from ...dsl.lower import encode

    def finish(at: Sequence[Any], m: Any, n: Any, total: Any) -> Any:
        env = dict(zip(roles.batch, at, strict=True)) | {roles.m: m, roles.n: n}
        if out is head:
            return total
        emitter.lowering.readers[id(head)] = lambda *_: total
        return encode(emitter.lowering.expr(out.expr, env), out.dtype)

    return finish


def _where(out: Stage, roles: Roles) -> Any:
    def split(*index: Any) -> tuple[list[Any], Any, Any]:
        env = dict(zip(out.axes, index, strict=True))
        return [env[a] for a in roles.batch], env[roles.m], env[roles.n]

    return split


def _panel_sizes(roles: Roles, config: packed.PackedConfig) -> list[Any]:
    panels = binary("floordiv", as_expr(roles.n.extent, i64) + (config.nr - 1), config.nr)
    sizes: list[Any] = [roles.batch[i].extent for i in roles.b_batch]
    sizes += [panels, *(a.extent for a in roles.k), config.nr]
    return sizes
