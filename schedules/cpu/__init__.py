"""Rules for devices of a few threads with wide vectors and caches."""

from __future__ import annotations

from ..rule import Rule


def rules() -> tuple[Rule, ...]:
    """The rules in the order they are tried."""
    from .columns import Columns
    from .fallback import Fallback
    from .pointwise import Pointwise
    from .rows import Rows

    return (Rows(), Columns(), Pointwise(), Fallback())
