"""The toolchain, and the loader with and without a C compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_kernels import KERNELS, PRELUDE, needs_compiler, script

from rudnn.runtime.cache import DiskCache
from rudnn.runtime.targets.llvm import loader, toolchain

# The same shape as LLVM IR: out[i] += 1 for i in 0..n-1 on a parallel loop.
TEXT = r"""
@__TVMBackendParallelLaunch = linkonce dllexport global ptr null, align 8
define i32 @counts(ptr %args) {
  %launch = load ptr, ptr @__TVMBackendParallelLaunch
  %rc = call i32 %launch(ptr @task, ptr %args, i32 0)
  ret i32 %rc
}
define private i32 @task(i32 %id, ptr %env, ptr %args) {
  %np = getelementptr i8, ptr %env, i64 8
  %n = load i32, ptr %np
  %n64 = sext i32 %n to i64
  %first = sext i32 %id to i64
  %extent = load i64, ptr %args
  %outp = getelementptr i64, ptr %args, i64 1
  %out = load ptr, ptr %outp
  br label %head
head:
  %i = phi i64 [ %first, %0 ], [ %next, %body ]
  %more = icmp slt i64 %i, %extent
  br i1 %more, label %body, label %done
body:
  %p = getelementptr i64, ptr %out, i64 %i
  %old = load i64, ptr %p
  %new = add i64 %old, 1
  store i64 %new, ptr %p
  %next = add i64 %i, %n64
  br label %head
done:
  ret i32 0
}
"""


@needs_compiler
def test_embedding_needs_no_setup_call(tmp_path):
    """Object and runtime source in one cc command: the pointers are set by the linker."""
    (tmp_path / "kernels.c").write_text(KERNELS)
    (tmp_path / "host.c").write_text(
        """
        #include <stdio.h>
        #include "rudnn_runtime.h"
        int32_t counts(const int64_t *);
        int main(void) {
            int64_t out[100] = {0}, sum = 0, args[5] = {0, 100, (int64_t)(intptr_t)out, 5, -1};
            if (rudnn_abi_version() != RUDNN_ABI_VERSION || counts(args)) return 1;
            for (int i = 0; i < 100; ++i) sum += out[i];
            args[4] = 50;
            printf("%d %d %s", (int)sum, counts(args), rudnn_last_error());
            return 0;
        }"""
    )
    toolchain.run_compiler(["-O1", "-c", tmp_path / "kernels.c", "-o", tmp_path / "kernels.o"])
    host, runtime = tmp_path / "host.c", toolchain.NATIVE / "rudnn_runtime.c"
    strict = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{toolchain.NATIVE}"]
    objects = [tmp_path / "kernels.o", "-o", tmp_path / "host", "-lm"]
    toolchain.run_compiler([*strict, host, runtime, *objects])
    done = subprocess.run([tmp_path / "host"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "100 5 ValueError: row is bad")


@needs_compiler
def test_many_processes_build_one_runtime(tmp_path):
    code = PRELUDE + "print(toolchain.build_runtime(cache).path)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert outputs == {f"{DiskCache(tmp_path).list()[0].path}\n"}


def test_garbled_runtime_library_is_rebuilt(tmp_path, native_library):
    cache = DiskCache(tmp_path)
    path = toolchain.build_runtime(cache).file(toolchain.RUNTIME_LIBRARY)
    path.write_bytes(path.read_bytes()[:2000] + b"garbage" * 400)
    code = 'assert ones(loader.load(Path(sys.argv[2]), "counts", cache), 100)'
    script(code, tmp_path, native_library)


def test_missing_entry_or_file_is_a_load_error(native_library, native_cache, tmp_path):
    with pytest.raises(loader.LoadError, match="nowhere"):
        loader.load(native_library, "nowhere", native_cache)
    with pytest.raises(loader.LoadError):
        loader.load(tmp_path / "missing.so", "counts", native_cache)


class _Module:
    """A compiled module, as far as `loader.build` asks."""

    def write_to_file(self, path: str, kind: str) -> None:
        source = Path(path).with_suffix(".c")
        source.write_text("int entry(const void *args) { return args != 0; }")
        toolchain.run_compiler(["-fPIC", "-c", source, "-o", path])


@needs_compiler
@pytest.mark.parametrize("when", ["before the copy", "before the link"])
def test_a_cache_cleared_while_a_kernel_is_built(monkeypatch, tmp_path, when):
    """Another process cleared it: the linker missed the runtime's part of the kernel."""
    cache = DiskCache(tmp_path / "cache")
    toolchain.build_runtime(cache)
    module, name = (loader.shutil, "copyfile") if when == "before the copy" else (toolchain, "link")
    step, cleared = getattr(module, name), []

    def after_clearing(*arguments):
        if not cleared:
            cleared.append(cache.clear())
        return step(*arguments)

    monkeypatch.setattr(module, name, after_clearing)
    path = loader.build(_Module(), tmp_path, cache)
    assert cleared == [1] and path.name == "kernel.so"
    assert loader.load(path, "entry", cache)(b"x") == 1


@needs_compiler
def test_linker_failure_is_a_compile_error(tmp_path):
    (tmp_path / "bad.o").write_bytes(b"not an object")
    with pytest.raises(toolchain.CompileError, match="failed"):
        toolchain.link([tmp_path / "bad.o"], tmp_path / "bad.so")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.o"]


def test_choice_of_compiler(monkeypatch, tmp_path):
    (tmp_path / "mycc").write_text("#!/bin/sh\n")
    (tmp_path / "mycc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CC", "mycc -m64")
    monkeypatch.delenv("RUDNN_CC", raising=False)
    assert toolchain.find_compiler() == ("mycc", "-m64")
    monkeypatch.setenv("RUDNN_CC", "none")
    assert toolchain.find_compiler() is None
    with pytest.raises(toolchain.CompileError, match="needs a C compiler"):
        toolchain.run_compiler(["-v"])


@pytest.mark.parametrize("runtime", ["python", pytest.param("native", marks=needs_compiler)])
def test_no_compiler(tmp_path, runtime):
    """LLVM text is compiled in process; with librudnn_runtime cached it serves, else Python."""
    if runtime == "native":
        toolchain.build_runtime(DiskCache(tmp_path / "cache"))
    (tmp_path / "kernel.ll").write_text(TEXT)
    code = """
from concurrent.futures import ThreadPoolExecutor
import tvm
empty = tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(0)).with_attr("global_symbol", "empty")
build = tvm.get_global_func("target.build.llvm")
frame = build(tvm.IRModule({"empty": empty}), tvm.target.Target("llvm")).inspect_source("ll")
path = Path(sys.argv[2])
path.write_text(frame + path.read_text())
assert loader.artefact_name(cache) == "kernel.ll"
counts = loader.load(path, "counts", cache)
check = lambda: all(ones(counts, 300, ()) for _ in range(50))
assert check()
with ThreadPoolExecutor(8) as pool:
    assert all(pool.map(lambda _: check(), range(8)))
in_child(check)
for n in (1, 2, 4):
    loader.runtime().set_num_threads(n)
    assert check() and loader.runtime().num_threads() == n
print("native" if loader.runtime().native else "python")
try:
    loader.load(path, "nowhere", cache)
except loader.LoadError:
    print("refused")
"""
    out = script(code, tmp_path / "cache", tmp_path / "kernel.ll", RUDNN_CC="none")
    assert out.split() == [runtime, "refused"]


def test_shared_library_without_runtime_or_compiler(tmp_path, native_library):
    """A cached kernel whose runtime was lost still runs, on Python threads."""
    code = """
path = Path(sys.argv[2])
out = (ctypes.c_float * 64)()
assert ones(loader.load(path, "counts", cache), 1000)
scratch = loader.load(path, "scratch", cache)
assert scratch(struct.pack("<3q", 64, ctypes.addressof(out), 1)) == 0 and set(out) == {3000.0}
nested = (ctypes.c_int64 * 600)()
args = struct.pack("<3q", 20, 30, ctypes.addressof(nested))
assert loader.load(path, "nested", cache)(args) == 0 and list(nested) == [1] * 600
fails = struct.pack("<5q", 0, 600, ctypes.addressof(nested), 7, 300)
assert loader.load(path, "counts", cache)(fails) == 7
assert not loader.runtime().native and "tvm" not in sys.modules
"""
    script(code, tmp_path / "empty", native_library, RUDNN_CC="none")
