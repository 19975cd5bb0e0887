"""The `Target` and `Driver` of the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schedules.capability import Capability
from ...device import MemoryUsage, Queue
from ...driver import Artifact, Status
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

    def device_names(self) -> Sequence[str]:
        return (cpu.model_name(),)

    def capability(self) -> Capability:
        return cpu.capability("")

    def load(self, binary: Path, plan: LaunchPlan, cache: DiskCache) -> Callable[[bytes, int], int]:
        return loader.runtime(cache).caller(loader.load(binary, plan.entry, cache))

    def last_error(self) -> str:
        return loader.runtime().last_error()

    def poison(self, on: bool) -> None:
        loader.runtime().poison(on)

    def synchronize(self, queue: Queue) -> None:
        """Calls return when their work is done."""

    def memory_usage(self) -> MemoryUsage:
        from ...tensor import live_bytes
        from ...workspace import arena_bytes

        scratch = loader.runtime().memory()
        now, peak = arena_bytes()
        return MemoryUsage(live_bytes(), scratch["reserved"] + now, scratch["peak"] + peak)


@lru_cache(maxsize=1)
def _driver() -> HostDriver:
    return HostDriver()
