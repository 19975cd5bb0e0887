"""The command line: what it prints, its files, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import rudnn
from rudnn import bench
from rudnn.bench_cases import SUITES
from rudnn.cli import main
from rudnn.cli.arguments import spread
from rudnn.ops.registry import operators

ROOT = Path(__file__).parents[1]
SWISH = f"{ROOT / 'examples' / 'swish_gate.py'}:swish_gate"


pytestmark = pytest.mark.usefixtures("own_cache")


def said(capsys, *words: object, code: int = 0) -> str:
    """What a command printed on stdout, or on stderr where `code` is not 0."""
    found = main([str(w) for w in words])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out if code == 0 else captured.err


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def rms_norm(x: np.ndarray, gamma: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * gamma


# --- a fresh process ---


def test_help_is_quick_and_loads_no_compiler_and_no_framework() -> None:
    code = """
        import sys, rudnn.cli
        assert rudnn.cli.main(["--help"]) == 0
        heavy = ("tvm", "tvm_ffi", "torch", "networkx")
        print([m for m in heavy if m in sys.modules], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.stderr.strip() == "[]"
    for name in ("ops", "doctor", "show", "compile", "run", "check", "bench", "cache"):
        assert f"\n  {name} " in done.stdout


def test_as_a_program_bad_arguments_are_one_line_and_a_closed_pipe_is_none() -> None:
    command = [sys.executable, "-m", "rudnn.cli"]
    done = subprocess.run([*command, "show", "rms_nrm"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("rudnn: needs an operator, got 'rms_nrm': did you mean rms_norm")
    assert done.stderr.count("\n") == 1
    read, write = os.pipe()
    os.close(read)
    piped = subprocess.run([*command, "ops"], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert b"Traceback" not in piped.stderr


# --- listing ---


def test_version(capsys) -> None:
    assert said(capsys, "--version") == f"rudnn {rudnn.__version__}\n"


def test_ops(capsys) -> None:
    records = {r["op"]: r for r in json.loads(said(capsys, "ops", "--json"))}
    assert set(records) == set(operators())
    assert records["rms_norm"]["backward"] == "rms_norm_backward"
    assert records["rms_norm"]["static"] == ["H"]
    assert records["linear"]["inputs"]["bias"]["optional"]
    text = said(capsys, "ops")
    assert all(name in text for name in records)


def test_doctor(capsys) -> None:
    record = json.loads(said(capsys, "doctor", "--json"))
    assert record["targets"][0]["target"] == "llvm" and record["targets"][0]["runs"]
    assert "apache-tvm" in said(capsys, "doctor")


# --- show ---


def test_show_math(capsys) -> None:
    text = said(capsys, "show", "rms_norm", "--dim", "H=77", "--dtype", "f16")
    assert "x: f16[rows, H=77]" in text and "Σ_H x[rows, H]²" in text


def test_show_graph(capsys) -> None:
    text = said(capsys, "show", "layer_norm_backward", "--as", "graph")
    assert "kernel 0: " in text and "(input)" in text and "(result)" in text
    assert "→ dx: f32[64, 1024], 256.0 KiB  (result)" in text


def test_show_tir_and_source(capsys) -> None:
    small = ("--dim", "rows=4", "--dim", "H=32")
    assert "T.prim_func" in said(capsys, "show", "softmax_last_axis", *small, "--as", "tir")
    source = said(capsys, "show", "softmax_last_axis", *small, "--as", "source")
    assert "define" in source and "rudnn_softmax_last_axis" in source


def test_show_takes_options(capsys) -> None:
    assert "tanh(" in said(capsys, "show", "gelu", "--option", "approximate=tanh")


# --- run ---


def test_run_with_files_in_order_and_by_name(capsys, tmp_path) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 5, 33), dtype=np.float32)
    gamma = random.standard_normal(33, dtype=np.float32)
    files = saved(tmp_path / "x.npy", x), saved(tmp_path / "gamma.npy", gamma)
    out = tmp_path / "y.npy"
    want = rms_norm(x, gamma, 0.25)
    said(capsys, "run", "rms_norm", "--input", *files, "--param", "epsilon=0.25", "-o", out)
    np.testing.assert_allclose(np.load(out), want, rtol=1e-5, atol=1e-5)
    text = said(capsys, "run", "rms_norm", "--input", f"gamma={files[1]}", "--input", files[0],
                "--param", "epsilon=0.25", "-o", out)  # fmt: skip
    np.testing.assert_allclose(np.load(out), want, rtol=1e-5, atol=1e-5)
    assert text == f"out: float32[3, 5, 33] → {out}\n"


def test_run_with_several_results_and_a_size(capsys, tmp_path) -> None:
    x = np.random.default_rng(1).permutation(40).reshape(2, 20).astype(np.float32)
    said(capsys, "run", "top_k", "--input", saved(tmp_path / "x.npy", x), "--param", "k=3",
         "-o", tmp_path / "y.npy")  # fmt: skip
    order = np.argsort(-x, axis=-1)[:, :3]
    assert (np.load(tmp_path / "y_indices.npy") == order).all()
    assert (np.load(tmp_path / "y_values.npy") == np.take_along_axis(x, order, -1)).all()


def test_run_without_a_place_for_the_result_prints_it(capsys, tmp_path) -> None:
    one = saved(tmp_path / "one.npy", np.full((1, 2), 1.5, np.float32))
    text = said(capsys, "run", "add", "--input", one, one)
    assert text == "out: float32[1, 2]\n[[3. 3.]]\n"


def test_run_takes_and_gives_bf16(capsys, tmp_path) -> None:
    one = saved(tmp_path / "one.npy", np.full((2, 3), 1.5, ml_dtypes.bfloat16))
    said(capsys, "run", "mul", "--input", one, one, "-o", tmp_path / "y.npy")
    assert (np.load(tmp_path / "y.npy").view(ml_dtypes.bfloat16) == 2.25).all()


def test_run_an_option_and_an_operator_of_a_file(capsys, tmp_path) -> None:
    x = saved(tmp_path / "x.npy", np.array([[-1.0, 2.0]], np.float32))
    said(capsys, "run", "gelu", "--input", x, "--param", "approximate=tanh", "-o", x)
    assert np.load(x)[0, 1] == pytest.approx(1.9545977, abs=1e-6)
    ones = saved(tmp_path / "ones.npy", np.ones((2, 4), np.float32))
    said(capsys, "run", SWISH, "--input", ones, ones, "-o", tmp_path / "s.npy")
    np.testing.assert_allclose(np.load(tmp_path / "s.npy"), 1 / (1 + np.exp(-1)), rtol=1e-6)


# --- compile ---


def test_compile_leaves_dims_dynamic_where_it_may(capsys, tmp_path) -> None:
    text = said(capsys, "compile", "rms_norm", "--dtype", "f32", "-o", tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text("utf-8"))
    assert {d["name"]: d["size"] for d in manifest["dims"]} == {"rows": "dynamic", "H": 1024}
    assert all((tmp_path / name).is_file() for name in manifest["files"])
    assert manifest["build"] in text


def test_compile_takes_sizes_options_and_optional_inputs(capsys, tmp_path) -> None:
    text = said(capsys, "compile", "linear", "--dim", "rows=3xdynamic", "K=16", "N=24",
                "--option", "activation=gelu", "--with", "bias", "-o", tmp_path,
                "--json")  # fmt: skip
    manifest = json.loads(text)
    assert [d["size"] for d in manifest["dims"]] == [3, "dynamic", 16, 24]
    assert manifest["options"] == {"activation": "gelu"}
    assert [t["name"] for t in manifest["tensors"]] == ["x", "weight", "bias", "out"]


def test_the_example_of_an_operator_compiles_to_a_host_that_is_right(capsys, tmp_path) -> None:
    text = said(capsys, "compile", SWISH, "--target", "llvm", "--dim", "rows=dynamic",
                "--dtype", "f32", "-o", tmp_path, "--json")  # fmt: skip
    manifest = json.loads(text)
    subprocess.run(manifest["build"], shell=True, cwd=tmp_path, check=True, timeout=60)
    host = tmp_path / f"{manifest['name']}_host"
    done = subprocess.run([host], capture_output=True, text=True, check=True, timeout=60)
    from rudnn.dsl import f32
    from rudnn.runtime.export import sample

    x, gate = (sample(64 * 1024, seed, f32).astype(np.float64) for seed in (1, 2))
    want = x * gate / (1 + np.exp(-gate))
    first = [float(t) for t in done.stdout.partition("=")[2].partition(";")[0].split()]
    np.testing.assert_allclose(first, want[: len(first)], rtol=1e-5, atol=1e-6)
    assert float(done.stdout.partition("sum ")[2].split(",")[0]) == pytest.approx(
        want.sum(), rel=1e-3
    )


def test_the_example_runs_as_a_script() -> None:
    done = subprocess.run([sys.executable, ROOT / "examples" / "swish_gate.py"],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr


# --- check ---


def test_check_passes_on_the_example_of_an_operator(capsys) -> None:
    rows = json.loads(said(capsys, "check", SWISH, "--target", "llvm", "--dtype", "f32", "--json"))
    assert {r["status"] for r in rows} == {"pass"}
    assert {r["op"] for r in rows} == {"swish_gate", "swish_gate_backward"}


def test_check_fails_with_exit_code_1(capsys, tmp_path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        textwrap.dedent("""
        from rudnn.dsl import In, Out, axes, op

        @op(out=Out("N"), example={"N": 8})
        def square(x=In("N")):
            n = axes("N")
            return x[n] * x[n]

        @op(out=Out("N"), example={"N": 8})
        def square_backward(grad=In("N"), x=In("N")):
            n = axes("N")
            return grad[n] * x[n]

        square.differentiable(square_backward, "x")
    """)
    )
    error = said(capsys, "check", f"{wrong}:square", "--dtype", "f32", code=1)
    assert "FAIL square against numeric" in error and "comparisons failed" in error
    text = said(capsys, "check", f"{wrong}:square_backward", "--dtype", "f32", "--dim", "N=5")
    assert "greatest error" in text


# --- bench ---


def test_bench(capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_SECONDS", 0.05)
    monkeypatch.setenv("RUDNN_NUM_THREADS", "2")
    text = said(capsys, "bench", "--suite", "pointwise", "--against", "torch", "--json")
    rows = json.loads(text)
    assert [r["op"] for r in rows] == ["gelu", "add"]
    keys = ["op", "case", "target", "dtype", "ours_s", "peer", "peer_s", "ratio", "floor_share"]
    for row in rows:
        assert list(row) == keys
        assert row["peer"] == "torch" and row["ratio"] == pytest.approx(
            row["peer_s"] / row["ours_s"]
        )
        assert row["floor_share"] > 0
    assert "µs" in said(capsys, "bench", "--suite", "overhead")


def test_bench_does_not_report_a_wrong_result(monkeypatch) -> None:
    monkeypatch.setenv("RUDNN_NUM_THREADS", "2")
    monkeypatch.setattr(bench, "peer", lambda op: lambda a: next(iter(a.values())) * 1.01)
    outcome = bench.run("pointwise", "torch", seconds=0.01)
    assert outcome.results == []
    assert len(outcome.wrong) == 2 and "gelu 4096×1024: not reported" in outcome.wrong[0]


def test_minilm_suite_says_what_it_needs(capsys, monkeypatch, tmp_path) -> None:
    assert "minilm" in SUITES
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_has", lambda module: module != "minilm")
    assert "needs the example" in said(capsys, "bench", "--suite", "minilm", code=2)


# --- cache ---


def test_cache_list_and_clear(capsys, tmp_path) -> None:
    one = saved(tmp_path / "one.npy", np.ones((3, 7), np.float32))
    said(capsys, "run", "silu", "--input", one)
    records = json.loads(said(capsys, "cache", "list", "--json"))
    assert "silu" in {r["op"] for r in records}
    assert f"{len(records)} entries" in said(capsys, "cache", "list")
    assert f"removed {len(records)} " in said(capsys, "cache", "clear")
    assert json.loads(said(capsys, "cache", "list", "--json")) == []


# --- bad arguments ---


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("cache", "See rudnn cache --help"),
        ("ops --nonsense", "--nonsense"),
        ("show", "Missing argument"),
        ("show softmax", "did you mean softmax_last_axis"),
        ("show rms_norm --as poem", "--as"),
        ("show rms_norm --dim H", "--dim needs NAME=VALUE, got 'H'"),
        ("show rms_norm --dim H=1 --dim H=2", "needs H once"),
        ("show rms_norm --dim H=-1", "a size of H, got -1"),
        ("show rms_norm --dim H=2x3", "one size of H"),
        ("show rms_norm --dim Q=3", "needs a dim of rms_norm, got 'Q'"),
        ("show rms_norm --dtype i8", "a dtype among f32, f16, bf16, got i8"),
        ("show rms_norm --target abacus", "needs a target among llvm"),
        ("show gelu --option approximate=no", "approximate among none, tanh"),
        ("show gelu --option x=no", "options among approximate"),
        ("show nowhere.py:x", "needs a Python file, got nowhere.py"),
        ("show nowhere.py", "needs nowhere.py:OPERATOR"),
        ("compile rms_norm", "--output"),
        ("compile linear --dim K=dynamic -o out", "K, which is static only"),
        ("compile linear --with gamma -o out", "optional inputs among bias, residual"),
        ("compile linear --target llvm:z80 -o out", "got z80"),
        ("compile linear --name 3d -o out", "a C identifier"),
        ("run rms_norm", "missing the argument 'x'"),
        ("run rms_norm --input nowhere.npy", "No such file or directory: nowhere.npy"),
        ("run rms_norm --input text.npy", "needs a .npy file"),
        ("run rms_norm --input ids.npy ids.npy ids.npy ids.npy", "at most 2 inputs"),
        ("run rms_norm --input z=ids.npy", "an input of rms_norm, got 'z'"),
        ("run rms_norm --input ids.npy ids.npy", "x of dtype f32, f16 or bf16, got i32"),
        ("run silu --input one.npy --param a=1", "a parameter of silu, got 'a'"),
        ("run rms_norm --input one.npy --param epsilon=no", "epsilon a number, got 'no'"),
        ("run top_k --input one.npy --param k=no", "k an integer, got 'no'"),
        ("run top_k --input one.npy --param k=1000", "k at most the size of the last axis"),
        ("run silu --input one.npy -o a -o b", "-o needs 1 path (out), got 2"),
        ("run silu --input one.npy -o no/where/y.npy", "No such file or directory"),
        ("check rms_norm --seed -1", "a number ≥ 0"),
        ("check rms_norm --target llvm:x86-64-v3", "the device at hand"),
        ("bench --suite sprint", "needs a suite among normalization"),
        ("bench --against abacus", "--against"),
        ("bench --threads 0", "--threads"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    capsys, monkeypatch, tmp_path, line: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "one.npy", np.ones((3, 7), np.float32))
    saved(tmp_path / "ids.npy", np.ones((3, 7), np.int32))
    (tmp_path / "text.npy").write_text("no array")
    error = said(capsys, *line.split(), code=2)
    assert told in error
    assert error.startswith("rudnn: ") and error.count("\n") == 1


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(3)", "def", "import no_such_module"])
def test_a_file_that_does_not_run_is_one_line(capsys, tmp_path, body: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(body)
    error = said(capsys, "show", f"{path}:x", code=2)
    assert "needs a file that runs" in error and error.count("\n") == 1


def test_option_values_may_follow_each_other() -> None:
    given = ["run", "OP", "--input", "a.npy", "b=c.npy", "--param", "k=1", "j=2", "-o", "y.npy"]
    assert spread(given) == [
        "run", "OP", "--input", "a.npy", "--input", "b=c.npy", "--param", "k=1", "--param", "j=2",
        "-o", "y.npy",
    ]  # fmt: skip
    assert spread(["run", "--input", "a.npy", "OP"]) == ["run", "--input", "a.npy", "OP"]
