"""Attention over a history kept in pages, and its form with a shared latent row (MLA).

A plan (`paged_plan`) cuts the queries into tiles of one sequence each, so that a key is read once
for all rows of a tile: its queries times the query heads that share a key's head. The history of a
tile is cut into S splits; `paged_merge` puts them together and the rows where the queries are.
"""

from __future__ import annotations

from typing import Any

from ..dsl import (
    Axis,
    Expr,
    Extent,
    In,
    Out,
    Param,
    Shared,
    axes,
    axis,
    dim,
    f32,
    finite,
    i32,
    i64,
    log_sum_exp,
    minimum,
    op,
    require,
    softmax_sum,
    sum,
)
from ..dsl.errors import PagedAttentionError

# What a plan holds: the pages of its sequences, its tiles (see `paged_plan.Tiles`), their sizes.
_PLAN = Shared(
    tables=In("sequences", "width", dtype=i32, below="pages"),
    sequence=In("T", dtype=i32, below="sequences"),
    counts=In("T", dtype=i32), ends=In("T", dtype=i32), chunks=In("T", dtype=i32),
    queries=In("T", "R", dtype=i32, below="N"), limits=In("T", "R", dtype=i32),
    S=Extent(1), C=Extent(), rows=Extent(),
)  # fmt: skip

_RESULTS = (
    Out("T", "S", "Hkv", "rows", "Dv", dtype=f32, name="mean"),
    Out("T", "S", "Hkv", "rows", dtype=f32, name="lse"),
)
_SIZES = {"N": 5, "Hkv": 2, "G": 4, "pages": 7, "P": 16, "sequences": 3, "width": 4, "T": 3,
          "R": 2, "S": 2, "C": 32, "rows": 8}  # fmt: skip


class _History:
    """A key of a tile's history: where it is, and which rows keep it.

    `tile`, `split` and `row` are the axes of a score besides the head, `key` is summed; `page` and
    `slot` are where the key lies, `query` and `head` whose row it is.
    """

    def __init__(self, plan: Any) -> None:
        group, page_size = dim("G"), dim("P")
        require(plan.rows == dim("R") * group, "rows = R · G", rows=plan.rows, R=dim("R"), G=group)
        require(dim("width") > 0, "width > 0", width=dim("width"))
        self.tile = t = axes("T")
        self.split, self.row = axis("S", plan.S), axis("rows", plan.rows)
        self.key: Axis = axis("C", plan.C)
        place = self.row // group
        chunk = i64(plan.chunks[t])
        at = self.split * chunk + self.key
        column = minimum(at // page_size, dim("width") - 1)
        self.page, self.slot = i64(plan.tables[i64(plan.sequence[t]), column]), at % page_size
        self.query, self.head = i64(plan.queries[t, place]), self.row % group
        self.keep = (
            (self.key < minimum(chunk, i64(plan.ends[t]) - self.split * chunk))
            & (self.row < i64(plan.counts[t]) * group)
            & (at < i64(plan.limits[t, place]))
        )


def _attended(history: _History, score: Expr, value: Expr) -> tuple[Expr, Expr]:
    mean = softmax_sum(score, value, over=history.key, where=history.keep)
    return mean, log_sum_exp(mean)


@op(out=_RESULTS, static=("P", "G", "D", "Dv", "R", "rows"), error=PagedAttentionError,
    example=_SIZES | {"D": 64, "Dv": 64})  # fmt: skip
def paged_attention(
    query: Any = In("N", "Hkv", "G", "D"),
    key: Any = In("pages", "P", "Hkv", "D"),
    value: Any = In("pages", "P", "Hkv", "Dv"),
    plan: Any = _PLAN,
    *,
    scale: Any = Param(),
) -> Any:
    """The mean of a split of each tile's history, weights softmax(scale · query·key), and its lse.

    query [N, Hkv, G, D], key [pages, P, Hkv, D], value [pages, P, Hkv, Dv] f32, f16 or bf16, all
    the same; of each of the T tiles i32: sequence, counts (queries), ends (keys that any of them
    sees), chunks (keys of a split) [T], queries (which) and limits (keys each sees) [T, R]; tables
    [sequences, width] i32 the page of each P keys. S is the number of splits, C the greatest
    chunk, rows R · G → [T, S, Hkv, rows, Dv] and [T, S, Hkv, rows], f32. Raises
    PagedAttentionError.
    """
    require(finite(scale), "scale finite", scale=scale)
    at = _History(plan)
    h, d, e = axes("Hkv", "D", "Dv")
    product = query[at.query, h, at.head, d] * key[at.page, at.slot, h, d]
    return _attended(at, scale * sum(product, over=d), value[at.page, at.slot, h, e])


@op(out=_RESULTS, static=("P", "G", "Dv", "Dp", "R", "rows"), error=PagedAttentionError,
    example=_SIZES | {"Hkv": 1, "Dv": 64, "Dp": 16})  # fmt: skip
def paged_mla(
    query: Any = In("N", "Hkv", "G", "Dv"),
    query_position: Any = In("N", "Hkv", "G", "Dp"),
    latent: Any = In("pages", "P", "Hkv", "Dv"),
    key_position: Any = In("pages", "P", "Hkv", "Dp"),
    plan: Any = _PLAN,
    *,
    scale: Any = Param(),
) -> Any:
    """`paged_attention` with the latent rows as keys and values, and a position part of the score.

    query [N, Hkv, G, Dv], query_position [N, Hkv, G, Dp], latent [pages, P, Hkv, Dv], key_position
    [pages, P, Hkv, Dp] f32, f16 or bf16, all the same; the rest as there → [T, S, Hkv, rows, Dv]
    and [T, S, Hkv, rows], f32. Raises PagedAttentionError.
    """
    require(finite(scale), "scale finite", scale=scale)
    at = _History(plan)
    h, p, e = axes("Hkv", "Dp", "Dv")
    d = axis("rank", dim("Dv"))
    content = query[at.query, h, at.head, d] * latent[at.page, at.slot, h, d]
    place = query_position[at.query, h, at.head, p] * key_position[at.page, at.slot, h, p]
    score = scale * (sum(content, over=d) + sum(place, over=p))
    return _attended(at, score, latent[at.page, at.slot, h, e])


@op(out=Out("N", "Hkv", "G", "Dv"), static=("Dv",), error=PagedAttentionError,
    example={"N": 6, "Hkv": 2, "G": 4, "D": 8, "T": 6, "S": 4, "rows": 4, "Dv": 64})  # fmt: skip
def paged_merge(
    query: Any = In("N", "Hkv", "G", "D"),
    mean: Any = In("T", "S", "Hkv", "rows", "Dv", dtype=f32),
    lse: Any = In("T", "S", "Hkv", "rows", dtype=f32),
    tile: Any = In("N", dtype=i32, below="T"),
    slot: Any = In("N", dtype=i32),
) -> Any:
    """The splits of each query's history merged: Σₛ exp(lseₛ) · meanₛ / Σₛ exp(lseₛ).

    query [N, Hkv, G, D] f32, f16 or bf16 for its dtype; mean [T, S, Hkv, rows, Dv] and lse
    [T, S, Hkv, rows] f32; tile and slot [N] i32: a query's G rows are from slot · G on →
    [N, Hkv, G, Dv] in query's dtype, 0 where nothing was kept. Raises PagedAttentionError.
    """
    require(dim("rows") >= dim("G"), "rows ≥ G", rows=dim("rows"), G=dim("G"))
    n, h, g, s, e = axes("N", "Hkv", "G", "S", "Dv")
    t, row = i64(tile[n]), minimum(i64(slot[n]) * dim("G") + g, dim("rows") - 1)
    total = lse[t, s, h, row]
    return softmax_sum(total, mean[t, s, h, row, e], over=s, where=total > float("-inf"))


@op(out=Out("rows", "H", "D"), static=("D",), example={"rows": 5, "H": 4, "D": 64},
    error=PagedAttentionError)  # fmt: skip
def paged_copy(x: Any = In("rows", "H", "D")) -> Any:
    """x [rows, H, D] f32, f16 or bf16, as it is. Raises PagedAttentionError."""
    return x[axes("rows", "H", "D")]
