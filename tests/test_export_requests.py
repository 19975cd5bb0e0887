"""What can be asked of an export: dims, dtypes, options, other machines; what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import compare, exported, shares
from native_kernels import needs_compiler

from rudnn.dsl import Extent, In, Out, Param, axes, bf16, dim, f16, f32, i64, op, require, sum
from rudnn.dsl.dtypes import DType
from rudnn.dsl.errors import NormalizationError, OperatorError, RudnnError, TargetError
from rudnn.ops.attention import attention_op
from rudnn.ops.embedding import embedding
from rudnn.ops.normalization import layer_norm, rms_norm, softmax_last_axis
from rudnn.ops.pointwise import add
from rudnn.runtime.export import sample
from rudnn.runtime.targets.llvm import cpu

pytestmark = needs_compiler


@op(out=Out("i", "while", name="status"), example={"i": 4, "while": 5, "default": 3})
def awkward(
    double: Any = In("i", "default"), x: Any = In("default", "while"), *, short: Any = Param(2.0)
) -> Any:
    """Names that C keeps for itself. */ The comment must not end here."""
    i, w, d = axes("i", "while", "default")
    return sum(double[i, d] * x[d, w], over=d) * short


@op(out=Out("N", "k"), static=("k",), example={"N": 6, "H": 9, "k": 4})
def head(x: Any = In("N", "H"), k: Any = Extent(4)) -> Any:
    """The first k columns."""
    require(dim("H") >= dim("k"), "H ≥ k", H=dim("H"), k=dim("k"))
    n, j = axes("N", "k")
    return x[n, j] + 0


@pytest.mark.parametrize("dtype", [f32, f16])
def test_attention_with_a_mask(tmp_path: Path, dtype: DType) -> None:
    made = exported(
        tmp_path, attention_op, dtype=dtype, present=["mask"], options={"causal": "bottom_right"},
        dims={"D": 16, "Dv": 24},
    )  # fmt: skip
    given = {"B": 2, "Hq": 4, "Hkv": 2, "Q": 5, "K": 9}
    settings = [f"{name}={size}" for name, size in given.items()]
    made.run(*settings, "scale=0.25")
    wanted = made.expected(made.inputs(**given), {"scale": 0.25}, **given)
    compare(made.results(**given)["out"], wanted[0], dtype)
    done = subprocess.run([made.host(), "Hkv=3"], capture_output=True, text=True)
    assert done.returncode == 1 and "requirement" in done.stderr


def test_broadcast_input_and_a_longer_pack(tmp_path: Path) -> None:
    made = exported(tmp_path, add, ranks={"shape": 3}, dtype=bf16, dims={"shape.2": 5})
    made.run("shape_0=3", "shape_1=4")
    given = {"shape_0": 3, "shape_1": 4}
    compare(made.results(**given)["out"], made.expected(made.inputs(**given), **given)[0], bf16)


def test_no_dims_at_all(tmp_path: Path) -> None:
    made = exported(tmp_path, add, ranks={"shape": 0})
    made.run()
    compare(made.results()["out"], made.expected(made.inputs())[0], f32)


def test_names_that_c_keeps_for_itself(tmp_path: Path) -> None:
    made = exported(tmp_path, awkward)
    made.run("short_=2")
    out = np.frombuffer((tmp_path / "status_.bin").read_bytes(), np.float32).reshape(4, 5)
    compare(out, made.expected(made.inputs())[0], f32)


def test_all_dims_compiled_in(tmp_path: Path) -> None:
    made = exported(tmp_path, rms_norm, dims={"rows": "3", "H": 16})
    text = (tmp_path / f"{made.name}.h").read_text()
    assert "_rows 3" in text and "int64_t rows" not in text
    made.run()
    compare(made.results()["out"], made.expected(made.inputs())[0], f32)


def test_index_out_of_range_is_refused_not_read(tmp_path: Path) -> None:
    made = exported(tmp_path, embedding, dims={"H": 8}, dtypes={"indices": i64})
    made.run("tokens=10", "V=7")
    given = {"tokens": 10, "V": 7}
    compare(made.results(**given)["out"], made.expected(made.inputs(**given), **given)[0], f32)
    for bad in (-1, 7, 2**40):
        np.array([0, bad], np.int64).tofile(tmp_path / "bad")
        done = subprocess.run(
            [made.host(), "tokens=2", "V=7", f"indices=@{tmp_path / 'bad'}"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 1 and "an index out of range" in done.stderr


def test_export_is_reproducible(tmp_path: Path) -> None:
    first = exported(tmp_path / "a", softmax_last_axis, dims={"H": 40}).manifest
    again = exported(tmp_path / "b", softmax_last_axis, dims={"H": 40}).manifest
    assert first == again


def test_aarch64_object(tmp_path: Path) -> None:
    made = exported(tmp_path, rms_norm, target="llvm:aarch64", dtype=f16)
    header = (tmp_path / f"{made.name}.o").read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[4] == 2
    assert int.from_bytes(header[16:18], "little") == 1  # relocatable
    assert int.from_bytes(header[18:20], "little") == 183  # aarch64
    assert made.manifest["cpu"]["triple"].startswith("aarch64")


@pytest.mark.parametrize(
    "level, flags", [("x86-64-v2", {"sse4_2"}), ("x86-64-v3", {"avx2", "fma", "f16c"})]
)
@pytest.mark.parametrize("dtype", [f32, f16])
def test_baseline_for_other_machines(
    tmp_path: Path, level: str, flags: set[str], dtype: DType
) -> None:
    if not flags <= cpu.features():
        pytest.skip(f"needs a processor with {', '.join(sorted(flags))}")
    made = exported(tmp_path, layer_norm, target=f"llvm:{level}", dtype=dtype, dims={"H": 77})
    made.run("rows=9")
    compare(made.results(rows=9)["out"], made.expected(made.inputs(rows=9), rows=9)[0], dtype)


REFUSED: dict[str, tuple[Any, dict[str, Any], type[RudnnError], str]] = {
    "unknown dim": (rms_norm, {"dims": {"W": 3}}, NormalizationError,
                    "needs dims among rows, H, got W"),
    "static only": (rms_norm, {"dims": {"H": "dynamic"}}, NormalizationError,
                    "needs a size of H, which is static only, got dynamic"),
    "size": (rms_norm, {"dims": {"H": -1}}, NormalizationError, "needs H a size ≥ 0 or dynamic"),
    "word": (rms_norm, {"dims": {"rows": "some"}}, NormalizationError, "rows a size ≥ 0"),
    "dtype": (rms_norm, {"dtype": i64}, NormalizationError, "needs a dtype among f32, f16, bf16"),
    "present": (layer_norm, {"present": ["gamma"]}, NormalizationError,
                "needs optional inputs among beta, got gamma"),
    "pack": (rms_norm, {"ranks": {"H": 2}}, NormalizationError, "needs ranks of rows, got H"),
    "rank": (rms_norm, {"ranks": {"rows": -1}}, NormalizationError, "needs a rank ≥ 0 for rows"),
    "option": (rms_norm, {"options": {"fast": 1}}, NormalizationError,
               "needs options among none, got fast"),
    "input dtype": (rms_norm, {"dtypes": {"gamma": f16}}, NormalizationError,
                    "needs gamma of dtype f32, got f16"),
    "contract": (rms_norm, {"dims": {"H": 0}}, NormalizationError, "a last axis that is not empty"),
    "unit": (rms_norm, {"unit": ["y"]}, NormalizationError, "needs unit tensors among"),
    "name": (rms_norm, {"name": "rms-norm"}, NormalizationError, "a name that is a C identifier"),
    "target": (shares, {"target": "llvm:pdp11"}, TargetError, "pdp11"),
    "own error": (shares, {"dims": {"Q": 1}}, OperatorError, "needs dims among rows, H, got Q"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_typed_error(tmp_path: Path, case: str) -> None:
    declaration, asked, error, message = REFUSED[case]
    with pytest.raises(error, match=".*" + message):
        exported(tmp_path / "out", declaration, **asked)
    assert not (tmp_path / "out").exists()


def test_requirement_over_dims_is_checked_in_c(tmp_path: Path) -> None:
    made = exported(tmp_path, head, unit=[])
    made.run("N=3", "H=5")
    given = {"N": 3, "H": 5}
    compare(made.results(**given)["out"], made.expected(made.inputs(**given), **given)[0], f32)
    done = subprocess.run([made.host(), "H=3"], capture_output=True, text=True)
    assert done.returncode == 1 and "requirement" in done.stderr


def test_example_values_are_the_documented_ones() -> None:
    """The first of splitmix64 at 1 << 32, worked out by hand."""
    z = (1 << 32) * 0x9E3779B97F4A7C15 % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = (z ^ (z >> shift)) * factor % 2**64
    assert sample(1, 1, f32)[0] == ((z >> 56) - 128) / 128
    assert sample(1, 1, i64, 1000)[0] == (z >> 33) % 1000
