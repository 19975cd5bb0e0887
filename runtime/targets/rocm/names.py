"""Names bound to values, as cells of private memory."""

from __future__ import annotations

from typing import Any

# What an expression may keep a value in: cells by dtype, written by functions of the prelude.
_KEEPERS = {
    "float32": "f32", "float16": "f16", "int8": "i8", "uint8": "i8", "int16": "i16",
    "uint16": "i16", "int32": "i32", "uint32": "i32",
}  # fmt: skip


def hide_values(function: Any) -> Any:
    """`function` with its names, those of indices apart, kept in cells, which LLVM removes.

    TVM's code generator simplifies the value of every name with the values of those before it put
    in; chains of names, each used twice, then take seconds::

        before::  let a = x * x in let b = a + a in b * b
        after::   let _ = keep(cell_a, x * x) in let _ = keep(cell_b, cell_a + cell_a) in
                  cell_b * cell_b
    """
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Var

    cells = _cells(function.body)
    zero = tirx.const(0, "int64")

    def use(var: Var, kind: Any) -> Any:
        cell = cells.get(int(var.__chandle__())) if kind == tvm_ffi.DefRegionKind.NONE else None
        return var if cell is None else cell[zero]

    def let(node: Any) -> Any:
        cell = cells.get(int(node.var.__chandle__()))
        if cell is None:
            return node
        dtype = str(cell.dtype)
        keep = tirx.call_extern(
            dtype, f"rudnn_keep_{_KEEPERS[dtype]}", tirx.address_of(cell[zero]), node.value
        )
        return tirx.Let(tirx.Var("kept", dtype), keep, node.body)

    def bind(node: Any) -> Any:
        cell = cells.get(int(node.var.__chandle__()))
        return node if cell is None else tirx.BufferStore(cell, node.value, [zero])

    if not cells:
        return function
    body = tvm_ffi.structural_map(
        function.body, ((tirx.Let, let), (tirx.Bind, bind)), (Var, use)
    )  # fmt: skip
    body = tirx.SeqStmt([*(tirx.AllocBuffer(cell) for cell in cells.values()), body])
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def _cells(body: Any) -> dict[int, Any]:
    """A private buffer of one element for each name that is to be kept in one."""
    import tvm_ffi
    from tvm import tirx

    found: dict[int, Any] = {}

    def visit(node: Any) -> None:
        if isinstance(node, (tirx.Let, tirx.Bind)):
            name, dtype = node.var.name, str(getattr(node.var.ty, "dtype", ""))
            if dtype in _KEEPERS:
                one = (tirx.const(1, "int64"),)
                cell = tirx.decl_buffer(one, dtype, f"{name}_cell", scope="local")
                found[int(node.var.__chandle__())] = cell

    tvm_ffi.structural_walk(body, visit)
    return found
