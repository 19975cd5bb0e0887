"""Reductions on grids, in shapes that no operator has: rows, columns, and a launch each."""

from __future__ import annotations

from typing import Any

import pytest
from spirv_kernels import needs_vulkan

from rudnn.check import check, failures
from rudnn.dsl import In, Out, any, axes, bool_, dim, exp, f32, max, mean, min, op, rsqrt, sum
from rudnn.dsl import tensor as keep
from rudnn.dsl.declare import Declaration
from rudnn.runtime import compiler
from rudnn.runtime.export import Request


@op(out=tuple(Out("R", dtype=f32, name=n) for n in ("top", "total", "least")), static=("H",),
    example={"R": 5, "H": 64})  # fmt: skip
def three(x: Any = In("R", "H")) -> Any:
    """Results of one row that do not read each other."""
    r, h = axes("R", "H")
    return max(x[r, h], over=h), sum(x[r, h], over=h), min(x[r, h], over=h)


@op(out=Out("N", "G", "C", "K"), static=("C", "K"), example={"N": 2, "G": 3, "C": 4, "K": 16})
def group_norm(x: Any = In("N", "G", "C", "K"), gamma: Any = In("G", "C", dtype=f32)) -> Any:
    """Rows of two axes each, reduced over both."""
    n, g, c, k = axes("N", "G", "C", "K")
    centre = mean(x[n, g, c, k], over=(c, k))
    variance = mean((x[n, g, c, k] - centre) ** 2, over=(c, k))
    return (x[n, g, c, k] - centre) * rsqrt(variance + 1e-5) * gamma[g, c]


@op(out=(Out("R", "H", name="y"), Out("R", name="scale"), Out("R", dtype=bool_, name="big")),
    static=("H",), example={"R": 20, "H": 64})  # fmt: skip
def several(x: Any = In("R", "H")) -> Any:
    """Results along the row and one a row, of intermediates that both kinds read."""
    r, h = axes("R", "H")
    weight = keep("weight", (r, h), exp(x[r, h]))
    scale = keep("factor", (r,), 1 / sum(weight[r, h], over=h) + 1)
    return weight[r, h] * scale[r], scale[r], any(x[r, h] > 1, over=h)


@op(out=(Out("B", "K", dtype=f32, name="s"), Out("K", dtype=f32, name="m")), static=("K",),
    example={"B": 3, "I": 300, "K": 40})  # fmt: skip
def middle(x: Any = In("B", "I", "K")) -> Any:
    """Reductions over an axis between kept ones, and over the two outer ones."""
    b, i, k = axes("B", "I", "K")
    return sum(x[b, i, k], over=i), min(x[b, i, k], over=(b, i))


@op(out=Out("R", "H"), example={"R": 20, "H": 64})
def over_everything(x: Any = In("R", "H")) -> Any:
    """Reductions with a single result, whose elements other stages read."""
    r, h = axes("R", "H")
    weight = keep("weight", (r, h), exp(x[r, h] - max(x[r, h], over=(r, h))))
    return weight[r, h] / sum(weight[r, h], over=(r, h))


@op(out=Out("R", "H"), example={"R": 3, "H": 5})
def neighbours(x: Any = In("R", "H")) -> Any:
    """An intermediate read at other elements of the row than its reader's."""
    r, h = axes("R", "H")
    weight = keep("weight", (r, h), exp(x[r, h]))
    return weight[r, (h + 1) % dim("H")] / sum(weight[r, h], over=h)


CASES = [
    (three, {"H": 64}, {"rows"}), (three, {"H": 3}, {"rows"}), (three, {"H": 9001}, {"rows"}),
    (group_norm, {}, {"rows"}), (group_norm, {"C": 3, "K": 5}, {"rows"}),
    (several, {}, {"rows"}), (several, {"H": 1000}, {"rows"}),
    (middle, {}, {"columns"}), (middle, {"K": 3}, {"columns"}),
    (over_everything, {}, {"fallback"}), (neighbours, {}, {"fallback"}),
]  # fmt: skip


@needs_vulkan
@pytest.mark.parametrize(
    ("declaration", "dims", "rules"),
    CASES,
    ids=[f"{d.name}-{'-'.join(map(str, s.values()))}" for d, s, _ in CASES],
)
def test_reductions(declaration: Declaration, dims: dict[str, int], rules: set[str]) -> None:
    static = {n: dims.get(n, declaration.example[n]) for n in declaration.static}
    graph = declaration.trace(Request(declaration, {}).spec(static, None, {}, (), {}))
    program = compiler.schedule(graph, compiler.Layouts(frozenset(), frozenset()), "vulkan")
    assert rules <= {k.rule for k in program.kernels}
    bad = failures(check(declaration, "vulkan", dims))
    assert not bad, "\n".join(f"{r.dtype} {r.layout} {r.dims}: {r.detail}" for r in bad)


@op(out=Out("R", dtype=f32), static=("H",), example={"R": 2, "H": 70001})
def long_sum(x: Any = In("R", "H")) -> Any:
    """Rows that several blocks share."""
    r, h = axes("R", "H")
    return sum(x[r, h], over=h)


@needs_vulkan
def test_long_rows_are_shared_by_blocks() -> None:
    graph = long_sum.trace(Request(long_sum, {}).spec({"H": 70001}, None, {}, (), {}))
    program = compiler.schedule(graph, compiler.Layouts(frozenset(), frozenset()), "vulkan")
    assert [len(k.scratch) for k in program.kernels] == [1]
    bad = failures(check(long_sum, "vulkan", {"H": 70001, "R": 2}, [f32]))
    assert not bad, "\n".join(f"{r.dtype} {r.layout} {r.dims}: {r.detail}" for r in bad)
