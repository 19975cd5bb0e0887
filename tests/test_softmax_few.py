"""`softmax_sum` for rows that are known to be few, and bounds that a mask reads from a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declared import compared, drawn

import rudnn  # noqa: F401  makes declarations callable
from rudnn.dsl import (
    In,
    Out,
    axes,
    bool_,
    f32,
    i32,
    i64,
    log_sum_exp,
    op,
    softmax_sum,
    sum,
    tanh,
    where,
)
from rudnn.dsl.declare import Declaration

Array = Any
HEADS = {"B": 2, "H": 3, "G": 4, "M": 75, "D": 20, "E": 37}


@op(out=(Out("B", "H", "G", "E"), Out("B", "H", "G", dtype=f32, name="lse")),
    static=("G", "D", "E"), example=HEADS)  # fmt: skip
def heads_inside(
    q: Any = In("B", "H", "G", "D"), k: Any = In("B", "M", "H", "D"),
    v: Any = In("B", "M", "H", "E"), m: Any = In("B", "G", "M", dtype=bool_),
) -> Any:  # fmt: skip
    """Keys lie beside those of other heads, which are gone over together."""
    b, h, g, j, d, e = axes("B", "H", "G", "M", "D", "E")
    score = 2 * tanh(sum(q[b, h, g, d] * k[b, j, h, d], over=d))
    mean = softmax_sum(score, v[b, j, h, e], over=j, where=m[b, g, j])
    return mean, log_sum_exp(mean)


@op(out=(Out("B", "H", "G", "E"), Out("B", "H", "G", dtype=f32, name="lse")),
    static=("G", "D", "E"), example=HEADS)  # fmt: skip
def heads_apart(
    q: Any = In("B", "H", "G", "D"), k: Any = In("B", "H", "M", "D"),
    v: Any = In("B", "H", "M", "E"), m: Any = In("B", "G", "M", dtype=bool_),
) -> Any:  # fmt: skip
    """Each head's keys together in memory; a value that a mask of the key's takes part in."""
    b, h, g, j, d, e = axes("B", "H", "G", "M", "D", "E")
    score = 2 * tanh(sum(q[b, h, g, d] * k[b, h, j, d], over=d))
    value = where(m[b, 0, j], v[b, h, j, e], 2 * v[b, h, j, e])
    mean = softmax_sum(score, value, over=j, where=m[b, g, j])
    return mean, log_sum_exp(mean)


@op(out=Out("B", "N", "E"), static=("D", "E"),
    example={"B": 3, "N": 20, "M": 150, "D": 8, "E": 9})  # fmt: skip
def bounded(
    q: Any = In("B", "N", "D"), k: Any = In("B", "M", "D"), v: Any = In("B", "M", "E"),
    keys: Any = In("B", dtype=i32), rows: Any = In("B", dtype=i32),
) -> Any:  # fmt: skip
    """How many keys and rows there are is read from tensors."""
    b, n, j, d, e = axes("B", "N", "M", "D", "E")
    keep = (j < i64(keys[b])) & (n < i64(rows[b]))
    score = sum(q[b, n, d] * k[b, j, d], over=d)
    return 3 * softmax_sum(score, v[b, j, e], over=j, where=keep) + 1


@pytest.mark.parametrize("declaration", [heads_inside, heads_apart], ids=["inside", "apart"])
def test_few_rows(declaration: Declaration) -> None:
    for keys in (0, 1, 31, 32, 75):
        sizes = HEADS | {"M": keys}
        compared(declaration, drawn(declaration, sizes), sizes)


@pytest.mark.parametrize("declaration", [heads_inside, heads_apart], ids=["inside", "apart"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_no_row_keeps_may_hold_anything(declaration: Declaration, bad: float) -> None:
    arrays = drawn(declaration, HEADS)
    arrays["m"][:, :, 40:45] = False
    want = compared(declaration, arrays, HEADS)
    keys = arrays["k"], arrays["v"]
    for array in keys:
        moved = array.transpose(0, 2, 1, 3) if declaration is heads_inside else array
        moved[:, :, 40:45] = bad
    got = declaration(*arrays.values())
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_a_value_reaches_the_rows_that_keep_it() -> None:
    arrays = drawn(heads_inside, HEADS)
    arrays["m"][:, 0, 50], arrays["m"][:, 1:, 50] = True, False
    arrays["v"][0, 50, 1, 2] = np.nan
    mean, lse = heads_inside(*arrays.values())
    bad = np.zeros_like(mean, bool)
    bad[0, 1, 0, 2] = True
    assert np.array_equal(np.isnan(mean), bad) and np.isfinite(lse).all()


def test_bounds_read_from_tensors_leave_out_the_rest() -> None:
    sizes = {"B": 3, "N": 20, "M": 150, "D": 8, "E": 9}
    arrays = drawn(bounded, sizes)
    arrays["keys"] = np.array([0, 37, 150], np.int32)
    arrays["rows"] = np.array([20, 3, 0], np.int32)
    (want,) = compared(bounded, arrays, sizes)
    for name in ("k", "v"):
        arrays[name][0], arrays[name][1, 37:], arrays[name][2] = np.nan, np.nan, np.nan
    np.testing.assert_array_equal(bounded(*arrays.values()), want)
    assert (want[0] == 1).all() and (want[2] == 1).all() and (want[1, 3:] == 1).all()
