"""Operators exported for ROCm: the C host builds without warnings and runs on a stub of HIP."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import amdgpu
import numpy as np
import pytest
from exports import build_host, run_host
from exports import shares_of_squares as shares
from hip_emulator import emulated, stub_library
from native_kernels import needs_compiler

from rudnn.dsl.dtypes import f16, f32
from rudnn.ops.linear import linear
from rudnn.ops.pointwise import mul
from rudnn.runtime.export import export_operator, sample
from rudnn.runtime.targets.rocm import capability, linker

pytestmark = [
    pytest.mark.skipif(linker.find() is None, reason=f"needs {linker.HINT}"),
    needs_compiler,
]


def export(operator: Any, folder: Path, name: str, arch: str, **wanted: Any) -> dict[str, Any]:
    """Export, and build the host."""
    manifest = export_operator(operator, target=f"rocm:{arch}", folder=folder, name=name, **wanted)
    build_host(manifest, folder, "-std=c99")
    (folder / "libamdhip64.so").symlink_to(stub_library())
    (folder / "out").mkdir()
    return manifest


def emulate(folder: Path, name: str, arch: str) -> None:
    """Put kernels that the stub can run in the place of the code object."""
    module = emulated((folder / f"{name}.ll").read_text(), capability.record(arch).wave)
    (folder / f"{name}.hsaco").write_bytes(module)


def run(folder: Path, name: str, *arguments: str, code: int = 0, driver: bool = True) -> str:
    """What the host prints."""
    places = {"LD_LIBRARY_PATH": str(folder)} if driver else {}
    return run_host(folder, name, *arguments, "--out", "out", code=code, **places)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1201"])
def test_the_host_agrees_with_the_oracle(tmp_path: Path, arch: str) -> None:
    manifest = export(shares, tmp_path, "shares", arch, dims={"H": "dynamic"})
    assert len(manifest["launches"]) > 1
    emulate(tmp_path, "shares", arch)
    for rows, h in ((3, 5), (40, 17)):
        run(tmp_path, "shares", f"rows={rows}", f"H={h}")
        x = sample(rows * h, 1, f32).reshape(rows, h).astype(np.float64)
        got = np.fromfile(tmp_path / "out" / "out.bin", np.float32).reshape(rows, h)
        assert np.allclose(got, x / (1 + (x * x).sum(0)), 1e-5, 1e-6)


@pytest.mark.parametrize(("arch", "instruction"), [("gfx942", "v_mfma"), ("gfx1100", "v_wmma")])
def test_a_product_by_matrix_units_runs_from_c(tmp_path: Path, arch: str, instruction: str) -> None:
    manifest = export(linear, tmp_path, "linear", arch, dtype=f16, dims={"N": 24, "K": 48})
    emulate(tmp_path, "linear", arch)
    run(tmp_path, "linear", "rows=33")
    x = sample(33 * 48, 1, f16).reshape(33, 48).astype(np.float64)
    w = sample(24 * 48, 2, f16).reshape(24, 48).astype(np.float64)
    got = np.fromfile(tmp_path / "out" / "out.bin", np.float16).reshape(33, 24)
    assert np.allclose(got, x @ w.T, 2e-3, 2e-3)
    assert instruction in (tmp_path / "linear.s").read_text() and manifest["arch"] == arch


def test_the_folder_is_complete(tmp_path: Path) -> None:
    manifest = export_operator(shares, target="rocm:gfx90a", folder=tmp_path, name="shares")
    assert set(manifest["files"]) == {p.name for p in tmp_path.iterdir()} - {"manifest.json"}
    made = {"shares.hsaco", "shares.ll", "shares.s", "shares.h", "shares_host.c", "rudnn_hip.h"}
    assert made <= set(manifest["files"]) and manifest["wavefront"] == 64
    found = amdgpu.kernels((tmp_path / "shares.s").read_text())
    for launch in manifest["launches"]:
        assert found[launch["entry"]].threads == launch["block"] and launch["grid"][0]["python"]


def test_the_header_is_plain_c_plus_plus_too(tmp_path: Path) -> None:
    export_operator(shares, target="rocm:gfx1100", folder=tmp_path, name="shares")
    unit = '#include "shares.h"\nint main() { return shares_load(nullptr, ".", nullptr); }\n'
    command = ["g++", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I.", "-xc++", "-"]
    subprocess.run(command, input=unit.encode(), cwd=tmp_path, check=True)


def test_faults_are_told(tmp_path: Path) -> None:
    export(mul, tmp_path, "mul", "gfx1100")
    assert "loading libamdhip64.so failed" in run(tmp_path, "mul", code=1, driver=False)
    code_object = (tmp_path / "mul.hsaco").read_bytes()
    (tmp_path / "mul.hsaco").write_bytes(b"no code object")
    assert "loading mul.hsaco failed" in run(tmp_path, "mul", code=1)
    (tmp_path / "mul.hsaco").unlink()
    assert "reading ./mul.hsaco failed" in run(tmp_path, "mul", code=1)
    (tmp_path / "mul.hsaco").write_bytes(code_object.replace(b"mul_0", b"other"))
    assert "finding mul_0 failed" in run(tmp_path, "mul", code=1)


def test_the_real_code_object_is_started_with_the_plans_arguments(tmp_path: Path) -> None:
    """The stub takes a code object, which it cannot run: all of HIP's calls are made."""
    export(mul, tmp_path, "mul", "gfx942")
    assert "1000 elements" in run(tmp_path, "mul", "shape=1000")
