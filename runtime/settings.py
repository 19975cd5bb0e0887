"""Settings of a call as plain values: numbers, switches and choices of any kind, checked."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np

from ..dsl.errors import RudnnError, require_host

NOT_ONE = object()  # what `choice` gives for what is none


def number(given: Any) -> int | float | None:
    """`given` as a Python number, or None if it is none.

    NumPy scalars and arrays of one element count, any real type does; a bool does not.
    """
    item = getattr(given, "item", None)
    try:
        plain = given if item is None else item()
    except (TypeError, ValueError, RuntimeError):
        return None
    if isinstance(plain, bool) or not isinstance(plain, Real):
        return None
    return int(plain) if isinstance(plain, Integral) else float(plain)


def flag(name: str, given: Any, error: type[RudnnError]) -> bool:
    """`given`, True or False. Raises `error` for anything else, such as the string "no"."""
    whole = isinstance(given, (bool, np.bool_))
    require_host(whole, f"{name} True or False", repr(given), error)
    return bool(given)


def choice(given: Any, choices: Iterable[Any]) -> Any:
    """The one of `choices` that is given, or NOT_ONE; 1 and 0 do not stand for True and False."""
    plain = given.item() if isinstance(given, np.generic) else given
    for one in choices:
        if plain is one or (isinstance(plain, type(one)) and not isinstance(plain, bool)
                            and plain == one):  # fmt: skip
            return one
    return NOT_ONE
