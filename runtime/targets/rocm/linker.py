"""Finding an `ld.lld` that links AMDGPU objects, and running it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from ....dsl.errors import CompileError

HINT = "pip install 'rudnn[rocm]'"
_OLDEST = 17  # earlier ones refuse relocations or code object versions of TVM's LLVM


def find() -> tuple[str, ...] | None:
    """The command that starts the linker, or None: `ziglang`'s, ROCm's, one on the path."""
    return _find(os.environ.get("ROCM_PATH"), os.environ.get("PATH"))


@lru_cache(maxsize=8)
def _find(rocm: str | None, path: str | None) -> tuple[str, ...] | None:
    ziglang = importlib.util.find_spec("ziglang")
    for place in (ziglang.submodule_search_locations or ()) if ziglang else ():
        zig = Path(place, "zig")
        if os.access(zig, os.X_OK):
            return (str(zig), "ld.lld")
    names = [f"{rocm or '/opt/rocm'}/llvm/bin/ld.lld", "ld.lld"]
    names += [f"ld.lld-{version}" for version in range(30, _OLDEST - 1, -1)]
    for name in names:
        command = shutil.which(name, path=path)
        if command and _version(command) >= _OLDEST:
            return (command,)
    return None


def _version(command: str) -> int:
    """The major version of an `ld.lld`, 0 where it does not say."""
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r"LLD (\d+)\.", done.stdout)
    return int(found[1]) if found else 0


def link(code: bytes) -> bytes:
    """A code object from an object file. Raises CompileError with the linker's messages."""
    command = find()
    if command is None:
        raise CompileError(f"needs an ld.lld of version {_OLDEST} or later, got none: {HINT}")
    with tempfile.TemporaryDirectory(prefix="rudnn-") as folder:
        source, result = Path(folder, "kernel.o"), Path(folder, "kernel.hsaco")
        source.write_bytes(code)
        whole = [*command, "--no-undefined", "-shared", str(source), "-o", str(result)]
        try:
            done = subprocess.run(whole, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise CompileError(f"cannot start the linker {command[0]}: {error}") from error
        if done.returncode or not result.exists():
            raise CompileError(
                f"{' '.join(command)} failed:\n{(done.stderr or done.stdout).strip()}"
            )
        return result.read_bytes()
