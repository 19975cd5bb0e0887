"""Operators exported for Vulkan: the C host builds without warnings, and agrees with the oracle."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import build_host, run_host
from exports import shares_of_squares as shares

from rudnn.dsl.dtypes import f16, f32
from rudnn.ops.pointwise import gelu, mul
from rudnn.runtime.export import export_operator, sample
from rudnn.runtime.targets.vulkan.driver import driver
from rudnn.runtime.targets.vulkan.tools import find

HEADER = subprocess.run(
    ["cc", "-E", "-x", "c", "-"], input=b"#include <vulkan/vulkan.h>", capture_output=True,
    check=False,
).returncode if shutil.which("cc") else 1  # fmt: skip
needs_host = pytest.mark.skipif(
    bool(HEADER) or not driver().device_names(),
    reason="needs a C compiler and Vulkan: apt install gcc libvulkan-dev mesa-vulkan-drivers",
)


def run(folder: Path, name: str, *arguments: str, code: int = 0) -> str:
    """What the host prints, with the validation layer watching."""
    layer = {"VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation"}
    printed = run_host(folder, name, *arguments, code=code, **layer)
    assert "VUID" not in printed
    return printed


@needs_host
@pytest.mark.parametrize("dtype, tolerance", [(f32, 1e-6), (f16, 2e-3)])
def test_the_host_agrees_with_the_oracle(tmp_path: Path, dtype: Any, tolerance: float) -> None:
    manifest = export_operator(gelu, target="vulkan", dtype=dtype, folder=tmp_path, name="gelu")
    build_host(manifest, tmp_path, "-std=c99")
    for count in (3, 1000, 0):
        (tmp_path / "out").mkdir(exist_ok=True)
        assert f"; {count} elements" in run(tmp_path, "gelu", f"shape={count}", "--out", "out")
        got = np.fromfile(tmp_path / "out" / "out.bin", dtype.numpy).astype(np.float64)
        x = sample(count, 1, dtype).astype(np.float64)
        want = np.array([0.5 * v * (1 + math.erf(v / 2**0.5)) for v in x])
        assert got.shape == want.shape and np.allclose(got, want, tolerance, tolerance)


@needs_host
def test_kernels_share_a_workspace_that_the_device_lends(tmp_path: Path) -> None:
    manifest = export_operator(
        shares, target="vulkan", folder=tmp_path, name="shares", dims={"H": "dynamic"}
    )
    assert len(manifest["launches"]) > 1
    build_host(manifest, tmp_path, "-std=c99")
    (tmp_path / "out").mkdir()
    for rows, h in ((3, 5), (40, 17)):
        run(tmp_path, "shares", f"rows={rows}", f"H={h}", "--out", "out")
        x = sample(rows * h, 1, f32).reshape(rows, h).astype(np.float64)
        got = np.fromfile(tmp_path / "out" / "out.bin", np.float32).reshape(rows, h)
        assert np.allclose(got, x / (1 + (x * x).sum(0)), 1e-5, 1e-6)


@needs_host
def test_many_numbers_go_through_a_buffer(tmp_path: Path) -> None:
    """Strides of three tensors of rank 4 are more than push constants hold."""
    manifest = export_operator(
        mul, target="vulkan", folder=tmp_path, name="mul", ranks={"shape": 4}, unit=()
    )
    assert manifest["shaders"][0]["numbers"]["in"] == "buffer"
    build_host(manifest, tmp_path, "-std=c99")
    (tmp_path / "out").mkdir()
    sizes = {"shape_0": 2, "shape_1": 3, "shape_2": 4, "shape_3": 5}
    run(tmp_path, "mul", *(f"{n}={v}" for n, v in sizes.items()), "--out", "out")
    a, b = (sample(120, seed, f32) for seed in (1, 2))
    assert np.array_equal(np.fromfile(tmp_path / "out" / "out.bin", np.float32), a * b)


@needs_host
def test_a_host_without_its_kernels_says_so(tmp_path: Path) -> None:
    manifest = export_operator(gelu, target="vulkan", folder=tmp_path, name="gelu")
    build_host(manifest, tmp_path, "-std=c99")
    (tmp_path / "gelu_0.spv").write_bytes(b"not SPIR-V at all")
    assert "reading SPIR-V from ./gelu_0.spv failed" in run(tmp_path, "gelu", code=1)
    (tmp_path / "gelu_0.spv").unlink()
    assert "reading ./gelu_0.spv failed" in run(tmp_path, "gelu", code=1)


def test_the_portable_folder_is_complete(tmp_path: Path) -> None:
    """It needs no device, and no subgroups."""
    manifest = export_operator(gelu, target="vulkan:portable", folder=tmp_path, name="gelu")
    assert set(manifest["files"]) == {p.name for p in tmp_path.iterdir()} - {"manifest.json"}
    assert {"gelu_0.spv", "gelu_0.spvasm", "gelu.h", "gelu_host.c"} <= set(manifest["files"])
    assert manifest["shaders"][0]["subgroup_size"] is None
    assert [g["python"] for g in manifest["launches"][0]["grid"]]
    text = (tmp_path / "gelu_0.spvasm").read_text()
    assert re.search(r'OpEntryPoint GLCompute %\w+ "main"', text)
    command = [find("spirv-val"), "--target-env", "vulkan1.2", str(tmp_path / "gelu_0.spv")]
    assert subprocess.run(command, check=False).returncode == 0
