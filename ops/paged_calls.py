"""Paged attention as called: plans on a device, workspaces for split histories."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ..dsl.dtypes import DType, f32
from ..dsl.errors import PagedAttentionError, WorkspaceError
from ..runtime.settings import flag, number
from . import paged_attention as declared
from .paged_append import is_shared, write
from .paged_arrays import Place, require, require_array
from .paged_plan import HostPlan, Tiles

WORKSPACE_BYTES = 64 << 20
_FEWEST_SPLITS, _MOST_SPLITS = 2, 32
_DEPTH, _POSITION = 1024, 256  # the most elements of a head, of a position part
_SPLIT_KEYS = 256  # a split is worth its merge from this many keys on
_TASKS = 2  # of a launch, for each core, so that all are busy to the end


def _depth(name: str, size: int, most: int) -> None:
    require(1 <= size <= most, f"{name} in 1 … {most}", size)


def _scale(value: Any) -> None:
    scale = number(value)
    fits = scale is not None and math.isfinite(scale) and scale > 0
    require(fits, "scale finite and > 0", value)


class SplitWorkspace:
    """Memory for the parts of histories that are attended to in `splits` pieces.

    Parameters
    ----------
    q : array
        Says what kind of array, device and queue the workspace is for; it is not kept.
    queries, heads, value_dim : int
        Of the queries: q's first two dims, and the last of the result (the rank for MLA).
    splits : int
        2 … 32.

    Raises
    ------
    PagedAttentionError
        On sizes that do not fit.
    WorkspaceError
        Over 64 MiB. Nothing was allocated then.
    """

    def __init__(self, q: Any, queries: int, heads: int, value_dim: int, splits: int) -> None:
        sizes = {"queries": queries, "heads": heads, "value_dim": value_dim}
        for name, size in sizes.items():
            whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
            require(whole and size >= 0, f"{name} a whole number", repr(size))
        self.splits = _splits(splits)
        _depth("value_dim", value_dim, _DEPTH)
        self.shape = (int(queries), int(heads), int(value_dim))
        # Python's numbers from here on: those of NumPy overflow.
        queries, heads, value_dim = self.shape
        self._bytes = 4 * queries * self.splits * heads * (value_dim + 1)
        if self._bytes > WORKSPACE_BYTES:
            told = ", ".join(f"{n}={s}" for n, s in sizes.items())
            raise WorkspaceError(
                f"needs a split workspace of at most {WORKSPACE_BYTES} bytes, got {self._bytes} "
                f"for {told}, splits={splits}"
            )
        self.place = Place(q, "q")
        self._mean = self.place.empty((queries, self.splits, heads, value_dim), f32)
        self._lse = self.place.empty((queries, self.splits, heads), f32)

    def bytes(self) -> int:
        """What it holds."""
        return self._bytes

    def parts(self, kv_heads: int) -> tuple[Any, Any]:
        """The memory as the results of the declared operators, a tile a query."""
        queries, heads, depth = self.shape
        shape = (queries, self.splits, kv_heads, heads // kv_heads)
        return self._mean.reshape(*shape, depth), self._lse.reshape(*shape)


def _splits(splits: Any) -> int:
    whole = isinstance(splits, (int, np.integer)) and not isinstance(splits, bool)
    fits = whole and _FEWEST_SPLITS <= splits <= _MOST_SPLITS
    require(fits, f"splits in {_FEWEST_SPLITS} … {_MOST_SPLITS}", repr(splits))
    return int(splits)


class DevicePlan:
    """A plan on a device: reusable there, on its queue, for as long as the schedule holds.

    Made by `upload`. It keeps the host's plan and its own arrays, no tensor of a caller.
    """

    def __init__(self, host: HostPlan, place: Place) -> None:
        self.host, self.place = host, place
        self._tables = place.put(host.tables)
        self._tiles: dict[tuple[int, bool, int], tuple[Tiles, dict[str, Any]]] = {}

    @classmethod
    def upload(cls, host: HostPlan, like: Any) -> DevicePlan:
        """The plan where `like` is: its device and its queue, which calls are held to."""
        return cls(host, Place(like, "like"))

    def attention(
        self, q: Any, k: Any, v: Any, scale: float, causal: bool, *, out: Any = None
    ) -> Any:
        """Attention of packed queries to their sequences' pages.

        Parameters
        ----------
        q : array [queries, Hq, D], f32, f16 or bf16
        k, v : array [pages, page_size, Hkv, D] and [pages, page_size, Hkv, Dv] of q's dtype
            Hq divisible by Hkv, D and Dv 1 … 1024. All contiguous. What no sequence reaches may
            hold anything; the rest is finite.
        scale : float
            Factor of the scores, finite and > 0.
        causal : bool
            Whether a query sees keys up to its position only, else its sequence's whole length.
        out : array [queries, Hq, Dv], optional

        Returns
        -------
        array [queries, Hq, Dv] in q's dtype, 0 for a query that sees no key. Few queries with long
        histories have those split among the device's cores.

        Raises
        ------
        PagedAttentionError
            On shapes, strides, dtypes or numbers that do not fit.
        DeviceError
            On tensors that are not where the plan is.
        """
        return self._attention(q, k, v, scale, causal, None, out)

    def attention_with_workspace(
        self, q: Any, k: Any, v: Any, scale: float, causal: bool, workspace: SplitWorkspace,
        *, out: Any = None,
    ) -> Any:  # fmt: skip
        """`attention` with each history in the workspace's number of splits, merged in f32."""
        return self._attention(q, k, v, scale, causal, workspace, out)

    def mla(
        self, q: Any, qp: Any, latent: Any, kp: Any, scale: float, causal: bool, *, out: Any = None
    ) -> Any:
        """Multi-head latent attention with absorbed projections.

        Parameters
        ----------
        q, qp : array [queries, H, R] and [queries, H, P], f32, f16 or bf16
            Absorbed queries, and their position parts; R 1 … 1024, P 1 … 256.
        latent, kp : array [pages, page_size, 1, R] and [pages, page_size, 1, P] of q's dtype
        scale : float
            That of the original model, finite and > 0: not 1/√R.
        causal, out : see `attention`

        Returns
        -------
        array [queries, H, R] in q's dtype: the compressed context, Σⱼ wⱼ · latentⱼ with weights
        softmax(scale · (q·latent + qp·kp)).

        Raises
        ------
        PagedAttentionError, DeviceError
            As `attention`.
        """
        return self._mla(q, qp, latent, kp, scale, causal, None, out)

    def mla_with_workspace(
        self, q: Any, qp: Any, latent: Any, kp: Any, scale: float, causal: bool,
        workspace: SplitWorkspace, *, out: Any = None,
    ) -> Any:  # fmt: skip
        """`mla` with each history in the workspace's number of splits, merged in f32."""
        return self._mla(q, qp, latent, kp, scale, causal, workspace, out)

    def append(self, k: Any, v: Any, key_cache: Any, value_cache: Any) -> tuple[Any, Any]:
        """Put each query's new key and value where its position is; the caches to go on with.

        Parameters
        ----------
        k, v : array [queries, Hkv, D] and [queries, Hkv, Dv]
        key_cache, value_cache : array [pages, page_size, Hkv, D] and [pages, page_size, Hkv, Dv]
            All contiguous, of one dtype. A cache is written in place and returned if the caller's
            one reference is the only one to its memory. If there are others (a second name or a
            container, a view, other owners), or it is read-only, a copy is written and returned.
            Pages that sequences share are the scheduler's to copy.

        Raises
        ------
        PagedAttentionError
            On shapes, strides or dtypes that do not fit, or two queries with one slot. Nothing was
            written then.
        DeviceError
            On tensors that are not where the plan is.
        """
        references = sys.getrefcount(key_cache), sys.getrefcount(value_cache)
        host = self.host
        shape, dtype = require_array("k", k, "queries Hkv D", (host.queries, None, None))
        pages = (host.pages, host.page_size, shape[1])
        require_array("key_cache", key_cache, "pages page_size Hkv D", (*pages, shape[2]), dtype)
        shape, _ = require_array("v", v, "queries Hkv Dv", (host.queries, shape[1], None), dtype)
        layout = "pages page_size Hkv Dv"
        require_array("value_cache", value_cache, layout, (*pages, shape[2]), dtype)
        given = {"k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache}
        for name, array in given.items():
            self.place.require("plan", array, name)
        del given, array
        slots = host.slots()
        if not len(slots):
            return key_cache, value_cache
        copied = is_shared(key_cache, references[0]), is_shared(value_cache, references[1])
        return (
            write(key_cache, k, slots, copied[0]), write(value_cache, v, slots, copied[1])
        )  # fmt: skip

    def splits(self, group: int) -> int:
        """How many parts `attention` cuts a history into, for heads of keys shared by `group`.

        As many as keep all cores busy where queries are few and a history is long, else 1. A core
        may take all heads of a key.
        """
        tiles = -(-self.host.queries // self.host.rows_of_tiles(group))
        wanted = _TASKS * self.place.device.capability.cores
        longest = int(self.host.lengths.max(initial=0))
        count = min(-(-wanted // max(tiles, 1)), longest // _SPLIT_KEYS, _MOST_SPLITS)
        return count if count >= _FEWEST_SPLITS else 1

    def _attention(
        self, q: Any, k: Any, v: Any, scale: float, causal: bool,
        workspace: SplitWorkspace | None, out: Any,
    ) -> Any:  # fmt: skip
        host = self.host
        shape, dtype = require_array("q", q, "queries Hq D", (host.queries, None, None))
        heads, depth = shape[1:]
        _depth("D", depth, _DEPTH)
        pages = (host.pages, host.page_size)
        keys, _ = require_array("k", k, "pages page_size Hkv D", (*pages, None, depth), dtype)
        shared = keys[2]
        require(shared > 0 and heads % shared == 0, "Hq divisible by Hkv",
                 f"Hq={heads}, Hkv={shared}")  # fmt: skip
        values, _ = require_array("v", v, "pages page_size Hkv Dv", (*pages, shared, None), dtype)
        _depth("Dv", values[3], _DEPTH)
        self._check(scale, causal, {"q": q, "k": k, "v": v})
        return self._run(
            declared.paged_attention, (q,), (k, v), (shared, values[3]), scale, causal,
            workspace, out, dtype,
        )  # fmt: skip

    def _mla(
        self, q: Any, qp: Any, latent: Any, kp: Any, scale: float, causal: bool,
        workspace: SplitWorkspace | None, out: Any,
    ) -> Any:  # fmt: skip
        host = self.host
        shape, dtype = require_array("q", q, "queries H R", (host.queries, None, None))
        heads, rank = shape[1:]
        _depth("R", rank, _DEPTH)
        place, _ = require_array("qp", qp, "queries H P", (host.queries, heads, None), dtype)
        _depth("P", place[2], _POSITION)
        pages = (host.pages, host.page_size, 1)
        require_array("latent", latent, "pages page_size 1 R", (*pages, rank), dtype)
        require_array("kp", kp, "pages page_size 1 P", (*pages, place[2]), dtype)
        self._check(scale, causal, {"q": q, "qp": qp, "latent": latent, "kp": kp})
        return self._run(
            declared.paged_mla, (q, qp), (latent, kp), (1, rank), scale, causal, workspace, out,
            dtype,
        )  # fmt: skip

    def _check(self, scale: Any, causal: Any, arrays: dict[str, Any]) -> None:
        _scale(scale)
        flag("causal", causal, PagedAttentionError)
        for name, array in arrays.items():
            self.place.require("plan", array, name)

    def _run(
        self, operator: Any, queries: tuple[Any, ...], caches: tuple[Any, ...],
        sizes: tuple[int, int], scale: float, causal: bool, workspace: SplitWorkspace | None,
        out: Any, dtype: DType,
    ) -> Any:  # fmt: skip
        (kv_heads, value_dim), (count, heads, _) = sizes, queries[0].shape
        shape = (count, heads, value_dim)
        if out is not None:
            require_array("out", out, "queries heads value_dim", shape, dtype)
            self.place.require("plan", out, "out")
        group = heads // kv_heads
        parts = self._parts(workspace, shape, kv_heads)
        size = 1 if workspace is not None else self.host.rows_of_tiles(group)
        splits = workspace.splits if workspace is not None else self.splits(group)
        tiles, arrays = self._tiled(size, causal, splits)
        grouped = [a.reshape(count, kv_heads, group, a.shape[2]) for a in queries]
        schedule = {n: arrays[n] for n in operator.inputs if n in arrays}
        mean, lse = operator(
            *grouped, *caches, **schedule, scale=float(scale), S=splits, C=tiles.keys,
            rows=size * group, out=parts,
        )  # fmt: skip
        target = None if out is None else out.reshape(count, kv_heads, group, value_dim)
        made = declared.paged_merge(
            grouped[0], mean, lse, arrays["tile"], arrays["slot"], out=target
        )
        return made.reshape(*shape) if out is None else out

    def _parts(
        self, workspace: SplitWorkspace | None, shape: tuple[int, ...], kv_heads: int
    ) -> tuple[Any, Any] | None:
        if workspace is None:
            return None
        require(workspace.shape == shape, f"a workspace for [queries, heads, value_dim] = "
                 f"{list(shape)}", list(workspace.shape))  # fmt: skip
        mean, lse = workspace.parts(kv_heads)
        self.place.require("plan", mean, "workspace")
        return mean, lse

    def _tiled(self, size: int, causal: bool, splits: int) -> tuple[Tiles, dict[str, Any]]:
        """The tiles and their arrays here, kept for the next call."""
        key = (size, causal, splits)
        found = self._tiles.get(key)
        if found is None:
            tiles = self.host.tiles(size, causal, splits)
            arrays = {n: self.place.put(a) for n, a in tiles.arrays().items()}
            found = self._tiles[key] = (tiles, arrays | {"tables": self._tables})
        return found
