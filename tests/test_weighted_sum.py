"""`weighted_sum` in declarations other than attention, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_emulator import emulated_cuda
from declared import check
from spirv_kernels import needs_vulkan

import rudnn
from rudnn.dsl import In, Out, axes, axis, bool_, f32, op, sum, tanh, tensor, weighted_sum
from rudnn.dsl.declare import Spec
from rudnn.dsl.dtypes import f16
from rudnn.dsl.oracle import evaluate
from rudnn.runtime.compiler import Layouts, schedule
from rudnn.runtime.device import device
from rudnn.samples import specialise


@op(out=Out("B", "E"), static=("E",), example={"B": 2, "J": 3, "E": 4})
def pool(
    x: Any = In("B", "J"), v: Any = In("B", "J", "E"), m: Any = In("B", "J", dtype=bool_)
) -> Any:
    """Weights without sums under them: nothing to tile."""
    b, j, e = axes("B", "J", "E")
    return weighted_sum(tanh(x[b, j]), v[b, j, e], over=j, where=m[b, j])


@op(out=(Out("N", "D"), Out("M", "D", name="other")), static=("D",),
    example={"N": 2, "M": 3, "D": 4})  # fmt: skip
def both_ways(q: Any = In("N", "D"), k: Any = In("M", "D")) -> Any:
    """Two sums of one tile of weights without a mask, pointwise work after one of them."""
    n, m, d = axes("N", "M", "D")
    left, right = f32(q[n, d]), f32(k[m, d])
    weight = 0.0625 * tanh(sum(left * right, over=d))
    rows = weighted_sum(weight, right, over=m)
    return rows, 2 * weighted_sum(weight, left, over=n) + 1


@op(out=Out("N", dtype=f32), static=("D",), example={"N": 2, "M": 3, "D": 4})
def no_columns(q: Any = In("N", "D"), k: Any = In("M", "D")) -> Any:
    """A value that does not depend on the column."""
    n, m, d = axes("N", "M", "D")
    return weighted_sum(tanh(sum(q[n, d] * k[m, d], over=d)), 0.5, over=m, where=n >= m)


@op(out=(Out("N", "D"), Out("N", "D", name="again")), static=("D",),
    example={"N": 2, "M": 3, "D": 4})  # fmt: skip
def one_after_another(q: Any = In("N", "D"), k: Any = In("M", "D")) -> Any:
    """Weights over the same axes, the second from the first one's sums."""
    n, m, d = axes("N", "M", "D")
    c, e = axis("c", k.shape[1]), axis("e", k.shape[1])
    first = tensor("first", (n, d), 0.0625 * weighted_sum(
        sum(q[n, c] * k[m, c], over=c), k[m, d], over=m))  # fmt: skip
    return first, weighted_sum(sum(first[n, e] * k[m, e], over=e), k[m, d], over=m)


def test_a_weighted_sum_of_another_was_in_its_kernel_before_that_was_done() -> None:
    check(one_after_another, {"N": 5, "M": 70, "D": 19})


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_every_shape_of_weighted_sum(rows: int) -> None:
    check(pool, {"B": rows, "J": 7, "E": 4})
    check(both_ways, {"N": rows, "M": 140, "D": 19})
    check(both_ways, {"N": 140, "M": rows, "D": 19})
    check(no_columns, {"N": rows, "M": 9, "D": 4})


@needs_vulkan
@pytest.mark.parametrize("declaration", [pool, both_ways, no_columns])
def test_on_a_grid(declaration: Any) -> None:
    sizes = {"B": 3, "J": 140, "E": 5, "N": 37, "M": 70, "D": 19}
    check(declaration, sizes, device="vulkan", tolerance=1e-5)


def test_by_matrix_units_emulated() -> None:
    """Without a mask, with work after a sum, one product, columns past the last."""
    rng = np.random.default_rng(4)
    given = {"q": rng.standard_normal((37, 19)), "k": rng.standard_normal((70, 19))}
    given = {n: a.astype(np.float16) for n, a in given.items()}
    graph = both_ways.trace(Spec((("q", f16), ("k", f16)), (), (("D", 19),), ()))
    want = evaluate(graph, given, {"N": 37, "M": 70}, precision="float64")
    with emulated_cuda():
        device("cuda").driver.poison(True)
        got = [
            t.numpy() for t in both_ways(*(rudnn.tensor(a, device="cuda") for a in given.values()))
        ]
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=4e-3, atol=4e-3)


def test_sums_with_the_same_weights_share_a_kernel() -> None:
    graph = specialise(both_ways).graph
    program = schedule(graph, Layouts(frozenset(), frozenset()), "llvm")
    assert [k.rule for k in program.kernels] == ["weighted_sums"]
    assert not program.workspace.offsets
