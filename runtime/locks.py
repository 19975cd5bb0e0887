"""Locks that a forked child finds free."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

_LOCKS: weakref.WeakSet[_ForkSafeLock] = weakref.WeakSet()


class _ForkSafeLock:
    """A re-entrant lock (finalizers may run while it is held) that is made anew after a fork.

    Another thread of the parent may hold it at the moment of the fork, and no thread of the child
    would ever release it.
    """

    def __init__(self) -> None:
        self.renew()
        _LOCKS.add(self)

    def renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


def fork_safe_lock() -> _ForkSafeLock:
    """A new lock; use it with `with`."""
    return _ForkSafeLock()


def _renew_all() -> None:
    for lock in list(_LOCKS):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
