"""Index divisions: quick to compile where nothing is negative, floored where something may be."""

from __future__ import annotations

from typing import Any

import numpy as np

from rudnn.dsl import In, Out, axes, dim, f32, op
from rudnn.ops.pointwise import silu
from rudnn.runtime.bind import Binder, View


@op(out=Out("N"), example={"N": 8})
def _floored(x: Any = In("N")) -> Any:
    """x plus a floor division and a remainder of numbers that are negative at first."""
    i = axes("N")
    shifted = i - 5
    return x[i] + f32(shifted // dim("N")) + 10 * f32(shifted % dim("N"))


def test_rows_that_do_not_join_compile_in_ten_seconds() -> None:
    """Fused loops were taken apart with selects on signs, which LLVM needed 10 s to digest."""
    from rudnn.runtime.compiler import Layouts, schedule
    from rudnn.runtime.targets.llvm import cpu
    from rudnn.runtime.targets.llvm.compile import lower

    view = View(f32, (3, 5, 13), (999, 99, 2))
    bound = Binder(silu).bind({"x": view}, {}, {}, {}, {"out": view})
    module, _ = lower(
        schedule(bound.graph, Layouts(bound.unit), "llvm"), "entry", cpu.tvm_target("")
    )
    text = module.script()
    assert "T.Div(" in text and "rmod" not in text


def test_negative_numerators_are_floored() -> None:
    x = np.zeros(8, np.float32)
    shifted = np.arange(8) - 5
    assert np.array_equal(_floored(x), (shifted // 8 + 10 * (shifted % 8)).astype(np.float32))
