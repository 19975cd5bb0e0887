"""Operators exported for CUDA: the C host builds without warnings and runs on a stub of libcuda."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulator import emulated, stub_library
from exports import build_host, run_host
from exports import shares_of_squares as shares
from native_kernels import needs_compiler
from sass import resources, tool

from rudnn.dsl.dtypes import f16, f32
from rudnn.ops.linear import linear
from rudnn.ops.pointwise import mul
from rudnn.runtime.export import export_operator, sample
from rudnn.runtime.targets.cuda import toolkit

pytestmark = [
    pytest.mark.skipif(toolkit.find_nvrtc() is None, reason=f"needs {toolkit.HINT}"),
    needs_compiler,
]


def export(operator: Any, folder: Path, name: str, **wanted: Any) -> dict[str, Any]:
    """Export, and build the host."""
    target = wanted.pop("target", "cuda:sm_90")
    manifest = export_operator(operator, target=target, folder=folder, name=name, **wanted)
    build_host(manifest, folder, "-std=c99")
    (folder / "libcuda.so.1").symlink_to(stub_library())
    (folder / "out").mkdir()
    return manifest


def emulate(folder: Path, name: str) -> None:
    """Put kernels that the stub can run in the place of the cubin."""
    (folder / f"{name}.cubin").write_bytes(emulated((folder / f"{name}.cu").read_text()))


def run(folder: Path, name: str, *arguments: str, code: int = 0, driver: bool = True) -> str:
    """What the host prints."""
    places = {"LD_LIBRARY_PATH": str(folder)} if driver else {}
    return run_host(folder, name, *arguments, "--out", "out", code=code, **places)


def test_the_host_agrees_with_the_oracle(tmp_path: Path) -> None:
    export(mul, tmp_path, "mul", ranks={"shape": 2}, unit=(), dtype=f16)
    emulate(tmp_path, "mul")
    for rows, columns in ((3, 5), (40, 17), (0, 4)):
        run(tmp_path, "mul", f"shape_0={rows}", f"shape_1={columns}")
        a, b = (sample(rows * columns, seed, f16) for seed in (1, 2))
        assert np.array_equal(np.fromfile(tmp_path / "out" / "out.bin", np.float16), a * b)


def test_kernels_share_a_workspace_that_the_device_lends(tmp_path: Path) -> None:
    manifest = export(shares, tmp_path, "shares", dims={"H": "dynamic"})
    assert len(manifest["launches"]) > 1
    emulate(tmp_path, "shares")
    for rows, h in ((3, 5), (40, 17)):
        run(tmp_path, "shares", f"rows={rows}", f"H={h}")
        x = sample(rows * h, 1, f32).reshape(rows, h).astype(np.float64)
        got = np.fromfile(tmp_path / "out" / "out.bin", np.float32).reshape(rows, h)
        assert np.allclose(got, x / (1 + (x * x).sum(0)), 1e-5, 1e-6)


def test_a_product_by_tensor_cores_runs_from_c(tmp_path: Path) -> None:
    manifest = export(linear, tmp_path, "linear", dtype=f16, dims={"N": 24, "K": 48})
    emulate(tmp_path, "linear")
    run(tmp_path, "linear", "rows=33")
    x = sample(33 * 48, 1, f16).reshape(33, 48).astype(np.float64)
    w = sample(24 * 48, 2, f16).reshape(24, 48).astype(np.float64)
    got = np.fromfile(tmp_path / "out" / "out.bin", np.float16).reshape(33, 24)
    assert np.allclose(got, x @ w.T, 2e-3, 2e-3)
    assert "mma.sync" in (tmp_path / "linear.cu").read_text() and manifest["arch"] == "sm_90"


def test_the_folder_is_complete(tmp_path: Path) -> None:
    manifest = export_operator(shares, target="cuda:sm_120", folder=tmp_path, name="shares")
    assert set(manifest["files"]) == {p.name for p in tmp_path.iterdir()} - {"manifest.json"}
    assert {"shares.cubin", "shares.cu", "shares.h", "shares_host.c"} <= set(manifest["files"])
    launches = manifest["launches"]
    assert all(launch["block"] and launch["grid"][0]["python"] for launch in launches)
    if tool("cuobjdump"):
        found = resources((tmp_path / "shares.cubin").read_bytes())
        assert found.keys() == {launch["entry"] for launch in launches}


def test_the_header_is_plain_c_plus_plus_too(tmp_path: Path) -> None:
    export_operator(shares, target="cuda:sm_80", folder=tmp_path, name="shares")
    unit = '#include "shares.h"\nint main() { return shares_load(nullptr, ".", nullptr); }\n'
    command = ["g++", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I.", "-xc++", "-"]
    subprocess.run(command, input=unit.encode(), cwd=tmp_path, check=True)


def test_faults_are_told(tmp_path: Path) -> None:
    export(mul, tmp_path, "mul")
    assert "loading libcuda.so.1 failed" in run(tmp_path, "mul", code=1, driver=False)
    (tmp_path / "mul.cubin").write_bytes(b"not a cubin")
    assert "loading mul.cubin failed" in run(tmp_path, "mul", code=1)
    (tmp_path / "mul.cubin").unlink()
    assert "reading ./mul.cubin failed" in run(tmp_path, "mul", code=1)
    (tmp_path / "mul.cubin").write_bytes(emulated('extern "C" __global__ void other() {}'))
    assert "finding mul_0 failed" in run(tmp_path, "mul", code=1)


def test_the_real_cubin_is_started_with_the_plans_arguments(tmp_path: Path) -> None:
    """The stub takes a cubin, which it cannot run: all the driver's calls are made."""
    export(mul, tmp_path, "mul")
    assert "1000 elements" in run(tmp_path, "mul", "shape=1000")
