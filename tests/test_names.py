"""Names that TVM would write out in each other go through memory, and only those."""

from __future__ import annotations

from typing import Any

import pytest
from declared import lowered

from rudnn.dsl import In, Out, axes, op, sinpi
from rudnn.ops.pointwise import gelu
from rudnn.runtime.names import hide_values
from rudnn.samples import specialise


@op(out=Out("N"), example={"N": 1000})
def window(x: Any = In("N")) -> Any:
    """lanczos3's: of functions of the same, none within another."""
    z = x[axes("N")] * 1.7 + 0.3
    return sinpi(z) * sinpi(z / 3) * sinpi(z / 5) / (z * z)


def _chain(dtype: str) -> Any:
    """let a = x · x in let b = a + a in b · b."""
    from rudnn.runtime.tvm_import import load_tvm

    load_tvm()
    from tvm import tirx

    x, a, b = (tirx.Var(n, dtype) for n in "xab")
    return tirx.Evaluate(tirx.Let(a, x * x, tirx.Let(b, a + a, b * b)))


@pytest.mark.parametrize(
    ("dtype", "keeper"),
    [("float32", ("rudnn_keep_f32", "float")), ("float32x8", ("rudnn_keep_f32x8", "<8 x float>"))],
)
def test_values_are_kept_in_cells(dtype: str, keeper: tuple[str, str]) -> None:
    body, keepers = hide_values(_chain(dtype))
    assert dict([keeper]) == keepers
    assert str(body).count("a_cell") > 2 and str(body).count("b_cell") > 2


def test_vectors_of_odd_lengths_stay_names() -> None:
    """TVM refused memory of their elements: bf16 attention with 37 columns did not compile."""
    body, keepers = hide_values(_chain("float32x5"))
    assert not keepers and "cell" not in str(body)


def test_few_names_stay() -> None:
    assert hide_values(_chain("float32"), above=8)[1] == {}
    assert hide_values(_chain("float32"), above=2)[1] != {}


def test_the_cpu_hides_names_where_they_are_many() -> None:
    """lanczos3 took 28 s to compile; with cells throughout attention was 5 to 10 % slower."""
    assert "rudnn_keep_f32" in lowered(specialise(window))
    assert "rudnn_keep" not in lowered(specialise(gelu))
