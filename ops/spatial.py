"""Arguments of operators over one or two spatial dims, which are declared over two.

One spatial dim is two of which the first has size 1.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

from ..dsl.errors import RudnnError, require_host
from ..runtime.arrays import kind_of

Numbers = int | Sequence[int]
LIMIT = 2**31  # of numbers that are compiled in


def spatial_rank(x: Any, arguments: Sequence[Any], error: type[RudnnError]) -> int:
    """1 for [N, C, L] and [C, L], 2 for [N, C, H, W] and, where an argument is a pair, [C, H, W].

    Raises `error` for other ranks, OperatorError for what is no array.
    """
    kind_of(x, "x")
    dims = len(x.shape)
    require_host(2 <= dims <= 4, "[N, C, L] or [N, C, H, W], with or without N", list(x.shape),
                 error)  # fmt: skip
    paired = any(isinstance(a, Sequence) and len(a) == 2 for a in arguments)
    return 2 if dims == 4 or (dims == 3 and paired) else 1


def numbers(
    name: str,
    given: Any,
    rank: int,
    least: int,
    error: type[RudnnError],
    below: int = 2**63,
) -> tuple[int, ...]:
    """`given`, one number for all spatial dims or one for each, as `rank` numbers ≥ `least`.

    Raises `error` for what is not; `below` is a power of two.
    """
    items = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    items = items * rank if len(items) == 1 else items
    try:
        made = tuple(-1 if isinstance(i, bool) else operator.index(i) for i in items)
    except TypeError:
        made = ()
    limit = f" and < 2**{below.bit_length() - 1}" if any(i >= below for i in made) else ""
    require_host(len(made) == rank and all(least <= i < below for i in made),
                 f"{name} of {rank} {'number' if rank == 1 else 'numbers'} ≥ {least}{limit}",
                 repr(given), error)  # fmt: skip
    return made


def along(name: str, values: Sequence[int], missing: int = 1, dims: str = "HW") -> dict[str, int]:
    """{"KH": 3, "KW": 5} of "K" and (3, 5); dims before those of `values` are `missing`."""
    full = (missing,) * (len(dims) - len(values)) + tuple(values)
    return {f"{name}{d}": v for d, v in zip(dims, full, strict=True)}


def telling(grad: Any, input_size: Sequence[int]) -> Any:
    """What of `input_size` tells the spatial rank of a gradient: a pair for [C, H, W] does.

    Of [C, L] it may be the whole shape, which is no pair of spatial dims.
    """
    size = tuple(input_size)
    return size if len(size) == 2 and len(grad.shape) > 2 else 0


def lifted(x: Any, rank: int) -> Any:
    """A view of x with two spatial dims; None stays None."""
    return x if rank == 2 or x is None else x[..., None, :]


def lowered(made: Any, rank: int, out: Any) -> Any:
    """The result with `rank` spatial dims; `out` itself where it was given."""
    if out is not None:
        return out
    return made if rank == 2 else made[..., 0, :]


def is_tracked(x: Any) -> bool:
    """Whether torch wants a gradient for x."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor) and x.requires_grad \
        and torch.is_grad_enabled()  # fmt: skip
