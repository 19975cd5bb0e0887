"""ROCm without a GPU: records, code objects, lanes of matrix units, barriers, what is refused."""

from __future__ import annotations

import os
import re
import struct
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import amdgpu
import amdgpu_kernels as kernels
import ml_dtypes
import numpy as np
import pytest
from cuda_emulator import run
from hip_emulator import emulated

from rudnn.dsl.errors import CompileError, TargetError
from rudnn.runtime.device_code import DeviceFunction
from rudnn.runtime.plan import Launch
from rudnn.runtime.targets import parse
from rudnn.runtime.targets.rocm import capability, compile, linker
from rudnn.runtime.tvm_import import load_tvm

ARCHES = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
RELATIVES = ("gfx906", "gfx908", "gfx950", "gfx1030", "gfx1101", "gfx1102", "gfx1200")
UNITS = [
    pytest.param(arch, unit, id=f"{arch}-{unit.operands}")
    for arch in (*ARCHES, "gfx908", "gfx1151")
    for unit in capability.record(arch).capability.matrix
]
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Array = np.ndarray[Any, Any]
needs_linker = pytest.mark.skipif(linker.find() is None, reason=f"needs {linker.HINT}")


@pytest.fixture(autouse=True)
def tvm() -> None:
    load_tvm()


def built(arch: str, *functions: DeviceFunction) -> compile.Code:
    return compile.compile_functions(functions, capability.record(arch))


def ran(code: compile.Code, arch: str, function: DeviceFunction, *arrays: Array) -> str:
    """Run a function's one block on the CPU; what was wrong, or ""."""
    module = emulated(code.ir, capability.record(arch).wave)
    packed = struct.pack(f"{len(arrays)}Q", *(a.ctypes.data for a in arrays))
    return run(module, function.name, packed, 1, function.launch.block)


# --- records ---


def test_records_tell_wavefronts_and_matrix_units() -> None:
    for arch, wave, units in (
        ("gfx906", 64, 0), ("gfx908", 64, 1), ("gfx90a", 64, 2), ("gfx942", 64, 2),
        ("gfx950", 64, 2), ("gfx1030", 32, 0), ("gfx1101", 32, 2), ("gfx1201", 32, 2),
    ):  # fmt: skip
        record = capability.record(arch).capability
        assert (record.subgroup, len(record.matrix)) == (wave, units), arch
        for unit in record.matrix:  # every lane holds its share; gfx11 keeps operands twice
            copies = 2 if "wmma_" in unit.intrinsic else 1
            assert (unit.a * wave, unit.c * wave) == (256 * copies, 256), unit


def test_features_of_a_named_architecture_are_left_aside() -> None:
    assert capability.record("gfx90a:sramecc+:xnack-") == capability.record("gfx90a")


@pytest.mark.parametrize("arch", ["gfx803", "gfx9", "90a", "sm_90", "gfx1299"])
def test_other_architectures_are_refused(arch: str) -> None:
    with pytest.raises(TargetError, match=f"gfx90a, gfx942.*got '{arch}'"):
        capability.record(arch)


def test_without_a_device_an_architecture_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from rudnn.runtime.targets.rocm import driver, hip

    monkeypatch.setenv(hip.LIBRARY, "librudnn-no-such-hip.so")
    monkeypatch.setattr(driver, "driver", lru_cache(driver.HipDriver))
    rocm, _ = parse("rocm")
    with pytest.raises(TargetError, match="such as rocm:gfx942, got rocm .*librudnn-no-such-hip"):
        rocm.capability("")
    status = rocm.status()
    assert not status.can_run and "librudnn-no-such-hip" in status.detail and status.hint
    assert parse("rocm:gfx942")[0].capability("gfx942").subgroup == 64


# --- code ---


@pytest.mark.parametrize(("arch", "unit"), UNITS)
@pytest.mark.parametrize("a_t", [False, True])
@pytest.mark.parametrize("b_t", [False, True])
def test_matrix_units_multiply(arch: str, unit: Any, a_t: bool, b_t: bool) -> None:
    wave, dtype = capability.record(arch).wave, NUMPY[unit.operands]
    function = kernels.product(unit, wave, a_t, b_t)
    code = built(arch, function)
    (facts,) = amdgpu.kernels(code.assembly()).values()
    assert (facts.scratch, facts.spills, facts.bare_barriers) == (0, 0, 0)
    assert sum(n for name, n in facts.instructions.items() if re.match("v_(mfma|wmma)", name)) == 2
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-8, 9, (2, 16, 16)).astype(dtype) for _ in "ab")
    c = np.full((2, 16, 16), np.nan, np.float32)
    assert ran(code, arch, function, a, b, c) == ""
    left, right = a.astype(np.float32), b.astype(np.float32)
    left = left.swapaxes(1, 2) if a_t else left
    right = right if b_t else right.swapaxes(1, 2)
    np.testing.assert_array_equal(c, 2 * left @ right)


@pytest.mark.parametrize(("arch", "align"), [("gfx942", 8), ("gfx1100", 16), ("gfx1201", 16)])
def test_fragments_of_rows_load_in_one_piece(arch: str, align: int) -> None:
    record = capability.record(arch)
    code = built(arch, kernels.product(record.capability.matrix[0], record.wave, False, False))
    aligned = re.findall(r"load <\d+ x half>, ptr addrspace\(3\) [^\n]*, align (\d+)", code.ir)
    assert aligned == [str(align)] * 2


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100"])
@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "int64", "int32", "uint16", "int8", "bool"]
)
@pytest.mark.parametrize("down", [None, 5])
@pytest.mark.parametrize("width", [8, 32])
def test_lanes_exchange_values(arch: str, dtype: str, down: int | None, width: int) -> None:
    wave = capability.record(arch).wave
    function = kernels.exchange(dtype, wave, down, width)
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, 2 * wave)
    x = x.astype("uint8" if dtype == "bool" else dtype)
    out = np.zeros_like(x)
    assert ran(built(arch, function), arch, function, x, out) == ""
    i = np.arange(2 * wave)
    first, place = i - i % width, i % width
    source = first + (3 * i + 1) % width if down is None else i + down * (place + down < width)
    np.testing.assert_array_equal(out, x[source])


@pytest.mark.parametrize("arch", ARCHES)
def test_barriers_order_shared_memory(arch: str) -> None:
    function = kernels.reverse(256, synchronised=True)
    code = built(arch, function)
    (facts,) = amdgpu.kernels(code.assembly()).values()
    assert facts.bare_barriers == 0
    assert facts.instructions["s_barrier"] + facts.instructions["s_barrier_signal"] == 2
    x, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    assert ran(code, arch, function, x, out) == ""
    np.testing.assert_array_equal(out, x[::-1])


def test_a_missing_barrier_shows_in_the_emulator() -> None:
    function = kernels.reverse(256, synchronised=False)
    x, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    assert ran(built("gfx942", function), "gfx942", function, x, out) == ""
    assert np.isnan(out).any()


def test_bare_barriers_are_counted() -> None:
    text = built("gfx1100", kernels.reverse(256, synchronised=True)).assembly()
    waits = re.sub(r"^\ts_waitcnt .*lgkmcnt\(0\)$", "\ts_nop 0", text, flags=re.M)
    (facts,) = amdgpu.kernels(waits).values()
    assert facts.bare_barriers > 0


@pytest.mark.parametrize(("through_global", "fence"), [(False, "!mmra"), (True, "acquire\n")])
def test_barriers_order_global_memory_where_it_is_read_back(
    through_global: bool, fence: str
) -> None:
    code = built("gfx1100", kernels.reverse(256, True, through_global))
    fences = re.findall(r"fence syncscope\(\"workgroup\"\) acquire[^\n]*\n", code.ir)
    assert len(fences) == 2 and all(fence in line for line in fences)


@pytest.mark.parametrize("threads", [64, 256, 1024])
def test_a_kernel_is_compiled_for_its_own_number_of_threads(threads: int) -> None:
    for arch in ("gfx90a", "gfx1201"):
        code = built(arch, kernels.reverse(threads, True))
        (facts,) = amdgpu.kernels(code.assembly()).values()
        assert (facts.threads, facts.shared) == (threads, 4 * threads)
        assert facts.wave == capability.record(arch).wave
        assert facts.arguments == ((0, 8), (8, 8))


@needs_linker
@pytest.mark.parametrize("arch", [*ARCHES, *RELATIVES])
def test_code_objects_of_every_architecture(arch: str) -> None:
    image = built(arch, kernels.reverse(256, True)).link()
    assert image[:4] == b"\x7fELF" and image[18] == 224  # the machine is AMD's
    assert b"amdgcn-amd-amdhsa--" + arch.encode() in image and b"reverse.kd" in image


def test_the_same_functions_make_the_same_code() -> None:
    first, second = (built("gfx1100", kernels.reverse(128, True)).ir for _ in range(2))
    assert first == second


def test_threads_compile_for_several_architectures_at_once() -> None:
    wanted = {arch: built(arch, kernels.reverse(64, True)).ir for arch in ARCHES}
    found: dict[str, str] = {}

    def work(arch: str) -> None:
        found[arch] = built(arch, kernels.reverse(64, True)).ir

    threads = [threading.Thread(target=work, args=(arch,)) for arch in ARCHES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted


def test_tvms_warnings_about_its_own_rocm_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    from rudnn.runtime.targets.rocm.quiet import quiet

    with quiet():
        os.write(2, b"before\n[10:00:00] /x.cc:96: Warning: Unable to detect ROCm version, 1\n")
        os.write(2, b"[10:00:00] /x.cc:9: Warning: Cannot get maximum number of threads for AMD "
                    b"codegen\n[10:00:00] /x.cc:9: Warning: of note\nafter")  # fmt: skip
    assert capfd.readouterr().err == "before\n[10:00:00] /x.cc:9: Warning: of note\nafter"
    with pytest.raises(KeyError), quiet():
        os.write(2, b"told\n")
        raise KeyError
    assert capfd.readouterr().err == "told\n"


# --- what is refused ---


def with_value(dtype: str, make: Any) -> DeviceFunction:
    """out = `make`(x), elementwise."""
    from tvm import tirx

    thread = tirx.Var("thread", "int32")
    at = tirx.Cast("int64", thread)
    x, out = kernels.buffer("x", dtype, 64), kernels.buffer("out", dtype, 64)
    store = tirx.BufferStore(out, make(x[at]), [at])
    return kernels.device_function("value", 64, [x, out], [store], thread)


def test_functions_without_instructions_are_refused_before_llvm_ends_the_process() -> None:
    from tvm import tirx

    with pytest.raises(CompileError, match="needs operations that AMD devices have, got exp"):
        built("gfx942", with_value("float64", tirx.exp))
    with pytest.raises(CompileError, match="needs functions of the ROCm prelude, got sinf"):
        built("gfx942", with_value("float32", lambda v: tirx.call_extern("float32", "sinf", v)))


def test_another_architectures_matrix_unit_is_refused() -> None:
    unit = capability.record("gfx942").capability.matrix[0]
    with pytest.raises(CompileError, match="got rudnn_mfma_f16_zero"):
        built("gfx1100", kernels.product(unit, 32, False, False))


@pytest.mark.parametrize(
    ("launch", "told"),
    [
        (Launch("reverse", (), ("1", "1"), 2048), "1 to 1024 threads a block on gfx942, got 2048"),
        (Launch("reverse", (), ("1", "1"), 64, 70000), "65536 bytes of shared .* got 70000"),
    ],
)
def test_blocks_over_the_limits_are_refused(launch: Launch, told: str) -> None:
    function = kernels.reverse(64, True)
    with pytest.raises(CompileError, match=told):
        built("gfx942", DeviceFunction("reverse", function.function, launch))


def test_a_linker_that_fails_tells_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    code = built("gfx942", kernels.reverse(64, True))
    monkeypatch.setattr(linker, "find", lambda: ("sh", "-c", "echo no such thing >&2; exit 1"))
    with pytest.raises(CompileError, match="no such thing"):
        code.link()
    monkeypatch.setattr(linker, "find", lambda: None)
    with pytest.raises(CompileError, match=r"needs an ld\.lld .* got none: pip install"):
        code.link()


def test_an_old_linker_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version in (("ld.lld", 14), ("ld.lld-19", 19)):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\necho LLD {version}.0.6\n")
        os.chmod(file, 0o755)
    monkeypatch.setattr(linker.importlib.util, "find_spec", lambda _: None)
    found = linker._find(str(tmp_path / "rocm"), str(tmp_path))
    assert found == (str(tmp_path / "ld.lld-19"),)
