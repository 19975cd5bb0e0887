"""Index divisions: quick to compile where nothing is negative, floored where something may be."""

from __future__ import annotations

from typing import Any

import numpy as np
from declared import lowered

from rudnn.dsl import In, Out, axes, dim, f32, op
from rudnn.ops.pointwise import silu
from rudnn.ops.registry import operators
from rudnn.runtime.bind import Binder, View
from rudnn.samples import specialise

OPERATORS = operators()


@op(out=Out("N"), example={"N": 8})
def _floored(x: Any = In("N")) -> Any:
    """x plus a floor division and a remainder of numbers that are negative at first."""
    i = axes("N")
    shifted = i - 5
    return x[i] + f32(shifted // dim("N")) + 10 * f32(shifted % dim("N"))


def test_rows_that_do_not_join_compile_in_ten_seconds() -> None:
    """Fused loops were taken apart with selects on signs, which LLVM needed 10 s to digest."""
    view = View(f32, (3, 5, 13), (999, 99, 2))
    text = lowered(Binder(silu).bind({"x": view}, {}, {}, {}, {"out": view}))
    assert "T.Div(" in text and "rmod" not in text


def test_quotients_of_sizes_are_found_once() -> None:
    """The number of taps, a quotient of sizes, stood in 1910 divisions; TVM took 8 s over them."""
    options = {"mode": "bicubic", "antialias": True}
    text = lowered(specialise(OPERATORS["interpolate_backward"], options=options))
    assert text.count("T.Div(") < 600  # by numbers, most


def test_negative_numerators_are_floored() -> None:
    x = np.zeros(8, np.float32)
    shifted = np.arange(8) - 5
    assert np.array_equal(_floored(x), (shifted // 8 + 10 * (shifted % 8)).astype(np.float32))
