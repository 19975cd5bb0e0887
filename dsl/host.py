"""Expressions over dims and scalars as source text: Python for the runtime, C for headers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from .dtypes import i64
from .errors import DeclarationError
from .expr import Binary, Cast, Const, DimRef, Expr, ScalarRef, Select, Unary, as_expr, binary

_PYTHON = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})",
    "floordiv": "({} // {})", "mod": "({} % {})", "max": "max({}, {})", "min": "min({}, {})",
    "lt": "({} < {})", "le": "({} <= {})", "gt": "({} > {})", "ge": "({} >= {})",
    "eq": "({} == {})", "ne": "({} != {})", "and": "({} and {})", "or": "({} or {})",
}  # fmt: skip
_C = _PYTHON | {  # C's / and % round to 0, Python's and the kernels' down
    "floordiv": "RUDNN_FLOORDIV({}, {})", "mod": "RUDNN_FLOORMOD({}, {})",
    "max": "RUDNN_MAX({}, {})", "min": "RUDNN_MIN({}, {})",
    "and": "({} && {})", "or": "({} || {})",
}  # fmt: skip
_UNARY = {
    "neg": "(-{})", "not": "(not {})", "finite": "isfinite({})", "isnan": "isnan({})",
    "abs": "abs({})", "sqrt": "sqrt({})", "floor": "floor({})",
}  # fmt: skip
_C_UNARY = {"not": "(!{})", "abs": "fabs((double){})"}


def identifier(name: str) -> str:
    """A dim or tensor name as an identifier (`rows.0` → `rows_0`)."""
    return name.replace(".", "_")


def source(node: Expr | int | float | bool, language: str = "python") -> str:
    """`node` as an expression of Python or C over the names of dims and scalars."""
    if not isinstance(node, Expr):
        return _literal(node, language)
    if isinstance(node, Const):
        return _literal(node.value, language)
    if isinstance(node, (DimRef, ScalarRef)):
        return identifier(node.name)
    if isinstance(node, Cast):
        inner = source(node.a, language)
        return f"((double){inner})" if language == "c" and node.dtype.is_float else inner
    if isinstance(node, Binary):
        table = _PYTHON if language == "python" else _C
        return table[node.op].format(source(node.a, language), source(node.b, language))
    if isinstance(node, Unary) and node.op in _UNARY:
        form = _UNARY[node.op] if language == "python" else _C_UNARY.get(node.op, _UNARY[node.op])
        return form.format(source(node.a, language))
    if isinstance(node, Select):
        form = "({0} if {1} else {2})" if language == "python" else "({1} ? {0} : {2})"
        parts = (node.then, node.condition, node.otherwise)
        return form.format(*(source(part, language) for part in parts))
    raise DeclarationError(f"needs dims and scalars only, got {type(node).__name__}")


def _literal(value: int | float | bool, language: str) -> str:
    if language == "python":
        return repr(value)
    if isinstance(value, int):
        return str(int(value)) if isinstance(value, bool) else f"INT64_C({value})"
    if math.isfinite(value):
        return repr(value)
    return "NAN" if value != value else "INFINITY" if value > 0 else "(-INFINITY)"


_GLOBALS: dict[str, Any] = {
    "__builtins__": {}, "inf": math.inf, "nan": math.nan, "max": max, "min": min, "abs": abs,
    "isfinite": math.isfinite, "isnan": math.isnan, "sqrt": math.sqrt, "floor": math.floor,
}  # fmt: skip


@lru_cache(maxsize=4096)
def compiled(text: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function of the names' values for a source text of `source`."""
    code = compile(text, "<dims>", "eval")
    return lambda names: eval(code, _GLOBALS, dict(names))


def evaluate(node: Expr | int | float | bool, names: Mapping[str, Any]) -> Any:
    """The value of an expression for given dims and scalars (keys are identifiers)."""
    return compiled(source(node))(names) if isinstance(node, Expr) else node


def align(value: Expr | int, to: int) -> Expr:
    """`value` rounded up to a multiple of `to`."""
    node = as_expr(value, i64)
    return binary("mul", binary("floordiv", binary("add", node, to - 1), to), to)
