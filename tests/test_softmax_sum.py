"""`softmax_sum` in declarations other than attention, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from declared import check

import rudnn  # noqa: F401  makes declarations callable
from rudnn.dsl import In, Out, axes, bool_, f32, log_sum_exp, op, softmax_sum, sum


@op(out=(Out("B", "E"), Out("B", dtype=f32, name="lse")), static=("E",),
    example={"B": 2, "J": 3, "E": 4})  # fmt: skip
def pool(
    x: Any = In("B", "J"), v: Any = In("B", "J", "E"), m: Any = In("B", "J", dtype=bool_)
) -> Any:
    """Weights of a row meet values of the same row: nothing to tile."""
    b, j, e = axes("B", "J", "E")
    mean = softmax_sum(x[b, j], v[b, j, e], over=j, where=m[b, j])
    return mean, log_sum_exp(mean)


@op(out=Out("B", "E", "F"), static=("E",), example={"B": 2, "J": 3, "L": 2, "E": 4, "F": 2})
def two_axes(x: Any = In("B", "J", "L"), v: Any = In("J", "L", "E", "F")) -> Any:
    """Two summed axes, two columns, an epilogue."""
    b, j, k, e, f = axes("B", "J", "L", "E", "F")
    return 2 * softmax_sum(x[b, j, k], v[j, k, e, f], over=(j, k)) + 1


@op(out=Out("N", "E"), static=("D", "E"), example={"N": 2, "M": 3, "D": 2, "D2": 2, "E": 4})
def two_products(
    q: Any = In("N", "D"), k: Any = In("M", "D"), v: Any = In("M", "E"),
    p: Any = In("N", "D2"), g: Any = In("M", "D2"),
) -> Any:  # fmt: skip
    """Two contractions under one score, the depth of the second dynamic."""
    n, m, d, e, d2 = axes("N", "M", "D", "E", "D2")
    score = sum(q[n, d] * k[m, d], over=d) + sum(p[n, d2] * g[m, d2], over=d2)
    return softmax_sum(score, v[m, e], over=m, where=n >= m)


@op(out=Out("N", "E"), static=("E",), example={"N": 2, "M": 3, "E": 4})
def given_scores(x: Any = In("N", "M"), v: Any = In("M", "E"), last: Any = In("N")) -> Any:
    """Scores that are no contraction, and an input that only the rows have."""
    n, m, e = axes("N", "M", "E")
    return softmax_sum(x[n, m] * last[n], v[m, e], over=m, where=x[n, m] > last[n])


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_every_shape_of_softmax_sum(rows: int) -> None:
    check(pool, {"B": rows, "J": 7, "E": 4})
    check(two_axes, {"B": rows, "J": 4, "L": 5, "E": 6, "F": 3})
    check(given_scores, {"N": rows, "M": 140, "E": 19})


@pytest.mark.parametrize("depth", [("D", "E"), ("D", "E", "D2")])
def test_two_products_under_a_score(depth: tuple[str, ...]) -> None:
    import dataclasses

    declaration = dataclasses.replace(two_products, static=frozenset(depth), _graphs={})
    check(declaration, {"N": 37, "M": 39, "D": 4, "D2": 5, "E": 6})
    check(declaration, {"N": 3, "M": 0, "D": 4, "D2": 5, "E": 6})
