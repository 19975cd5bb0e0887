"""The packed loop nest of a contraction: ``C = epilogue(sum_k A(b, m, k) * B(b, n, k))`` in f32.

The loop nest is the classic packed one. B lies in *panels* ``[N/nr, K, nr]`` and A in *tiles* of
``mr`` rows, so that the innermost loop walks both at unit stride whatever the operands' strides,
dtypes and transposes were, and keeps an ``mr x nr`` block of C in registers over the whole of K::

    parallel task in (batch, row block, group of panels):
        pack the row block of A                          # mc x K, stays in L2
        for panel in group:                              # K x nr, stays in L1/L2
            for tile in row block:                       # mr rows
                acc[mr, nr] = 0
                for k: acc += A_tiles[.., k] (x) B_panels[k, ..]
                C[tile, panel] = epilogue(acc)           # guarded at the edges of C

Each element of C is one chain of fused multiply-adds over k in order, by one thread: the bits
depend neither on the number of threads nor on how tasks are dealt out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..capability import Capability
from ..rule import Config

if TYPE_CHECKING:
    from tvm.te import Tensor

Expr = Any  # a TIR expression, or an int where a static extent is meant
Read = Callable[[Sequence[Expr], Expr, Expr], Expr]
TRANSPOSE = 4  # edge of the square that packing transposes in registers
Epilogue = Callable[[Sequence[Expr], Expr, Expr, Expr], Expr]


@dataclass(frozen=True)
class PackedConfig(Config):
    """The shape of the nest; every value is a compile-time constant.

    Parameters
    ----------
    mr, nr : int
        Register tile: ``mr * nr / lanes`` accumulators, plus ``nr / lanes`` vectors of B and one
        broadcast of A, must fit the register file. ``nr`` is a multiple of ``lanes`` and is the
        only part of the configuration that the layout of packed weights depends on.
    mc : int
        Rows in a row block, a multiple of ``mr``.
    lanes : int
        f32 lanes of a vector.
    panels : int or None
        Panels of B in a task; None: all. Fewer give more tasks, for M of few row blocks, and each
        packs the row block again, a copy that 2 panels already outweigh tenfold.
    k_step : int
        Depth of the strips in which B is transposed into panels.
    """

    mr: int
    nr: int
    mc: int
    lanes: int
    panels: int | None = None
    k_step: int = 64

    def __post_init__(self) -> None:
        if self.nr % self.lanes or self.mc % self.mr:
            raise ValueError(f"nr must divide into lanes and mc into mr: {self}")

    @classmethod
    def default(
        cls, caps: Capability, *, m: int | None = None, n: int | None = None, k: int | None = None
    ) -> PackedConfig:
        """Choose from the machine and the extents that are known (None: dynamic).

        `nr` depends on the machine alone, so one packed weight serves every configuration.
        """
        lanes, nr = caps.lanes(), caps.panel_width
        mr = 8 if nr == 3 * lanes else 6
        if m is not None and m <= 4:
            mr = 4
        # B is streamed from L3 once per row block: tall blocks, while they fit L2 and there are
        # enough of them to deal out evenly, save bandwidth.
        mc = 64 // mr * mr
        tall = 2 * mc
        if m is not None and m >= 2 * caps.cores * tall:
            mc = tall if k is None or tall * k * 4 <= caps.l2_bytes else mc
        row_blocks = 2 if m is None else max(-(-m // mc), 1)
        groups = -(-4 * caps.cores // row_blocks)
        if m is not None and row_blocks >= 8 * caps.cores:
            panels = None
        elif n is None:
            panels = 8
        else:
            panels = max(-(-n // nr) // groups, 1)
        return cls(mr, nr, mc, lanes, panels)


@dataclass(frozen=True)
class Nest:
    """The TE tensors of one contraction, and what `schedule` has to know of them.

    `panels` is packed B, None where B came packed.
    """

    config: PackedConfig
    name: str
    out: Tensor
    panels: Tensor | None
    a_by_columns: bool
    b_by_columns: bool

    def block(self, part: str) -> str:
        """Name of the block of a stage: ``a``, ``b``, ``acc``, ``tile`` or ``out``."""
        return self.name if part == "out" else f"{self.name}_{part}"


def i64(x: Expr) -> Expr:
    """A static extent as an int64 immediate; expressions pass through."""
    from tvm import tirx

    return tirx.IntImm("int64", x) if isinstance(x, int) else x


def ceil_div(a: Expr, b: int) -> Expr:
    """ceil(a / b) for a >= 0, as floor((a - 1) / b) + 1.

    The usual (a + b - 1) // b is one that the region analysis cannot compare with the
    ``[0, a)`` it covers, and then refuses every `compute_at`.
    """
    from tvm import tirx

    return tirx.floordiv(i64(a) - 1, i64(b)) + 1


def panel_shape(
    n: Expr, k: Expr, config: PackedConfig, batch: Sequence[Expr] = ()
) -> tuple[Expr, ...]:
    """Shape of packed B: ``[batch.., ceil(N / nr), K, nr]`` f32, columns past N hold zeros."""
    return (*map(i64, batch), ceil_div(n, config.nr), i64(k), i64(config.nr))


def pack_panels(
    b: Read, n: Expr, k: Expr, config: PackedConfig, *, batch: Sequence[Expr] = (), name: str
) -> Tensor:
    """The stage that packs ``B(b, n, k)`` into `panel_shape`."""
    from tvm import te, tirx

    nr, n = i64(config.nr), i64(n)

    def element(*index: Expr) -> Expr:
        *at, panel, kk, lane = index
        col = panel * nr + lane
        return tirx.if_then_else(col < n, b(at, col, kk), tirx.const(0.0, "float32"))

    return te.compute(panel_shape(n, k, config, batch), element, name)


def contraction(
    a: Read,
    b: Read | Tensor,
    m: Expr,
    n: Expr,
    k: Expr,
    epilogue: Epilogue,
    config: PackedConfig,
    *,
    batch: Sequence[Expr] = (),
    b_batch: Sequence[int] = (),
    shape: Sequence[Expr] | None = None,
    where: Callable[..., tuple[Sequence[Expr], Expr, Expr]] | None = None,
    a_by_columns: bool = False,
    b_by_columns: bool = False,
    name: str = "C",
) -> Nest:
    """Declare the stages of a contraction.

    Parameters
    ----------
    a : callable
        ``a(b, m, k)`` gives an f32 expression; it is read once per element and group of tasks.
    b : callable or Tensor
        ``b(b, n, k)`` gives an f32 expression; or B already packed, of `panel_shape`.
    m, n, k : Expr
        Extents, ints or int64 expressions. Zero is allowed; ``K == 0`` sums to 0.
    epilogue : callable
        ``epilogue(b, m, n, acc)`` gives an element of C, in C's dtype.
    batch : sequence of Expr
        Leading extents of C.
    b_batch : sequence of int
        Positions of the batch dims that B has too; the others share it.
    shape, where : optional
        C's shape and a function from an index of C to ``(b, m, n)``, where C's dims are not
        ``[batch.., m, n]``; n must be the last.
    a_by_columns, b_by_columns : bool
        Whether the unit stride of A is m, of B is n, rather than k. A hint for packing: the
        results are the same.
    """
    from tvm import te, tirx

    m, n, k = i64(m), i64(n), i64(k)
    batch = tuple(map(i64, batch))
    mr, nr = i64(config.mr), i64(config.nr)
    tiles, panels = ceil_div(m, config.mr), ceil_div(n, config.nr)
    packs_b = callable(b) and not isinstance(b, te.Tensor)
    if packs_b:
        packed = pack_panels(b, n, k, config, batch=[batch[i] for i in b_batch], name=f"{name}_b")
    else:
        packed = b

    def a_element(*index: Expr) -> Expr:
        *at, tile, i, kk = index
        row = tile * mr + i
        return tirx.if_then_else(row < m, a(at, row, kk), tirx.const(0.0, "float32"))

    a_tiles = te.compute((*batch, tiles, mr, k), a_element, f"{name}_a")
    kk = te.reduce_axis((i64(0), k), "k")

    def product(*index: Expr) -> Expr:
        *at, tile, panel, i, j = index
        right = packed[(*(at[i] for i in b_batch), panel, kk, j)]
        return te.sum(a_tiles[(*at, tile, i, kk)] * right, axis=kk)

    grid = (*batch, tiles, panels, mr, nr)
    acc = te.compute(grid, product, f"{name}_acc")
    tile = te.compute(grid, lambda *index: acc[index], f"{name}_tile")

    def element(*index: Expr) -> Expr:
        at, i, j = where(*index) if where is not None else (index[:-2], index[-2], index[-1])
        div, mod = tirx.floordiv, tirx.floormod
        return epilogue(at, i, j, tile[(*at, div(i, mr), div(j, nr), mod(i, mr), mod(j, nr))])

    out = te.compute((*batch, m, n) if shape is None else tuple(shape), element, name)
    return Nest(config, name, out, packed if packs_b else None, a_by_columns, b_by_columns)


def schedule(sch: Any, c: Nest) -> None:
    """Schedule the stages of `c`, in place, on an ``s_tir.Schedule`` that holds them.

    Vectorised loops keep their edge predicates: run `split_vector_guards` before
    `VectorizeLoop`, which else turns a predicated vector loop into a scalar one.
    """
    if c.panels is not None:
        schedule_panels(sch, c.block("b"), c.config, by_columns=c.b_by_columns)
    task, tile_loop, k = _tile_loops(sch, c)
    _pack_a(sch, c, task)
    _write_back(sch, c, tile_loop)
    sch.decompose_reduction(sch.get_sblock(c.block("acc")), k)


def schedule_panels(
    sch: Any, block: str, config: PackedConfig, *, by_columns: bool = False
) -> None:
    """Pack B in strips.

    before::  for b.., panel, k, j: panels[..] = B
    after::   parallel (b.., panel, k / step): for j / 4, k % step / 4:
                  unrolled k % 4: vector j % 4: panels[..] = B

    Strips are parallel, so that one wide panel is spread as well, and long enough in k for the
    prefetcher, because the rows they cross may be a power of two apart. LLVM turns the
    4 x 4 core into loads along k and shuffles. With `by_columns` (B's unit stride is n) the copy
    is plain: ``for k % step, j / lanes: vector j % lanes``.
    """
    *outer, k, j = sch.get_loops(sch.get_sblock(block))
    strip, step = sch.split(k, [None, config.k_step])
    if by_columns:
        _, lane = sch.split(j, [None, config.lanes])
    else:
        j, lane = sch.split(j, [None, TRANSPOSE])
        step, across = sch.split(step, [None, TRANSPOSE])
        sch.reorder(*outer, strip, j, step, across, lane)
        sch.unroll(across)
    sch.vectorize(lane)
    sch.parallel(sch.fuse(*outer, strip))


def _tile_loops(sch: Any, c: Nest) -> tuple[Any, Any, Any]:
    """Tile the accumulation.

    before::  for b.., tile, panel, i, j, k: acc += ..
    after::   parallel task = (b.., tile / T, panel / P):
                  for panel % P, tile % T, k: unrolled i, j / lanes: vector j % lanes: acc += ..

    with ``T = mc / mr`` tiles in a row block. The guards ``tile < tiles`` and ``panel < panels``
    of the splits do not depend on k and are hoisted out of it.
    Returns the task loop, the tile loop (mr x nr of C inside) and k.
    """
    cfg = c.config
    acc = sch.get_sblock(c.block("acc"))
    *batch, tile, panel, i, j, k = sch.get_loops(acc)
    row_block, tile = sch.split(tile, [None, cfg.mc // cfg.mr])
    group, panel = sch.split(panel, [None, cfg.panels] if cfg.panels else [1, None])
    vec, lane = sch.split(j, [cfg.nr // cfg.lanes, cfg.lanes])
    sch.reorder(*batch, row_block, group, panel, tile, k, i, vec, lane)
    task = sch.fuse(*batch, row_block, group)
    sch.parallel(task)
    sch.unroll(i)
    sch.unroll(vec)
    sch.vectorize(lane)
    sch.set_scope(acc, 0, "local")
    return task, tile, k


def _pack_a(sch: Any, c: Nest, task: Any) -> None:
    """Pack A by rows.

    before::  for b.., tile, i, k: tiles[..] = A
    after::   inside the task:
                  for tile % T, i, k / lanes: vector k % lanes: tiles[..] = A

    Rows stay rows: the copy is vectorised (casts included), and the micro-kernel broadcasts from
    mr streams, which costs the same as from one. Where A's unit stride is m, the core is a
    4 x 4 transpose: ``for tile % T, i / 4, k / 4: unrolled i % 4: vector k % 4``.
    """
    cfg = c.config
    block = sch.get_sblock(c.block("a"))
    sch.compute_at(block, task)
    *_, i, k = sch.get_loops(block)
    by_columns = c.a_by_columns and cfg.mr % TRANSPOSE == 0
    k, lane = sch.split(k, [None, TRANSPOSE if by_columns else cfg.lanes])
    if by_columns:
        i, across = sch.split(i, [None, TRANSPOSE])
        sch.reorder(i, k, across, lane)
        sch.unroll(across)
    sch.vectorize(lane)


def _write_back(sch: Any, c: Nest, tile_loop: Any) -> None:
    """Spill the accumulators, then apply the epilogue from memory.

    before::  for ..: tile[..] = acc[..];  for b.., m, n: C = epilogue(tile[..])
    after::   at the end of the tile loop:
                  unrolled i, j / lanes: vector: tile = acc
                  for i, j / lanes: vector j % lanes: if m < M and n < N: C = epilogue(tile)

    Only the copy is unrolled with the register tile; the epilogue is a short loop, so a long one
    (a polynomial) is compiled once and not mr * nr / lanes times.
    """
    lanes = c.config.lanes
    tile = sch.get_sblock(c.block("tile"))
    sch.reverse_compute_at(tile, tile_loop)
    sch.set_scope(tile, 0, "local")
    *_, i, j = sch.get_loops(tile)
    vec, lane = sch.split(j, [None, lanes])
    sch.unroll(i)
    sch.unroll(vec)
    sch.vectorize(lane)
    out = sch.get_sblock(c.block("out"))
    sch.reverse_compute_at(out, tile_loop)
    *_, j = sch.get_loops(out)
    _, lane = sch.split(j, [None, lanes])
    sch.vectorize(lane)
