"""Loading TVM: the pair of packages this code was verified with, and never half of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..dsl.errors import CompileError

PINS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}


@lru_cache(maxsize=1)
def load_tvm() -> None:
    """Import TVM once it is known to be the right one.

    Raises CompileError on any other pair: with tvm-ffi 0.1.15 schedules can crash the process.
    """
    for name, wanted in PINS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            raise CompileError(f"needs {name}=={wanted}, got {found}: pip install {name}=={wanted}")
    with _interrupts_deferred():
        import tvm  # noqa: F401


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Ctrl-C waits: TVM imports torch where it is there, and neither survives half an import."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, Any]] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if caught and callable(former):
        former(*caught[0])
