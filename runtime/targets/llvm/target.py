"""The `Target` and `Driver` of the CPU."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ....schedules.capability import Capability
from ... import dlpack, workspace
from ...device import MemoryUsage, Queue
from ...driver import Artifact, Loaded, Mark, Memory, Status
from ...plan import LaunchPlan
from . import cpu, loader, toolchain

if TYPE_CHECKING:
    from ....schedules.program import Program
    from ....schedules.rule import Rule
    from ...cache import DiskCache
    from ...signature import Signature


class Llvm:
    """Code generation for the host's processor or a named baseline."""

    name = "llvm"

    def identity(self, arch: str, cache: DiskCache) -> str:
        return f"{cpu.identity(arch)} {loader.artefact_name(cache)}"

    def capability(self, arch: str) -> Capability:
        return cpu.capability(arch)

    def rules(self) -> Sequence[Rule]:
        from ....schedules.cpu import rules

        return rules()

    def compile(self, program: Program, entry: str, arch: str, cache: DiskCache) -> Artifact:
        """A shared library, or LLVM IR for the just-in-time compiler where nothing can link."""
        from . import compile as codegen

        target = cpu.tvm_target(arch)
        module, plan = codegen.lower(program, entry, target)
        built = codegen.build(module, target)
        with tempfile.TemporaryDirectory(prefix="rudnn-") as folder:
            path = loader.build(built, Path(folder), cache)
            return Artifact(plan, {path.name: path.read_bytes()}, path.name)

    def source(self, program: Program, entry: str, arch: str) -> tuple[str, str]:
        from . import compile as codegen

        target = cpu.tvm_target(arch)
        module, _ = codegen.lower(program, entry, target)
        return codegen.build(module, target).inspect_source("ll"), "llvm"

    def driver(self) -> HostDriver:
        return _driver()

    def status(self) -> Status:
        compiler, native = toolchain.find_compiler(), loader.runtime().native
        if compiler is not None and native:
            return Status(True, True, f"{cpu.model_name()}; links with {' '.join(compiler)}")
        lacks = ["no C compiler"] if compiler is None else []
        lacks += [] if native else ["the native runtime could not be built"]
        detail = (f"{cpu.model_name()}; {' and '.join(lacks)}: kernels are compiled by TVM's "
                  "just-in-time compiler in each process")  # fmt: skip
        hint = "apt install gcc, or pip install ziglang"
        if compiler is not None:
            hint = "set RUDNN_CC to a C compiler that works, RUDNN_CACHE_DIR to a writable folder"
        return Status(True, True, detail if native else f"{detail}, on Python's threads", hint)

    def export(
        self, program: Program, signature: Signature, arch: str, folder: Path
    ) -> dict[str, Any]:
        from .export import export

        return export(program, signature, arch, folder)


class HostDriver:
    """Kernels run in this process, on the calling thread and the native thread pool."""

    dlpack: int | None = dlpack.CPU
    host = True

    def device_names(self) -> Sequence[str]:
        return (cpu.model_name(),)

    def capability(self, index: int) -> Capability:
        return cpu.capability("")

    def arch(self, index: int) -> str:
        return ""

    def load(self, binary: Path, plan: LaunchPlan, cache: DiskCache, index: int) -> Loaded:
        return _HostKernel(loader.runtime(cache).caller(loader.load(binary, plan.entry, cache)))

    def last_error(self) -> str:
        return loader.runtime().last_error()

    def poison(self, on: bool) -> None:
        workspace.poison(on)
        loader.runtime().poison(on)

    def allocate(self, nbytes: int, queue: Queue) -> Memory:
        return _HostMemory(nbytes)

    def copy_in(self, address: int, data: memoryview, queue: Queue) -> None:
        ctypes.memmove(address, np.frombuffer(data, np.uint8).ctypes.data, data.nbytes)

    def copy_out(self, address: int, data: memoryview, queue: Queue) -> None:
        ctypes.memmove(np.frombuffer(data, np.uint8).ctypes.data, address, data.nbytes)

    def copy(self, to: int, start: int, nbytes: int, queue: Queue) -> None:
        ctypes.memmove(to, start, nbytes)

    def arena(self, queue: Queue, nbytes: int) -> int:
        return int(workspace.arena(nbytes).ctypes.data)

    def synchronize(self, queue: Queue) -> None:
        """Calls return when their work is done."""

    def record(self, queue: Queue) -> Mark:
        return _HostMark(time.perf_counter())

    def memory_usage(self, index: int) -> MemoryUsage:
        from ...tensor import live_bytes

        scratch = loader.runtime().memory()
        now, peak = workspace.arena_bytes()
        return MemoryUsage(live_bytes(), scratch["reserved"] + now, scratch["peak"] + peak)


@dataclass(frozen=True)
class _HostKernel:
    launch: Callable[[bytes, int], int]

    def on(self, queue: Queue) -> Callable[[bytes, int], int]:
        return self.launch


class _HostMemory:
    """Bytes on the heap."""

    def __init__(self, nbytes: int) -> None:
        self._bytes, self.nbytes = np.empty(nbytes, np.uint8), nbytes
        self.address = int(self._bytes.ctypes.data)


@dataclass(frozen=True)
class _HostMark:
    seconds: float

    def synchronize(self) -> None:
        """Work is done when its call returns."""

    def since(self, earlier: _HostMark) -> float:
        return self.seconds - earlier.seconds


@lru_cache(maxsize=1)
def _driver() -> HostDriver:
    return HostDriver()
