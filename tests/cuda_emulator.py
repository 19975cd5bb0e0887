"""Running CUDA without a GPU: a stub of the driver, and kernels compiled for the CPU.

`stubs/cuda/shim.h` makes CUDA C++ a program of fibers; `stubs/libcuda_stub.c` is a driver whose
modules are such programs. With both in place an operator's whole path runs: generated source,
argument packing, launches, memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from rudnn.runtime import device
from rudnn.runtime.cache import DiskCache
from rudnn.runtime.targets.cuda import driver, libcuda, target, toolkit

STUBS = Path(__file__).parent / "stubs"
_KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([\d, ]+\) )?(\w+)\(")
_FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")


def built(name: str, inputs: Iterable[bytes], command: Sequence[str]) -> Path:
    """The file `{out}` that a command makes of `inputs`: from the compile cache, if it is there."""
    digest = hashlib.sha256(" ".join(command).encode())
    for content in inputs:
        digest.update(content)
    key, cache = digest.hexdigest(), DiskCache()
    entry = cache.get(key)
    if entry is None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, name)
            line = [part.format(out=out) for part in command]
            done = subprocess.run(line, input=b"".join(inputs), capture_output=True, check=False)
            assert done.returncode == 0, done.stderr.decode()[:4000]
            entry = cache.put(key, {}, {name: out})
    return entry.file(name)


@lru_cache(maxsize=1)
def stub_library() -> Path:
    """The stub of libcuda.so.1."""
    source = (STUBS / "libcuda_stub.c").read_bytes()
    command = ("cc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", "{out}", "-xc", "-", "-ldl")
    return built("libcuda_stub.so", [source], command)


def emulated(source: str) -> bytes:
    """A module for the stub: a shared library that runs CUDA C++ on the CPU."""
    kernels = dict.fromkeys(_KERNEL.findall(source))
    assert kernels, source
    entries = "\n".join(f"RUDNN_KERNEL({name})" for name in kernels)
    unit = f'// {_shim_version()}\n#include "shim.h"\n{source}\n{entries}\n'
    command = ("g++", *_FLAGS, "-shared", f"-I{STUBS / 'cuda'}", "-o", "{out}", str(_fibers()),
               "-xc++", "-")  # fmt: skip
    return built("kernel.so", [unit.encode()], command).read_bytes()


@lru_cache(maxsize=1)
def _fibers() -> Path:
    """What all emulated kernels share, as an object file."""
    source = f'// {_shim_version()}\n#include "fibers.cc"\n'
    # Not -I: the headers of C++ that kernels find there are empty.
    command = ("g++", *_FLAGS, "-O2", "-iquote", str(STUBS / "cuda"), "-c", "-o", "{out}",
               "-xc++", "-")  # fmt: skip
    return built("fibers.o", [source.encode()], command)


def run(module: bytes, kernel: str, parameters: bytes, grid: int, block: int) -> str:
    """Run an emulated kernel on host memory; what was wrong, or ""."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(module)
        file.flush()
        function = ctypes.CDLL(file.name)[f"{kernel}__run"]
    function.restype = ctypes.c_char_p
    return (function(parameters, grid, 1, 1, block) or b"").decode()


@lru_cache(maxsize=1)
def _shim_version() -> str:
    files = sorted((STUBS / "cuda").iterdir())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@contextmanager
def emulated_cuda() -> Iterator[Stub]:
    """The device `cuda:0`, whose kernels run on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(libcuda.LIBRARY, str(stub_library()))
        patch.setattr(toolkit, "cubin", lambda source, _arch, _name: (emulated(source), source))
        patch.setattr(toolkit, "identity", lambda _compiler: f"emulated {_shim_version()}")
        patch.setattr(target, "driver", lru_cache(driver.CudaDriver))
        patch.setattr(device, "_INTERNED", {})
        patch.setattr(device, "_DEFAULTS", {})
        yield Stub()


class Stub:
    """The stub's own functions: its log of calls, and faults to come."""

    library = staticmethod(stub_library)

    def __init__(self) -> None:
        self._c: Any = ctypes.CDLL(str(self.library()))
        self._c.stub_log.restype = ctypes.c_char_p
        self._c.stub_used.restype = ctypes.c_size_t
        self._c.stub_memory.argtypes = [ctypes.c_size_t]

    def calls(self) -> list[str]:
        """Functions called since the last `clear`, in order; launches are indented."""
        return self._c.stub_log().decode().splitlines()

    def launches(self) -> list[str]:
        return [line.strip() for line in self.calls() if line.startswith("  ")]

    def clear(self) -> None:
        self._c.stub_clear()

    def fail(self, name: str, code: int, after: int = 0) -> None:
        """The call of `name` after `after` others returns `code`; "" lifts every fault."""
        self._c.stub_fail(name.encode(), code, after)

    def break_context(self, code: int) -> None:
        """The next kernel ruins the context: calls after it return `code`."""
        self._c.stub_break(code)

    def memory(self, total: int) -> None:
        self._c.stub_memory(total)

    def used(self) -> int:
        """Bytes allocated and not freed."""
        return int(self._c.stub_used())

    def depth(self) -> int:
        """Contexts pushed and not popped by this thread."""
        return int(self._c.stub_depth())
