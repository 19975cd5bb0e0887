"""The SPIR-V emitter: arithmetic of hand-written device functions, bit for bit as NumPy's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from spirv_kernels import (
    FLOATS,
    INTS,
    THREADS,
    Array,
    Make,
    N,
    Runner,
    device_features,
    differing,
    fits,
    function,
    i64,
    needs_vulkan,
    pointwise,
    samples,
)

from rudnn.schedules import vector_math

pytestmark = pytest.mark.usefixtures("vulkan_is_silent")


@needs_vulkan
@pytest.mark.parametrize("exact_half", [False, True])
@pytest.mark.parametrize("source", INTS + FLOATS)
def test_casts(run: Runner, source: str, exact_half: bool) -> None:
    from tvm import tirx

    goals = ("float16",) if exact_half else INTS + FLOATS
    x = samples(source)
    casts = [(lambda v, g=goal: tirx.Cast(g, v), goal) for goal in goals]
    features = replace(device_features(), exact_half=exact_half)
    with np.errstate(invalid="ignore", over="ignore"):
        for goal, got in zip(goals, pointwise(run, [x], casts, features), strict=True):
            wrong = differing(got, x.astype(goal))
            if source in FLOATS and goal in INTS:
                wrong &= fits(x, goal)
            assert not wrong.any(), (goal, x[wrong][:4], got[wrong][:4])


@needs_vulkan
def test_floats_that_no_integer_holds_saturate(run: Runner) -> None:
    from tvm import tirx

    x = np.resize(np.array([3e9, -3e9, math.inf, -math.inf, math.nan], np.float32), N)
    (got,) = pointwise(run, [x], [(lambda v: tirx.Cast("int32", v), "int32")])
    assert got[:5].tolist() == [2**31 - 128, -(2**31), 2**31 - 128, -(2**31), -(2**31)]


def truncated(a: Array, b: Array) -> Array:
    """Quotients towards zero, of Python integers."""
    return np.array([abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
                     for x, y in zip(a.tolist(), b.tolist(), strict=True)], object)  # fmt: skip


def wrapped(values: Array, dtype: str) -> Array:
    """Python integers modulo the width of a type."""
    bits = np.iinfo(dtype).bits
    unsigned = np.array([int(v) % 2**bits for v in values], f"uint{bits}")
    return unsigned.view(dtype)


@needs_vulkan
@pytest.mark.parametrize("dtype", INTS)
def test_integers(run: Runner, dtype: str) -> None:
    from tvm import tirx

    x, y = samples(dtype), np.roll(samples(dtype, 1), 11)
    y[y == 0] = 1
    y[(x == np.iinfo(dtype).min) & (y == dtype_minus_one(dtype))] = 3
    shift = (np.arange(N) % np.iinfo(dtype).bits).astype(dtype)
    a, b = x.astype(object), y.astype(object)
    quotient = truncated(a, b)
    cases: dict[str, tuple[Make, Array]] = {
        "+": (lambda p, q, _: p + q, wrapped(a + b, dtype)),
        "-": (lambda p, q, _: p - q, wrapped(a - b, dtype)),
        "*": (lambda p, q, _: p * q, wrapped(a * b, dtype)),
        "/": (lambda p, q, _: tirx.truncdiv(p, q), wrapped(quotient, dtype)),
        "%": (lambda p, q, _: tirx.truncmod(p, q), wrapped(a - quotient * b, dtype)),
        "floor /": (lambda p, q, _: tirx.floordiv(p, q), x // y),
        "floor %": (lambda p, q, _: tirx.floormod(p, q), x % y),
        "min": (lambda p, q, _: tirx.min(p, q), np.minimum(x, y)),
        "max": (lambda p, q, _: tirx.max(p, q), np.maximum(x, y)),
        "&": (lambda p, q, _: p & q, x & y),
        "|": (lambda p, q, _: p | q, x | y),
        "^": (lambda p, q, _: p ^ q, x ^ y),
        "~": (lambda p, q, _: ~p, ~x),
        "<<": (lambda p, _, n: p << n, x << shift),
        ">>": (lambda p, _, n: p >> n, x >> shift),
    }
    results = pointwise(run, [x, y, shift], [(f, dtype) for f, _ in cases.values()])
    for (name, (_, want)), got in zip(cases.items(), results, strict=True):
        wrong = got != want
        assert not wrong.any(), (name, x[wrong][:4], y[wrong][:4], got[wrong][:4])


def dtype_minus_one(dtype: str) -> Any:
    return np.array(-1).astype(dtype)


def comparisons() -> list[tuple[Make, Callable[..., Array]]]:
    from tvm import tirx

    return [
        (lambda p, q: p < q, np.less), (lambda p, q: p <= q, np.less_equal),
        (lambda p, q: p > q, np.greater), (lambda p, q: p >= q, np.greater_equal),
        (tirx.EQ, np.equal), (tirx.NE, np.not_equal),
    ]  # fmt: skip


@needs_vulkan
@pytest.mark.parametrize("dtype", INTS + FLOATS)
def test_comparisons(run: Runner, dtype: str) -> None:
    from tvm import tirx

    x, y = samples(dtype), np.roll(samples(dtype, 1), 11)
    y[::5] = x[::5]
    outputs = [(lambda p, q, f=f: tirx.Cast("uint8", f(p, q)), "uint8") for f, _ in comparisons()]
    results = pointwise(run, [x, y], outputs)
    for (_, reference), got in zip(comparisons(), results, strict=True):
        assert np.array_equal(got, reference(x, y)), reference


@needs_vulkan
@pytest.mark.parametrize("literal", [0, 5, -5, 2**31 - 1, 2**31, -(2**31), 2**40])
def test_an_extended_int32_against_a_literal(run: Runner, literal: int) -> None:
    """Mesa 22.3 had `(int64)i < 5` false for every i."""
    from tvm import tirx

    x = samples("int32")
    outputs = [
        (lambda p, f=f: tirx.Cast("uint8", f(tirx.Cast("int64", p), i64(literal))), "uint8")
        for f, _ in comparisons()
    ]
    for (_, reference), got in zip(comparisons(), pointwise(run, [x], outputs), strict=True):
        assert np.array_equal(got, reference(x.astype(np.int64), literal)), reference


def thread_numbers() -> list[tuple[Make, Callable[[Array], Array]]]:
    """Functions of a thread's number, in TIR and in NumPy."""
    from tvm import tirx

    def quotient(t: Array, by: int) -> Array:
        return np.trunc(t / by).astype(np.int64)

    div, mod = tirx.truncdiv, tirx.truncmod
    return [
        (lambda t: div(t, i64(8)), lambda t: t // 8),
        (lambda t: mod(t, i64(8)), lambda t: t % 8),
        (lambda t: div(t, i64(6)) * i64(3) + mod(t, i64(6)), lambda t: t // 6 * 3 + t % 6),
        (lambda t: div(t - i64(40), i64(7)), lambda t: quotient(t - 40, 7)),
        (lambda t: mod(t - i64(40), i64(8)), lambda t: t - 40 - 8 * quotient(t - 40, 8)),
        (lambda t: div(i64(1000), t + i64(1)), lambda t: 1000 // (t + 1)),
        (lambda t: (t - i64(40)) >> i64(2), lambda t: (t - 40) >> 2),
        (lambda t: ((t << i64(3)) | i64(1)) ^ (t & i64(5)), lambda t: (t << 3 | 1) ^ (t & 5)),
        (lambda t: t * i64(-(2**24)), lambda t: t * -(2**24)),
        (lambda t: div(t * i64(2**40), i64(3)), lambda t: t * 2**40 // 3),
        (lambda t: tirx.min(t, i64(9)) - tirx.max(t, i64(50)),
         lambda t: np.minimum(t, 9) - np.maximum(t, 50)),
    ]  # fmt: skip


@needs_vulkan
def test_index_arithmetic(run: Runner) -> None:
    """As a number in 64 bits, and as an index."""
    from tvm import tirx

    numbers, thread = thread_numbers(), np.arange(THREADS)

    def make(block: Any, t: Any, buffers: Any, _: Any) -> Any:
        x, indices, elements = buffers
        stores = []
        for place, (function_of, reference) in enumerate(numbers):
            at, value = i64(place * THREADS) + t, function_of(t)
            stores.append(tirx.BufferStore(indices, value, [at]))
            if np.abs(reference(thread)).max() < N // 2:
                stores.append(tirx.BufferStore(elements, x[value + i64(N // 2)], [at]))
        return tirx.SeqStmt(stores)

    x = np.arange(N)
    indices, elements = (np.zeros(len(numbers) * THREADS, np.int64) for _ in range(2))
    run(function(make, [("int64", 8)] * 3), [x, indices, elements])
    rows = indices.reshape(-1, THREADS)
    for row, element, (_, reference) in zip(
        rows, elements.reshape(rows.shape), numbers, strict=True
    ):
        want = reference(thread)
        assert np.array_equal(row, want)
        assert np.abs(want).max() >= N // 2 or np.array_equal(element, want + N // 2)


@needs_vulkan
@pytest.mark.parametrize("nan", [(16, 32), ()])
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(run: Runner, dtype: str, nan: tuple[int, ...]) -> None:
    from tvm import tirx

    x, y = samples(dtype), np.roll(samples(dtype, 1), 11)
    with np.errstate(all="ignore"):
        cases: dict[str, tuple[Make, Array]] = {
            "+": (lambda p, q: p + q, x + y),
            "-": (lambda p, q: p - q, x - y),
            "*": (lambda p, q: p * q, x * y),
            "/": (lambda p, q: p / q, x / y),
            "min": (tirx.min, np.where(x < y, x, y)),
            "max": (tirx.max, np.where(x > y, x, y)),
            "sqrt": (lambda p, q: tirx.sqrt(p), np.sqrt(x)),
            "floor": (lambda p, q: tirx.floor(p), np.floor(x)),
            "abs": (lambda p, q: tirx.abs(p), np.abs(x)),
            "nan": (lambda p, q: tirx.Select(tirx.isnan(p), q, p), np.where(np.isnan(x), y, x)),
        }
    features = replace(device_features(), nan=nan)
    results = pointwise(run, [x, y], [(f, dtype) for f, _ in cases.values()], features)
    for (name, (_, want)), got in zip(cases.items(), results, strict=True):
        wrong = differing(got, want)
        assert not wrong.any(), (name, x[wrong][:4], y[wrong][:4], got[wrong][:4])


@needs_vulkan
@pytest.mark.parametrize("name", sorted(vector_math.FUNCTIONS))
def test_elementary_functions(run: Runner, name: str) -> None:
    x = np.linspace(-12, 12, N, dtype=np.float32)
    exact: dict[str, Callable[[float], float]] = {
        "exp": math.exp, "log": lambda v: math.log(v) if v > 0 else math.nan, "tanh": math.tanh,
        "erf": math.erf, "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
        "sinpi": lambda v: math.sin(math.pi * math.fmod(v, 2)),
    }  # fmt: skip
    want = np.array([exact[name](float(v)) for v in x])
    (got,) = pointwise(run, [x], [(vector_math.FUNCTIONS[name], "float32")])
    assert np.array_equal(np.isnan(got), np.isnan(want))
    ulp = np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))
    assert np.nanmax(ulp) < 2.5  # 2 with fused multiply-adds, which not every device has
