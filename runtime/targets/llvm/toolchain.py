"""The C compiler: links kernels and builds the native runtime, once, into the compile cache.

Which compiler: the command in ``RUDNN_CC``, where ``none`` means to do without; else the first that
is there of ``CC``, ``cc``, ``gcc``, ``clang`` and the Python package ``ziglang``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from ....dsl.errors import CompileError
from ...cache import DiskCache, Entry
from ...locks import fork_safe_lock

NATIVE = Path(__file__).parent / "native"
EMBED_FILES = ("rudnn_runtime.c", "rudnn_runtime.h", "rudnn_kernel.h")  # compile only the .c
RUNTIME_LIBRARY = "librudnn_runtime.so"
KERNEL_OBJECT = "rudnn_kernel.o"  # goes into each kernel library

_CFLAGS = ("-std=c11", "-O2", "-fPIC", "-pthread")
_build_lock = fork_safe_lock()  # other processes: the cache's first writer wins


def find_compiler() -> tuple[str, ...] | None:
    """The command that starts the C compiler, or None. Costs about 1 us after the first call."""
    return _find(os.environ.get("RUDNN_CC"), os.environ.get("CC"), os.environ.get("PATH"))


@functools.lru_cache(maxsize=8)
def _find(forced: str | None, cc: str | None, path: str | None) -> tuple[str, ...] | None:
    if forced == "none":
        return None
    for text in (forced, cc) if forced else (cc, "cc", "gcc", "clang"):
        command = tuple(shlex.split(text or ""))
        if command and shutil.which(command[0], path=path):
            return command
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "cc")
    return None


def run_compiler(arguments: Sequence[str | os.PathLike[str]]) -> None:
    """Run the compiler; CompileError with its messages if it fails or there is none."""
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("needs a C compiler (cc, gcc, clang or `pip install ziglang`), got none")
    command = [*compiler, *(os.fspath(argument) for argument in arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CompileError(f"cannot start the C compiler {compiler[0]}: {error}") from error
    if done.returncode != 0:
        raise CompileError(f"{shlex.join(command)} failed:\n{(done.stderr or done.stdout).strip()}")


def link(objects: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Link ``objects`` into the shared library ``out``, replacing it in one step.

    Never in place: a process may have the old one mapped. Raises CompileError.
    """
    out = Path(out)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    # a kernel's pointer variables are its own, whatever else the process has loaded
    own = () if sys.platform == "darwin" else ("-Wl,-Bsymbolic",)
    try:
        run_compiler(["-shared", *own, "-o", temporary, *objects, "-lm"])
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return out


@functools.cache
def runtime_key() -> str:
    """Cache key of the native runtime: its sources and this machine, not the compiler."""
    text = repr((_CFLAGS, platform.system(), platform.machine(), sys.maxsize))
    parts = [text.encode(), *((NATIVE / name).read_bytes() for name in EMBED_FILES)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def build_runtime(cache: DiskCache) -> Entry:
    """The entry holding ``RUNTIME_LIBRARY`` and ``KERNEL_OBJECT``, built if it is not there yet.

    Building takes about 0.3 s. Safe under many threads and processes. Raises CompileError.
    """
    with _build_lock:
        if entry := cache.get(runtime_key()):
            return entry
        with tempfile.TemporaryDirectory(prefix="rudnn-") as folder:
            library, kernel = Path(folder, RUNTIME_LIBRARY), Path(folder, KERNEL_OBJECT)
            flags = [*_CFLAGS, "-DRUDNN_SHARED", "-shared", "-o"]
            run_compiler([*flags, library, NATIVE / "rudnn_runtime.c"])
            flags = [*_CFLAGS, "-DRUDNN_KERNEL_LIBRARY", "-c", "-o"]
            run_compiler([*flags, kernel, "-x", "c", NATIVE / "rudnn_kernel.h"])
            files = {path.name: path for path in (library, kernel)}
            return cache.put(runtime_key(), {"kind": "native runtime"}, files)
