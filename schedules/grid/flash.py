"""softmax_sum by tiles on grids: what a block does, whichever way the products are computed.

    block (batch.., tile of rows):
        top = −inf; total = 0; sums = 0
        for block of keys, up to the last that counts for the tile:
            scores = Σ rows · keys                          # the subclass
            scores = score expression, −inf where masked; new top; weights = exp(scores − top)
            sums   = sums · decay + Σ weights · values      # the subclass
        result = sums / total

A run of `across` threads has `high` rows of a tile, a thread `near` keys of a block and `wide`
columns of the sums. Weights pass through shared memory. A masked weight is −0.0, all others have
the sign +: a block of values that are not all finite is summed without those of masked keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...dsl.dtypes import DType, f32
from ...dsl.expr import Axis, Expr, Stage
from ...dsl.forms import LogSumExp
from ...dsl.lower import encode, select
from ...dsl.walk import free_axes, rebuild
from ..group import Group, divides, is_map
from ..rule import Config
from ..softmax import Roles, key_bounds, split
from ..terms import both, float32, int32, least
from .contraction_copy import Factor
from .contraction_view import Space
from .finite import bits, holds_odd
from .nest import GridNest
from .rolled import Rolled
from .vectors import reading

Tir = Any


@dataclass(frozen=True)
class FlashConfig(Config):
    """`rows` and `keys` of a block at a time, its `threads`.

    `across` neighbouring threads share rows. `chunk` are the indices of a depth (plain
    arithmetic), or columns of a part of the sums (matrix units), that are in shared memory at
    once; `resident`: all of the rows' own factors are there. `unit` is the matrix unit's id, ""
    for plain arithmetic.
    """

    rows: int
    keys: int
    threads: int
    across: int
    chunk: int
    resident: bool = True
    unit: str = ""


class Flash:
    """Emits the launch of one group. A subclass computes the two products."""

    weight_type: DType = f32

    def __init__(self, nest: GridNest, group: Group, found: Roles, config: FlashConfig) -> None:
        self.nest, self.group, self.roles, self.config = nest, group, found, config
        self.lower_expr = nest.emitter.lowering.expr
        self.exp = nest.emitter.lowering.math["exp"]
        self.high = config.rows * config.across // config.threads
        self.near = config.keys // config.across
        self.masked = found.node.where is not None
        self.env: dict[Axis, Tir] = {}

    # --- what a subclass says ---

    wide: int

    def key(self, c: Tir) -> Tir:
        """A thread's key number `c` within a block of keys."""
        raise NotImplementedError

    def column(self, c: int) -> Tir:
        """A thread's column number `c`."""
        raise NotImplementedError

    def begin(self) -> None:
        """Before the loop over keys."""
        raise NotImplementedError

    def multiply(self) -> None:
        """The products under the scores, for the block of keys at `self.start`."""
        raise NotImplementedError

    def product(self, number: int, i: int, c: Tir) -> Tir:
        """Where in shared memory product `number` is at a thread's row `i` and key `c`.

        The place of the first one is free for the score.
        """
        raise NotImplementedError

    def weigh(self, i: int, c: Tir, weight: Tir) -> None:
        """Keep a weight, as it is stored."""
        raise NotImplementedError

    def accumulate(self) -> None:
        """Add the weighted values to the sums, which are to be decayed."""
        raise NotImplementedError

    # --- the launch ---

    def lower(self) -> None:
        nest, roles = self.nest, self.roles
        extents = [nest.emitter.size(a.extent) for a in roles.batch]
        extents.append(nest.ceil_div(nest.emitter.size(roles.row.extent), self.config.rows))
        with nest.launch(nest.simple(nest.product(extents)), self.config.threads) as (block, _):
            *index, tile = nest.unflatten(block, extents)
            for axis, at in zip(roles.batch, index, strict=True):
                self.env[axis] = nest.hidden(axis.name, at)
            self.first = nest.hidden("first_row", tile * nest.number(self.config.rows))
            across = nest.number(self.config.across)
            self.y = nest.bind("y", nest.thread // across)
            self.x = nest.bind("x", nest.thread % across)
            self._block()

    def _block(self) -> None:
        nest = self.nest
        self._settle_all()
        count = self.high * self.wide
        self.sums = nest.private("sums", [nest.number(count)], "float32")
        self.top, self.total, self.decay, self.shift = (
            nest.private(n, [nest.number(self.high)], "float32")
            for n in ("top", "total", "decay", "shift")
        )
        self._fill(self.sums, count, 0.0)
        self._fill(self.total, self.high, 0.0)
        self._fill(self.top, self.high, float("-inf"))
        self._cells()
        self.begin()
        end = nest.opaque("keys_end", self._last_key())
        with nest.loop("block", nest.ceil_div(end, self.config.keys)) as block:
            self.block = block
            self.start = nest.bind("first_key", block * nest.number(self.config.keys))
            self.multiply()
            self._weights()
            self.accumulate()
        self._finish()

    def _cells(self) -> None:
        """What the block shares: the last block of values that are not all finite."""
        nest, zero = self.nest, self.nest.number(0)
        self.odd = nest.shared("odd", [nest.number(1)], "int32")
        with nest.when(nest.thread.equal(zero)):
            nest.store(self.odd, [zero], int32(-1))
        self.rolled = Rolled(nest).loop

    def _fill(self, buffer: Tir, count: int, value: float) -> None:
        nest = self.nest
        with nest.loop("i", nest.number(count), "unroll") as i:
            nest.store(buffer, [i], float32(value))

    def _settle_all(self) -> None:
        """The expressions of the nest, with divisions of the batch axes done once, here."""
        node = self.roles.node
        self._settled: dict[int, Expr] = {}
        self.score, self.value = self._settle(node.score), self._settle(node.value)
        self.keep = None if node.where is None else self._settle(node.where)
        self.factors = [
            (self._settle(p.row), self._settle(p.key), p.depth) for p in self.roles.products
        ]

    def _settle(self, node: Expr) -> Expr:
        found = self._settled.get(id(node))
        if found is None:
            children = tuple(self._settle(c) for c in node.children())
            found = rebuild(node, children) if children else node
            axes = free_axes(node)
            if axes and divides(node) and all(a in self.env for a in axes):
                part = Axis("part", axes[0].extent)
                self.env[part] = self.nest.hidden("part", self.lower_expr(found, self.env))
                found = part
            self._settled[id(node)] = found
        return found

    def _last_key(self) -> Tir:
        """Keys that a tile has to look at."""
        from tvm import tirx

        nest = self.nest
        keys = nest.emitter.size(self.roles.key.extent)
        rows = nest.emitter.size(self.roles.row.extent)
        last = least(self.first + nest.number(self.config.rows), rows) - nest.number(1)
        for bound in key_bounds(self.roles):
            limit = self.lower_expr(bound, self.env | {self.roles.row: last})
            keys = least(keys, tirx.max(limit, nest.number(0)))
        return keys

    # --- weights ---

    def _weights(self) -> None:
        """Scores, maxima and weights of a thread's keys; what was summed before is to decay."""
        nest, high = self.nest, range(self.high)
        self.best = nest.private("best", [nest.number(self.high)], "float32")
        self._fill(self.best, self.high, float("-inf"))
        if self.masked:
            self.kept = nest.private("kept", [nest.number(self.high)], "int32")
            for i in high:
                nest.store(self.kept, [nest.number(i)], int32(0))
        with self.rolled("score", self.near) as c:
            for i in high:
                self._score(i, c)
        for i in high:
            best = self.best[nest.number(i)]
            self._maximum(i, nest.reduce("max", best, self.config.across))
        with self.rolled("weight", self.near) as c:
            for i in high:
                self._weigh(i, c)

    def _place(self, i: int, c: Tir) -> tuple[dict[Axis, Tir], Tir]:
        """The axes at a thread's row `i` and key `c`, and whether there is such a key.

        Past the ends they are those of the last row and key.
        """
        nest, roles = self.nest, self.roles
        one = nest.number(1)
        rows, keys = (nest.emitter.size(a.extent) for a in (roles.row, roles.key))
        key = self.start + self.key(c)
        row = least(self.row(i), rows - one)
        key = nest.bind("key", key)
        return self.env | {roles.row: row, roles.key: least(key, keys - one)}, key < keys

    def row(self, i: int) -> Tir:
        """A thread's row number `i`."""
        return self.first + self.inner_row(i)

    def inner_row(self, i: int) -> Tir:
        """A thread's row number `i` within the tile."""
        return self.y * self.nest.number(self.high) + self.nest.number(i)

    def _score(self, i: int, c: Tir) -> None:
        """The score of a thread's key `c` in row `i`, in shared memory; the greatest follows."""
        nest, at = self.nest, self.nest.number(i)
        env, exists = self._place(i, c)
        fresh = {
            id(p.stage): (lambda *_, n=n: self.product(n, i, c))
            for n, p in enumerate(self.roles.products)
        }
        with reading(nest, fresh):
            value = self.lower_expr(self.score, env)
        if self.keep is not None:
            keep = both(exists, self.lower_expr(self.keep, env))
            mark = nest.bind("mark", select(keep, int32(1), int32(0)))
            nest.store(self.kept, [at], self.kept[at] | mark << c.astype("int32"))
            exists = mark != int32(0)
        score = nest.bind("score", select(exists, value, float32(float("-inf")), self.score))
        place = self.product(0, i, c)
        nest.store(place.source, place.indices, score)
        best = self.best[at]
        nest.store(self.best, [at], select(score > best, score, best))

    def _maximum(self, i: int, best: Tir) -> None:
        """Take the maximum of a block's scores in row `i`."""
        nest, at = self.nest, self.nest.number(i)
        before = nest.bind("before", self.top[at])
        top = nest.bind("top", select(best > before, best, before))
        shift = select(top.equal(float32(float("-inf"))), float32(0.0), top)
        nest.store(self.shift, [at], shift)
        nest.store(self.decay, [at], self.exp(before - self.shift[at]))
        nest.store(self.top, [at], top)
        nest.store(self.total, [at], self.total[at] * self.decay[at])

    def _weigh(self, i: int, c: Tir) -> None:
        nest, at = self.nest, self.nest.number(i)
        weight = nest.bind("weight", self.exp(self.product(0, i, c) - self.shift[at]))
        nest.store(self.total, [at], self.total[at] + weight)
        stored = weight
        if self.masked:
            kept = (self.kept[at] >> c.astype("int32") & int32(1)) != int32(0)
            stored = select(kept, weight, float32(-0.0))
        self.weigh(i, c, encode(stored.astype(self._weight_value()), self.weight_type))

    def _weight_value(self) -> str:
        """The type that `encode` takes weights in."""
        return "float16" if self.weight_type.name == "float16" else "float32"

    def masked_weight(self, stored: Tir) -> Tir:
        """Whether a weight, as it is stored, is that of a masked key."""
        found = bits(stored, self.weight_type)
        return found < int32(0) if self.weight_type == f32 else found >= int32(2**15)

    # --- values ---

    def note_odd(self, values: Factor, mark: Tir) -> None:
        """Leave `mark` in shared memory if a value that the thread holds is not finite."""
        if not self.masked:
            return
        with self.nest.when(holds_odd(self.nest, values, self.weight_type)):
            self.nest.store(self.odd, [self.nest.number(0)], mark)

    def space(self, k: Axis) -> Space:
        made = Space(self.nest, (k,))
        made.env = self.env
        return made

    # --- results ---

    def _finish(self) -> None:
        """Divide, apply what follows, store."""
        nest, zero = self.nest, self.nest.number(0)
        _, heads, _ = split(self.group)
        rows = nest.emitter.size(self.roles.row.extent)
        for i in range(self.high):
            at = nest.number(i)
            total = nest.bind("row_total", nest.reduce("sum", self.total[at], self.config.across))
            empty = total.equal(float32(0.0))
            scale = select(empty, float32(0.0), float32(1.0) / total)
            scale = nest.bind("row_scale", scale)
            row = nest.bind("row", self.row(i))
            env = self.env | {self.roles.row: row}
            with nest.when(row < rows):
                for stage in self.group.outputs:
                    if isinstance(stage.expr, LogSumExp):
                        log = self.shift[at] + nest.emitter.lowering.math["log"](total)
                        log = select(empty, float32(float("-inf")), log)
                        with nest.when(self.x.equal(zero)):
                            nest.write(stage, [env[a] for a in stage.axes], log)
                    else:
                        self._finish_row(stage, heads, env, i, (empty, scale))

    def _finish_row(self, stage: Stage, heads: Sequence[Stage], env: dict[Axis, Tir], i: int,
                    statistics: tuple[Tir, Tir]) -> None:  # fmt: skip
        nest, columns = self.nest, self.nest.emitter.size(self.roles.column.extent)
        empty, scale = statistics
        for c in range(self.wide):
            column = self.column(c)
            with nest.when(column < columns):
                here = env | {self.roles.column: column}
                found = self.sums[nest.number(i * self.wide + c)] * scale
                value = nest.bind("mean", select(empty, float32(0.0), found))
                if is_map(stage):
                    with reading(nest, {id(h): (lambda *_, v=value: v) for h in heads}):
                        value = self.lower_expr(stage.expr, here)
                nest.write(stage, [here[a] for a in stage.axes], value)
