"""The Vulkan driver with a hand-written kernel: memory, queues, marks, faults, threads."""

from __future__ import annotations

import gc
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spirv_kernels import needs_vulkan
from vulkan_kernel import (
    LAYOUT,
    PLAN,
    SLOW_COUNT,
    SLOW_TIMES,
    Kernel,
    assemble,
    new_queue,
    numbers,
)

from rudnn.dsl.errors import (
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    LaunchError,
    LoadError,
    OutOfMemoryError,
)
from rudnn.runtime.cache import DiskCache
from rudnn.runtime.targets.vulkan import gpu, memory, stream, transfer
from rudnn.runtime.targets.vulkan import pipelines as pipeline_module
from rudnn.runtime.targets.vulkan.driver import driver
from rudnn.runtime.targets.vulkan.spirv import Shader, pack

pytestmark = [pytest.mark.usefixtures("vulkan_is_silent"), needs_vulkan]


@pytest.fixture(scope="module")
def shader() -> Shader:
    return Shader("scale_0", assemble(), 64, (True, False), LAYOUT)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of the test's own, which it may spoil."""
    monkeypatch.setattr(gpu, "_OPEN", {})


@pytest.fixture
def kernel(shader: Shader, tmp_path: Path) -> Kernel:
    return Kernel(shader, tmp_path)


def test_a_kernel_runs(kernel: Kernel) -> None:
    x = numbers(1000)
    assert np.array_equal(kernel(x, 2.0), x * 2)
    assert np.array_equal(kernel(x, 0.5, times=3), x / 8)


def test_numbers_in_a_buffer(tmp_path: Path) -> None:
    shader = Shader("scale_0", assemble(in_buffer=True), 64, (True, False), LAYOUT, in_buffer=True)
    kernel, x = Kernel(shader, tmp_path), numbers(100)
    for s in (2.0, 3.0):
        assert np.array_equal(kernel(x, s), x * np.float32(s))


def test_full_subgroups_of_a_required_size(shader: Shader, tmp_path: Path) -> None:
    x = numbers(100)
    assert np.array_equal(Kernel(replace(shader, subgroup=True), tmp_path)(x, 2.0), x * 2)


def test_views_begin_inside_an_allocation(kernel: Kernel) -> None:
    x, d, q = numbers(100), kernel.driver, kernel.queue
    a, b = d.allocate(400, q), d.allocate(400, q)
    d.copy_in(a.address, memoryview(x), q)
    d.copy_in(b.address, memoryview(np.zeros(100, np.float32)), q)
    kernel.start(40, 1, a.address + 4 * 7, b.address + 4 * 50, 3.0)
    want = np.zeros(100, np.float32)
    want[50:90] = x[7:47] * 3
    assert np.array_equal(kernel.read(b.address, 100), want)


def test_what_lies_past_an_allocation_is_not_written(kernel: Kernel) -> None:
    d, q = kernel.driver, kernel.queue
    x, y, neighbour = (d.allocate(256, q) for _ in range(3))
    for m in (x, y, neighbour):
        d.copy_in(m.address, memoryview(np.ones(64, np.float32)), q)
    assert neighbour.address == y.address + 256
    kernel.start(128, 1, x.address, y.address, 2.0)
    assert (kernel.read(neighbour.address, 64) == 1).all()
    assert (kernel.read(y.address, 64) == 2).all()


def test_empty_tensors_and_empty_grids(kernel: Kernel) -> None:
    d, q = kernel.driver, kernel.queue
    a, b = d.allocate(0, q), d.allocate(0, q)
    assert a.address != b.address
    d.copy_in(a.address, memoryview(b""), q)
    d.copy(a.address, b.address, 0, q)
    kernel.start(0, 1, a.address, b.address, 1.0)
    kernel.start(64, 1, a.address, 0x7FFF12345678, 1.0)  # as the host's empty arrays have
    kernel.call(struct.pack("<qqqq", 64, 1, 0, 0), 0)
    d.copy_out(b.address, memoryview(bytearray()), q)


def test_memory_is_used_again_once_the_queue_is_past_it(kernel: Kernel) -> None:
    d, q, x = kernel.driver, kernel.queue, numbers(1 << 14)
    gc.collect()
    before = d.memory_usage(0).tensors
    seen = set()
    for i in range(3 * stream.DEPTH):
        a, b = d.allocate(x.nbytes, q), d.allocate(x.nbytes, q)
        d.copy_in(a.address, memoryview(x), q)
        kernel.start(x.size, 1, a.address, b.address, float(i))
        seen.add(b.address)
    assert d.memory_usage(0).tensors == before + 2 * x.nbytes
    assert len(seen) < 2 * stream.DEPTH
    assert np.array_equal(kernel.read(b.address, x.size), x * (3 * stream.DEPTH - 1))
    del a, b
    assert d.memory_usage(0).tensors == before


def test_input_may_change_while_its_copy_is_read(kernel: Kernel) -> None:
    """A copy to memory that the device still reads waits its turn."""
    d, q = kernel.driver, kernel.queue
    x = np.ones(SLOW_COUNT, np.float32)
    source, result = kernel.start_slow()
    other = d.allocate(x.nbytes, q)
    for i in range(2, 5):
        x[:] = i
        d.copy_in(source.address, memoryview(x), q)
        kernel.start(x.size, 1, source.address, other.address, 1.0)
        x[:] = np.nan
    assert (kernel.read(result.address, x.size) == 1).all()
    assert (kernel.read(other.address, x.size) == 4).all()


def test_copies_within_the_device(kernel: Kernel) -> None:
    d, q, x = kernel.driver, kernel.queue, np.arange(101, dtype=np.uint8)
    a, b = d.allocate(101, q), d.allocate(101, q)
    d.copy_in(a.address, memoryview(x), q)
    d.copy_in(b.address, memoryview(np.zeros(101, np.uint8)), q)
    d.copy(b.address + 3, a.address + 5, 17, q)
    y = np.zeros(101, np.uint8)
    d.copy_out(b.address, memoryview(y), q)
    want = np.zeros(101, np.uint8)
    want[3:20] = x[5:22]
    assert np.array_equal(y, want)
    with pytest.raises(DeviceError, match="needs a copy within 101 bytes"):
        d.copy(b.address + 90, a.address, 20, q)


@pytest.mark.usefixtures("fresh")
def test_copies_through_staging(
    shader: Shader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device with memory of its own, in several parts."""
    monkeypatch.setattr(memory, "unified", lambda _: False)
    monkeypatch.setattr(transfer, "_CHUNK", 1000)
    kernel, x = Kernel(shader, tmp_path), numbers(1000)
    assert np.array_equal(kernel(x, 2.0), x * 2)
    assert np.array_equal(kernel(x[:10], 2.0), x[:10] * 2)


def test_poison_fills_memory_and_the_workspace(kernel: Kernel) -> None:
    d, q = kernel.driver, kernel.queue
    d.poison(True)
    try:
        assert np.isnan(kernel.read(d.allocate(40, q).address, 10)).all()
        for _ in range(2):
            address = d.arena(q, 1000)
            assert address % 64 == 0
            assert np.isnan(kernel.read(address, 250)).all()
            d.copy_in(address, memoryview(np.zeros(250, np.float32)), q)
    finally:
        d.poison(False)
    assert (kernel.read(d.arena(q, 400), 100) == 0).all()
    assert d.memory_usage(0).workspace >= 1000


def test_marks_measure_the_device(kernel: Kernel) -> None:
    d, q = kernel.driver, kernel.queue
    a = d.allocate(256, q)
    marks = [d.record(q)]
    kernel.start(64, 1, a.address, a.address, 1.0)
    marks.append(d.record(q))
    kernel.start_slow()
    marks.append(d.record(q))
    short, long = (later.since(earlier) for earlier, later in zip(marks, marks[1:], strict=False))
    assert 0 <= short < long < 60


def test_numbers_and_grids_out_of_range(kernel: Kernel) -> None:
    a = kernel.driver.allocate(256, kernel.queue)
    with pytest.raises(LaunchError, match="scale needs at most 65535 blocks an axis, got 65536"):
        kernel.start(65536 * 64, 1, a.address, a.address, 1.0)
    with pytest.raises(LaunchError, match="scale needs an address of whole elements"):
        kernel.start(4, 1, a.address + 2, a.address, 1.0)
    gone = kernel.driver.allocate(1 << 20, kernel.queue).address
    kernel.driver.memory_usage(0)  # collects it
    with pytest.raises(DeviceError, match="has no tensor at address 0x"):
        kernel.start(4, 1, gone, a.address, 1.0)
    assert np.array_equal(kernel(numbers(4), 1.0), numbers(4))


def test_bad_modules(shader: Shader, kernel: Kernel, tmp_path: Path) -> None:
    path, d, cache = tmp_path / "bad.spvs", kernel.driver, DiskCache(tmp_path / "cache")
    good = pack([shader])
    many = replace(shader, readonly=(True,) * 1000)
    for bad, message in (
        (b"", "needs a file of SPIR-V shaders"),
        (os.urandom(1000), "needs a file of SPIR-V shaders"),
        (good[:-8], "needs a file of SPIR-V shaders"),
        (pack([]), "needs kernels scale_0, got 0 others"),
        (pack([replace(shader, words=b"\0" * 64)]), "needs SPIR-V, got kernel scale_0"),
        (pack([replace(shader, local_size=1 << 20)]), "needs at most [0-9]* threads"),
        (pack([many]), "needs at most [0-9]* buffers, got kernel scale_0"),
    ):
        path.write_bytes(bad)
        with pytest.raises(LoadError, match=message):
            d.load(path, PLAN, cache, 0)
    with pytest.raises(LoadError, match="missing"):
        d.load(tmp_path / "missing", PLAN, cache, 0)
    assert np.array_equal(kernel(numbers(4), 1.0), numbers(4))


@pytest.mark.usefixtures("fresh")
def test_a_refused_pipeline(shader: Shader, tmp_path: Path, monkeypatch: Any) -> None:
    opened = gpu.opened(0)
    monkeypatch.setattr(opened.fn, "vkCreateComputePipelines", lambda *_: -13)
    with pytest.raises(LoadError, match="refused kernel scale_0: VK_ERROR_UNKNOWN"):
        Kernel(shader, tmp_path)


@pytest.mark.usefixtures("fresh")
def test_out_of_memory(shader: Shader, tmp_path: Path, monkeypatch: Any) -> None:
    kernel, x = Kernel(shader, tmp_path), numbers(1000)
    d, q = kernel.driver, kernel.queue
    most = gpu.opened(0).facts.max_range
    with pytest.raises(OutOfMemoryError, match=f"of at most {most} bytes, got one of {most + 1}"):
        d.allocate(most + 1, q)
    heap = gpu.opened(0).space.heap
    monkeypatch.setattr(heap, "available", lambda: (64 << 20) - sum(b.size for b in heap.blocks))
    held = [d.allocate(20 << 20, q) for _ in range(2)]
    with pytest.raises(OutOfMemoryError, match=f"no memory for {40 << 20} bytes"):
        d.allocate(40 << 20, q)
    assert np.array_equal(kernel(x, 2.0), x * 2)
    kernel.start(SLOW_COUNT, SLOW_TIMES, held[0].address, held[1].address, 1.0)
    del held  # still in use: the next one waits for the kernel
    assert d.allocate(40 << 20, q).nbytes == 40 << 20


def test_a_time_out_names_the_kernel(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    d, q = kernel.driver, kernel.queue
    _, result = kernel.start_slow()
    monkeypatch.setenv("RUDNN_VULKAN_TIMEOUT", "0.02")
    with pytest.raises(DeviceTimeoutError, match=r"within 0\.02 s, got no end of scale"):
        d.synchronize(q)
    monkeypatch.setenv("RUDNN_VULKAN_TIMEOUT", "soon")
    with pytest.raises(DeviceError, match="RUDNN_VULKAN_TIMEOUT needs a number of seconds"):
        d.synchronize(q)
    monkeypatch.delenv("RUDNN_VULKAN_TIMEOUT")
    assert (kernel.read(result.address, SLOW_COUNT) == 1).all()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("function", ["vkQueueSubmit", "vkWaitSemaphores"])
def test_a_lost_device_names_the_kernel(
    function: str, shader: Shader, tmp_path: Path, monkeypatch: Any
) -> None:
    kernel, x = Kernel(shader, tmp_path), numbers(64)
    d, q = kernel.driver, kernel.queue
    a = d.allocate(x.nbytes, q)
    d.copy_in(a.address, memoryview(x), q)
    with monkeypatch.context() as patch, pytest.raises(DeviceLostError, match="flight: .*scale"):
        patch.setattr(gpu.opened(0).fn, function, lambda *_: -4)
        kernel.start_slow()
        d.synchronize(q)
    later: tuple[Callable[[], object], ...] = (
        lambda: kernel.start(64, 1, a.address, a.address, 1.0),
        lambda: d.allocate(4, q),
        lambda: d.synchronize(q),
        lambda: d.record(new_queue()),
        lambda: kernel.read(a.address, 64),
        lambda: Kernel(shader, tmp_path),
    )
    for call in later:
        with pytest.raises(DeviceLostError, match="scale"):
            call()
    assert d.memory_usage(0).tensors >= x.nbytes
    assert np.array_equal(x, numbers(64))


def test_threads_with_queues_of_their_own_and_one_shared(shader: Shader, tmp_path: Path) -> None:
    shared, failures = Kernel(shader, tmp_path), []

    def work(seed: int) -> None:
        x, own = numbers(500 + seed, seed), Kernel(shader, tmp_path / str(seed))
        for i in range(25):
            for kernel in (own, shared):
                if not np.array_equal(kernel(x, float(i)), x * np.float32(i)):
                    failures.append((seed, i))

    for seed in range(4):
        (tmp_path / str(seed)).mkdir()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_streams_of_dead_queues_are_used_again(kernel: Kernel) -> None:
    def one() -> int:
        queue = new_queue()
        driver().record(queue).synchronize()
        return id(queue.handle)

    assert len({one() for _ in range(5)}) == 1


@pytest.mark.usefixtures("fresh")
def test_the_pipeline_cache_survives_a_corrupt_file(
    shader: Shader, tmp_path: Path, monkeypatch: Any
) -> None:
    Kernel(shader, tmp_path)
    first = gpu.opened(0)
    first.pipelines.save()
    path = pipeline_module.cache_file(DiskCache(tmp_path / "cache"), first)
    whole = path.read_bytes()
    for content in (whole, whole[:-1], b"", os.urandom(200)):
        path.write_bytes(content)
        monkeypatch.setattr(gpu, "_OPEN", {})
        kernel = Kernel(shader, tmp_path)
        assert np.array_equal(kernel(numbers(8), 2.0), numbers(8) * 2)
        gpu.opened(0).pipelines.save()
        assert path.read_bytes() == whole
    assert list(path.parent.iterdir()) == [path]


def test_a_forked_child_is_refused(kernel: Kernel) -> None:
    held = kernel.driver.allocate(4, kernel.queue)
    child = os.fork()
    if child == 0:
        refused = int(kernel.driver.memory_usage(0).tensors < 4)
        for call in (
            lambda: kernel(numbers(4), 1.0),
            lambda: kernel.driver.synchronize(kernel.queue),
            lambda: kernel.driver.record(new_queue()),
            lambda: gpu.opened(99),
        ):
            try:
                call()
            except DeviceError as error:
                refused += "spawn" in str(error)
        os._exit(0 if refused == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held.nbytes == 4
    assert np.array_equal(kernel(numbers(4), 1.0), numbers(4))
