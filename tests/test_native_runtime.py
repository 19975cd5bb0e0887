"""The native runtime: thread pool and scratch memory, with kernels in C."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native_kernels import needs_compiler, ones, pack, script

from rudnn.runtime.cache import DiskCache
from rudnn.runtime.targets.llvm import loader


@pytest.fixture
def kernel(native_library: Path, native_cache: DiskCache) -> Callable[[str], loader.Kernel]:
    return lambda entry: loader.load(native_library, entry, native_cache)


@pytest.fixture
def services(native_cache: DiskCache) -> Iterator[loader.Runtime]:
    runtime = loader.runtime(native_cache)
    runtime.set_num_threads(2)
    yield runtime
    runtime.set_num_threads(0)
    runtime.thread_limit(0)
    runtime.poison(False)


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
def test_thread_count_from_environment(native_library, native_cache, setting):
    code = """
tasks = lambda: len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
before = tasks()  # NumPy's BLAS has threads of its own
counts = loader.load(Path(sys.argv[2]), "counts", cache)
assert all(ones(counts, 1000) for _ in range(50))
print(loader.runtime(cache).num_threads(), 1 + tasks() - before if before else -1)
"""
    threads, tasks = script(
        code, native_cache.root, native_library, RUDNN_NUM_THREADS=setting
    ).split()
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
def test_fork_after_use(native_library, native_cache):
    code = """
counts = loader.load(Path(sys.argv[2]), "counts", cache)
check = lambda: all(ones(counts, 300) for _ in range(50))
assert check()
in_child(check)
in_child(lambda: check() and (in_child(check) or True))  # a grandchild, after use in the child
assert check()
"""
    script(code, native_cache.root, native_library, RUDNN_NUM_THREADS="3")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_other_threads_launch(native_library, native_cache):
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
    script(code, native_cache.root, native_library, RUDNN_NUM_THREADS="2")


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
