"""The CUDA driver over a stub of libcuda: loading, arguments, launches, graphs, memory, faults."""

from __future__ import annotations

import gc
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulator import Stub, emulated, emulated_cuda

from rudnn.dsl.errors import (
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    LaunchError,
    LoadError,
    OutOfMemoryError,
)
from rudnn.runtime.device import Device, Queue, device
from rudnn.runtime.plan import Argument, Launch, LaunchPlan, Slot

KERNELS = """
extern "C" __global__ void scale(float *y, const float *x, long n, float by) {
  long i = blockIdx.x * 64L + threadIdx.x;
  if (i < n) y[i] = by * x[i];
}
extern "C" __global__ void offset(float *y, signed char a, long b, short c, int d,
                                  unsigned char e) {
  y[threadIdx.x] += a + b + c + d + e;
}
"""
SCALE = Launch(
    "scale",
    (Argument("pointer", 2), Argument("pointer", 1), Argument("int64", 0), Argument("float32", 3)),
    ("(n + 63) // 64", "1"), 64,
)  # fmt: skip
OFFSET = Launch(
    "offset",
    (Argument("pointer", 2), Argument("int8", 4), Argument("int64", 4), Argument("int16", 4),
     Argument("int32", 4), Argument("uint8", 5)),
    ("1 if n else 0", "1"), 4,
)  # fmt: skip
SLOTS = (
    Slot("dim", "n"), Slot("pointer", "x", dtype="float32"), Slot("pointer", "y", dtype="float32"),
    Slot("scalar", "by", dtype="float32"), Slot("scalar", "a"), Slot("scalar", "e"),
)  # fmt: skip
N = 100


@pytest.fixture
def stub() -> Iterator[Stub]:
    with emulated_cuda() as stub:
        stub.fail("", 0)
        stub.clear()
        yield stub
        stub.fail("", 0)


@pytest.fixture
def cuda(stub: Stub) -> Device:
    return device("cuda:0")


def plan(*launches: Launch) -> LaunchPlan:
    return LaunchPlan("test", SLOTS, "0", "0", (), launches)


def load(on: Device, launches: LaunchPlan, folder: Path) -> Any:
    binary = folder / "kernel.cubin"
    binary.write_bytes(emulated(KERNELS))
    return on.driver.load(binary, launches, None, on.index)  # type: ignore[arg-type]


def packed(n: int, x: int, y: int, by: float, a: int = 0, e: int = 0) -> bytes:
    return struct.pack("<3qf4x2q", n, x, y, by, a, e)


class Call:
    """Arrays on the device, and a kernel over them."""

    def __init__(self, on: Device, kernel: Any, queue: Queue | None = None) -> None:
        self.on, self.queue = on, queue or Queue(on)
        self.x = np.arange(N, dtype=np.float32)
        self.memory = [on.driver.allocate(4 * N, self.queue) for _ in range(2)]
        on.driver.copy_in(self.memory[0].address, self.x.data, self.queue)
        self.launch = kernel.on(self.queue)

    def __call__(self, by: float, a: int = 0, e: int = 0) -> None:
        assert self.launch(packed(N, *(m.address for m in self.memory), by, a, e), 0) == 0

    def result(self) -> np.ndarray[Any, Any]:
        y = np.empty(N, np.float32)
        self.on.driver.copy_out(self.memory[1].address, y.data, self.queue)
        return y


# --- what works ---


def test_arguments_reach_the_kernels(stub: Stub, cuda: Device, tmp_path: Path) -> None:
    call = Call(cuda, load(cuda, plan(SCALE, OFFSET), tmp_path))
    call(2.5, a=-3, e=200)
    want = np.float32(2.5) * call.x
    want[:4] += 4 * -3 + 200
    np.testing.assert_array_equal(call.result(), want)
    assert [line.split(" params")[0] for line in stub.launches()] == [
        "scale grid=2,1 block=64", "offset grid=1,1 block=4",
    ]  # fmt: skip
    assert stub.depth() == 0


def test_an_empty_grid_starts_nothing(stub: Stub, cuda: Device, tmp_path: Path) -> None:
    launch = load(cuda, plan(SCALE, OFFSET), tmp_path).on(Queue(cuda))
    assert launch(packed(0, 0, 0, 1.0), 0) == 0
    assert stub.launches() == []


def test_offsets_into_the_workspace_follow_the_dims(stub: Stub, cuda: Device,
                                                    tmp_path: Path) -> None:  # fmt: skip
    moved = Launch("scale", (Argument("pointer", 2, "n * 2"), *SCALE.arguments[1:]), SCALE.grid, 64)
    call = Call(cuda, load(cuda, plan(moved), tmp_path))
    launch = packed(N // 2, *(m.address for m in call.memory), 1.0)
    call.launch(launch, 0)
    np.testing.assert_array_equal(call.result()[N // 4 : 3 * N // 4], call.x[: N // 2])


def test_repeated_calls_of_several_kernels_become_a_graph(stub: Stub, cuda: Device,
                                                          tmp_path: Path) -> None:  # fmt: skip
    call = Call(cuda, load(cuda, plan(SCALE, OFFSET), tmp_path))
    counts = []
    for turn in range(4):
        stub.clear()
        call(float(turn // 3), a=1)
        counts.append((stub.calls().count("cuLaunchKernel"), stub.calls().count("cuGraphLaunch")))
    # once plain, then recorded and replayed; other arguments are plain again
    assert counts == [(2, 0), (2, 1), (0, 1), (2, 0)]
    want = np.where(np.arange(N) < 4, call.x + 4, call.x)
    np.testing.assert_array_equal(call.result(), want)
    del call
    gc.collect()
    assert "cuGraphExecDestroy" in stub.calls() and "cuModuleUnload" in stub.calls()


def test_many_different_calls_are_not_all_kept(stub: Stub, cuda: Device, tmp_path: Path) -> None:
    call = Call(cuda, load(cuda, plan(SCALE, OFFSET), tmp_path))
    for turn in range(40):
        call(float(turn))
        call(float(turn))
    created = stub.calls().count("cuGraphInstantiateWithFlags")
    assert created == 40 and stub.calls().count("cuGraphExecDestroy") >= 40 - 16
    np.testing.assert_array_equal(call.result(), 39 * call.x)


def test_a_single_kernel_needs_no_graph(stub: Stub, cuda: Device, tmp_path: Path) -> None:
    call = Call(cuda, load(cuda, plan(SCALE), tmp_path))
    for _ in range(3):
        call(1.0)
    assert "cuGraphLaunch" not in stub.calls()


def test_queues_have_streams_of_their_own(stub: Stub, cuda: Device, tmp_path: Path) -> None:
    kernel = load(cuda, plan(SCALE), tmp_path)
    first, second, foreign = Queue(cuda), Queue(cuda), Queue(cuda, 0)
    stub.clear()
    calls = [Call(cuda, kernel, queue) for queue in (first, second, foreign)]
    assert stub.calls().count("cuStreamCreate") == 2
    assert len({queue.handle for queue in (first, second, foreign)}) == 3 and foreign.handle == 0
    for call in calls:
        call(3.0)
        np.testing.assert_array_equal(call.result(), 3 * call.x)


def test_a_stream_goes_with_its_queue_and_a_foreign_one_stays(stub: Stub, cuda: Device) -> None:
    own, made = Queue(cuda), Queue(cuda)
    cuda.driver.synchronize(made)
    foreign = Queue(cuda, made.handle)
    for queue in (own, foreign):
        cuda.driver.arena(queue, 100)
    stub.clear()
    del own, foreign, queue
    gc.collect()
    assert stub.calls().count("cuStreamDestroy_v2") == 1
    cuda.driver.synchronize(made)


def test_events_measure_device_time(cuda: Device, tmp_path: Path) -> None:
    call = Call(cuda, load(cuda, plan(SCALE), tmp_path))
    start = call.queue.record()
    call(1.0)
    end = call.queue.record()
    end.synchronize()
    assert 0 < end.since(start) < 10


def test_memory_is_counted_and_given_back(stub: Stub, cuda: Device) -> None:
    queue, before = Queue(cuda), stub.used()
    memory = [cuda.driver.allocate(n, queue) for n in (0, 1000, 3)]
    assert cuda.driver.memory_usage(0).tensors == 1003
    cuda.driver.arena(queue, 500)
    cuda.driver.arena(queue, 200)
    assert cuda.driver.arena(queue, 800) % 64 == 0
    usage = cuda.driver.memory_usage(0)
    assert (usage.workspace, usage.peak_workspace) == (800, 800)
    del memory, queue
    gc.collect()
    assert stub.used() == before and cuda.driver.memory_usage(0).total == 0


def test_a_poisoned_arena_is_nan(cuda: Device) -> None:
    queue = Queue(cuda)
    cuda.driver.poison(True)
    address = cuda.driver.arena(queue, 64)
    got = np.zeros(16, np.float32)
    cuda.driver.copy_out(address, got.data, queue)
    assert np.isnan(got).all()


def test_devices_without_pools_allocate_all_the_same(
    stub: Stub, cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_NO_POOLS", "1")
    before = stub.used()
    memory = cuda.driver.allocate(100, Queue(cuda))
    assert stub.used() == before + 100
    del memory
    gc.collect()
    assert stub.used() == before and "cuMemFree_v2" in stub.calls()


def test_several_devices(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_DEVICES", "2")
    assert device("cuda:1").name == "Stub 1"
    with pytest.raises(DeviceError, match="needs one of the devices .*cuda:1, .*got cuda:2"):
        device("cuda:2")


def test_threads_launch_side_by_side(cuda: Device, tmp_path: Path) -> None:
    kernel = load(cuda, plan(SCALE, OFFSET), tmp_path)
    wrong: list[int] = []

    def work(number: int) -> None:
        call = Call(cuda, kernel)
        for _ in range(20):
            call(float(number), a=number)
            want = number * call.x
            want[:4] += 4 * number
            if not np.array_equal(call.result(), want):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- what goes wrong ---


@pytest.mark.parametrize("content", [b"", b"not a module"], ids=["empty", "text"])
def test_a_file_that_is_no_module_is_refused(cuda: Device, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "kernel.cubin").write_bytes(content)
    with pytest.raises(LoadError, match="loading test on cuda:0"):
        cuda.driver.load(tmp_path / "kernel.cubin", plan(SCALE), None, 0)  # type: ignore[arg-type]


def test_a_module_without_the_kernel_is_refused(cuda: Device, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="finding absent on cuda:0"):
        load(cuda, plan(Launch("absent", (), ("1", "1"), 32)), tmp_path)


def test_parameters_of_unknown_types_are_refused(cuda: Device, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="needs parameters of .*got complex"):
        load(cuda, plan(Launch("scale", (Argument("complex", 0),), ("1", "1"), 32)), tmp_path)


def test_out_of_memory_says_how_much_there_is(stub: Stub, cuda: Device) -> None:
    queue = Queue(cuda)
    cuda.driver.synchronize(queue)
    with pytest.raises(OutOfMemoryError, match=r"allocating 4294967296 bytes.*of 1073741824 bytes"):
        cuda.driver.allocate(1 << 32, queue)
    cuda.driver.allocate(1 << 20, queue)  # and goes on


def test_a_launch_that_is_refused_names_its_kernel(stub: Stub, cuda: Device,
                                                   tmp_path: Path) -> None:  # fmt: skip
    call = Call(cuda, load(cuda, plan(SCALE, OFFSET), tmp_path))
    stub.fail("cuLaunchKernel", 701, after=1)
    with pytest.raises(LaunchError, match=r"starting offset \(before it ran scale\) on cuda:0"):
        call(1.0)
    call(2.0)  # the device goes on
    assert call.result()[-1] == 2 * (N - 1)


def test_a_recording_that_fails_ends(stub: Stub, cuda: Device, tmp_path: Path) -> None:
    call = Call(cuda, load(cuda, plan(SCALE, OFFSET), tmp_path))
    call(1.0)
    stub.fail("cuLaunchKernel", 701, after=1)
    with pytest.raises(LaunchError, match="starting offset"):
        call(1.0)
    call(1.0)
    assert call.result()[-1] == N - 1 and "cuGraphLaunch" in stub.calls()


@pytest.mark.parametrize("code", [214, 700, 716, 719])
def test_a_kernel_that_breaks_the_device_is_named_from_then_on(
    stub: Stub, cuda: Device, tmp_path: Path, code: int
) -> None:
    call = Call(cuda, load(cuda, plan(SCALE), tmp_path))
    stub.break_context(code)
    call(1.0)
    with pytest.raises(DeviceLostError, match=f"after scale on cuda:0: .*{code}"):
        call.result()
    for attempt in (call.queue.synchronize, call.result, call.queue.record):
        with pytest.raises(DeviceLostError, match="after scale on cuda:0"):
            attempt()
    del call, attempt
    gc.collect()  # giving back what the lost device had is no error


def test_a_kernel_that_runs_too_long_is_named(stub: Stub, cuda: Device, tmp_path: Path) -> None:
    call = Call(cuda, load(cuda, plan(SCALE), tmp_path))
    call(1.0)
    stub.fail("cuStreamSynchronize", 702)
    with pytest.raises(DeviceTimeoutError, match="waiting after scale on cuda:0"):
        call.queue.synchronize()


def test_a_broken_driver_is_no_device(stub: Stub) -> None:
    from rudnn.runtime.targets.cuda.driver import CudaDriver

    stub.fail("cuInit", 802)
    driver = CudaDriver()
    assert driver.device_names() == () and "802" in driver.problem
    with pytest.raises(DeviceError, match="802"):
        driver.context(0)


def test_a_fork_of_a_process_that_used_cuda_is_told(cuda: Device) -> None:
    queue = Queue(cuda)
    cuda.driver.synchronize(queue)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            cuda.driver.synchronize(queue)
        except DeviceError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert "not forked" in told.read()
    os.waitpid(child, 0)
