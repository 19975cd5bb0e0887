"""The ROCm driver over a stub of HIP: devices, memory, arguments, faults; operators on it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amdgpu
import amdgpu_kernels as kernels
import numpy as np
import pytest
from hip_emulator import HipStub, emulated_rocm, stub_library

from rudnn.check import Attempt, Harness, failures
from rudnn.dsl.errors import (
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    LaunchError,
    LoadError,
    OutOfMemoryError,
)
from rudnn.ops.registry import operators
from rudnn.runtime.device import Device, Queue, device, devices, foreign_queue
from rudnn.runtime.plan import Launch, LaunchPlan, Slot
from rudnn.runtime.streams.kernel import Packer
from rudnn.runtime.targets import parse
from rudnn.runtime.targets.rocm import capability, compile, hip
from rudnn.runtime.tvm_import import load_tvm

OPERATORS = operators()
THREADS = 64
OUT_OF_MEMORY, INVALID_IMAGE, NOT_FOUND = 2, 200, 500
ILLEGAL_ADDRESS, TIMEOUT, LAUNCH_FAILURE, NOT_SUPPORTED = 700, 702, 719, 801


@pytest.fixture
def stub() -> Iterator[HipStub]:
    with emulated_rocm("gfx1100") as stub:
        stub.fail("", 0)
        stub.clear()
        yield stub
        stub.fail("", 0)


@pytest.fixture
def rocm(stub: HipStub) -> Device:
    return device("rocm:0")


class Call:
    """`reverse` loaded on a device, and arrays for it."""

    def __init__(self, on: Device, folder: Path, queue: Queue | None = None) -> None:
        load_tvm()
        function = kernels.reverse(THREADS, True)
        code = compile.compile_functions([function], capability.record("gfx1100"))
        binary = folder / "kernel.hsaco"
        binary.write_bytes(code.link())
        slots = (Slot("pointer", "x"), Slot("pointer", "out"))
        plan = LaunchPlan("reversed", slots, "0", "0", (), (function.launch,))
        self.on, self.queue = on, queue or Queue(on)
        self.x = np.arange(THREADS, dtype=np.float32)
        self.memory = [on.driver.allocate(4 * THREADS, self.queue) for _ in range(2)]
        on.driver.copy_in(self.memory[0].address, self.x.data, self.queue)
        loaded = on.driver.load(binary, plan, None, on.index)  # type: ignore[arg-type]
        self.launch = loaded.on(self.queue)

    def __call__(self) -> None:
        assert self.launch(struct.pack("2q", *(m.address for m in self.memory)), 0) == 0

    def result(self) -> np.ndarray[Any, Any]:
        out = np.empty(THREADS, np.float32)
        self.on.driver.copy_out(self.memory[1].address, out.data, self.queue)
        return out


# --- devices ---


def test_devices_tell_their_architecture(rocm: Device) -> None:
    assert str(rocm) == "rocm:0" and rocm.name == "Stub 0" and rocm.code == "rocm:gfx1100"
    assert rocm.capability == capability.record("gfx1100").capability
    assert rocm in devices() and parse("rocm")[0].status().can_run


def test_a_device_without_a_record_is_refused_by_name(
    stub: HipStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_ARCH", "gfx803")
    with pytest.raises(Exception, match="got 'gfx803'"):
        device("rocm:0").capability  # noqa: B018


def test_without_hip_the_doctor_says_what_to_install(
    stub: HipStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hip.LIBRARY, "librudnn-no-such-hip.so")
    with pytest.raises(DeviceError, match="librudnn-no-such-hip.*install AMD's ROCm"):
        device("rocm:0")


def test_a_copy_of_hip_that_the_process_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = "7f00 r-xp 00000000 08:01 1  {}/libamdhip64.so.6\n7f01 r-xp 0 0:0 0 [heap]\n"
    folder = stub_library().parent
    (folder / "libamdhip64.so.6").touch()
    monkeypatch.setattr(hip.Path, "read_text", lambda _: maps.format(folder))
    assert hip._candidates()[0] == str(folder / "libamdhip64.so.6")


def test_the_threads_current_device_stays_what_it_was(
    stub: HipStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STUB_DEVICES", "3")
    call = Call(device("rocm:2"), tmp_path)
    stub.clear()
    call()
    inside = stub.calls()
    assert inside[:2] == ["hipGetDevice", "hipSetDevice"] and inside[-1] == "hipSetDevice"
    assert hip.open_library().hipGetDevice(hip.ctypes.byref(found := hip.ctypes.c_int(9))) == 0
    assert found.value == 0
    np.testing.assert_array_equal(call.result(), call.x[::-1])


# --- what works ---


def test_kernels_run_in_the_order_of_a_queue(rocm: Device, stub: HipStub, tmp_path: Path) -> None:
    call = Call(rocm, tmp_path)
    call()
    np.testing.assert_array_equal(call.result(), call.x[::-1])
    (line,) = stub.launches()
    assert line.startswith(f"reverse grid=1,1 block={THREADS} params=")


def test_a_frameworks_stream_serves_as_a_queue(rocm: Device, stub: HipStub, tmp_path: Path) -> None:
    stream = hip.ctypes.c_void_p()
    assert hip.open_library().stream_create(hip.ctypes.byref(stream), 0) == 0
    queue = foreign_queue(rocm, stream.value or 0)
    rocm.driver.memory_usage(0)  # makes what the device itself needs
    stub.clear()
    call = Call(rocm, tmp_path, queue)
    call()
    np.testing.assert_array_equal(call.result(), call.x[::-1])
    assert "hipStreamCreateWithFlags" not in stub.calls()


def test_parameters_lie_where_the_code_object_has_them() -> None:
    load_tvm()
    function = kernels.total(("int8", "int64", "int16", "float32", "uint8", "int32"))
    code = compile.compile_functions([function], capability.record("gfx942"))
    (facts,) = amdgpu.kernels(code.assembly()).values()
    plan = LaunchPlan("f", (Slot("pointer", "out"), Slot("scalar", "s")), "0", "0", (),
                      (function.launch,))  # fmt: skip
    ((_, _, _, packed),) = Packer(plan)(struct.pack("2Q", 2**64 - 1, 2**64 - 1))
    marked = {i for i, byte in enumerate(packed) if byte}
    assert marked == {o + i for o, size in facts.arguments for i in range(size)}


# --- faults ---


def test_memory_without_an_order_serves_too(rocm: Device, stub: HipStub, tmp_path: Path) -> None:
    stub.fail("hipMallocAsync", NOT_SUPPORTED)
    call = Call(rocm, tmp_path)
    call()
    np.testing.assert_array_equal(call.result(), call.x[::-1])
    assert stub.calls().count("hipMalloc") == 2 and stub.calls().count("hipMallocAsync") == 1


def test_out_of_memory_tells_how_much_there_is(rocm: Device, stub: HipStub) -> None:
    with pytest.raises(OutOfMemoryError, match=f"allocating {2**40} bytes on rocm:0.*are free"):
        rocm.driver.allocate(2**40, Queue(rocm))
    assert rocm.driver.allocate(64, Queue(rocm)).nbytes == 64


def test_a_file_that_is_no_code_object_is_refused(rocm: Device, tmp_path: Path) -> None:
    binary = tmp_path / "kernel.hsaco"
    binary.write_bytes(b"not a code object" * 10)
    plan = LaunchPlan("op", (), "0", "0", (), (Launch("op_0", (), ("1", "1"), 64),))
    with pytest.raises(LoadError, match="loading op on rocm:0"):
        rocm.driver.load(binary, plan, None, 0)  # type: ignore[arg-type]


def test_a_code_object_without_the_kernel_is_refused(
    rocm: Device, stub: HipStub, tmp_path: Path
) -> None:
    stub.fail("hipModuleGetFunction", NOT_FOUND)
    with pytest.raises(LoadError, match="finding reverse on rocm:0"):
        Call(rocm, tmp_path)


def test_a_launch_that_is_refused_leaves_the_device_usable(
    rocm: Device, stub: HipStub, tmp_path: Path
) -> None:
    call = Call(rocm, tmp_path)
    stub.fail("hipModuleLaunchKernel", 1)
    with pytest.raises(LaunchError, match="starting reverse on rocm:0"):
        call()
    call()
    np.testing.assert_array_equal(call.result(), call.x[::-1])


@pytest.mark.parametrize(
    ("code", "error"),
    [(ILLEGAL_ADDRESS, DeviceLostError), (LAUNCH_FAILURE, DeviceLostError),
     (TIMEOUT, DeviceTimeoutError)],
)  # fmt: skip
def test_a_kernel_that_breaks_the_device_is_named(
    rocm: Device, stub: HipStub, tmp_path: Path, code: int, error: type[Exception]
) -> None:
    call = Call(rocm, tmp_path)
    stub.break_context(code)
    call()
    with pytest.raises(error, match="waiting after reverse on rocm:0"):
        rocm.driver.synchronize(call.queue)
    with pytest.raises(DeviceLostError, match="reverse"):
        call()


def test_a_forked_child_is_told_to_be_spawned(rocm: Device, tmp_path: Path) -> None:
    call = Call(rocm, tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = ""
        try:
            call()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    told = os.read(reader, 4096).decode()
    os.waitpid(child, 0)
    assert told.startswith("DeviceError") and "rocm:0" in told and "spawn" in told


# --- operators ---


def attempts(harness: Harness, dtype: str, sizes: str, layouts: tuple[str, ...]) -> list[Attempt]:
    return [
        a for a in harness.plan(None, None)
        if (a.dtype.short, a.case.label) == (dtype, sizes) and a.layout in layouts
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted(OPERATORS))
@pytest.mark.parametrize(
    ("arch", "dtype", "sizes", "layouts"),
    [
        ("gfx90a", "f32", "odd", ("strided",)),
        ("gfx942", "bf16", "odd", ("broadcast",)),
        ("gfx1100", "f16", "typical", ("contiguous",)),
        ("gfx1201", "bf16", "typical", ("strided",)),
    ],
)
def test_operators_agree_with_the_oracle(
    name: str, arch: str, dtype: str, sizes: str, layouts: tuple[str, ...]
) -> None:
    with emulated_rocm(arch) as stub:
        stub.fail("", 0)
        stub.clear()
        harness = Harness(OPERATORS[name], "rocm", 0)
        made = [row for a in attempts(harness, dtype, sizes, layouts) for row in harness.forward(a)]
        bad = failures(made)
        assert not bad, "\n".join(f"{r.against} {r.layout} {r.dims}: {r.detail}" for r in bad)
        assert stub.launches() or not made
