"""Names for values within expressions, where TVM's passes cannot take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tir = Any


def lay_by_bindings(function: Tir) -> Tir:
    """Bindings within what others stand for, as elements of memory that are set before.

    TVM puts what a name stands for back wherever it goes, unless that is read from memory. An
    elementary function binds what it works with; of one function of another TVM then makes
    expressions that take minutes, or refuses a name that it meets again::

        before::  y[i] = let a = (let b = x[i] in b * b) in a * exp(a)
        after::   cell_0[0] = x[i]
                  cell_1[0] = cell_0[0] * cell_0[0]
                  y[i] = cell_1[0] * exp(cell_1[0])

    In a vector loop each lane has an element. What is bound in an arm of a branch stays there: it
    may be defined there alone.
    """
    import tvm_ffi
    from tvm import tirx

    if not any(_lets(let.value) for let in _lets(function.body)):
        return function

    def store(node: Tir) -> Tir:
        return _laid_by(node.value, lambda v: tirx.BufferStore(node.buffer, v, node.indices), node)

    def bind(node: Tir) -> Tir:
        return _laid_by(node.value, lambda v: tirx.Bind(node.var, v), node)

    body = tvm_ffi.structural_map(function.body, (tirx.BufferStore, store))
    body = tvm_ffi.structural_map(body, (tirx.Bind, bind))
    body = tvm_ffi.structural_map(body, (tirx.For, _outside_vectors))
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def _laid_by(value: Tir, remade: Callable[[Tir], Tir], statement: Tir) -> Tir:
    """`statement`, which `remade` makes with another value, after those that set the memory."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Var

    if not any(_lets(let.value) for let in _lets(value)):
        return statement
    guarded = {_key(let.var) for arm in _arms(value) for let in _lets(arm)}
    bound: dict[int, tuple[Tir, Tir]] = {}

    def unbind(node: Tir) -> Tir:
        if _key(node.var) in guarded:
            return node
        bound[_key(node.var)] = (node.var, node.value)
        return node.body

    last = tvm_ffi.structural_map(value, (tirx.Let, unbind))
    if not bound:
        return statement
    cells: dict[int, Tir] = {}
    before: list[Tir] = []

    def read(node: Tir) -> Tir:
        """`node` with what is bound read from memory, which is set first."""
        for key in _variables(node):
            if key in bound and key not in cells:
                var, held = bound[key]
                held = read(held)
                kind = str(held.ty.dtype)
                cells[key] = tirx.decl_buffer([1], kind, f"{var.name}_cell", scope="local")
                before.append(tirx.AllocBuffer(cells[key]))
                before.append(tirx.BufferStore(cells[key], held, [0]))

        def replaced(var: Any) -> Tir:
            cell = cells.get(_key(var))
            return var if cell is None else cell[0]

        return tvm_ffi.structural_map(node, (Var, replaced))

    final = remade(read(last))
    return tirx.SeqStmt([*before, final])


def _outside_vectors(loop: Tir) -> Tir:
    """A loop; from a vector loop the memory within goes before it, with an element a lane."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import TensorLoad

    if loop.kind != tirx.ForKind.VECTORIZED:
        return loop
    allocated = _found(loop.body, tirx.AllocBuffer)
    if not allocated:
        return loop
    wide = {
        _key(a.buffer): tirx.decl_buffer([loop.extent], str(a.buffer.dtype), a.buffer.name)
        for a in allocated
    }
    lane = loop.loop_var - loop.min

    def load(node: Tir) -> Tir:
        made = wide.get(_key(node.source))
        return node if made is None else made[lane]

    def store(node: Tir) -> Tir:
        made = wide.get(_key(node.buffer))
        return node if made is None else tirx.BufferStore(made, node.value, [lane])

    def drop(_: Tir) -> Tir:
        return tirx.Evaluate(0)

    body = tvm_ffi.structural_map(loop.body, (TensorLoad, load))
    body = tvm_ffi.structural_map(body, (tirx.BufferStore, store))
    body = tvm_ffi.structural_map(body, (tirx.AllocBuffer, drop))
    inner = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, loop.annotations)
    return tirx.SeqStmt([*(tirx.AllocBuffer(w) for w in wide.values()), inner])


def _lets(node: Tir) -> list[Tir]:
    from tvm import tirx

    return _found(node, tirx.Let)


def _arms(node: Tir) -> list[Tir]:
    """Values of which a branch computes one; a Select computes both."""
    from tvm.ir import Call

    calls = _found(node, Call)
    branches = (c for c in calls if str(getattr(c.op, "name", "")).endswith("if_then_else"))
    return [arm for branch in branches for arm in branch.args[1:]]


def _variables(node: Tir) -> list[int]:
    from tvm.ir import Var

    return [_key(v) for v in _found(node, Var)]


def _found(node: Tir, kind: type) -> list[Tir]:
    import tvm_ffi

    found: list[Tir] = []
    tvm_ffi.structural_walk(node, (kind, found.append))
    return found


def _key(var: Tir) -> int:
    return int(var.__chandle__())
