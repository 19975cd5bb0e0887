"""CUDA without a GPU: records, source, cubins, the matrix units' lanes, what is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import cuda_tile
import ml_dtypes
import numpy as np
import pytest
from cuda_emulator import Stub, emulated, emulated_cuda, run
from sass import TOOLS, instructions, matrix, resources, tool

from rudnn.dsl.errors import CompileError, TargetError
from rudnn.runtime.device import Queue, device
from rudnn.runtime.targets import parse
from rudnn.runtime.targets.cuda import capability, source, toolkit
from rudnn.schedules.capability import MatrixUnit

ARCHES = ("sm_80", "sm_90a", "sm_120")
UNITS = capability.record("sm_80").matrix
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FORMS = [  # A transposed, B transposed, stages of asynchronous copies
    (False, False, 0), (True, False, 0), (False, True, 0), (True, True, 0), (False, False, 3),
    (True, True, 2),
]  # fmt: skip
needs_nvrtc = pytest.mark.skipif(toolkit.find_nvrtc() is None, reason=f"needs {toolkit.HINT}")
needs_tools = pytest.mark.skipif(tool("nvdisasm") is None, reason=f"needs {TOOLS}")


def short(unit: MatrixUnit) -> str:
    return unit.operands


@pytest.fixture
def stub() -> Iterator[Stub]:
    with emulated_cuda() as stub:
        yield stub


def generated(
    unit: MatrixUnit, form: tuple[bool, bool, int], arch: str = "sm_80"
) -> tuple[str, Any]:
    target = source.tvm_target(arch)
    a_t, b_t, stages = form
    function, plan = cuda_tile.product(unit, target, 96, a_t=a_t, b_t=b_t, stages=stages)
    return source.generate([function], target), plan


# --- records ---


def test_every_architecture_of_the_range_has_a_record() -> None:
    for number in range(capability.OLDEST, capability.NEWEST + 1):
        record = capability.record(f"sm_{number}")
        assert record.model == "grid" and record.subgroup == 32 and record.shuffle
        assert record.async_copy == bool(record.matrix) == (number >= 80)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100f"])
def test_variants_of_an_architecture_share_its_record(arch: str) -> None:
    assert capability.record(arch) == capability.record(arch.rstrip("af"))


@pytest.mark.parametrize("arch", ["sm_70", "sm_122", "90", "sm_90b", "sm_", "gfx942"])
def test_other_architectures_are_refused(arch: str) -> None:
    with pytest.raises(TargetError, match=f"from sm_75 to sm_121.*got {arch}"):
        capability.record(arch)


def test_without_a_device_an_architecture_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from rudnn.runtime.targets.cuda import driver, libcuda, target

    monkeypatch.setenv(libcuda.LIBRARY, "librudnn-no-such-driver.so")
    monkeypatch.setattr(target, "driver", lru_cache(driver.CudaDriver))
    cuda, _ = parse("cuda")
    with pytest.raises(TargetError, match=r"needs an architecture.*cuda:sm_90.*no driver"):
        cuda.capability("")
    status = cuda.status()
    assert not status.can_run and "no driver" in status.detail and status.hint


def test_the_device_tells_its_architecture(stub: Stub) -> None:
    cuda, _ = parse("cuda")
    assert cuda.capability("") == capability.record("sm_90")
    assert device("cuda:0").code == "cuda:sm_90"
    assert cuda.status().can_run


# --- compilers ---


@needs_nvrtc
def test_a_source_that_does_not_compile_tells_why() -> None:
    with pytest.raises(CompileError, match=r"NVRTC cannot compile bad for sm_80:\n.*nonsense"):
        toolkit.cubin('extern "C" __global__ void bad() { nonsense(); }', "sm_80", "bad")


def test_an_unknown_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolkit.COMPILER, "clang")
    with pytest.raises(CompileError, match=r"needs RUDNN_CUDA_COMPILER=nvrtc or nvcc, got clang"):
        toolkit.cubin("", "sm_80", "empty")


def test_nvcc_compiles_when_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; cp "$3" "$2"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv(toolkit.COMPILER, "nvcc")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    given = "what nvcc was given"
    assert toolkit.cubin(given, "sm_80", "unit") == (given.encode(), given)
    nvcc.write_text("#!/bin/sh\necho not this way >&2; exit 1\n")
    with pytest.raises(CompileError, match=r"nvcc cannot compile unit for sm_80:\nnot this way"):
        toolkit.cubin("", "sm_80", "unit")


CROWDED = """
template <int N> __device__ void mix(float *x, int n) {
  float a[N];
  #pragma unroll
  for (int i = 0; i < N; ++i) a[i] = x[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; ++k)
  #pragma unroll
    for (int i = 0; i < N; ++i) a[i] = a[i] * a[(i + 7) % N] + 1.0f;
  #pragma unroll
  for (int i = 0; i < N; ++i) x[i * 1024 + threadIdx.x] = a[i];
}
extern "C" __global__ void __launch_bounds__(1024) tight(float *x, int n) { mix<100>(x, n); }
extern "C" __global__ void __launch_bounds__(256) roomy(float *x, int n) { mix<20>(x, n); }
"""


@needs_nvrtc
@needs_tools
def test_a_kernel_on_the_stack_is_given_more_registers() -> None:
    cubin, text = toolkit.cubin(CROWDED, "sm_90", "unit")
    usage = resources(cubin)
    assert "__launch_bounds__(1024, 1) tight(" in text  # in vain: 64 is all that 1024 threads have
    assert "__launch_bounds__(256) roomy(" in text and usage["roomy"].stack == 0
    assert usage["tight"].stack and usage["tight"].registers == 64


def test_tvm_keeps_its_own_compiler_callback() -> None:
    source.tvm_target("sm_80")
    import tvm

    before = tvm.get_global_func("tvm_callback_cuda_compile")
    generated(UNITS[0], FORMS[0])
    assert tvm.get_global_func("tvm_callback_cuda_compile").same_as(before)


def test_functions_that_no_prelude_has_are_refused() -> None:
    unit = MatrixUnit((16, 8, 16), "float16", "float32", "rudnn_m16n8k16_f8", 8, 4, 4)
    text, _ = generated(unit, FORMS[0])
    with pytest.raises(CompileError, match="rudnn_m16n8k16_f8_zero"):
        toolkit.cubin(text, "sm_80", "product")


# --- matrix units ---


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("unit", UNITS, ids=short)
def test_matrix_unit_multiplies(stub: Stub, unit: MatrixUnit, form: tuple[bool, bool, int],
                                tmp_path: Path) -> None:  # fmt: skip
    """The prelude's own indexing, over ldmatrix, mma.sync and cp.async as the PTX ISA has them."""
    text, plan = generated(unit, form)
    binary = tmp_path / "product.so"
    binary.write_bytes(emulated(text))
    rng = np.random.default_rng(3)
    a = rng.standard_normal((32, 96)).astype(NUMPY[unit.operands])
    b = rng.standard_normal((96, 32)).astype(NUMPY[unit.operands])
    stored = [
        np.ascontiguousarray(a.T if form[0] else a),
        np.ascontiguousarray(b if form[1] else b.T),
    ]
    got = np.empty((32, 32), np.float32)
    on = device("cuda:0")
    queue, driver = Queue(on), on.driver
    memory = [driver.allocate(x.nbytes, queue) for x in (*stored, got)]
    for place, array in zip(memory, stored, strict=False):
        driver.copy_in(place.address, array.view(np.uint16).data, queue)
    kernel: Any = driver.load(binary, plan, None, 0)  # type: ignore[arg-type]
    kernel.on(queue)(struct.pack("3q", *(m.address for m in memory)), 0)
    driver.copy_out(memory[2].address, got.data, queue)
    want = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@needs_nvrtc
@needs_tools
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("unit", UNITS, ids=short)
def test_matrix_unit_stays_in_registers(unit: MatrixUnit, arch: str) -> None:
    for form in FORMS[3:5]:
        text, _ = generated(unit, form, arch)
        cubin, _ = toolkit.cubin(text, arch, "product")
        usage, code = resources(cubin)["product_0"], instructions(cubin)["product_0"]
        assert (usage.stack, usage.local) == (0, 0) and usage.registers <= 64
        assert matrix(code) and code["LDSM"] and not code["LDL"] + code["STL"]
        assert bool(code["LDGSTS"]) == bool(form[2])


# --- the emulation is of use only if it notices what a device would ---


def test_a_copy_not_waited_for_is_noticed() -> None:
    text, _ = generated(UNITS[0], FORMS[4])
    text = text.replace("  rudnn_copy_async_wait_2();\n", "")
    memory = [np.zeros(32 * 96, np.float32) for _ in range(3)]
    parameters = struct.pack("3q", *(m.ctypes.data for m in memory))
    assert "copies have arrived" in run(emulated(text), "product_0", parameters, 1, 128)


BARRIER = """
extern "C" __global__ void mixed(float *x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  %s
  x[threadIdx.x] = s[63 - threadIdx.x];
}
"""


@pytest.mark.parametrize("backwards", ["", "1"])
def test_a_missing_barrier_is_noticed(backwards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backwards:
        monkeypatch.setenv("STUB_BACKWARDS", backwards)
    for statement, right in (("__syncthreads();", True), ("", False)):
        x = np.arange(64, dtype=np.float32)
        parameters = struct.pack("q", x.ctypes.data)
        assert run(emulated(BARRIER % statement), "mixed", parameters, 1, 64) == ""
        assert np.array_equal(x, np.arange(64)[::-1]) == right


@pytest.mark.parametrize("statement", [
    "if (threadIdx.x < 7) __syncthreads(); else __syncwarp();",
    "if (threadIdx.x < 7) __shfl_sync(0xffffffffu, 1.0f, 0, 32);"
    "else __shfl_down_sync(0xffffffffu, 1.0f, 1, 32), __syncthreads();",
])  # fmt: skip
def test_exchanges_in_branches_are_noticed(statement: str) -> None:
    x = np.zeros(64, np.float32)
    error = run(emulated(BARRIER % statement), "mixed", struct.pack("q", x.ctypes.data), 1, 64)
    assert "never come" in error


def test_half_precision_rounds_as_numpy_does() -> None:
    unit = """
#include <cuda_fp16.h>
extern "C" __global__ void convert(const float *x, half *y, float *z) {
  long i = blockIdx.x * 256L + threadIdx.x;
  y[i] = (half)x[i];
  z[i] = (float)y[i];
}
"""
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint32)
    near = np.arange(1 << 16, dtype=np.uint32) << 12 | 0x38000000 & 0x7F000000
    x = np.concatenate([bits, near]).view(np.float32)
    y, z = np.empty(x.size, np.float16), np.empty(x.size, np.float32)
    parameters = struct.pack("3q", *(m.ctypes.data for m in (x, y, z)))
    assert run(emulated(unit), "convert", parameters, x.size // 256, 256) == ""
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(y, x.astype(np.float16))
    np.testing.assert_array_equal(z, y.astype(np.float32))
