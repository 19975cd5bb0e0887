"""Index arithmetic that compilers can take: divisions that are few and without a case for signs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class _Bounds:
    """What integer expressions are at least, as far as their form tells.

    `dims` are variables known to be ≥ 0; loop variables and thread axes are found, and names bound
    to what is made of them.
    """

    def __init__(self, body: Any, dims: Iterable[Any]) -> None:
        import tvm_ffi
        from tvm import tirx

        self.known = {int(d.__chandle__()) for d in dims}

        def loop(node: Any) -> Any:
            if getattr(node.min, "value", -1) >= 0:
                self.known.add(int(node.loop_var.__chandle__()))
            return node

        def axis(node: Any) -> Any:
            if node.attr_key == "thread_extent":
                self.known.add(int(node.node.var.__chandle__()))
            return node

        def named(node: Any) -> Any:
            if self.natural(node.value):
                self.known.add(int(node.var.__chandle__()))
            return node

        for kind, visit in ((tirx.For, loop), (tirx.AttrStmt, axis), (tirx.Bind, named)):
            tvm_ffi.structural_map(body, (kind, visit))

    def natural(self, node: Any) -> bool:
        """Whether `node` is ≥ 0 whatever the sizes."""
        least = self.least(node)
        return least is not None and least >= 0

    def least(self, node: Any) -> int | None:
        """A number that `node` never is below, if one is known."""
        from tvm import tirx
        from tvm.ir import Var

        if isinstance(node, tirx.IntImm):
            return int(node.value)
        if isinstance(node, Var):
            return 0 if int(node.__chandle__()) in self.known else None
        if isinstance(node, tirx.Cast):
            return self.least(node.value)
        if isinstance(node, tirx.Select):
            return self._both(min, node.true_value, node.false_value)
        if isinstance(node, tirx.Max):
            found = [f for f in (self.least(node.a), self.least(node.b)) if f is not None]
            return max(found, default=None)
        if isinstance(node, tirx.Min):
            return self._both(min, node.a, node.b)
        if isinstance(node, tirx.Add):
            return self._both(int.__add__, node.a, node.b)
        if isinstance(node, tirx.Sub) and isinstance(node.b, tirx.IntImm):
            return self._both(int.__sub__, node.a, node.b)
        if isinstance(node, tirx.Mul):
            natural = self.natural(node.a) and self.natural(node.b)
            return self._both(int.__mul__, node.a, node.b) if natural else None
        if isinstance(node, (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)):
            return 0 if self.natural(node.a) and self.natural(node.b) else None
        return None

    def _both(self, join: Any, a: Any, b: Any) -> int | None:
        first, second = self.least(a), self.least(b)
        return None if first is None or second is None else join(first, second)


def truncate_divisions(function: Any, dims: Iterable[Any]) -> Any:
    """Floor divisions by a dynamic size, of what cannot be negative, as C's divisions.

    `dims` are variables known to be ≥ 0. TVM lowers a floor division by a variable, such as the
    one that takes fused loops apart, to selects on four signs; LLVM then needs 10 s where it needs
    0.2 s without::

        before::  floordiv(rows_fused, rows_1)
        after::   truncdiv(rows_fused, rows_1)
    """
    import tvm_ffi
    from tvm import tirx

    bounds = _Bounds(function.body, dims)

    def plain(node: Any) -> bool:
        return isinstance(node.b, tirx.IntImm) or not (
            bounds.natural(node.a) and bounds.natural(node.b)
        )

    def divide(node: Any) -> Any:
        return node if plain(node) else tirx.truncdiv(node.a, node.b)

    def remain(node: Any) -> Any:
        return node if plain(node) else tirx.truncmod(node.a, node.b)

    body = tvm_ffi.structural_map(function.body, (tirx.FloorDiv, divide))
    body = tvm_ffi.structural_map(body, (tirx.FloorMod, remain))
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def name_divisions(body: Any, constants: Iterable[Any]) -> tuple[list[Any], Any, list[Any]]:
    """Divisions by what is known before `body` starts, done once and named.

    A size that is a quotient stands in every index that depends on it. `constants` are the
    variables known by then. Returns the statements that define the names, the body with the names
    in it, and those whose values are ≥ 0 if the constants are::

        before::  for i < (h + 1) // 2: a[i // ((h + 1) // s)] = …
        after::   cell = (h + 1) // s; q = cell; for i < (h + 1) // 2: a[i // q] = …

    The value goes through memory, which LLVM removes, so that TVM does not put it in again.
    """
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Var

    constants = list(constants)
    known = {int(c.__chandle__()) for c in constants}
    bounds = _Bounds(tirx.Evaluate(tirx.const(0, "int32")), constants)
    made: dict[str, tuple[Any, Any]] = {}
    statements: list[Any] = []
    naturals: list[Any] = []
    zero = tirx.const(0, "int64")

    def fixed(node: Any) -> bool:
        if isinstance(node, Var):
            return int(node.__chandle__()) in known
        if isinstance(node, tirx.Select):
            return all(map(fixed, (node.condition, node.true_value, node.false_value)))
        if hasattr(node, "b"):
            return fixed(node.a) and fixed(node.b)
        return isinstance(node, tirx.IntImm)

    def name(node: Any) -> Any:
        if isinstance(node.b, tirx.IntImm) or str(node.ty.dtype) != "int64" or not fixed(node):
            return node
        text = str(node)
        if text not in made or not tvm_ffi.structural_equal(made[text][0], node):
            cell = tirx.decl_buffer((tirx.const(1, "int64"),), "int64", "cell", scope="local")
            var = tirx.Var("quotient", "int64")
            statements.extend((tirx.AllocBuffer(cell), tirx.BufferStore(cell, node, [zero]),
                               tirx.Bind(var, cell[zero])))  # fmt: skip
            made[text] = node, var
            known.add(int(var.__chandle__()))
            if bounds.natural(node):
                naturals.append(var)
                bounds.known.add(int(var.__chandle__()))
        return made[text][1]

    kinds = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
    body = tvm_ffi.structural_map(body, (kinds, name))
    return statements, body, naturals
