"""The vectorised elementary functions: accuracy on a dense sample, special values, code shape."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rudnn.schedules import vector_math

if TYPE_CHECKING:
    import tvm

NAMES = sorted(vector_math.FUNCTIONS)
# "exp ldexp" is the form for devices with `vector_ldexp`, right everywhere (if slow).
FORMS = vector_math.FUNCTIONS | {
    f"{name} ldexp": function
    for name, function in vector_math.functions(ldexp=True).items()
    if function is not vector_math.FUNCTIONS[name]
}
MAX_ULP = 2.0
LANES = 16
ROW = 4096

INF, NAN = math.inf, math.nan
TINY = 2.0**-149
SPECIAL = {
    "exp": [
        (0.0, 1.0), (-0.0, 1.0), (INF, INF), (-INF, 0.0), (NAN, NAN), (TINY, 1.0),
        (88.8, INF), (3e38, INF), (-104.1, 0.0), (-131.8, 0.0), (-3e38, 0.0),
    ],
    "log": [
        (0.0, -INF), (-0.0, -INF), (1.0, 0.0), (INF, INF), (-INF, NAN), (-1.0, NAN),
        (-TINY, NAN), (NAN, NAN),
    ],
    "tanh": [
        (0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN), (TINY, TINY),
        (-TINY, -TINY), (9.3, 1.0), (-3e38, -1.0),
    ],
    "erf": [
        (0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN), (TINY, TINY),
        (4.2, 1.0), (-3e38, -1.0),
    ],
    "sigmoid": [
        (0.0, 0.5), (-0.0, 0.5), (INF, 1.0), (-INF, 0.0), (NAN, NAN), (3e38, 1.0),
        (-104.1, 0.0), (-3e38, 0.0),
    ],
    "sinpi": [
        (0.0, 0.0), (-0.0, -0.0), (0.5, 1.0), (-0.5, -1.0), (1.5, -1.0), (1.0, 0.0), (-2.0, -0.0),
        (3e38, 0.0), (INF, NAN), (-INF, NAN), (NAN, NAN),
    ],
}  # fmt: skip


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def _sinpi(x: np.ndarray) -> np.ndarray:
    part = np.mod(np.abs(x), 2.0)
    within = np.where(part > 1, part - 1, part)
    wave = np.sin(np.pi * np.minimum(within, 1 - within))
    return np.copysign(1.0, x) * np.where(part > 1, -wave, wave)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.fromiter(map(math.erf, x.tolist()), np.float64, x.size)


REFERENCE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp, "log": np.log, "tanh": np.tanh, "erf": _erf, "sigmoid": _sigmoid,
    "sinpi": _sinpi,
}  # fmt: skip


@cache
def compiled(name: str, mcpu: str | None = None, triple: str | None = None) -> tvm.ir.IRModule:
    """f32 [rows, ROW] -> f32 [rows, ROW] for one CPU (this one by default), lanes vectorised."""
    import tvm
    from tvm import s_tir, te, tirx

    rows = tirx.Var("rows", "int64")
    x = te.placeholder((rows, ROW), "float32", "x")
    y = te.compute((rows, ROW), lambda i, j: FORMS[name](x[i, j]), "y")
    schedule = s_tir.Schedule(te.create_prim_func([x, y]))
    _, column = schedule.get_loops(schedule.get_sblock("y"))
    schedule.vectorize(schedule.split(column, [None, LANES])[1])
    config = {"kind": "llvm", "mcpu": mcpu or tvm.target.codegen.llvm_get_system_cpu()}
    if triple:
        config["mtriple"] = triple
    target = tvm.target.Target(config)
    return tvm.compile(schedule.mod, target=target.with_host(target))


def evaluate(name: str, values: np.ndarray) -> np.ndarray:
    """The compiled function of f32 values [n]; the result has their shape."""
    import tvm

    padded = np.resize(values, (-(-values.size // ROW), ROW))
    x, y = tvm.runtime.tensor(padded), tvm.runtime.empty(padded.shape, "float32")
    compiled(name)["main"](x, y)
    return y.numpy().reshape(-1)[: values.size]


def sample() -> np.ndarray:
    """f32 [1048576]: every sign and exponent, 2048 random mantissas each; half of NaN's too."""
    rng = np.random.default_rng(0)
    high = np.arange(512, dtype=np.uint32)[:, None] << 23
    return (high | rng.integers(0, 2**23, (512, 2048), dtype=np.uint32)).view(np.float32).ravel()


def crowded_sample() -> np.ndarray:
    """f32 [1048576], uniform where the functions bend: [-110, 110], [-11, 11] and [-1.1, 1.1]."""
    rng = np.random.default_rng(1)
    scale = np.repeat([110.0, 11.0, 11.0, 1.1], 2**18)
    return (scale * rng.uniform(-1.0, 1.0, scale.size)).astype(np.float32)


def ulp_error(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|actual - expected| in f32 ulps of expected (f64); inf where only one is NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = expected.astype(np.float32)
        same = (actual == rounded) & (np.signbit(actual) == np.signbit(rounded))
        same |= np.isnan(actual) & np.isnan(rounded)
        exponent = np.maximum(np.frexp(expected)[1] - 1, -126)
        error = np.ldexp(np.abs(actual - expected), 23 - exponent)
    comparable = np.isfinite(actual) & np.isfinite(rounded)
    return np.where(comparable, error, np.where(same, 0.0, INF))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("values", [sample, crowded_sample])
def test_accuracy(name: str, values: Callable[[], np.ndarray]) -> None:
    x = values()
    with np.errstate(all="ignore"):
        expected = REFERENCE[name.split()[0]](x.astype(np.float64))
    error = ulp_error(evaluate(name, x), expected)
    worst = int(np.argmax(error))
    assert error[worst] <= MAX_ULP, f"{name}({x[worst]!r}) is {error[worst]:.3g} ulp off"


@pytest.mark.parametrize("name", FORMS)
def test_special_values(name: str) -> None:
    x, expected = np.array(SPECIAL[name.split()[0]], np.float32).T
    actual = evaluate(name, np.ascontiguousarray(x))
    np.testing.assert_array_equal(actual, expected)
    signed = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[signed]), np.signbit(expected[signed]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("mcpu", "triple"),
    [
        ("skylake-avx512", "x86_64-linux-gnu"),
        ("haswell", "x86_64-linux-gnu"),
        ("cortex-a76", "aarch64-linux-gnu"),
    ],
)
def test_loop_is_vector_code(name: str, mcpu: str, triple: str) -> None:
    source = compiled(name, mcpu, triple).mod.inspect_source("ll")
    [body] = re.findall(r"define [^\n]*@main_compute_\(.*?\n}\n", source, re.DOTALL)
    called = set(re.findall(r"call [^@\n]*@([\w.]+)\(", body))
    assert {f for f in called if not f.endswith(f".v{LANES}f32")} <= {"llvm.assume"}
    assert not re.search(r"extractelement|insertelement", body)
