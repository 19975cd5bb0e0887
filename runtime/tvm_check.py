"""The pair of TVM packages this code was verified with, checked before the first compile."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from ..dsl.errors import CompileError

PINS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}


@lru_cache(maxsize=1)
def check_versions() -> None:
    """Raises CompileError on any other pair: with tvm-ffi 0.1.15 schedules can crash the process."""
    for name, wanted in PINS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            raise CompileError(f"needs {name}=={wanted}, got {found}: pip install {name}=={wanted}")
