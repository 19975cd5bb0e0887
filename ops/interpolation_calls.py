"""Interpolation as called: torch.nn.functional's arguments, one or two spatial dims by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..dsl.errors import InterpolationError, require_host
from ..runtime.settings import flag, number
from .interpolation import interpolate_backward as declared_backward
from .interpolation import interpolate_op
from .spatial import Numbers, along, lifted, lowered, numbers, spatial_rank, telling

MODES = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "lanczos3")
_FINEST = 2**20  # the greatest denominator of a scale factor

Scale = float | Sequence[float]


def interpolate(
    x: Any,
    size: Numbers | None = None,
    scale_factor: Scale | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    antialias: bool = False,
    *,
    out: Any = None,
) -> Any:
    """Resample the spatial dims of x.

    Parameters
    ----------
    x : array [N, C, L] or [N, C, H, W], or without N; f32, f16 or bf16
        Three dims are one spatial dim unless an argument has two numbers or mode is "bilinear".
    size : int, or one for each spatial dim
        The result's spatial dims. Either this or `scale_factor`.
    scale_factor : float, or one for each spatial dim
        The result has ⌊size · factor⌋ places, 1/factor elements apart.
    mode : "nearest", "nearest-exact", "linear" (one dim), "bilinear" (two), "bicubic", "lanczos3"
    align_corners : bool
        The first and last places are the first and last elements; one place takes element 0. Not
        for the nearest modes.
    antialias : bool
        Widen the filter where the result is smaller. Not for the nearest modes.
    out : array, optional

    Raises
    ------
    InterpolationError
        On shapes, dtypes or arguments that do not fit.
    """
    rank = _rank(x, size, scale_factor, mode)
    planes = lifted(x, rank)
    settings = _settings(rank, scale_factor, mode, align_corners, antialias)
    counts = _counts(planes.shape[-rank:], rank, size, scale_factor)
    settings |= along("O", counts)
    return lowered(interpolate_op(planes, out=lifted(out, rank), **settings), rank, out)


def interpolate_backward(
    grad: Any,
    input_size: Sequence[int],
    scale_factor: Scale | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    antialias: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The gradient of `interpolate` for its input, summed in one order.

    grad has the result's shape, f32, f16 or bf16; `input_size` are the input's spatial dims, or its
    shape; `scale_factor` as it was given, None with a `size`. Returns an array of the input's shape
    in grad's dtype. Raises InterpolationError.
    """
    rank = _rank(grad, telling(grad, input_size), scale_factor, mode)
    own = numbers("input_size", tuple(input_size)[-rank:], rank, 1, InterpolationError)
    settings = _settings(rank, scale_factor, mode, align_corners, antialias)
    settings |= along("", own)
    made = declared_backward(lifted(grad, rank), out=lifted(out, rank), **settings)
    return lowered(made, rank, out)


def _rank(x: Any, size: Any, scale_factor: Any, mode: str) -> int:
    require_host(mode in MODES, f"mode among {list(MODES)}", repr(mode), InterpolationError)
    plane = (0, 0) if mode == "bilinear" else 0
    rank = spatial_rank(x, (size, scale_factor, plane), InterpolationError)
    only = {"linear": 1, "bilinear": 2}.get(mode, rank)
    require_host(only == rank, f"{only} spatial dims for {mode}", f"x of shape {list(x.shape)}",
                 InterpolationError)  # fmt: skip
    return rank


def _settings(
    rank: int, scale_factor: Scale | None, mode: str, align_corners: bool | None, antialias: bool
) -> dict[str, Any]:
    aligned = align_corners is not None and flag("align_corners", align_corners, InterpolationError)
    settings: dict[str, Any] = {
        "mode": "linear" if mode == "bilinear" else mode,
        "align_corners": aligned,
        "antialias": antialias,
    }
    if scale_factor is not None and not aligned:
        named = zip(("row", "column")[2 - rank :], _factors(scale_factor, rank), strict=True)
        for name, factor in named:
            settings |= {f"{name}_num": factor.denominator, f"{name}_den": factor.numerator}
    return settings


def _factors(scale_factor: Scale, rank: int) -> list[Fraction]:
    return [Fraction(f).limit_denominator(_FINEST) for f in _scales(scale_factor, rank)]


def _scales(scale_factor: Scale, rank: int) -> list[int | float]:
    """A number for each spatial dim. Raises InterpolationError."""
    given = tuple(scale_factor) if isinstance(scale_factor, Sequence) else (scale_factor,)
    made = [f for f in map(number, given * (rank if len(given) == 1 else 1)) if f is not None]
    fits = len(made) == rank and all(math.isfinite(f) and f > 1 / _FINEST for f in made)
    require_host(fits, f"scale_factor of {rank} finite numbers > 2⁻²⁰", repr(scale_factor),
                 InterpolationError)  # fmt: skip
    return made


def _counts(
    own: Sequence[int], rank: int, size: Numbers | None, scale_factor: Scale | None
) -> tuple[int, ...]:
    """The result's spatial dims."""
    require_host((size is None) != (scale_factor is None), "either size or scale_factor",
                 f"size={size!r}, scale_factor={scale_factor!r}", InterpolationError)  # fmt: skip
    if size is not None:
        return numbers("size", size, rank, 1, InterpolationError)
    assert scale_factor is not None
    made = tuple(math.floor(n * float(f)) for n, f in zip(own, _scales(scale_factor, rank),
                                                          strict=True))  # fmt: skip
    require_host(all(made), "a result that is not empty", f"{list(own)} · {scale_factor}",
                 InterpolationError)  # fmt: skip
    return made
