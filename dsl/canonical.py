"""Reductions that hardware lacks, said in those it has.

`argmax`, `any` and NaN-carrying `max`/`min` become `max`/`min` that ignore NaN plus a flag, so
that schedules need to know three monoids only: sum, prod, and max/min.
"""

from __future__ import annotations

from dataclasses import replace

from .dtypes import bool_, i32, i64
from .expr import Binary, Cast, Const, Expr, Read, Select, Stage, Tensor, Unary
from .forms import Reduce
from .graph import Graph, Names
from .walk import free_axes, rebuild

_FAR = 2**62


def canonicalise(graph: Graph) -> Graph:
    """The graph with `argmax`, `any` and NaN-carrying extrema rewritten."""
    stages: list[Stage] = []
    replaced: dict[int, Tensor] = {}
    # One memo for all stages: what two of them share stays shared, and partition looks for that.
    memo: dict[int, Expr] = {}
    tensors: tuple[Tensor, ...] = (*graph.inputs, *graph.stages)
    numbers = [*(s.name for s in graph.scalars), *(d.name for d in graph.dims)]
    names = Names([*(t.name for t in tensors), *numbers])
    for stage in graph.stages:
        expr = retarget(stage.expr, replaced, memo)
        body = expr
        if isinstance(expr, Reduce) and (
            expr.op in ("argmax", "any") or (expr.op in ("max", "min") and _carries(expr))
        ):
            helpers, body = _expand(stage, expr, names)
            stages += helpers
        if body is stage.expr:
            stages.append(stage)
            continue
        fresh = Stage(stage.name, stage.shape, stage.dtype, axes=stage.axes, expr=body)
        replaced[id(stage)] = fresh
        stages.append(fresh)
    outputs = tuple(replaced.get(id(s), s) for s in graph.outputs)
    return replace(graph, stages=tuple(stages), outputs=outputs)  # type: ignore[arg-type]


def _carries(node: Reduce) -> bool:
    return node.nan == "carry" and node.body.dtype.is_float


def retarget(node: Expr, replaced: dict[int, Tensor], memo: dict[int, Expr]) -> Expr:
    found = memo.get(id(node))
    if found is not None:
        return found
    children = tuple(retarget(c, replaced, memo) for c in node.children())
    result = rebuild(node, children) if children else node
    if isinstance(result, Read) and id(result.tensor) in replaced:
        result = Read(replaced[id(result.tensor)], result.index, result.fill, result.dtype)
    memo[id(node)] = result
    return result


def _stage(base: Stage, suffix: str, node: Reduce, names: Names) -> tuple[Stage, Read]:
    axes = tuple(a for a in base.axes if a in free_axes(node))
    shape = tuple(a.extent for a in axes)
    name = names.fresh(f"{base.name}_{suffix}")
    stage = Stage(name, shape, node.dtype, axes=axes, expr=node)
    return stage, Read(stage, axes, None, stage.dtype)


def _flag(
    base: Stage, node: Reduce, condition: Expr, suffix: str, names: Names
) -> tuple[Stage, Expr]:
    """A stage that counts whether `condition` holds anywhere, and its test."""
    marks = Reduce("max", Cast(condition, i32), node.over, node.where, "any", i32)
    stage, read = _stage(base, suffix, marks, names)
    return stage, Binary("gt", read, Const(0, i32), bool_)


def _expand(base: Stage, node: Reduce, names: Names) -> tuple[list[Stage], Expr]:
    if node.op == "any":
        stage, test = _flag(base, node, node.body, "any", names)
        return [stage], test
    op = "max" if node.op == "argmax" else node.op
    best = replace(node, op=op, nan="any", dtype=node.body.dtype)
    helpers, value = [], None
    nan_here: Expr | None = None
    if node.body.dtype.is_float:
        nan_here = Unary("isnan", node.body, bool_)
        stage, has_nan = _flag(base, node, nan_here, "nan", names)
        helpers.append(stage)
        stage, top = _stage(base, op, best, names)
        helpers.append(stage)
        nan = Const(float("nan"), node.body.dtype)
        value = Select(has_nan, nan, top, node.body.dtype)
    else:
        stage, top = _stage(base, op, best, names)
        helpers.append(stage)
    if node.op != "argmax":
        assert value is not None
        return helpers, value
    (along,) = node.over
    hit: Expr = Binary("eq", node.body, top, bool_)
    if nan_here is not None:
        hit = Select(has_nan, nan_here, hit, bool_)
    first = Reduce("min", Select(hit, along, Const(_FAR, i64), i64), node.over, node.where,
                   "any", i64)  # fmt: skip
    stage, index = _stage(base, "first", first, names)
    return [*helpers, stage], index
