"""The backward of grid sampling as called."""

from __future__ import annotations

from typing import Any

from ..dsl.errors import GridSamplingError
from ..runtime.settings import flag
from .grid_sampling import grid_sample_backward as declared


def grid_sample_backward(
    grad: Any,
    x: Any,
    grid: Any,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
    *,
    ordered: bool = False,
    out: Any = None,
) -> Any:
    """The gradients of `grid_sample`.

    Parameters
    ----------
    grad : array [N, C, OH, OW] of x's dtype
    x, grid, mode, padding_mode, align_corners : as `grid_sample`'s
    ordered : bool
        Whether dx must be the same bits on every run. Without, a device may add with atomics; the
        kernels there are now add in the order of the points either way.
    out : (dx, dgrid), optional

    Returns
    -------
    (dx, dgrid) like x and grid.

    Raises
    ------
    GridSamplingError
        On shapes, dtypes or modes that do not fit.
    """
    flag("ordered", ordered, GridSamplingError)
    return declared(grad, x, grid, mode, padding_mode, align_corners, out=out)
