"""The budget for kernels' intermediates, and the workspaces of the host's threads."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import numpy as np

from ..dsl.errors import WorkspaceError
from .locks import fork_safe_lock

DEFAULT_BUDGET = 1 << 30
_LOCAL = threading.local()
_LOCK = fork_safe_lock()
_BYTES = 0
_PEAK = 0
_POISON = False


def budget() -> int:
    """The largest workspace a call may take, bytes (`RUDNN_WORKSPACE_BYTES`, default 1 GiB).

    Raises WorkspaceError if the variable is not a number.
    """
    text = os.environ.get("RUDNN_WORKSPACE_BYTES", str(DEFAULT_BUDGET))
    if not text.isdecimal():
        raise WorkspaceError(f"RUDNN_WORKSPACE_BYTES needs a number of bytes, got {text!r}")
    return int(text)


def check_budget(nbytes: int, limit: int, what: str) -> None:
    """Raise WorkspaceError if `nbytes` is over `limit`."""
    if nbytes > limit:
        raise WorkspaceError(f"{what} needs {nbytes} bytes of workspace, the budget is {limit}")


def arena(nbytes: int) -> Any:
    """This thread's workspace of at least `nbytes`, 64-byte aligned; contents are undefined."""
    held = getattr(_LOCAL, "arena", None)
    if held is None or held.nbytes < nbytes:
        raw = np.empty(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        held = _LOCAL.arena = raw[start : start + nbytes]
        _count(nbytes)
        weakref.finalize(raw, _count, -nbytes)
    if _POISON:
        held[:nbytes] = 0xFF
    return held


def _count(nbytes: int) -> None:
    global _BYTES, _PEAK
    with _LOCK:
        _BYTES += nbytes
        _PEAK = max(_PEAK, _BYTES)


def arena_bytes() -> tuple[int, int]:
    """Bytes that threads hold as workspaces now, and the greatest so far."""
    return _BYTES, _PEAK


def poison(on: bool) -> None:
    """Fill workspaces with NaN before each use (for tests)."""
    global _POISON
    _POISON = on
