"""Bugs of the language, partition and the CPU rules that once were; names tell the symptom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rudnn  # noqa: F401  makes declarations callable
from rudnn.dsl import (
    In,
    Out,
    Param,
    axes,
    axis,
    bool_,
    dim,
    exp,
    f32,
    log_sum_exp,
    maximum,
    op,
    sinpi,
    softmax_sum,
    tanh,
    tensor,
    where,
)
from rudnn.dsl import max as greatest
from rudnn.dsl import min as least
from rudnn.dsl import sum as total
from rudnn.dsl.canonical import canonicalise
from rudnn.dsl.declare import Declaration, Spec
from rudnn.dsl.dtypes import DType, f16, i32, i64, u8, u16, u32, u64
from rudnn.dsl.errors import DeclarationError
from rudnn.dsl.expr import Form
from rudnn.dsl.forms import argmax
from rudnn.dsl.graph import Graph, Names
from rudnn.runtime.compiler import Layouts, build, schedule
from rudnn.runtime.targets.cuda import toolkit
from rudnn.schedules.cpu.softmax_block import sums_tile
from rudnn.schedules.emit import Emitter
from rudnn.schedules.group import Group
from rudnn.schedules.program import groups_of

Array = Any
UNSIGNED = (u8, u16, u32, u64)


def _graph(declaration: Declaration, dtype: DType = f32, **static: int) -> Graph:
    """A specialisation with `dtype` wherever the declaration leaves it open."""
    dtypes = {n: i.dtype if isinstance(i.dtype, DType) else dtype
              for n, i in declaration.inputs.items()}  # fmt: skip
    return declaration.trace(Spec(tuple(dtypes.items()), (), tuple(static.items())))


def _names(graph: Graph) -> list[str]:
    return [t.name for t in (*graph.inputs, *graph.stages)]


def _random(*shape: int) -> Array:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


@op(out=Out("R", "H"), example={"R": 4, "H": 5})
def less_columns(sum: Any = In("R", "H")) -> Any:
    """An input that is called as the stage of a hoisted Σ would be."""
    r, h = axes("R", "H")
    q = axes("R")
    return sum[r, h] - total(sum[q, h], over=q)


@op(out=Out("R"), example={"R": 4, "H": 5})
def taken_suffix(x: Any = In("R", "H")) -> Any:
    """`sum_1` is taken when the second Σ asks for it."""
    r, h = axes("R", "H")
    given = tensor("sum_1", (r, h), x[r, h] * 2)
    return total(given[r, h], over=h) / (1 + total(x[r, h] * x[r, h], over=h))


@op(out=Out("R"), example={"R": 4, "H": 5})
def taken_result(x: Any = In("R", "H")) -> Any:
    """An intermediate that is called as the result is."""
    r, h = axes("R", "H")
    inner = tensor("out", (r,), total(x[r, h], over=h))
    return inner[r] * 3


@op(out=Out("R", dtype=i64), example={"R": 4, "H": 5})
def taken_helper(x: Any = In("R", "H")) -> Any:
    """Names that canonical form would give its helper stages."""
    r, h = axes("R", "H")
    nan = tensor("out_nan", (r,), greatest(x[r, h], over=h, nan="ignore"))
    high = tensor("out_max", (r,), least(x[r, h], over=h, nan="ignore"))
    return argmax(x[r, h] + nan[r] + high[r], over=h)


def test_an_input_called_sum_is_not_taken_for_the_hoisted_sum() -> None:
    x = _random(7, 9)
    np.testing.assert_allclose(less_columns(x), x - x.sum(0), rtol=1e-5, atol=1e-5)


def test_a_hoisted_stage_does_not_take_the_name_of_a_given_one() -> None:
    names = _names(_graph(taken_suffix))
    assert len(set(names)) == len(names)
    x = _random(6, 40)
    want = 2 * x.sum(1) / (1 + (x * x).sum(1))
    np.testing.assert_allclose(taken_suffix(x), want, rtol=1e-4, atol=1e-5)


def test_a_suffixed_name_given_first_is_not_given_again() -> None:
    names = Names({"dim"})
    given = [names.fresh(n) for n in ("sum_1", "sum", "sum", "sum", "dim", "sum_1")]
    assert given == ["sum_1", "sum", "sum_2", "sum_3", "dim_1", "sum_1_1"]


def test_an_intermediate_called_as_the_result_leaves_it_its_name() -> None:
    x = _random(6, 5)
    assert [s.name for s in _graph(taken_result).outputs] == ["out"]
    np.testing.assert_allclose(taken_result(x), 3 * x.sum(1), rtol=1e-5, atol=1e-5)


def test_helpers_of_canonical_form_do_not_take_given_names() -> None:
    names = _names(canonicalise(_graph(taken_helper)))
    assert len(set(names)) == len(names)
    x = _random(5, 33)
    np.testing.assert_array_equal(taken_helper(x), x.argmax(1))


def test_a_result_called_as_an_input_is_refused() -> None:
    with pytest.raises(DeclarationError, match="a name of its own for each tensor, got x twice"):

        @op(out=Out("N", name="x"), example={"N": 3})
        def same(x: Any = In("N")) -> Any:
            return x[axes("N")]


def _extrema(dtype: DType, across: bool) -> Declaration:
    """Masked greatest and least along a row, or across rows."""
    kept = "H" if across else "R"

    @op(out=(Out(kept, dtype=dtype, name="high"), Out(kept, dtype=dtype, name="low")),
        example={"R": 4, "H": 5}, name=f"extrema_{dtype.short}_{kept}")  # fmt: skip
    def extrema(x: Any = In("R", "H", dtype=dtype), keep: Any = In("R", "H", dtype=bool_)) -> Any:
        r, h = axes("R", "H")
        over, mask = (r if across else h), keep[r, h]
        return (greatest(x[r, h], over=over, where=mask), least(x[r, h], over=over, where=mask))

    return extrema


@pytest.mark.parametrize("across", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [*UNSIGNED, i32], ids=str)
def test_integer_extrema_start_at_the_ends_of_their_range(dtype: DType, across: bool) -> None:
    info = np.iinfo(dtype.numpy)
    rng = np.random.default_rng(1)
    x = rng.integers(info.min, info.max, (37, 70), dtype.numpy, endpoint=True)
    keep = rng.random(x.shape) < 0.2
    keep[3], keep[:, 5] = False, False
    x[0], x[:, 0] = info.max // 2 + 2, info.max // 2 + 2  # above the signed range, where unsigned
    high, low = _extrema(dtype, across)(x, keep)
    along = 0 if across else 1
    np.testing.assert_array_equal(high, np.max(x, along, where=keep, initial=info.min))
    np.testing.assert_array_equal(low, np.min(x, along, where=keep, initial=info.max))


def test_tiles_of_the_sums_end_within_the_rows() -> None:
    for lanes in (4, 8, 16):
        for vectors in (1, 2, 3, 4):
            for columns in range(1, 20):
                for registers in (8, 16, 32):
                    high, wide = sums_tile(vectors * lanes, columns, registers)
                    assert vectors * lanes % high == 0 and columns % wide == 0


@op(out=Out("H", "L"), example={"R": 4, "H": 5, "L": 3})
def column_sums(x: Any = In("R", "H", "L")) -> Any:
    """A sum across rows with two kept axes."""
    r, h, k = axes("R", "H", "L")
    return total(x[r, h, k], over=r)


def test_partial_sums_of_columns_are_part_of_the_planned_workspace() -> None:
    program = schedule(_graph(column_sums), Layouts(frozenset({"x", "out"})), "llvm")
    (kernel,) = program.kernels
    assert kernel.rule == "columns"
    assert [s.name for s, _ in program.workspace.offsets] == [s.name for s in kernel.scratch] != []
    for shape in ((0, 3, 4), (1, 2, 5), (64, 3, 17), (200, 7, 33)):
        x = _random(*shape)
        np.testing.assert_allclose(column_sums(x), x.sum(0), rtol=1e-5, atol=1e-4)


@op(out=(Out("B", "E"), Out("B", dtype=f32, name="lse")), static=("E",),
    example={"B": 2, "J": 3, "L": 5, "E": 4})  # fmt: skip
def pool_of_peaks(x: Any = In("B", "J", "L"), v: Any = In("J", "E")) -> Any:
    """Scores that canonical form rewrites, under a softmax_sum and its log_sum_exp."""
    b, j, k, e = axes("B", "J", "L", "E")
    mean = softmax_sum(greatest(x[b, j, k], over=k), v[j, e], over=j)
    return mean, log_sum_exp(mean)


def test_a_softmax_sum_over_a_maximum_is_computed_once_with_its_log_sum_exp() -> None:
    graph = canonicalise(_graph(pool_of_peaks, E=4))
    homes = [g.name for s in graph.outputs for g in groups_of(graph) if s in g.stages]
    assert len(homes) == 2 and len(set(homes)) == 1
    x, v = _random(5, 6, 9), _random(6, 4)
    mean, lse = pool_of_peaks(x, v)
    weights = np.exp(x.max(2))
    want = weights @ v / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(mean, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(weights.sum(1)), rtol=1e-5)


@op(out=(Out("R", name="mean"), Out("R", name="square")), example={"R": 4, "H": 5})
def moments(x: Any = In("R", "H")) -> Any:
    """Two results of a row, neither read by the other."""
    r, h = axes("R", "H")
    return total(x[r, h], over=h), total(x[r, h] * x[r, h], over=h)


def test_two_reductions_of_a_row_as_results_compile() -> None:
    for shape in ((0, 3), (1, 2), (5, 64), (9, 333), (4, 0)):
        x = _random(*shape)
        mean, square = moments(x)
        np.testing.assert_allclose(mean, x.sum(1), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(square, (x * x).sum(1), rtol=1e-4, atol=1e-4)


@op(out=(Out("R", "H", name="third"), Out("R", name="row"), Out("R", "H", name="first")),
    example={"R": 4, "H": 5})  # fmt: skip
def late_row(x: Any = In("R", "H")) -> Any:
    """A row reduction that reads a pointwise stage but has to wait for a later kernel."""
    r, h = axes("R", "H")
    q = axis("q", r.extent)
    first = tensor("doubled", (r, h), x[r, h] * 2)
    across = tensor("across", (h,), total(x[q, h], over=q))
    row = tensor("row_sum", (r,), total(first[r, h] * across[h], over=h))
    third = tensor("tripled", (r, h), first[r, h] * 3)
    return third[r, h] + 1, row[r], first[r, h]


def test_a_reduction_that_has_to_wait_leaves_the_kernel_it_does_not_join_alone() -> None:
    groups: tuple[Group, ...] = groups_of(canonicalise(_graph(late_row)))
    plain = [g for g in groups if not any(isinstance(s.expr, Form) for s in g.stages)]
    assert all(len(g.stages) == 1 for g in plain)
    x = _random(6, 35)
    third, row, first = late_row(x)
    np.testing.assert_allclose(third, x * 6 + 1, rtol=1e-5)
    np.testing.assert_allclose(row, (2 * x * x.sum(0)).sum(1), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(first, x * 2)


def test_block_names_do_not_repeat() -> None:
    group = groups_of(canonicalise(_graph(column_sums)))[0]
    emitter = object.__new__(Emitter)
    emitter.group, emitter._names = group, Names()
    given = [emitter.name(n) for n in ("x_1", "x", "x", "rows.0", "rows_0")]
    assert len(set(given)) == len(given)


@pytest.mark.parametrize(
    "expression",
    [
        lambda x, i: x // 2.0,
        lambda x, i: x % x,
        lambda x, i: x + i // 0,
        lambda x, i: x + i * 2**64,
        lambda x, i: argmax(x, over=(i, i)),
    ],
)
def test_expressions_without_a_meaning_are_refused_by_name(expression) -> None:
    """They reached TVM, which answered with an internal error."""

    @op(out=Out("N"), example={"N": 4}, name="senseless")
    def senseless(x: Any = In("N")) -> Any:
        i = axes("N")
        return expression(x[i], i)

    with pytest.raises(DeclarationError, match="needs"):
        senseless.trace(Spec((("x", f32),)))


@op(out=Out("N"), example={"N": 40})
def not_less(x: Any = In("N"), y: Any = In("N")) -> Any:
    """1 where x is not less than y, which holds for NaN too; 2 more where not (x < y and x ≤ y)."""
    n = axes("N")
    less, most = x[n] < y[n], x[n] <= y[n]
    return where(~less, f32(1.0), f32(0.0)) + where(~(less & most), f32(2.0), f32(0.0))


def test_the_negation_of_a_comparison_holds_for_nan() -> None:
    x = np.array([0, 1, 2, np.nan, 1, np.nan, -np.inf, 0] * 5, np.float32)
    y = np.array([1, 1, 1, 1, np.nan, np.nan, np.inf, -0.0] * 5, np.float32)
    want = np.where(~(x < y), 3.0, 0.0)
    np.testing.assert_array_equal(not_less(x, y), want)


@op(out=Out("R", dtype=f32), static=("D",), example={"R": 5, "K": 7, "D": 8})
def free_energy(query: Any = In("R", "D"), key: Any = In("K", "D")) -> Any:
    """−log Σⱼ exp(query · keyⱼ)."""
    r, j, d = axes("R", "K", "D")
    inner = axis("inner", key.shape[1])
    score = total(query[r, inner] * key[j, inner], over=inner)
    return -log_sum_exp(softmax_sum(score, key[j, d], over=j))


def test_pointwise_work_after_a_log_sum_exp_alone_saw_the_mean() -> None:
    random = np.random.default_rng(4)
    query, key = (random.standard_normal((n, 8), np.float32) for n in (5, 7))
    want = -np.log(np.exp(query.astype(np.float64) @ key.T).sum(1))
    np.testing.assert_allclose(free_energy(query, key), want, rtol=1e-6)


@op(out=Out("N"), example={"N": 1000})
def nested(x: Any = In("N")) -> Any:
    """Each function's result is used several times in the next."""
    return tanh(sinpi(exp(tanh(x[axes("N")]))))


def test_functions_of_functions_compile() -> None:
    """`exp(tanh(x))` took 18 s on the CPU, three functions minutes: TVM wrote out all names."""
    x = np.linspace(-3, 3, 1001, dtype=np.float32)
    wide = x.astype(np.float64)
    expected = np.tanh(np.sin(np.pi * np.exp(np.tanh(wide))))
    assert np.abs(nested(x) - expected).max() < 2e-6


@op(out=Out("int", "new"), example={"int": 40, "new": 33})
def signed(
    new: Any = In("int", "new"), half: Any = In("new"), *, double: Any = Param(1.0),
    this: Any = Param(2.0),
) -> Any:  # fmt: skip
    """Words of C++ as names of everything."""
    i, j = axes("int", "new")
    row = tensor("operator", (i,), total(new[i, j], over=j))
    return sinpi(new[i, j]) * double + half[j] * this + row[i]


@pytest.mark.skipif(toolkit.find_nvrtc() is None, reason="needs pip install 'rudnn[cuda]'")
@pytest.mark.parametrize("dtype", [f32, f16])
def test_words_of_c_are_names_for_cuda(dtype: DType) -> None:
    """NVRTC refused a dim called `new`, and `sinpi` itself for a variable called `signed`."""
    assert build(_graph(signed, dtype), Layouts(frozenset()), "cuda:sm_80", "signed").files


@op(out=Out("N"), example={"N": 40})
def shares(x: Any = In("N")) -> Any:
    """x at ⌊n·i / (N − 1)⌋, or at 0 if N = 1, and ⌊70 / i⌋ besides."""
    i, n = axes("N"), dim("N")
    place = where(n == 1, 0, i * n // maximum(n - 1, 1))
    return x.at(place, fill=0.0) + where(i > 0, f32(70 // maximum(i, 1)), 0.0)


@op(out=(Out("R", name="most"), Out("R", name="mean")), example={"R": 4, "H": 5})
def share_sums(x: Any = In("R", "H")) -> Any:
    """Of what is divided by h, where h > 0."""
    r, h = axes("R", "H")
    share = f32(7 // maximum(h, 1))
    return (total(share, over=h, where=h > 0) + x[r, 0],
            softmax_sum(share, x[r, h], over=h, where=h > 0))  # fmt: skip


def test_the_condition_of_a_where_took_away_what_kept_a_divisor_from_0() -> None:
    """The process ended; where a sum had the condition, it was 0."""
    for n in (1, 2, 21):
        x, i = _random(n), np.arange(n)
        place = i * n // max(n - 1, 1)
        want = np.where(place < n, x[place % n], 0) + np.where(i > 0, 70 // np.maximum(i, 1), 0)
        np.testing.assert_allclose(shares(x), want, rtol=1e-6)
    x, h = _random(3, 21), np.arange(1, 21)
    most, mean = share_sums(x)
    weight = np.exp(7 // h)
    np.testing.assert_allclose(most, x[:, 0] + (7 // h).sum(), rtol=1e-6)
    np.testing.assert_allclose(mean, x[:, 1:] @ weight / weight.sum(), rtol=1e-5, atol=1e-6)


@op(out=Out("R"), example={"R": 4, "H": 5})
def idle(x: Any = In("R", "H"), unread: Any = In("R", "H")) -> Any:
    """Intermediates that no result needs."""
    r, h = axes("R", "H")
    given = tensor("given", (r,), total(unread[r, h], over=h))
    tensor("doubled", (r,), given[r] * 2)
    return total(x[r, h], over=h)


def test_an_intermediate_that_nobody_reads_raised_key_error() -> None:
    assert [s.name for s in _graph(idle).stages] == ["out"]
    x = _random(3, 7)
    np.testing.assert_allclose(idle(x, x), x.sum(1), rtol=1e-5, atol=1e-6)
