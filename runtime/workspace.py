"""Workspace memory for kernels that need intermediates, within a budget."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from ..dsl.errors import WorkspaceError

DEFAULT_BUDGET = 1 << 30
_LOCAL = threading.local()
_LOCK = threading.Lock()
_BYTES = 0
_POISON = False


def budget() -> int:
    """The largest workspace a call may take, bytes (`RUDNN_WORKSPACE_BYTES`, default 1 GiB)."""
    return int(os.environ.get("RUDNN_WORKSPACE_BYTES", DEFAULT_BUDGET))


def check_budget(nbytes: int, limit: int, what: str) -> None:
    """Raise WorkspaceError if `nbytes` is over `limit`."""
    if nbytes > limit:
        raise WorkspaceError(f"{what} needs {nbytes} bytes of workspace, the budget is {limit}")


def arena(nbytes: int) -> Any:
    """This thread's workspace of at least `nbytes`, 64-byte aligned; contents are undefined."""
    global _BYTES
    held = getattr(_LOCAL, "arena", None)
    if held is None or held.nbytes < nbytes:
        raw = np.empty(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        fresh = raw[start : start + nbytes]
        with _LOCK:
            _BYTES += fresh.nbytes - (held.nbytes if held is not None else 0)
        held = _LOCAL.arena = fresh
    if _POISON:
        held[:nbytes] = 0xFF
    return held


def arena_bytes() -> int:
    """Bytes that threads hold as workspaces."""
    return _BYTES


def poison(on: bool) -> None:
    """Fill workspaces with NaN before each use (tests)."""
    global _POISON
    from .targets.llvm import loader

    _POISON = on
    loader.runtime().poison(on)
