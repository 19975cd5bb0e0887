"""Going over expressions: their free axes, every node, and the same node over other operands."""

from __future__ import annotations

from collections.abc import Iterator

from .errors import DeclarationError
from .expr import Axis, Binary, Cast, Expr, Form, Read, Select, Unary


def free_axes(node: Expr) -> tuple[Axis, ...]:
    """The axes `node` depends on, in order of first appearance."""
    return tuple(_free(node, {}))


def _free(node: Expr, memo: dict[int, dict[Axis, None]]) -> dict[Axis, None]:
    found = memo.get(id(node))
    if found is None:
        found = {node: None} if isinstance(node, Axis) else {}
        for child in node.children():
            found = found | _free(child, memo)
        if isinstance(node, Form):
            for axis in node.bound():
                found.pop(axis, None)
            found = found | dict.fromkeys(node.added())
        memo[id(node)] = found
    return found


def walk(node: Expr) -> Iterator[Expr]:
    """Every node of the tree, children first, each object once."""
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(node, False)]
    while stack:
        item, done = stack.pop()
        if done:
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            stack.append((item, True))
            stack.extend((child, False) for child in reversed(item.children()))


def rebuild(node: Expr, children: tuple[Expr, ...]) -> Expr:
    """`node` with other children of the same types (itself when nothing changed)."""
    if all(a is b for a, b in zip(node.children(), children, strict=True)):
        return node
    if isinstance(node, Read):
        return Read(node.tensor, children, node.fill, node.dtype)
    if isinstance(node, Unary):
        return Unary(node.op, children[0], node.dtype)
    if isinstance(node, Binary):
        return Binary(node.op, children[0], children[1], node.dtype)
    if isinstance(node, Select):
        return Select(children[0], children[1], children[2], node.dtype)
    if isinstance(node, Cast):
        return Cast(children[0], node.dtype)
    if isinstance(node, Form):
        return node.with_children(children)
    raise DeclarationError(f"cannot rebuild {type(node).__name__}")
