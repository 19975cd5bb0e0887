"""scan, top_k and scatter_add: the public operators, and declarations that use the forms fully."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rudnn.check import check, failures
from rudnn.dsl import Extent, In, Out, Param, axes, axis, dim, exp, f32, i64, log, maximum, op, scan
from rudnn.dsl import max as greatest
from rudnn.dsl import scatter_add as scatter
from rudnn.dsl import sum as total
from rudnn.dsl.errors import OperatorError
from rudnn.ops.recurrence import linear_recurrence
from rudnn.ops.segments import segment_sum
from rudnn.ops.selection import top_k
from rudnn.runtime.compiler import disk_cache
from rudnn.runtime.targets.llvm import loader

Array = Any
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


@op(
    out=(Out("B", "H", "T", "V", name="output"), Out("B", "H", "K", "V", dtype=f32, name="final")),
    static=("K", "V"),
    example={"B": 2, "H": 2, "T": 9, "K": 16, "V": 32},
)
def gated_delta(
    query: Any = In("B", "H", "T", "K"),
    key: Any = In("B", "H", "T", "K"),
    value: Any = In("B", "H", "T", "V"),
    beta: Any = In("B", "H", "T"),
    log_decay: Any = In("B", "H", "T", dtype=f32),
    initial: Any = In("B", "H", "K", "V", dtype=f32, optional=True),
    *,
    scale: Any = Param(1.0),
) -> Any:
    """S ← e^g S;  S ← S + k βᵀ(v − kᵀS);  output qᵀS: reductions over the state in a step."""
    b, h, t, k, v = axes("B", "H", "T", "K", "V")
    j = axis("j", dim("K"))
    decay = exp(log_decay[b, h, t])

    def step(state: Any) -> Any:
        held = total(state[j, v] * decay * key[b, h, t, j], over=j)
        return state[k, v] * decay + key[b, h, t, k] * beta[b, h, t] * (value[b, h, t, v] - held)

    start = 0.0 if initial is None else initial[b, h, k, v]
    return scan(t, (k, v), init=start, step=step,
                emit=lambda s: scale * total(s[j, v] * query[b, h, t, j], over=j))  # fmt: skip


@op(
    out=(Out("B", "T", "C", name="states"), Out("B", "C", dtype=f32, name="final")),
    static=("C",),
    example={"B": 2, "T": 7, "C": 37},
)
def rotate(x: Any = In("B", "T", "C")) -> Any:
    """Each element follows its neighbour: the previous state must not be written over."""
    b, t, c = axes("B", "T", "C")
    j = axis("j", dim("C"))
    return scan(t, (c,), init=0.0, step=lambda s: (
        0.5 * s[(c + 1) % dim("C")] + x[b, t, c] + 0.25 * greatest(s[j], over=j)
    ))  # fmt: skip


@op(out=Out("B", "T"), static=("C",), example={"B": 2, "T": 7, "C": 5})
def collapse(x: Any = In("B", "T", "C")) -> Any:
    """One number a step out of a state of two axes; the final state is not asked for."""
    b, t, c = axes("B", "T", "C")
    d = axis("d", 3)
    return scan(t, (c, d), init=1.0, step=lambda s: 0.5 * s[c, d] + x[b, t, c] * (d + 1),
                emit=lambda s: total(s[c, d], over=(c, d)))[0]  # fmt: skip


@op(out=Out("B", "C"), example={"B": 2, "T": 7, "C": 65})
def decaying_peak(x: Any = In("B", "T", "C")) -> Any:
    """Only the final state."""
    b, t, c = axes("B", "T", "C")
    return scan(t, (c,), init=1.0, step=lambda s: maximum(s[c] * 0.9, x[b, t, c]))[1]


@op(
    out=(Out("B", "T", "D", "C", name="states"), Out("B", "D", "C", dtype=f32, name="final")),
    example={"B": 2, "T": 5, "D": 3, "C": 21},
)
def spread(x: Any = In("B", "T", "D", "C")) -> Any:
    """A state of dynamic size, neighbours in it, past its edges too, and functions of functions."""
    b, t, d, c = axes("B", "T", "D", "C")
    return scan(t, (d, c), init=0.0, step=lambda s: (
        log(exp(s[d, c] * 0.25) + exp(s.at(d - 1, c + 2, fill=0.5) + s.at(d, c - 1, fill=0.5)))
        + x[b, t, d, c]
    ))  # fmt: skip


@op(out=Out("T"), example={"T": 100})
def running_sum(x: Any = In("T")) -> Any:
    """A state without axes, and no batch."""
    t = axes("T")
    return scan(t, (), init=0.0, step=lambda s: s.at() + x[t])[0]


@op(out=Out("B", "S", "D", "E"), static=("S",),
    example={"B": 3, "N": 8, "M": 5, "S": 5, "D": 3, "E": 21})  # fmt: skip
def scatter_grid(
    ids: Any = In("B", "N", "M", dtype=i64), w: Any = In("N", "M", "D", "E"), S: Any = Extent()
) -> Any:
    """Points of two axes, an index that has a kept axis, values with two of their own."""
    b, n, m, s, d, e = axes("B", "N", "M", "S", "D", "E")
    return scatter(w[n, m, d, e] * 2.0, at={s: ids[b, n, m]}, over=(n, m))


@op(out=Out("S"), example={"N": 40, "S": 5})
def histogram(ids: Any = In("N", dtype=i64), w: Any = In("N"), S: Any = Extent()) -> Any:
    """No axis to vectorise."""
    n, s = axes("N", "S")
    return scatter(w[n], at={s: ids[n]}, over=n)


IN_FULL = (linear_recurrence, top_k, segment_sum, gated_delta)
CORNERS = (rotate, spread, collapse, decaying_peak, running_sum, scatter_grid, histogram)


@pytest.mark.parametrize("declaration", (*IN_FULL, *CORNERS), ids=lambda d: d.name)
def test_against_the_oracle(declaration: Any) -> None:
    rows = check(declaration, dtypes=(f32,) if declaration in CORNERS else None)
    assert any(r.status == "pass" for r in rows)
    assert not failures(rows)


def _random(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 5, 32), (2, 3, 4, 100), (4, 9, 513), (1, 3, 4999)])
def test_recurrence_in_two_halves(dtype: Any, shape: tuple[int, ...]) -> None:
    x, decay = _random(shape, dtype), np.abs(_random(shape, dtype, 1)) / 4
    decay, cut = decay.astype(dtype), shape[-2] // 2
    states, final = linear_recurrence(x, decay)
    first, middle = linear_recurrence(x[..., :cut, :], decay[..., :cut, :])
    second, last = linear_recurrence(x[..., cut:, :], decay[..., cut:, :], middle)
    assert np.concatenate([first, second], -2).tobytes() == states.tobytes()
    assert last.tobytes() == final.tobytes()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 33])
def test_a_state_is_filled_past_its_edges(count: int) -> None:
    """The oracle took the other end's element instead, or none; vectors of any tail."""
    x = _random((1, 4, 2, count), np.float32)
    states, final = spread(x)
    wide = np.full((3, count + 3), 0.5)
    wide[1:, 1:-2] = 0
    for t in range(4):
        near = np.exp(wide[:-1, 3:] + wide[1:, :-3])
        wide[1:, 1:-2] = np.log(np.exp(0.25 * wide[1:, 1:-2]) + near) + x[0, t]
        np.testing.assert_allclose(states[0, t], wide[1:, 1:-2], rtol=1e-5, atol=1e-6)
    assert np.array_equal(final[0], states[0, -1])


def test_recurrence_of_no_steps() -> None:
    start = _random((2, 5), np.float32)
    empty = np.zeros((2, 0, 5), np.float32)
    out = (np.zeros_like(empty), np.full((2, 5), np.nan, np.float32))
    states, final = linear_recurrence(empty, empty, start, out=out)
    assert states.shape == (2, 0, 5)
    assert np.array_equal(final, start)


def test_previous_state_survives_the_step() -> None:
    x = np.zeros((1, 3, 5), np.float32)
    x[0, 0] = np.arange(5)
    want = np.zeros((3, 5))
    state = np.zeros(5)
    for t in range(3):
        state = want[t] = 0.5 * np.roll(state, -1) + x[0, t] + 0.25 * state.max()
    np.testing.assert_allclose(rotate(x)[0][0], want, rtol=1e-6)


def _selected(x: Array, k: int) -> Array:
    """Indices by a stable sort: NaN first, then descending."""
    wide = x.astype(np.float64)
    nan = np.isnan(wide)
    keys = np.where(nan, np.inf, wide)
    return np.lexsort((-keys, ~nan), axis=-1)[..., :k]


KINDS = {
    "random": lambda x, u: x,
    "ties": lambda x, u: np.round(x),
    "signed zeros": lambda x, u: np.where(u < 0.5, -0.0, 0.0),
    "special": lambda x, u: np.select(
        [u < 0.2, u < 0.4, u < 0.8], [np.float32("nan"), np.inf, -np.inf], x
    ),
    "ascending": lambda x, u: np.sort(x, -1),
    "all −inf": lambda x, u: np.full_like(x, -np.inf),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "k"),
    [((3, 10), 4), ((2, 5, 7), 7), ((4, 300), 50), ((2, 1000), 64), ((0, 5), 2), ((3, 64), 1)],
)
def test_top_k(dtype: Any, kind: str, shape: tuple[int, ...], k: int) -> None:
    uniform = np.random.default_rng(2).random(shape)
    x = KINDS[kind](_random(shape, np.float32), uniform).astype(dtype)
    want = _selected(x, k)
    for view in (x, np.repeat(x, 3, axis=-1)[..., ::3]):
        values, indices = top_k(view, k)
        assert values.dtype == x.dtype and indices.dtype == np.int64
        np.testing.assert_array_equal(indices, want)
        assert values.tobytes() == np.take_along_axis(x, want, -1).tobytes()


def test_top_k_agrees_with_torch() -> None:
    import torch

    x = torch.from_numpy(_random((6, 2000), np.float32))
    ours, theirs = top_k(x, 17), torch.topk(x, 17)
    assert torch.equal(ours.values, theirs.values) and torch.equal(ours.indices, theirs.indices)


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("n, h, s", [(10, 4, 3), (0, 5, 3), (7, 0, 2), (100, 333, 17), (64, 1, 90)])
def test_segment_sum(ids_dtype: Any, n: int, h: int, s: int) -> None:
    x, ids = _random((n, h), np.float32), np.random.default_rng(1).integers(0, s, n)
    want = np.zeros((s, h), np.float32)
    np.add.at(want, ids, x)  # in order and in f32, as ours: the same bits
    out = np.full((s, h), np.nan, np.float32)
    assert segment_sum(x, ids.astype(ids_dtype), s, out=out) is out
    np.testing.assert_array_equal(out, want)


def test_segment_sum_is_the_same_on_any_number_of_threads() -> None:
    x, ids = _random((500, 700), np.float32), np.random.default_rng(1).integers(0, 9, 500)
    usual = segment_sum(x, ids, 9)
    services = loader.runtime(disk_cache())
    try:
        for threads in (1, 2, 5):
            services.set_num_threads(threads)
            np.testing.assert_array_equal(segment_sum(x, ids, 9), usual)
    finally:
        services.set_num_threads(0)


def test_an_index_outside_adds_nowhere() -> None:
    ids = np.array([-1, 0, 5, 2, 2**40, -(2**40)])
    room = np.full(9, 7.0, np.float32)
    histogram(ids, np.ones(6, np.float32), 5, out=room[2:7])
    np.testing.assert_array_equal(room, [7, 7, 1, 0, 1, 0, 0, 7, 7])


X, IDS = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_k(X, 4), "k at most the size of the last axis, got k=4, N=3"),
        (lambda: top_k(X, 0), "needs k ≥ 1"),
        (lambda: top_k(X.astype(np.float64), 1), "f32, f16 or bf16"),
        (lambda: segment_sum(X, IDS + 3, 3), "needs ids in 0 … 2, got 3"),
        (lambda: segment_sum(X, IDS - 1, 3), "needs ids in 0 … 2, got -1"),
        (lambda: segment_sum(X, IDS[:1], 3), "one size of N"),
        (lambda: linear_recurrence(X, X[:, :2]), "one size of C"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        call()
