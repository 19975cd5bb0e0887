"""The native runtime: thread pool, scratch memory, toolchain, loader with and without a compiler.

Kernels here are C with the shape of a compiled object: weak pointer variables, tasks, an entry.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rudnn.runtime.cache import DiskCache
from rudnn.runtime.targets.llvm import loader, toolchain

NO_COMPILER = "needs a C compiler: apt install gcc"
needs_compiler = pytest.mark.skipif(toolchain.find_compiler() is None, reason=NO_COMPILER)

KERNELS = r"""
#include <stdint.h>
#include <string.h>
typedef struct { void *sync; int32_t num_task; } env_t;
typedef int (*task_t)(int, env_t *, void *);
__attribute__((weak)) int (*__TVMBackendParallelLaunch)(task_t, void *, int) = 0;
__attribute__((weak)) void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = 0;
__attribute__((weak)) int (*__TVMBackendFreeWorkspace)(int, int, void *) = 0;
void TVMFFIErrorSetRaisedFromCStrParts(const char *, const char **, int32_t);

/* args: num_task, extent, out (int64[extent], each iteration adds 1), value to return at fail_at */
static int count(int id, env_t *env, void *cdata) {
    const int64_t *a = cdata;
    int64_t step = (a[1] + env->num_task - 1) / env->num_task;
    for (int64_t i = id * step; i < (id + 1) * step && i < a[1]; ++i) {
        if (i == a[4]) {
            const char *parts[] = {"row is ", "bad"};
            TVMFFIErrorSetRaisedFromCStrParts("ValueError", parts, 2);
            return (int)a[3];
        }
        ((int64_t *)a[2])[i] += 1;
    }
    return 0;
}
int32_t counts(const int64_t *a) { return __TVMBackendParallelLaunch(count, (void *)a, (int)a[0]); }

/* args: outer, inner, out (int64[outer][inner]) */
static int outer(int id, env_t *env, void *cdata) {
    const int64_t *a = cdata;
    for (int64_t i = id; i < a[0]; i += env->num_task) {
        int64_t inner[5] = {0, a[1], a[2] + 8 * i * a[1], 0, -1};
        if (counts(inner)) return 1;
    }
    return 0;
}
int32_t nested(const int64_t *a) { return __TVMBackendParallelLaunch(outer, (void *)a, 0); }

/* args: rows, out (float[rows]): sums scratch of 3000 floats, written first if args[2] */
static int sum(int id, env_t *env, void *cdata) {
    const int64_t *a = cdata;
    for (int64_t r = id; r < a[0]; r += env->num_task) {
        float *w = __TVMBackendAllocWorkspace(1, 0, 12000, 2, 32), s = 0;
        if (!w || (uintptr_t)w % 64) return 3;
        for (int i = 0; a[2] && i < 3000; ++i) w[i] = 1.0f;
        for (int i = 0; i < 3000; ++i) s += w[i];
        ((float *)a[1])[r] = s;
        if (__TVMBackendFreeWorkspace(1, 0, w)) return 4;
    }
    return 0;
}
int32_t scratch(const int64_t *a) { return __TVMBackendParallelLaunch(sum, (void *)a, 0); }

#ifdef __x86_64__
#include <xmmintrin.h>
static int tiny(int id, env_t *env, void *cdata) {
    volatile float x = 1e-38f, y = 0.1f;
    ((float *)cdata)[id] = x * y;
    for (volatile int spin = 0; spin < 20000; ++spin) {}
    return 0;
}
/* args: out (float[64]), whether to flush subnormals in the caller */
int32_t subnormals(const int64_t *a) {
    unsigned csr = _mm_getcsr();
    if (a[1]) _mm_setcsr(csr | 0x8000);
    int rc = __TVMBackendParallelLaunch(tiny, (void *)a[0], 64);
    _mm_setcsr(csr);
    return rc;
}
#endif
"""

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


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> DiskCache:
    return DiskCache(tmp_path_factory.mktemp("native-cache"))


@pytest.fixture(scope="session")
def library(cache: DiskCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if toolchain.find_compiler() is None:
        pytest.skip(NO_COMPILER)
    folder = tmp_path_factory.mktemp("native")
    source, compiled = folder / "kernels.c", folder / "kernels.o"
    source.write_text(KERNELS)
    toolchain.run_compiler(["-O1", "-fPIC", "-c", source, "-o", compiled])
    stub = toolchain.build_runtime(cache).file(toolchain.KERNEL_OBJECT)
    return toolchain.link([compiled, stub], folder / "kernels.so")


@pytest.fixture
def kernel(library: Path, cache: DiskCache) -> Callable[[str], loader.Kernel]:
    return lambda entry: loader.load(library, entry, cache)


@pytest.fixture
def services(cache: DiskCache) -> Iterator[loader.Runtime]:
    runtime = loader.runtime(cache)
    runtime.set_num_threads(2)
    yield runtime
    runtime.set_num_threads(0)
    runtime.thread_limit(0)
    runtime.poison(False)


def pack(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def ones(function: loader.Kernel, extent: int, num_task: int = 0) -> bool:
    """Whether a parallel loop runs each iteration exactly once."""
    out = (ctypes.c_int64 * extent)()
    rc = function(pack(num_task, extent, ctypes.addressof(out), 0, -1))
    return rc == 0 and all(value == 1 for value in out)


def script(code: str, *arguments: object, **environment: str) -> str:
    """Run Python code in a process of its own, which must end well; its output."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PRELUDE = """
import ctypes, os, signal, struct, sys, threading, warnings
from pathlib import Path
from rudnn.runtime.cache import DiskCache
from rudnn.runtime.targets.llvm import loader, toolchain
warnings.simplefilter("ignore")  # forking with threads is the point
cache = DiskCache(sys.argv[1])

def ones(function, extent, lead=(0,)):
    out = (ctypes.c_int64 * extent)()
    args = (*lead, extent, ctypes.addressof(out), 0, -1)
    return function(struct.pack(f"<{len(args)}q", *args)) == 0 and list(out) == [1] * extent

def in_child(check):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if check() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.parametrize("threads", [1, 2, 4, 7])
def test_each_iteration_once(kernel, services, threads):
    services.set_num_threads(threads)
    counts = kernel("counts")
    for extent in (1, 2, 10, 33, 5000):
        assert all(ones(counts, extent, num_task) for num_task in (0, 1, 2, 7, 300))


def test_many_short_launches_with_changing_thread_counts(kernel, services):
    counts = kernel("counts")
    for i in range(3000):
        services.set_num_threads(1 + i % 5)
        assert ones(counts, 50)


@pytest.mark.parametrize("setting", ["1", "2", "4"])
def test_thread_count_from_environment(library, cache, setting):
    code = """
tasks = lambda: len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
before = tasks()  # NumPy's BLAS has threads of its own
counts = loader.load(Path(sys.argv[2]), "counts", cache)
assert all(ones(counts, 1000) for _ in range(50))
print(loader.runtime(cache).num_threads(), 1 + tasks() - before if before else -1)
"""
    threads, tasks = script(code, cache.root, library, RUDNN_NUM_THREADS=setting).split()
    assert threads == setting
    assert tasks in (setting, "-1")


def test_thread_count_defaults_to_usable_cores(services):
    services.set_num_threads(0)
    if "RUDNN_NUM_THREADS" not in os.environ and hasattr(os, "sched_getaffinity"):
        assert services.num_threads() == min(len(os.sched_getaffinity(0)), 256)


@needs_compiler
def test_thread_limit_keeps_work_on_the_caller(services):
    task_t = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    launch_t = ctypes.CFUNCTYPE(ctypes.c_int, task_t, ctypes.c_void_p, ctypes.c_int)
    launch = launch_t(services.hooks["__TVMBackendParallelLaunch"])
    seen = []
    task = task_t(lambda i, env, data: seen.append((i, threading.get_ident())) or 0)
    assert services.thread_limit(1) == 0
    assert launch(task, None, 40) == 0
    assert services.thread_limit(0) == 1
    assert seen == [(i, threading.get_ident()) for i in range(40)]


def test_nested_launch(kernel, services):
    out = (ctypes.c_int64 * 600)()
    assert kernel("nested")(pack(20, 30, ctypes.addressof(out))) == 0
    assert list(out) == [1] * 600


def test_eight_threads_at_once(kernel, services):
    counts = kernel("counts")
    with ThreadPoolExecutor(8) as pool:
        work = lambda _: all(ones(counts, 200) for _ in range(300))  # noqa: E731
        assert all(pool.map(work, range(8), timeout=60))


def test_failing_task_is_reported_and_the_pool_lives_on(kernel, services):
    counts = kernel("counts")
    out = (ctypes.c_int64 * 500)()
    for fail_at in (0, 250, 499):
        assert counts(pack(0, 500, ctypes.addressof(out), 7, fail_at)) == 7
        assert services.last_error() == "ValueError: row is bad"
    assert ones(counts, 500)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_use(library, cache):
    code = """
counts = loader.load(Path(sys.argv[2]), "counts", cache)
check = lambda: all(ones(counts, 300) for _ in range(50))
assert check()
in_child(check)
in_child(lambda: check() and (in_child(check) or True))  # a grandchild, after use in the child
assert check()
"""
    script(code, cache.root, library, RUDNN_NUM_THREADS="3")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_other_threads_launch(library, cache):
    code = """
counts = loader.load(Path(sys.argv[2]), "counts", cache)
scratch = loader.load(Path(sys.argv[2]), "scratch", cache)
stop = threading.Event()
def busy():
    out = (ctypes.c_float * 64)()
    while not stop.is_set():
        assert ones(counts, 300) and scratch(struct.pack("<3q", 64, ctypes.addressof(out), 1)) == 0
threads = [threading.Thread(target=busy) for _ in range(3)]
for t in threads: t.start()
for _ in range(30):
    in_child(lambda: all(ones(counts, 300) for _ in range(10)))
stop.set()
for t in threads: t.join()
"""
    script(code, cache.root, library, RUDNN_NUM_THREADS="2")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads an x86 register")
def test_workers_take_the_callers_floating_point_mode(kernel, services):
    out = (ctypes.c_float * 64)()
    for flush in (0, 1, 0, 1):
        assert kernel("subnormals")(pack(ctypes.addressof(out), flush)) == 0
        assert [value == 0 for value in out] == [bool(flush)] * 64


def test_scratch_is_counted_reused_and_poisoned(kernel, services):
    out = (ctypes.c_float * 40)()
    for written, poison in ((1, False), (1, True), (0, True)):
        services.poison(poison)
        assert kernel("scratch")(pack(40, ctypes.addressof(out), written)) == 0
        assert all(value == 3000 if written else value != value for value in out)
    before = services.memory()
    assert kernel("scratch")(pack(40, ctypes.addressof(out), 1)) == 0
    after = services.memory()
    assert after["live"] == 0 < after["reserved"] <= after["peak"]
    assert after["reserved"] <= before["reserved"] + 12288  # at most a thread that came first now


@needs_compiler
def test_scratch_of_an_ended_thread_is_returned(services):
    library = services._c  # the one that `services` counts, whichever cache it came from
    library.rudnn_workspace_alloc.restype = ctypes.c_void_p
    library.rudnn_workspace_alloc.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64] + [
        ctypes.c_int
    ] * 2
    library.rudnn_workspace_free.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    before = services.memory()
    seen = []

    def use() -> None:
        blocks = [library.rudnn_workspace_alloc(1, 0, size, 2, 32) for size in (0, 1, 1 << 20)]
        seen.extend([all(b and b % 64 == 0 for b in blocks), services.memory()["live"]])
        seen.append(library.rudnn_workspace_alloc(1, 0, (1 << 64) - 1, 2, 32))
        for block in blocks:
            assert library.rudnn_workspace_free(1, 0, block) == 0

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [True, before["live"] + (1 << 20) + 2 * 4096, None]
    end = time.monotonic() + 10  # join returns shortly before the thread is gone
    while services.memory()["reserved"] > before["reserved"] and time.monotonic() < end:
        time.sleep(0.001)
    after = services.memory()
    assert (after["live"], after["reserved"]) == (before["live"], before["reserved"])
    assert after["peak"] >= before["reserved"] + (1 << 20)


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


def test_garbled_runtime_library_is_rebuilt(tmp_path, library):
    cache = DiskCache(tmp_path)
    path = toolchain.build_runtime(cache).file(toolchain.RUNTIME_LIBRARY)
    path.write_bytes(path.read_bytes()[:2000] + b"garbage" * 400)
    code = 'assert ones(loader.load(Path(sys.argv[2]), "counts", cache), 100)'
    script(code, tmp_path, library)


def test_missing_entry_or_file_is_a_load_error(library, cache, tmp_path):
    with pytest.raises(loader.LoadError, match="nowhere"):
        loader.load(library, "nowhere", cache)
    with pytest.raises(loader.LoadError):
        loader.load(tmp_path / "missing.so", "counts", cache)


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


def test_shared_library_without_runtime_or_compiler(tmp_path, library):
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
    script(code, tmp_path / "empty", library, RUDNN_CC="none")
