"""Make predicated vector loops fast: a pass to run just before `VectorizeLoop`."""

from __future__ import annotations

from typing import Any


def split_vector_guards() -> Any:
    """The module pass that splits edge predicates off vectorised loops.

    `VectorizeLoop` turns a vector loop into a scalar one when a condition in it depends on the
    lane. Edges of tiles are such conditions, and hold for every lane everywhere but at the edge::

        before::  vector v: if row < M and base + v < N: body
        after::   if row < M:
                      if base + lanes - 1 < N: vector v: body
                      else: for v: if base + v < N: body

    and the same for a store whose value is ``if_then_else(base + v < N, x, y)``. Only conditions
    ``f(v) < e`` and ``f(v) <= e`` with f linear and increasing in v are split (true at the last
    lane is then true at all); other loops are left alone.
    """
    import tvm
    import tvm_ffi
    from tvm import tirx

    @tvm.transform.module_pass(opt_level=0, name="SplitVectorGuards")
    def split(module: Any, _: Any) -> Any:
        functions = {}
        for name, func in module.functions_items():
            body = tvm_ffi.structural_map(func.body, (tirx.For, _split_loop))
            functions[name] = tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
        return tvm.IRModule(functions, attrs=module.attrs)

    return split


def _split_loop(loop: Any) -> Any:
    """One loop; a vectorised loop with a guard comes back as the two versions of itself."""
    from tvm import tirx

    if loop.kind != tirx.ForKind.VECTORIZED:
        return loop
    v, body = loop.loop_var, loop.body
    outer: list[Any] = []
    lane: list[Any] = []
    if isinstance(body, tirx.IfThenElse) and body.else_case is None:
        for cond in _conjuncts(body.condition):
            (lane if _uses(cond, v) else outer).append(cond)
        full = body.then_case
    else:
        full = body
    full, value_guards = _drop_value_guard(full, v)
    if not all(_increasing(cond, v) for cond in (*lane, *value_guards)):
        return loop
    result = _with(loop, loop.kind, v, full)
    if lane or value_guards:
        last = loop.min + (loop.extent - 1)
        holds = _substitute(_all([*lane, *value_guards]), v, last)
        w = tirx.Var(f"{v.name}_edge", v.ty)
        edge = (
            tirx.IfThenElse(_all(lane), body.then_case, None)
            if lane
            else (body.then_case if outer else body)
        )
        edge = _with(loop, tirx.ForKind.SERIAL, w, _substitute(edge, v, w))
        result = tirx.IfThenElse(holds, result, edge)
    return tirx.IfThenElse(_all(outer), result, None) if outer else result


def _drop_value_guard(store: Any, v: Any) -> tuple[Any, list[Any]]:
    """``x[..] = if_then_else(c, a, b)`` becomes ``x[..] = a`` and [c], if c depends on v."""
    from tvm import tirx

    value: Any = getattr(store, "value", None)
    if not isinstance(store, tirx.BufferStore) or not _is_call(value, "if_then_else"):
        return store, []
    guards = _conjuncts(value.args[0])
    if not any(_uses(guard, v) for guard in guards):
        return store, []
    return tirx.BufferStore(store.buffer, value.args[1], store.indices), guards


def _with(loop: Any, kind: Any, v: Any, body: Any) -> Any:
    from tvm import tirx

    annotations = loop.annotations if kind == loop.kind else {}
    return tirx.For(v, loop.min, loop.extent, kind, body, None, annotations)


def _is_call(expr: Any, op: str) -> bool:
    from tvm.ir import Call

    return isinstance(expr, Call) and str(expr.op.name).split(".")[-1] == op


def _conjuncts(cond: Any) -> list[Any]:
    from tvm import tirx

    if _is_call(cond, "likely"):
        return _conjuncts(cond.args[0])
    if isinstance(cond, tirx.And):
        return _conjuncts(cond.a) + _conjuncts(cond.b)
    return [cond]


def _all(conds: list[Any]) -> Any:
    from tvm import tirx

    result = conds[0]
    for cond in conds[1:]:
        result = tirx.And(result, cond)
    return result


def _increasing(cond: Any, v: Any) -> bool:
    """Whether `cond` holds at every lower v where it holds at one."""
    import tvm
    from tvm import tirx

    if not _uses(cond, v):
        return True
    if not isinstance(cond, (tirx.LT, tirx.LE)):
        return False
    difference = tvm.sym.Analyzer().simplify(
        _substitute(cond.a - cond.b, v, v + 1) - (cond.a - cond.b)
    )
    return getattr(difference, "value", -1) >= 0


def _uses(expr: Any, v: Any) -> bool:
    import tvm_ffi
    from tvm.ir import Var

    found: list[bool] = []

    def visit(x: Var) -> Var:
        found.extend([True] if x.same_as(v) else [])
        return x

    tvm_ffi.structural_map(expr, (Var, visit))
    return bool(found)


def _substitute(node: Any, v: Any, by: Any) -> Any:
    import tvm_ffi
    from tvm.ir import Var

    return tvm_ffi.structural_map(node, (Var, lambda x: by if x.same_as(v) else x))
