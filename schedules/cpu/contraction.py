"""Matrix products of every kind: which axes play m, n and k, and the packed nest that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...dsl.dtypes import i64
from ...dsl.expr import Axis, Binary, Const, Expr, Read, Stage, Tensor, as_expr, binary
from ..capability import Capability
from ..emit import Emitter
from ..group import Contraction as Product
from ..group import Group, contraction, innermost
from ..rule import Config, Rejection, check
from . import packed


@dataclass(frozen=True)
class _Roles:
    """A contraction as the nest sees it: `a` has m, `b` has n, n last in the result.

    `batch` are all other kept axes, whichever factor has them.
    """

    a: Expr
    b: Expr
    m: Axis
    n: Axis
    k: tuple[Axis, ...]
    batch: tuple[Axis, ...]
    b_batch: tuple[int, ...]


class Contraction:
    """Σₖ a·b → packed panels of one factor, a register tile, and the epilogue on the tile."""

    name = "contraction"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        product = contraction(group.stages[0].expr)
        if product is None:
            return Rejection("needs a sum of products of factors with axes of their own")
        if len(group.stages) > 2:
            return Rejection("needs at most one pointwise consumer")
        roles = _roles(product, group)
        if roles is None:
            return Rejection("needs the last axis in one factor only")
        # All loops of such a nest are of one iteration, and none is left to schedule.
        single = _known(roles.m) == 1 and _known(roles.n) == 1
        return check(not single, "needs more than one element in a product")

    def default(self, group: Group, caps: Capability) -> packed.PackedConfig:
        product = contraction(group.stages[0].expr)
        assert product is not None
        roles = _roles(product, group)
        assert roles is not None
        k = _known(roles.k[0]) if len(roles.k) == 1 else None
        rows = _known(roles.m)
        return packed.PackedConfig.default(caps, m=rows, n=_known(roles.n), k=k)

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
        product = contraction(head.expr)
        assert product is not None
        roles = _roles(product, group)
        assert roles is not None
        ready = _ready_panels(roles, config)
        nest = packed.contraction(
            _reader(emitter, roles, roles.a, roles.m),
            _placeholder(emitter, ready) if ready else _reader(emitter, roles, roles.b, roles.n),
            emitter.size(roles.m.extent),
            emitter.size(roles.n.extent),
            _depth(emitter, roles),
            _epilogue(emitter, head, out, roles),
            config,
            batch=[emitter.size(a.extent) for a in roles.batch],
            b_batch=() if ready else roles.b_batch,
            shape=[emitter.size(e) for e in out.shape],
            where=_where(out, roles),
            a_by_columns=_by(roles.a, roles.m, roles.k),
            b_by_columns=_by(roles.b, roles.n, roles.k),
            name=emitter.name(out.name),
        )
        emitter.lowering.readers[id(out)] = lambda *i: nest.out(*i)
        emitter.publish(out, nest.out)
        if nest.panels is not None:
            emitter.keep_in_workspace(nest.panels, "panels", _panel_sizes(roles, config))
        sch = emitter.schedule()
        packed.schedule(sch, nest)
        return sch


def _known(axis: Axis) -> int | None:
    return axis.extent if isinstance(axis.extent, int) else None


def _roles(product: Product, group: Group) -> _Roles | None:
    """Roles of the axes; None when the result's last axis is in both factors."""
    order = group.stages[-1].axes
    last = order[-1]
    if last in product.batch:
        return None
    a, b, left, right = product.a, product.b, product.m, product.n
    if last in left:
        a, b, left, right = b, a, right, left
    rows = [x for x in order if x in left]
    m = rows[-1]
    batch = tuple(x for x in order if x is not m and x is not last)
    shared = tuple(i for i, x in enumerate(batch) if x in product.batch or x in right)
    return _Roles(a, b, m, last, product.k, batch, shared)


def _ready_panels(roles: _Roles, config: packed.PackedConfig) -> Tensor | None:
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


def _depth(emitter: Emitter, roles: _Roles) -> Any:
    total = emitter.size(roles.k[0].extent)
    for axis in roles.k[1:]:
        total = total * emitter.size(axis.extent)
    return total


def _split_k(emitter: Emitter, roles: _Roles, k: Any) -> dict[Axis, Any]:
    """The reduced axes at a point of their fused range."""
    from tvm import tirx

    found: dict[Axis, Any] = {}
    for axis in reversed(roles.k[1:]):
        extent = emitter.size(axis.extent)
        found[axis] = tirx.floormod(k, extent)
        k = tirx.floordiv(k, extent)
    found[roles.k[0]] = k
    return found


def _reader(emitter: Emitter, roles: _Roles, node: Expr, own: Axis) -> Any:
    """`node` as a function of (batch, own axis, k); b is given only the batch axes it has."""
    batch = roles.batch if own is roles.m else tuple(roles.batch[i] for i in roles.b_batch)

    def read(at: Sequence[Any], index: Any, k: Any) -> Any:
        env = dict(zip(batch, at, strict=True)) | {own: index} | _split_k(emitter, roles, k)
        return emitter.lowering.expr(node, env)

    return read


def _epilogue(emitter: Emitter, head: Stage, out: Stage, roles: _Roles) -> Any:
    """The result's element from the accumulated sum."""
    from ...dsl.lower import encode

    def finish(at: Sequence[Any], m: Any, n: Any, total: Any) -> Any:
        env = dict(zip(roles.batch, at, strict=True)) | {roles.m: m, roles.n: n}
        if out is head:
            return total
        emitter.lowering.readers[id(head)] = lambda *_: total
        return encode(emitter.lowering.expr(out.expr, env), out.dtype)

    return finish


def _where(out: Stage, roles: _Roles) -> Any:
    def split(*index: Any) -> tuple[list[Any], Any, Any]:
        env = dict(zip(out.axes, index, strict=True))
        return [env[a] for a in roles.batch], env[roles.m], env[roles.n]

    return split


def _by(node: Expr, own: Axis, k: tuple[Axis, ...]) -> bool:
    """Whether `own`, not k, steps through memory one element at a time."""
    inner = innermost(node)
    return own in inner and not set(k) & inner


def _panel_sizes(roles: _Roles, config: packed.PackedConfig) -> list[Any]:
    panels = binary("floordiv", as_expr(roles.n.extent, i64) + (config.nr - 1), config.nr)
    sizes: list[Any] = [roles.batch[i].extent for i in roles.b_batch]
    sizes += [panels, *(a.extent for a in roles.k), config.nr]
    return sizes
