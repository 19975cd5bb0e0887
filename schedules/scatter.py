"""What rules for scatter_add ask of a group, whatever the device."""

from __future__ import annotations

from ..dsl import forms
from ..dsl.expr import Axis, Form
from ..dsl.walk import free_axes, walk
from .group import Group
from .rule import Rejection, check, first_rejection


def rejection(group: Group) -> Rejection | None:
    """Why the group is not one scatter_add of pointwise values."""
    (head, *others) = group.stages
    node = head.expr
    if not isinstance(node, forms.ScatterAdd):
        return Rejection("needs a scatter_add")
    nested = [n for e in (node.value, node.at) for n in walk(e) if isinstance(n, Form)]
    return first_rejection(
        check(not others, "needs one stage"),
        check(not nested, "needs pointwise values and indices"),
        check(node.target in head.axes, "needs the target axis in the result"),
        check(head.dtype == node.dtype, f"needs a result of {node.dtype}, got {head.dtype}"),
    )


def column(axes: tuple[Axis, ...], node: forms.ScatterAdd) -> Axis | None:
    """The last axis of the result that only the value has."""
    mine = free_axes(node.at)
    return next((a for a in reversed(axes) if a is not node.target and a not in mine), None)
