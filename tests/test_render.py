"""The mathematical rendering, and the cost of a graph."""

from __future__ import annotations

import pytest

from rudnn.dsl import f16
from rudnn.dsl.cost import flops, minimal_bytes
from rudnn.dsl.render import math_text
from rudnn.ops.registry import operators, resolve
from rudnn.samples import specialise


def text(name: str, **given) -> str:
    return math_text(specialise(resolve(name), **given).graph)


def test_rms_norm_reads_as_it_is_defined() -> None:
    assert text("rms_norm").splitlines() == [
        "rms_norm(x: f32[rows, H=1024], gamma: f32[H=1024], epsilon: f32) → out: f32[rows, H=1024]",
        "  needs epsilon finite and > 0",
        "sum[rows] = Σ_H x[rows, H]²",
        "out[rows, H] = x[rows, H] / √(sum[rows] / 1024 + epsilon) · gamma[H]",
    ]


def test_storage_dtypes_and_chosen_sizes_are_shown() -> None:
    first = text("softmax_last_axis", dims={"H": 7}, dtype=f16).splitlines()[0]
    assert first == "softmax_last_axis(x: f16[rows, H=7]) → out: f16[rows, H=7]"


def test_sizes_are_never_mixed_up() -> None:
    assert "out: f32[P=8, K=384, L=48]" in text("pack_weight")


def test_parentheses_stand_where_they_are_needed() -> None:
    last = text("softmax_last_axis_backward").splitlines()[-1]
    assert last == "out[rows, H] = y[rows, H] · (grad[rows, H] − sum[rows])"


def test_structured_forms() -> None:
    assert "= Σ_K softmax_{K : mask[B, Hq, Q, K]}(" in text("attention")
    assert "argtop_N(x[rows, N])" in text("top_k")
    assert "scan_T(state[C] ← initial[batch, C]; state[C] ← decay[" in text("linear_recurrence")
    assert "Σ_{N : " in text("segment_sum")
    assert "  needs 0 ≤ indices < V" in text("embedding")


@pytest.mark.parametrize("name", operators())
def test_every_operator_has_a_rendering_and_a_cost(name: str) -> None:
    bound = specialise(resolve(name))
    lines = math_text(bound.graph).splitlines()
    assert lines[0].startswith(f"{name}(")
    stages = [line for line in lines[1:] if not line.startswith("  ")]
    assert len(stages) == len(bound.graph.stages)
    assert all(" = " in line for line in stages)
    assert flops(bound.graph, bound.sizes) >= 0
    assert minimal_bytes(bound.graph, bound.sizes) > 0


def cost(name: str, **dims) -> tuple[int, int]:
    bound = specialise(resolve(name), dims=dims)
    return flops(bound.graph, bound.sizes), minimal_bytes(bound.graph, bound.sizes)


def test_cost_of_a_product_and_of_pointwise_work() -> None:
    assert cost("batched_matmul", batch=(1,), M=32, K=16, N=8) == (
        2 * 32 * 16 * 8,
        4 * (32 * 16 + 16 * 8 + 32 * 8),
    )
    assert cost("add", shape=(3, 5)) == (15, 4 * 3 * 15)


def test_cost_counts_scores_once() -> None:
    plain = specialise(resolve("attention"))
    both = specialise(resolve("attention"), options={"return_lse": True})
    rows = 8 * 64
    assert flops(both.graph, both.sizes) - flops(plain.graph, plain.sizes) == 2 * rows
    assert (
        minimal_bytes(both.graph, both.sizes) == minimal_bytes(plain.graph, plain.sizes) + 4 * rows
    )
