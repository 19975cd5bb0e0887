"""Embedding: exported operators built by a C compiler alone, run, and held against the oracle."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rudnn.dsl import Extent, In, Out, Param, axes, bf16, dim, f16, f32, i64, op, require, sum
from rudnn.dsl.dtypes import BY_NAME, DType
from rudnn.dsl.errors import NormalizationError, OperatorError, RudnnError, TargetError
from rudnn.dsl.oracle import evaluate
from rudnn.ops.attention import attention_op
from rudnn.ops.embedding import embedding
from rudnn.ops.linear import linear
from rudnn.ops.normalization import layer_norm, rms_norm, softmax_last_axis
from rudnn.ops.pointwise import add
from rudnn.runtime.export import Request, export_operator, sample
from rudnn.runtime.targets.llvm import cpu, toolchain

pytestmark = pytest.mark.skipif(
    toolchain.find_compiler() is None, reason="needs a C compiler: apt install gcc"
)
WARNINGS = ("-Wall", "-Wextra", "-Werror")
TOLERANCE = {f32: 2e-5, f16: 2e-3, bf16: 1.6e-2}


@op(out=Out("*rows", "H"), example={"rows": (8,), "H": 16})
def shares(x: Any = In("*rows", "H")) -> Any:
    """x / Σ x over the rows: needs a workspace, and scratch memory besides."""
    r, h = axes("*rows", "H")
    s = axes("*rows")
    return x[r, h] / sum(x[s, h], over=s)


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


@dataclass
class Exported:
    """An exported operator and how it was asked for."""

    declaration: Any
    folder: Path
    manifest: dict[str, Any]
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    def host(self) -> Path:
        """The example host, built by its documented command with every warning an error."""
        command = self.manifest["build"].split()
        assert command[0] == "cc"
        made = self.folder / f"{self.name}_host"
        if not made.exists():
            compile_c([*WARNINGS, *command[1:]], self.folder)
        return made

    def run(self, *arguments: str) -> str:
        return execute([self.host(), *arguments, "--out", self.folder])

    def sizes(self, **given: int) -> dict[str, int]:
        """Sizes of all dims; a dynamic one not given has its example size."""
        dims = self.manifest["dims"]
        fixed = {d["name"]: d["size"] for d in dims if d["size"] != "dynamic"}
        return {d["name"]: d["example"] for d in dims} | fixed | given

    def shape(self, tensor: dict[str, Any], sizes: dict[str, int]) -> list[int]:
        return [e if isinstance(e, int) else sizes[e] for e in tensor["shape"]]

    def inputs(self, **given: int) -> dict[str, Any]:
        """The host's own example inputs."""
        made, sizes = {}, self.sizes(**given)
        tensors = [t for t in self.manifest["tensors"] if t["role"] == "input"]
        for seed, tensor in enumerate(tensors, 1):
            shape = self.shape(tensor, sizes)
            below = sizes.get(tensor["values_below"], 0)
            flat = sample(int(np.prod(shape)), seed, BY_NAME[tensor["dtype"]], below)
            made[tensor["name"]] = flat.reshape(shape)
        return made

    def results(self, **given: int) -> dict[str, Any]:
        """What the host wrote."""
        made, sizes = {}, self.sizes(**given)
        for tensor in self.manifest["tensors"]:
            if tensor["role"] == "output":
                dtype = BY_NAME[tensor["dtype"]].numpy
                raw = np.frombuffer((self.folder / f"{tensor['name']}.bin").read_bytes(), dtype)
                made[tensor["name"]] = raw.reshape(self.shape(tensor, sizes))
        return made

    def expected(
        self, inputs: dict[str, Any], scalars: dict[str, float] | None = None, /, **given: int
    ) -> tuple[Any, ...]:
        """The float64 oracle's results."""
        asked = self.asked
        request = Request(self.declaration, dict(asked.get("ranks", {})))
        spec = request.spec(
            dict(asked.get("dims", {})), asked.get("dtype"), asked.get("options", {}),
            asked.get("present", ()), asked.get("dtypes", {}),
        )  # fmt: skip
        sizes = self.sizes(**given)
        numbers = {d["slot"]: sizes[d["name"]] for d in self.manifest["dims"]}
        numbers |= {s["name"]: s["default"] for s in self.manifest["scalars"]}
        numbers |= scalars or {}
        return evaluate(self.declaration.trace(spec), inputs, numbers, precision="float64")


def execute(command: list[Any]) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr}"
    return done.stdout


def compile_c(arguments: list[Any], folder: Path) -> None:
    compiler = toolchain.find_compiler()
    assert compiler is not None
    command = [*compiler, *(str(a) for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr


def exported(folder: Path, declaration: Any, **asked: Any) -> Exported:
    return Exported(
        declaration, folder, export_operator(declaration, folder=folder, **asked), asked
    )


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rms_norm-f32": (rms_norm, {"dims": {"H": 96}}),
    "rms_norm-f16": (rms_norm, {"dims": {"H": 33}, "dtype": f16}),
    "rms_norm-bf16": (rms_norm, {"dims": {"H": 96}, "dtype": bf16}),
    "layer_norm-f32": (layer_norm, {"dims": {"H": 33}, "present": ["beta"]}),
    "layer_norm-f16": (layer_norm, {"dims": {"H": 96}, "dtype": f16}),
    "softmax-f32": (softmax_last_axis, {"dims": {"H": 96}}),
    "softmax-f16": (softmax_last_axis, {"dims": {"H": 33}, "dtype": f16}),
    "linear-f32": (linear, {"dims": {"K": 48, "N": 40}, "present": ["bias"],
                            "options": {"activation": "gelu"}}),
    "linear-f16": (linear, {"dims": {"K": 48, "N": 40}, "dtype": f16}),
    "shares-f32": (shares, {"dims": {"H": 50}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Exports by case name, each made once."""
    made: dict[str, Exported] = {}

    def get(case: str) -> Exported:
        if case not in made:
            declaration, asked = CASES[case]
            made[case] = exported(tmp_path_factory.mktemp(case), declaration, **asked)
        return made[case]

    return get


def compare(got: Any, wanted: Any, dtype: DType) -> None:
    limit = TOLERANCE[dtype]
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("rows", [0, 1, 7, 4096])
@pytest.mark.parametrize("case", CASES)
def test_host_agrees_with_the_oracle(library: Any, case: str, rows: int) -> None:
    made = library(case)
    printed = made.run(f"rows={rows}")
    (out,) = made.results(rows=rows).values()
    (wanted,) = made.expected(made.inputs(rows=rows), rows=rows)
    compare(out, wanted, made.asked.get("dtype", f32))
    assert f"; {out.size} elements, sum " in printed
    if out.size:
        shown = printed.split("=")[1].split(";")[0].split()
        np.testing.assert_allclose([float(s) for s in shown], wanted.ravel()[:4], atol=2e-3)


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


def test_host_reads_files_and_scalars(library: Any) -> None:
    made = library("rms_norm-f32")
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    x.tofile(made.folder / "x.raw")
    made.run("rows=5", f"x=@{made.folder / 'x.raw'}", "epsilon=0.5")
    gamma = made.inputs()["gamma"].astype(np.float64)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 0.5) * gamma
    compare(made.results(rows=5)["out"], wanted, f32)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["rows=-1"], "needs a size of at least 0"),
        (["rows=many"], "needs a size of at least 0"),
        (["epsilon=small"], "needs a number"),
        (["H=4"], "unknown argument"),
        (["epsilon=0"], "a requirement of the operator does not hold"),
        (["x=@/nowhere"], "cannot read"),
    ],
)
def test_host_refuses(library: Any, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [library("rms_norm-f32").host(), *arguments], capture_output=True, text=True
    )
    assert done.returncode in (1, 2) and message in done.stderr and not done.stdout


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


STRIDED = r"""
#include <stdio.h>
#include <stdlib.h>
#include "NAME.h"
enum { ROWS = 5, H = 96, WIDE = 131 };
#define EXPECT(call, want) do { int got = call; \
    if (got != want) { printf("line %d: %d, not %d\n", __LINE__, got, want); return 1; } } while (0)
int main(void) {
    static float x[ROWS * WIDE + 1], gamma[H], dense[ROWS * H], a[ROWS * H], b[ROWS * WIDE * 2 + 1];
    const int64_t wide[2] = {-WIDE, 1}, apart[2] = {2 * WIDE, 1}, bad[2] = {WIDE, 2},
                  same[2] = {0, 1};
    int i, j;
    for (i = 0; i < ROWS * WIDE + 1; ++i) x[i] = (float)(i * 7919 % 1013) / 512 - 1;
    for (j = 0; j < H; ++j) gamma[j] = (float)j / H;
    /* rows in reverse order to rows far apart, unaligned; and dense copies of the same */
    const float *last = x + 1 + (ROWS - 1) * WIDE;
    for (i = 0; i < ROWS; ++i) for (j = 0; j < H; ++j) dense[i * H + j] = last[j - i * WIDE];
    for (i = 0; i < ROWS * WIDE * 2 + 1; ++i) b[i] = -77;
    EXPECT(NAME(dense, NULL, gamma, a, NULL, ROWS, 1e-6f, NULL), RUDNN_OK);
    EXPECT(NAME(last, wide, gamma, b + 1, apart, ROWS, 1e-6f, NULL), RUDNN_OK);
    for (i = 0; i < ROWS; ++i)
        for (j = 0; j < 2 * WIDE; ++j) {
            float want = j < H ? a[i * H + j] : -77;
            if (b[1 + i * 2 * WIDE + j] != want) { printf("differs at %d %d\n", i, j); return 1; }
        }
    EXPECT(NAME(x, same, gamma, a, NULL, ROWS, 1e-6f, NULL), RUDNN_OK);
    for (i = 1; i < ROWS; ++i)
        if (memcmp(a, a + i * H, sizeof(float) * H)) { printf("row %d differs\n", i); return 1; }
    /* refused before anything is written */
    a[0] = -77;
    EXPECT(NAME(NULL, NULL, gamma, a, NULL, ROWS, 1e-6f, NULL), RUDNN_NULL_POINTER);
    EXPECT(NAME(x, NULL, gamma, NULL, NULL, ROWS, 1e-6f, NULL), RUDNN_NULL_POINTER);
    EXPECT(NAME(x, bad, gamma, a, NULL, ROWS, 1e-6f, NULL), RUDNN_BAD_STRIDE);
    EXPECT(NAME(x, NULL, gamma, a, same, ROWS, 1e-6f, NULL), RUDNN_BAD_STRIDE);
    EXPECT(NAME(x, NULL, gamma, a, NULL, -1, 1e-6f, NULL), RUDNN_NEGATIVE_DIM);
    EXPECT(NAME(x, NULL, gamma, a, NULL, ROWS, 0, NULL), RUDNN_REQUIREMENT);
    EXPECT(NAME(x, NULL, gamma, a, NULL, ROWS, (float)NAN, NULL), RUDNN_REQUIREMENT);
    EXPECT(NAME(NULL, NULL, gamma, NULL, NULL, 0, 1e-6f, NULL), RUDNN_OK);
    if (a[0] != -77) { printf("written\n"); return 1; }
    EXPECT(rudnn_abi_version(), RUDNN_ABI_VERSION);
    return 0;
}
"""


def build_program(made: Exported, source: str, name: str, *objects: Any) -> Path:
    (made.folder / f"{name}.c").write_text(source.replace("NAME", made.name))
    compile_c(
        ["-O2", *WARNINGS, "-o", name, f"{name}.c", f"{made.name}.o", *objects, "rudnn_runtime.c",
         "-lm", "-lpthread"], made.folder,
    )  # fmt: skip
    return made.folder / name


def test_strides_and_refusals_through_the_header(library: Any) -> None:
    made = library("rms_norm-f32")
    execute([build_program(made, STRIDED, "strided")])


WORKSPACE = r"""
#include <stdio.h>
#include <stdlib.h>
#include "NAME.h"
int main(void) {
    enum { ROWS = 300, H = 50 };
    static float x[ROWS * H], a[ROWS * H], b[ROWS * H];
    int64_t bytes = NAME_workspace_bytes(ROWS), stats[3];
    char *work = malloc((size_t)bytes + 64), *aligned = work + (64 - (uintptr_t)work % 64) % 64;
    int i;
    for (i = 0; i < ROWS * H; ++i) x[i] = (float)(i % 89 + 1);
    memset(aligned, 0xff, (size_t)bytes);
    rudnn_workspace_poison(1);
    if (bytes < H * 4 || NAME(x, NULL, a, NULL, ROWS, aligned)) return 1;
    for (i = 0; i < 100; ++i)
        if (NAME(x, NULL, b, NULL, ROWS, NULL)) return 2;
    if (memcmp(a, b, sizeof a)) return 3;
    rudnn_workspace_stats(stats);
    if (stats[0] != 0) { printf("%d bytes of scratch are live\n", (int)stats[0]); return 4; }
    free(work);
    return 0;
}
"""


def test_workspace_of_the_caller_or_the_runtime_and_no_scratch_left(library: Any) -> None:
    """A kernel once returned before it released its own scratch memory, at each call anew."""
    execute([build_program(library("shares-f32"), WORKSPACE, "workspace")])


TWO = r"""
#include <stdio.h>
#include "NAME.h"
#include "OTHER.h"
/* The compiler's own conversion: the kernels' must not stand in for it. */
#if defined(__FLT16_MAX__) && !defined(__cplusplus)
static _Float16 half(float x) { return (_Float16)x; }
#endif
int main(void) {
    static uint16_t h[2 * 33], g[2 * 33];
    static float x[2 * 96], gamma[96], y[2 * 96];
    int i, status;
    for (i = 0; i < 2 * 96; ++i) x[i] = gamma[i % 96] = 1;
    status = NAME(x, NULL, gamma, y, NULL, 2, 1e-6f, NULL);
    status |= OTHER(h, NULL, g, NULL, 2, NULL);
#if defined(__FLT16_MAX__) && !defined(__cplusplus)
    { volatile float one = 1.5f; if ((float)half(one) != 1.5f) return 3; }
#endif
    printf("%.3f %04x\n", y[5], g[5]);
    return status;
}
"""


def link_two(library: Any, name: str, *flags: str) -> str:
    made, other = library("rms_norm-f32"), library("softmax-f16")
    source = TWO.replace("OTHER", other.name)
    flags = (f"-I{other.folder}", *flags)
    program = build_program(made, source, name, other.folder / f"{other.name}.o", *flags)
    return execute([program])


def test_two_operators_in_one_program(library: Any) -> None:
    third = np.float16(1 / 33).view(np.uint16)
    assert link_two(library, "two").split() == ["1.000", f"{third:04x}"]


@pytest.mark.parametrize("case", ["rms_norm-f32", "softmax-f16", "rms_norm-bf16", "shares-f32"])
def test_object_offers_its_entry_alone(library: Any, case: str) -> None:
    """Weak functions for half precision once stood in for the compiler library's in the app."""
    made = library(case)
    listing = execute(["nm", made.folder / f"{made.name}.o"])
    symbols = [line.split() for line in listing.splitlines()]
    offered = {s[-1]: s[-2] for s in symbols if s[-2] not in "trdbnNU"}
    assert offered.pop(f"{made.name}_entry") == "T"
    assert set(offered.values()) <= {"V"}
    assert all(name.startswith("__TVMBackend") for name in offered)


def test_header_is_c99_and_cpp(library: Any) -> None:
    for case in CASES:
        made = library(case)
        strict = [*WARNINGS, "-pedantic", "-fsyntax-only"]
        compile_c([*strict, "-std=c99", f"{made.name}_host.c"], made.folder)
        compile_c([*strict, "-std=c99", "-x", "c", f"{made.name}.h"], made.folder)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler: apt install g++")
def test_header_works_from_cpp(library: Any) -> None:
    made = library("rms_norm-f32")
    source = TWO.replace("OTHER", library("softmax-f16").name).replace("NAME", made.name)
    other = library("softmax-f16")
    (made.folder / "two.cpp").write_text(source)
    flags = [*WARNINGS, "-pedantic", "-std=c++11", f"-I{other.folder}"]
    runtime = made.folder / "runtime.o"
    compile_c(["-c", "-o", runtime, "rudnn_runtime.c"], made.folder)
    objects = [made.folder / f"{made.name}.o", other.folder / f"{other.name}.o", runtime]
    program = made.folder / "two_cpp"
    execute(["c++", *flags, "-o", program, made.folder / "two.cpp", *objects, "-lpthread"])
    assert execute([program]).startswith("1.000")


def test_host_links_neither_python_nor_tvm(library: Any) -> None:
    for case in ("rms_norm-f32", "softmax-f16"):
        libraries = execute(["ldd", library(case).host()]).lower()
        assert "libc" in libraries
        assert "python" not in libraries and "tvm" not in libraries


def test_manifest(library: Any) -> None:
    made = library("layer_norm-f32")
    stored = json.loads((made.folder / "manifest.json").read_text("utf-8"))
    assert stored == json.loads(json.dumps(made.manifest))
    assert stored["format"] == 1 and stored["abi"] == 1
    assert stored["operator"] == "layer_norm" and stored["target"] == "llvm"
    assert [d["size"] for d in stored["dims"]] == ["dynamic", 33]
    assert [t["name"] for t in stored["tensors"]] == ["x", "gamma", "beta", "out"]
    assert stored["scalars"] == [{"name": "epsilon", "dtype": "float32", "default": 1e-5}]
    kinds = [s["kind"] for s in stored["plan"]["slots"]]
    assert kinds == ["dim", *["pointer"] * 4, "stride", "stride", "scalar"]
    assert eval(stored["workspace_bytes"]["python"], {"max": max}, {"rows": 5}) == 0
    assert stored["versions"]["apache-tvm"]
    for name, digest in stored["files"].items():
        assert hashlib.sha256((made.folder / name).read_bytes()).hexdigest() == digest
    left = {p.name for p in made.folder.iterdir()} - set(stored["files"]) - {"manifest.json"}
    assert not {n for n in left if n.endswith((".ll", ".h"))}


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
