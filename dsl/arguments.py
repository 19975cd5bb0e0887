"""What a declaration takes and gives: the defaults of its arguments, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .dtypes import DType, f32


@dataclass(frozen=True)
class In:
    """A tensor argument: its dims by name (`"*rows"` is any number of leading dims).

    `dtype` None means the operator's own float type; a tuple lists what is accepted. `below` names
    the dim whose indices an integer input holds, where the caller has made sure of that.
    """

    dims: tuple[str, ...]
    dtype: DType | tuple[DType, ...] | None
    optional: bool
    broadcast: bool
    below: str | None

    def __init__(
        self,
        *dims: str,
        dtype: DType | tuple[DType, ...] | None = None,
        optional: bool = False,
        broadcast: bool = False,
        below: str | None = None,
    ) -> None:
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "optional", optional)
        object.__setattr__(self, "broadcast", broadcast)
        object.__setattr__(self, "below", below)

    def accepts(self, own: tuple[DType, ...]) -> tuple[DType, ...]:
        """The dtypes allowed here, where the operator's own float type is one of `own`."""
        if self.dtype is None:
            return own
        return self.dtype if isinstance(self.dtype, tuple) else (self.dtype,)


@dataclass(frozen=True)
class Out:
    """A result: its dims by name, and its dtype (None: the operator's own, see `own_dtype`)."""

    dims: tuple[str, ...]
    dtype: DType | None
    name: str

    def __init__(self, *dims: str, dtype: DType | None = None, name: str = "out") -> None:
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "name", name)


@dataclass(frozen=True)
class Param:
    """A number known at launch; it never recompiles. `default` None means required."""

    default: float | int | None = None
    dtype: DType = f32


@dataclass(frozen=True)
class Option:
    """A compile-time choice: each value is a kernel of its own."""

    default: Any
    choices: tuple[Any, ...]


@dataclass(frozen=True)
class Extent:
    """The size of a dim that no input has, named like the argument (top_k's `k`).

    One that no result has either is a whole number, such as a stride.
    """

    default: int | None = None


@dataclass(frozen=True)
class Shared:
    """Arguments of any kind that several declarations have, under the same names.

    As the default of one argument it stands for all of them: callers pass each by its own name, or
    in its place; the function gets a record with all of them.
    """

    members: Mapping[str, In | Param | Option | Extent]

    def __init__(self, **members: In | Param | Option | Extent) -> None:
        object.__setattr__(self, "members", members)
