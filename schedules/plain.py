"""What rules for pointwise stages and plain reductions ask of a group, whatever the device."""

from __future__ import annotations

from ..dsl.forms import Reduce
from .group import Group, is_map
from .rule import Rejection, check, first_rejection


def one_map(group: Group) -> Rejection | None:
    """Why the group is no pointwise stage alone."""
    return first_rejection(
        check(len(group.stages) == 1, "needs one stage"),
        check(is_map(group.stages[0]), "needs a pointwise stage"),
    )


def reductions_and_maps(group: Group) -> Rejection | None:
    """Why the group is not of reductions and pointwise stages alone."""
    return check(
        all(is_map(s) or isinstance(s.expr, Reduce) for s in group.stages),
        "needs reductions and pointwise stages only",
    )
