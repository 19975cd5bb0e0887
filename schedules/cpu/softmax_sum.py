"""The rule for softmax_sum: the roles of its axes, and which nest computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.expr import Axis, Expr, Stage
from ...dsl.graph import reads
from ...dsl.walk import free_axes
from ..capability import Capability
from ..emit import Emitter
from ..group import Group, contraction, is_map
from ..rule import Config, Rejection, check, first_rejection

TILE_BYTES = 128 * 1024
MAX_DEPTH = 1024


@dataclass(frozen=True)
class SoftmaxSumConfig(Config):
    """The tile and the block.

    `vectors` of rows are a tile, `keys` a block; `keys_unroll` × `vectors` accumulators make the
    scores, up to `registers` the sums.
    """

    vectors: int = 4
    keys: int = 128
    keys_unroll: int = 4
    registers: int = 16


@dataclass(frozen=True)
class Product:
    """A contraction under the score: Σ over `depth` of `row` times `key`, the sides' factors."""

    stage: Stage
    row: Expr
    key: Expr
    depth: Axis


@dataclass(frozen=True)
class Roles:
    """Which axis of a softmax_sum is what.

    `row` is in the scores only, `key` is summed, `column` is in the values only; `batch` axes
    may be anywhere. `products` are the contractions whose results the score reads.
    """

    node: forms.SoftmaxSum
    batch: tuple[Axis, ...]
    row: Axis
    key: Axis
    column: Axis
    products: tuple[Product, ...]


def source(stage: Stage) -> forms.SoftmaxSum | None:
    """The softmax_sum of a stage that is one, or its log-sum-exp."""
    node = stage.expr
    if isinstance(node, forms.LogSumExp):
        return node.source
    return node if isinstance(node, forms.SoftmaxSum) else None


def split(group: Group) -> tuple[list[Stage], list[Stage], list[Stage]]:
    """The group's stages: contractions under the score, the forms, what follows them."""
    forms_at = [i for i, s in enumerate(group.stages) if source(s) is not None]
    if not forms_at:
        return list(group.stages), [], []
    before, rest = group.stages[: forms_at[0]], group.stages[forms_at[0] :]
    heads = [s for s in rest if source(s) is not None]
    return list(before), heads, [s for s in rest if s not in heads]


def roles(group: Group) -> Roles | None:
    """The roles for the tiled nest, or None where the group has another shape."""
    before, heads, _ = split(group)
    node = source(heads[0])
    assert node is not None
    columns, rows = node.column_axes(), node.row_axes()
    if len(node.over) != 1 or len(columns) != 1 or not _short(columns[0]):
        return None
    (key,) = node.over
    products: list[Product] = []
    fixed = set(free_axes(node.value))
    for stage in before:
        product = _product(stage, key)
        if product is None:
            return None
        products.append(product)
        fixed |= set(free_axes(product.key))
    only_rows = [a for a in rows if a not in fixed]
    if not only_rows or any(only_rows[-1] not in free_axes(p.row) for p in products):
        return None
    row = only_rows[-1]
    return Roles(node, tuple(a for a in rows if a is not row), row, key, columns[0],
                 tuple(products))  # fmt: skip


def _product(stage: Stage, key: Axis) -> Product | None:
    found = contraction(stage.expr)
    if found is None or len(found.k) != 1 or not _short(found.k[0]):
        return None
    if key in found.n:
        return Product(stage, found.a, found.b, found.k[0])
    return Product(stage, found.b, found.a, found.k[0]) if key in found.m else None


def _short(axis: Axis) -> bool:
    return isinstance(axis.extent, int) and 0 < axis.extent <= MAX_DEPTH


class SoftmaxSumRows:
    """Tiles of rows run in parallel; each goes over the keys in blocks that stay in cache.

    Row maxima and sums are carried from block to block (the sums so far are rescaled when a
    maximum grows), so memory does not depend on the number of keys. What does not have the
    shape of `Roles` is computed row by row, plainly.
    """

    name = "softmax_sum_rows"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        before, heads, after = split(group)
        return first_rejection(
            check(bool(heads), "needs a softmax_sum"),
            check(all(isinstance(s.expr, forms.Reduce) and s.expr.op == "sum" for s in before),
                  "needs sums before the softmax_sum"),
            check(all(is_map(s) and heads[0] in reads(s.expr) for s in after),
                  "needs only pointwise stages after the softmax_sum"),
        )  # fmt: skip

    def default(self, group: Group, caps: Capability) -> SoftmaxSumConfig:
        wide = caps.vector_registers >= 32
        found = roles(group)
        keys = 128
        if found is not None:
            axes = (found.column, *(p.depth for p in found.products))
            depth = sum(a.extent for a in axes if isinstance(a.extent, int))
            while keys > 16 and keys * depth * 4 > TILE_BYTES:
                keys //= 2
        return SoftmaxSumConfig(4 if wide else 2, keys, 4, 16 if wide else 8)

    def space(self, group: Group, caps: Capability) -> Iterator[SoftmaxSumConfig]:
        first = self.default(group, caps)
        yield first
        for vectors in (1, 2, 4):
            for keys in (64, 128, 256):
                config = SoftmaxSumConfig(vectors, keys, first.keys_unroll, first.registers)
                if config != first:
                    yield config

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: SoftmaxSumConfig
    ) -> Any:
        found = roles(group)
        if found is None:
            from .softmax_plain import plain

            return plain(emitter, group)
        from .softmax_tiles import Tiles

        return Tiles(emitter, group, found, caps.lanes(), config).lower()
