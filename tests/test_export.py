"""Embedding: exported operators built by a C compiler alone, run, and held against the oracle."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import WARNINGS, Exported, compare, compile_c, execute, exported, shares
from native_kernels import needs_compiler

from rudnn.dsl import bf16, f16, f32
from rudnn.ops.linear import linear
from rudnn.ops.normalization import layer_norm, rms_norm, softmax_last_axis

pytestmark = needs_compiler

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
