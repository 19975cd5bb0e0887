"""TVM's warnings about a ROCm installation that nothing here needs, kept off the error stream."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NOISE = re.compile(
    rb"^\[[\d:]+\] [^\n]*: Warning: (?:Unable to detect ROCm version|"
    rb"Cannot get maximum number of threads for AMD codegen)[^\n]*\n",
    re.M,
)


@contextmanager
def quiet() -> Iterator[None]:
    """What is written to the error stream inside comes out after it, those warnings left out.

    Only where no other thread runs: it could start a process whose errors would be lost.
    """
    try:
        kept = os.dup(2) if threading.active_count() == 1 else None
    except OSError:  # there is no error stream
        kept = None
    if kept is None:
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            rest = _NOISE.sub(b"", caught.read())
            while rest:
                rest = rest[os.write(2, rest) :]
