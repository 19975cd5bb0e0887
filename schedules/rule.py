"""Rules: how a group of stages is recognised and scheduled, and how one is chosen.

A rule never names an operator or a target. It answers whether a group fits (`match`), with which
configuration (`default`, `space`), and lowers it (`lower`). Rules are tried in the order of a
table; `RUDNN_LOG=1` prints why each earlier one declined.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..dsl.errors import CompileError
from .capability import Capability

if TYPE_CHECKING:
    from .emit import Emitter
    from .group import Group


@dataclass(frozen=True)
class Rejection:
    """Why a rule does not apply: "needs …, got …".

    `lacking`: the device lacks something that the group's strategy asks for.
    """

    reason: str
    lacking: bool = False


@dataclass(frozen=True)
class Config:
    """Base of a rule's configurations: frozen, printable, hashable."""


class Rule(Protocol):
    """A way to schedule one pattern of stages."""

    name: str

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        """None if the rule applies."""

    def default(self, group: Group, caps: Capability) -> Config:
        """The heuristic's choice."""

    def space(self, group: Group, caps: Capability) -> Iterator[Config]:
        """Every configuration worth trying, the default first."""

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: Any) -> Any:
        """The group's scheduled function, a `tvm.s_tir.Schedule`."""


def check(condition: bool, reason: str, lacking: bool = False) -> Rejection | None:
    """A guard: None when it holds, else the reason."""
    return None if condition else Rejection(reason, lacking)


def first_rejection(*guards: Rejection | None) -> Rejection | None:
    return next((g for g in guards if g is not None), None)


def tracing() -> bool:
    """Whether rule choice is to be told (`RUDNN_LOG=1`)."""
    return os.environ.get("RUDNN_LOG", "0") not in ("", "0")


def choose(rules: Sequence[Rule], group: Group, caps: Capability) -> Rule:
    """The first rule that matches.

    Raises the error of the group's constraint if that is what no rule keeps to, or CompileError.
    """
    reasons: list[tuple[str, str]] = []
    lacking: list[str] = []
    for rule in rules:
        rejection = rule.match(group, caps)
        if rejection is None:
            if tracing():
                told = "".join(f"\n    not {n}: {r}" for n, r in reasons)
                print(f"rudnn: {group.name}: {rule.name}{told}", file=sys.stderr)
            return rule
        reasons.append((rule.name, rejection.reason))
        lacking += [rejection.reason] if rejection.lacking else []
    if lacking and group.constraint is not None:
        raise group.constraint.error(f"{group.constraint.name} {'; '.join(lacking)}")
    told = "; ".join(f"{n}: {r}" for n, r in reasons)
    raise CompileError(f"no rule fits {group.name}: {told}")
