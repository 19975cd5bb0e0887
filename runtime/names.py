"""Names bound to values, as cells of private memory."""

from __future__ import annotations

import re
from typing import Any

# What a cell may hold: element types as names and LLVM spell them. Indices are not among them:
# what is known of them is of use to the code generator.
_ELEMENTS = {
    "float32": ("f32", "float"), "float16": ("f16", "half"), "int8": ("i8", "i8"),
    "uint8": ("i8", "i8"), "int16": ("i16", "i16"), "uint16": ("i16", "i16"),
    "int32": ("i32", "i32"), "uint32": ("i32", "i32"),
}  # fmt: skip
_DTYPE = re.compile(r"([a-z]+\d+)(?:x(\d+))?")


def hide_values(body: Any, above: int = 0, statements: bool = True) -> tuple[Any, dict[str, str]]:
    """A function's body with its names, those of indices apart, in cells, which LLVM removes.

    TVM's code generator simplifies the value of every name with the values of those before it put
    in; chains of names, each used twice, then take seconds::

        before::  let a = x * x in let b = a + a in b * b
        after::   let _ = keep(cell_a, x * x) in let _ = keep(cell_b, cell_a + cell_a) in
                  cell_b * cell_b

    All stay names where none would be written out with more than `above` others, all told;
    `statements` tells whether names that statements bind are kept so too. Returns the functions
    that write the cells besides: LLVM's type by name.
    """
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Var

    cells = _cells(body, (tirx.Let, tirx.Bind) if statements else (tirx.Let,), above)
    zero = tirx.const(0, "int64")
    keepers: dict[str, str] = {}

    def use(var: Var, kind: Any) -> Any:
        cell = cells.get(int(var.__chandle__())) if kind == tvm_ffi.DefRegionKind.NONE else None
        return var if cell is None else cell[zero]

    def let(node: Any) -> Any:
        cell = cells.get(int(node.var.__chandle__()))
        if cell is None:
            return node
        dtype = str(cell.dtype)
        name, llvm = _keeper(dtype)
        keepers[name] = llvm
        keep = tirx.call_extern(dtype, name, tirx.address_of(cell[zero]), node.value)
        return tirx.Let(tirx.Var("kept", dtype), keep, node.body)

    def bind(node: Any) -> Any:
        cell = cells.get(int(node.var.__chandle__()))
        return node if cell is None else tirx.BufferStore(cell, node.value, [zero])

    if not cells:
        return body, keepers
    homes = _homes(body, cells)

    def loop(node: Any) -> Any:
        inside = homes.pop(int(node.loop_var.__chandle__()), ())
        if not inside:
            return node
        body = tirx.SeqStmt([*map(tirx.AllocBuffer, inside), node.body])
        return tirx.For(node.loop_var, node.min, node.extent, node.kind, body,
                        node.thread_binding, node.annotations)  # fmt: skip

    body = tvm_ffi.structural_map(
        body, ((tirx.Let, let), (tirx.Bind, bind), (tirx.For, loop)), (Var, use)
    )  # fmt: skip
    outside = homes.pop(None, ())
    return tirx.SeqStmt([*map(tirx.AllocBuffer, outside), body]) if outside else body, keepers


def _keeper(dtype: str) -> tuple[str, str]:
    """The function that writes a cell of `dtype`, and LLVM's type of what it holds."""
    found = _DTYPE.fullmatch(dtype)
    assert found is not None
    short, llvm = _ELEMENTS[found[1]]
    lanes = found[2]
    if lanes is None:
        return f"rudnn_keep_{short}", llvm
    return f"rudnn_keep_{short}x{lanes}", f"<{lanes} x {llvm}>"


def _cells(body: Any, kinds: tuple[type, ...], above: int) -> dict[int, Any]:
    """A private buffer of one element for each name that is to be kept in one."""
    import tvm_ffi
    from tvm import tirx

    found: dict[int, Any] = {}
    values: dict[int, Any] = {}

    def note(node: Any) -> Any:
        name, dtype = node.var.name, str(getattr(node.var.ty, "dtype", ""))
        element = _DTYPE.fullmatch(dtype)
        lanes = 1 if element is None else int(element[2] or 1)
        # Of other vectors TVM has no memory.
        if element is not None and element[1] in _ELEMENTS and lanes & (lanes - 1) == 0:
            one = (tirx.const(1, "int64"),)
            cell = tirx.decl_buffer(one, dtype, f"{name}_cell", scope="local")
            found[int(node.var.__chandle__())] = cell
            values[int(node.var.__chandle__())] = node.value
        return node

    tvm_ffi.structural_map(body, (kinds, note))
    return found if not above or any(w > above for w in _weights(values).values()) else {}


def _weights(values: dict[int, Any]) -> dict[int, int]:
    """How many names a value has with those of others written out in it, by name."""
    import tvm_ffi
    from tvm.ir import Var

    made: dict[int, int] = {}

    def weight(var: int) -> int:
        if var not in made:
            used: list[int] = []
            made[var] = 1  # of itself, where it is bound within its own value
            tvm_ffi.structural_walk(values[var], (Var, lambda v: used.append(int(v.__chandle__()))))
            made[var] = 1 + sum(weight(v) for v in used if v in values)
        return made[var]

    for var in values:
        weight(var)
    return made


def _homes(body: Any, cells: dict[int, Any]) -> dict[int | None, list[Any]]:
    """The cells by the parallel loop, its variable, in which they are private; None: the whole."""
    import tvm_ffi
    from tvm import tirx

    home: dict[int, int | None] = dict.fromkeys(cells)

    def loop(node: Any) -> Any:
        if node.kind == tirx.ForKind.PARALLEL:
            inside = int(node.loop_var.__chandle__())

            def note(inner: Any) -> Any:
                var = int(inner.var.__chandle__())
                if home.get(var, inside) is None:  # inner loops come first
                    home[var] = inside
                return inner

            tvm_ffi.structural_map(node.body, ((tirx.Let, tirx.Bind), note))
        return node

    tvm_ffi.structural_map(body, (tirx.For, loop))
    found: dict[int | None, list[Any]] = {}
    for var, inside in home.items():
        found.setdefault(inside, []).append(cells[var])
    return found
