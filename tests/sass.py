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
class Code:
    """One kernel's registers a thread, bytes of stack, local and shared memory, instructions."""

    registers: int
    stack: int
    shared: int
    local: int
    instructions: Counter[str]

    @property
    def spills(self) -> int:
        """Moves between registers and local memory."""
        return self.instructions["LDL"] + self.instructions["STL"]

    @property
    def matrix(self) -> int:
        """Instructions of the tensor cores."""
        return self.instructions["HMMA"] + self.instructions["HGMMA"]


@lru_cache(maxsize=2)
def tool(name: str) -> str | None:
    """The path of one of NVIDIA's programs."""
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or () if found else ():
        for path in Path(root).glob(f"*/bin/{name}"):
            return str(path)
    return shutil.which(name)


def inspect_cubin(cubin: bytes) -> dict[str, Code]:
    """The kernels of a cubin by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        listing = _run("nvdisasm", "-c", file.name)
    parts = _FUNCTION.split(listing)[1:]
    code = {
        n: Counter(_INSTRUCTION.findall(t)) for n, t in zip(parts[::2], parts[1::2], strict=True)
    }
    found = {}
    for name, registers, stack, shared, local in _USAGE.findall(usage):
        sizes = (int(registers), int(stack), int(shared), int(local))
        found[name] = Code(*sizes, code[name])
    assert found.keys() == code.keys() and found, usage
    return found


def _run(name: str, *arguments: str) -> str:
    path = tool(name)
    assert path is not None, f"needs {name}: {TOOLS}"
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
