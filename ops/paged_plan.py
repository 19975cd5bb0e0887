"""The schedule of paged attention on the host: its checks, and how it is cut into tiles."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dsl.errors import PagedAttentionError
from .paged_arrays import require

Array = np.ndarray[Any, Any]
_MOST = 2**31 - 1
_ROWS = 64  # of a tile: enough to make use of each key that is loaded
_PADDING = 1.5  # rows of all tiles, at most, for each that is a query's


@dataclass(frozen=True)
class Tiles:
    """The queries in tiles of one sequence each, of at most R; T tiles, i32 on the host.

    `queries` [T, R] by number, `limits` [T, R] how many keys each sees (0 where there is none);
    `sequence`, `counts` (queries), `ends` (the greatest limit) and `chunks` (keys of a split)
    [T]; `tile` [queries] and `slot` [queries] where a query is. `keys` is the greatest chunk,
    rounded up.
    """

    sequence: Array
    counts: Array
    ends: Array
    chunks: Array
    queries: Array
    limits: Array
    tile: Array
    slot: Array
    keys: int

    def arrays(self) -> dict[str, Array]:
        """Those that a device needs, by name."""
        return {n: a for n, a in vars(self).items() if isinstance(a, np.ndarray)}


class HostPlan:
    """Which pages hold which keys, and which queries there are: checked here, once.

    Parameters
    ----------
    page_size : int
        Keys of a page.
    pages : int
        Physical pages of a cache.
    tables : integer array [sequences, n], or rows of integers of any lengths
        The physical page of each logical page of a sequence. Several may name the same one. What
        is past a sequence's length is not looked at.
    lengths : integers [sequences]
        Keys in each sequence's history, its new ones included; 0 is legal.
    sequence_ids, positions : integers [queries]
        The sequence of each query, and its position there, from 0 and below the length (0 in an
        empty sequence). A causal query sees the keys up to its position.

    Raises
    ------
    PagedAttentionError
        On values that do not fit. Nothing given is kept: arrays are copied.
    """

    def __init__(
        self,
        page_size: int,
        pages: int,
        tables: Any,
        lengths: Any,
        sequence_ids: Any,
        positions: Any,
    ) -> None:
        self.page_size = _count("page_size", page_size, 1)
        self.pages = _count("pages", pages, 0)
        self.lengths = _integers("lengths", lengths)
        self.sequence_ids = _integers("sequence_ids", sequence_ids)
        self.positions = _integers("positions", positions)
        rows = [_integers(f"tables[{i}]", row) for i, row in enumerate(_rows(tables))]
        self._check_lengths(len(rows))
        self.tables = self._reachable(rows)
        self._check_queries()
        for array in (self.lengths, self.sequence_ids, self.positions, self.tables):
            array.flags.writeable = False

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def queries(self) -> int:
        return len(self.sequence_ids)

    def _check_lengths(self, tables: int) -> None:
        require(len(self.lengths) == tables, "a length for each of the tables",
                 f"{tables} tables and {len(self.lengths)} lengths")  # fmt: skip
        _within("lengths", self.lengths, 0, _MOST)

    def _reachable(self, rows: Sequence[Array]) -> Array:
        """[sequences, width ≥ 1] i32: the pages that lengths reach, 0 elsewhere."""
        needed = -(-self.lengths // self.page_size)
        made = np.zeros((len(rows), max(1, int(needed.max(initial=0)))), np.int32)
        for i, (row, count) in enumerate(zip(rows, needed, strict=True)):
            require(len(row) >= count, f"at least {count} pages in tables[{i}] for length "
                     f"{self.lengths[i]}", len(row))  # fmt: skip
            _within(f"tables[{i}]", row[:count], 0, self.pages - 1)
            made[i, :count] = row[:count]
        return made

    def _check_queries(self) -> None:
        ids, positions = self.sequence_ids, self.positions
        require(len(ids) == len(positions), "a position for each of sequence_ids",
                 f"{len(ids)} sequence_ids and {len(positions)} positions")  # fmt: skip
        _within("sequence_ids", ids, 0, self.sequences - 1)
        bound = np.maximum(self.lengths[ids], 1)
        wrong = np.flatnonzero((positions < 0) | (positions >= bound))
        if wrong.size:
            i = int(wrong[0])
            raise PagedAttentionError(
                f"needs positions[{i}] in 0 … {bound[i] - 1}, below the length of sequence "
                f"{ids[i]}, got {positions[i]}"
            )

    def slots(self) -> Array:
        """[queries] i64: page · page_size + place in the page, where a query's key goes.

        Raises PagedAttentionError for two queries with one slot, or in an empty sequence.
        """
        ids, positions = self.sequence_ids, self.positions
        empty = ids[positions >= self.lengths[ids]]
        if empty.size:
            raise PagedAttentionError(
                f"needs lengths that include what is appended, got length 0 of sequence {empty[0]}"
            )
        page, place = np.divmod(positions, self.page_size)
        slots = self.tables[ids, page].astype(np.int64) * self.page_size + place
        order = np.argsort(slots, kind="stable")
        same = np.flatnonzero(np.diff(slots[order]) == 0)
        if same.size:
            first, second = order[same[0]], order[same[0] + 1]
            raise PagedAttentionError(
                f"needs a slot for each key that is appended, got place {place[first]} of page "
                f"{slots[first] // self.page_size} for queries {first} and {second}"
            )
        return slots

    def rows_of_tiles(self, group: int) -> int:
        """R for `group` query heads to a head of keys: large tiles, as long as they are filled."""
        counts = np.bincount(self.sequence_ids, minlength=1)
        size = 1
        while 2 * size * max(group, 1) <= _ROWS:
            tiles = int((-(-counts // (2 * size))).sum())
            if tiles * 2 * size > _PADDING * self.queries:
                break
            size *= 2
        return size

    def tiles(self, size: int, causal: bool, splits: int) -> Tiles:
        """The queries in tiles of at most `size`, histories in `splits`."""
        ids = self.sequence_ids
        limits = self.lengths[ids]
        if causal:
            limits = np.minimum(limits, self.positions + 1)
        if size == 1:  # tile i is query i
            order, tile, slot = np.arange(len(ids)), np.arange(len(ids)), np.zeros_like(ids)
        else:
            order = np.lexsort((self.positions, ids))
            tile, slot = _places(ids, order, size)
        count = int(tile.max(initial=-1)) + 1
        queries, seen = np.zeros((2, count, size), np.int64)
        queries[tile, slot], seen[tile, slot] = np.arange(len(ids)), limits
        sequence, counts = ids[queries[:, 0]], np.bincount(tile, minlength=count)
        ends = seen.max(1, initial=0)
        page = self.page_size
        # Whole pages, but no more than i32 holds: no history is longer.
        chunks = np.minimum(-(-ends // (splits * page)) * page, _MOST)
        keys = _rounded(int(chunks.max(initial=0)), page)
        made = {"sequence": sequence, "counts": counts, "ends": ends, "chunks": chunks,
                "queries": queries, "limits": seen, "tile": tile, "slot": slot}  # fmt: skip
        return Tiles(**{n: a.astype(np.int32) for n, a in made.items()}, keys=keys)


def _places(ids: Array, order: Array, size: int) -> tuple[Array, Array]:
    """The tile and the place there of each query, tiles of one sequence in `order`."""
    sorted_ids = ids[order]
    starts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
    run = np.cumsum(np.diff(sorted_ids, prepend=-1) != 0) - 1
    place = np.arange(len(ids)) - starts[run] if len(ids) else run
    opens = place % size == 0
    tile, slot = np.empty_like(ids), np.empty_like(ids)
    tile[order], slot[order] = np.cumsum(opens) - 1, place % size
    return tile, slot


def _rounded(keys: int, page: int) -> int:
    """An extent for a loop over keys that seldom changes as histories grow."""
    step = page * max(1, 1 << max(0, (keys // page).bit_length() - 4))
    return -(-keys // step) * step


def _count(name: str, value: Any, least: int) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    require(least <= number <= _MOST, f"{name} a whole number ≥ {least}", repr(value))
    return number


def _rows(tables: Any) -> list[Any]:
    if isinstance(tables, Iterable) and not (hasattr(tables, "ndim") and tables.ndim != 2):
        return list(tables)
    got = f"{tables.ndim} dims" if hasattr(tables, "ndim") else type(tables).__name__
    raise PagedAttentionError(f"needs tables of 2 dims, got {got}")


def _integers(name: str, values: Any) -> Array:
    """A copy, i64. Raises PagedAttentionError for anything but one dim of integers."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise PagedAttentionError(f"needs {name} of one dim, got {error}") from error
    require(array.ndim == 1, f"{name} of one dim", f"{array.ndim} dims")
    whole = array.dtype.kind in "iu" or not array.size
    require(whole, f"{name} of integers", array.dtype)
    return array.astype(np.int64)


def _within(name: str, values: Array, low: int, high: int) -> None:
    wrong = np.flatnonzero((values < low) | (values > high))
    if wrong.size:
        i = int(wrong[0])
        raise PagedAttentionError(f"needs {name} in {low} … {high}, got {values[i]} at {i}")
