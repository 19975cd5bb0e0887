"""What a cubin needs and holds, by `cuobjdump` and `nvdisasm` of the pip packages."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

TOOLS = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
_USAGE = re.compile(r"Function ([\w$]+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_FUNCTION = re.compile(r"^\.text\.([\w$]+):", re.M)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.M)


@dataclass(frozen=True)
class Usage:
    """One kernel's registers a thread, and bytes of stack, of shared and of local memory.

    What does not fit into registers is on the stack.
    """

    registers: int
    stack: int
    shared: int
    local: int


@lru_cache(maxsize=2)
def tool(name: str) -> str | None:
    """The path of one of NVIDIA's programs."""
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or () if found else ():
        for path in Path(root).glob(f"*/bin/{name}"):
            return str(path)
    return shutil.which(name)


def resources(cubin: bytes) -> dict[str, Usage]:
    """What the kernels of a cubin need, by name."""
    found = _USAGE.findall(_run("cuobjdump", "-res-usage", cubin))
    assert found
    return {name: Usage(*map(int, sizes)) for name, *sizes in found}


def instructions(cubin: bytes) -> dict[str, Counter[str]]:
    """How often each kernel has each instruction, by its first word: `HMMA`, `LDGSTS`, `LDL`."""
    parts = _FUNCTION.split(listing(cubin))[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {name: Counter(_INSTRUCTION.findall(text)) for name, text in pairs}


def listing(cubin: bytes) -> str:
    """All of a cubin's instructions as text."""
    return _run("nvdisasm", "-c", cubin)


def matrix(code: Counter[str]) -> int:
    """Instructions of the tensor cores."""
    return code["HMMA"] + code["HGMMA"]


def _run(name: str, option: str, cubin: bytes) -> str:
    path = tool(name)
    assert path is not None, f"needs {name}: {TOOLS}"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
