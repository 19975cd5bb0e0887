"""Pooling as called: torch.nn.functional's arguments, one or two spatial dims by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..dsl.errors import PoolingError, require_host
from ..runtime.settings import flag
from . import pooling, pooling_adaptive
from .spatial import (
    LIMIT,
    Numbers,
    along,
    is_tracked,
    lifted,
    lowered,
    numbers,
    spatial_rank,
    telling,
)


@dataclass(frozen=True)
class _Window:
    """Kernel, stride, padding and dilation of each spatial dim, rows first."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def count(self, size: int, at: int, ceil_mode: bool) -> int:
        """The number of windows along a dim of `size`. Raises PoolingError unless there is one."""
        kernel, stride = self.kernel[at], self.stride[at]
        padding, span = self.padding[at], self.dilation[at] * (kernel - 1) + 1
        room = size + 2 * padding - span
        count = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
        if ceil_mode and (count - 1) * stride >= size + padding:
            count -= 1  # the last window would start past the input
        require_host(count >= 1, "a kernel that fits the padded input",
                     f"kernel {kernel} with dilation {self.dilation[at]} over {size} + 2·{padding}",
                     PoolingError)  # fmt: skip
        return count

    def settings(self, *, dilated: bool) -> dict[str, int]:
        """As the declarations have them."""
        named = along("K", self.kernel) | along("S", self.stride) | along("P", self.padding)
        return named | along("D", self.dilation) if dilated else named


def _numbers(name: str, given: Any, rank: int, least: int) -> tuple[int, ...]:
    """One number for all spatial dims, or one for each; they are compiled in."""
    return numbers(name, given, rank, least, PoolingError, below=LIMIT)


def _window(
    rank: int, kernel_size: Numbers, stride: Numbers | None, padding: Numbers,
    dilation: Numbers = 1,
) -> _Window:  # fmt: skip
    """The window, one spatial dim filled up to two. Raises PoolingError."""
    kernel = _numbers("kernel_size", kernel_size, rank, 1)
    step = kernel if stride is None else _numbers("stride", stride, rank, 1)
    margin = _numbers("padding", padding, rank, 0)
    spread = _numbers("dilation", dilation, rank, 1)
    for k, p in zip(kernel, margin, strict=True):
        require_host(2 * p <= k, "padding of at most half the kernel",
                     f"padding={p}, kernel_size={k}", PoolingError)  # fmt: skip
    fill = (1,) * (2 - rank)
    none = (0,) * (2 - rank)
    return _Window(fill + kernel, fill + step, none + margin, fill + spread)


def _sizes(x: Any, window: _Window, ceil_mode: bool) -> dict[str, int]:
    ceil_mode = flag("ceil_mode", ceil_mode, PoolingError)
    return along("O", [window.count(s, i, ceil_mode) for i, s in enumerate(x.shape[-2:])])


def max_pool(
    x: Any,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The greatest element of each window; a NaN in it is the greatest.

    Parameters
    ----------
    x : array [N, C, L] or [N, C, H, W], or without N; f32, f16 or bf16
        Three dims are one spatial dim unless an argument has two numbers.
    kernel_size, stride, padding, dilation : int, or one for each spatial dim
        stride None is kernel_size; padding counts as −∞ and is at most half the kernel.
    ceil_mode : bool
        Also a last window that hangs over the end, if it starts within the input.
    return_indices : bool
        Return (result, indices): where in its plane the first greatest element is, i64. With
        torch gradients the indices cost a second pass.
    out : array, or (result, indices), optional

    Raises
    ------
    PoolingError
        On shapes, dtypes or windows that do not fit.
    """
    rank = spatial_rank(x, (kernel_size, stride, padding, dilation), PoolingError)
    window = _window(rank, kernel_size, stride, padding, dilation)
    planes = lifted(x, rank)
    settings = _sizes(planes, window, ceil_mode) | window.settings(dilated=True)
    return _maximum(pooling.max_pool, pooling.max_pool_with_indices, x, rank, settings,
                    return_indices, out)  # fmt: skip


def _maximum(
    plain: Callable[..., Any], indexed: Callable[..., Any], x: Any, rank: int,
    settings: dict[str, int], return_indices: bool, out: Any,
) -> Any:  # fmt: skip
    planes = lifted(x, rank)
    if not flag("return_indices", return_indices, PoolingError):
        return lowered(plain(planes, out=lifted(out, rank), **settings), rank, out)
    if is_tracked(x):
        _, at = indexed(planes.detach(), **settings)
        return lowered(plain(planes, out=out, **settings), rank, None), lowered(at, rank, None)
    goal = None if out is None else tuple(lifted(o, rank) for o in out)
    made = indexed(planes, out=goal, **settings)
    return tuple(lowered(m, rank, None if out is None else out[i]) for i, m in enumerate(made))


def max_pool_backward(
    grad: Any,
    indices: Any,
    input_size: Sequence[int],
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    *,
    out: Any = None,
) -> Any:
    """The gradient of `max_pool` for its input, summed in one order.

    Parameters
    ----------
    grad : array of the result's shape, f32, f16 or bf16
    indices : array alike, i64, of `max_pool(…, return_indices=True)`
        An index that its window does not cover counts nowhere.
    input_size : the spatial dims of the input, or its whole shape
    kernel_size, stride, padding, dilation : as `max_pool`'s

    Returns
    -------
    array of the input's shape, in grad's dtype.

    Raises
    ------
    PoolingError
        On shapes, dtypes or windows that do not fit.
    """
    rank = spatial_rank(grad, (kernel_size, stride, padding, dilation), PoolingError)
    window = _window(rank, kernel_size, stride, padding, dilation)
    settings = _input_sizes(input_size, rank) | window.settings(dilated=True)
    made = pooling.max_pool_backward(
        lifted(grad, rank), lifted(indices, rank), out=lifted(out, rank), **settings
    )
    return lowered(made, rank, out)


def _input_sizes(size: Sequence[int], rank: int) -> dict[str, int]:
    return along("", numbers("input_size", tuple(size)[-rank:], rank, 1, PoolingError))


def avg_pool(
    x: Any,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: Any = None,
) -> Any:
    """The mean of each window.

    Parameters
    ----------
    x : array [N, C, L] or [N, C, H, W], or without N; f32, f16 or bf16
    kernel_size, stride, padding : int, or one for each spatial dim
        stride None is kernel_size; padding counts as 0 and is at most half the kernel.
    ceil_mode : bool
        Also a last window that hangs over the end; what overhangs is not counted.
    count_include_pad : bool
        Whether padding is counted among a window's elements.
    divisor_override : int, optional
        Divide by this instead of the number of elements; not 0.
    out : array, optional

    Raises
    ------
    PoolingError
        On shapes, dtypes or windows that do not fit.
    """
    rank = spatial_rank(x, (kernel_size, stride, padding), PoolingError)
    window = _window(rank, kernel_size, stride, padding)
    planes = lifted(x, rank)
    settings: dict[str, Any] = _sizes(planes, window, ceil_mode) | window.settings(dilated=False)
    settings |= _counting(count_include_pad, divisor_override)
    return lowered(pooling.avg_pool(planes, out=lifted(out, rank), **settings), rank, out)


def _counting(count_include_pad: bool, divisor_override: int | None) -> dict[str, Any]:
    divisor = 0
    if divisor_override is not None:
        (divisor,) = numbers("divisor_override", divisor_override, 1, 1, PoolingError)
    return {"count_include_pad": count_include_pad, "divisor": divisor}


def avg_pool_backward(
    grad: Any,
    input_size: Sequence[int],
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: Any = None,
) -> Any:
    """The gradient of `avg_pool` for its input of `input_size` (its spatial dims, or its shape).

    grad has the result's shape, f32, f16 or bf16; the other arguments are `avg_pool`'s. Returns an
    array of the input's shape in grad's dtype. Raises PoolingError.
    """
    rank = spatial_rank(grad, (kernel_size, stride, padding), PoolingError)
    window = _window(rank, kernel_size, stride, padding)
    settings: dict[str, Any] = _input_sizes(input_size, rank) | window.settings(dilated=False)
    settings |= _counting(count_include_pad, divisor_override)
    made = pooling.avg_pool_backward(lifted(grad, rank), out=lifted(out, rank), **settings)
    return lowered(made, rank, out)


OutputSize = int | None | Sequence[int | None]


def _output(x: Any, output_size: OutputSize) -> tuple[int, dict[str, int]]:
    """(spatial dims, OH and OW); None keeps a dim's size. Raises PoolingError."""
    given = (output_size,) if output_size is None or isinstance(output_size, int) else output_size
    rank = spatial_rank(x, (tuple(given) if len(given) > 1 else 0,), PoolingError)
    full = tuple(given) * (rank if len(given) == 1 else 1)
    require_host(len(full) == rank, f"{rank} numbers in output_size", output_size, PoolingError)
    kept = tuple(s if o is None else o for s, o in zip(x.shape[-rank:], full, strict=True))
    return rank, along("O", numbers("output_size", kept, rank, 0, PoolingError))


def adaptive_max_pool(
    x: Any, output_size: OutputSize, return_indices: bool = False, *, out: Any = None
) -> Any:
    """The greatest element of each of `output_size` windows that share the input out.

    x [N, C, L] or [N, C, H, W], or without N, f32, f16 or bf16; output_size an int, or one for each
    spatial dim, None keeps its size. With `return_indices` also where in its plane the first
    greatest element is, i64. Raises PoolingError.
    """
    rank, settings = _output(x, output_size)
    return _maximum(pooling_adaptive.adaptive_max_pool,
                    pooling_adaptive.adaptive_max_pool_with_indices, x, rank, settings,
                    return_indices, out)  # fmt: skip


def adaptive_max_pool_backward(
    grad: Any, indices: Any, input_size: Sequence[int], *, out: Any = None
) -> Any:
    """The gradient of `adaptive_max_pool` for its input of `input_size`: all of its shape.

    grad has the result's shape, f32, f16 or bf16, indices alike, i64. Returns an array of the
    input's shape in grad's dtype. Raises PoolingError.
    """
    rank = spatial_rank(grad, (telling(grad, input_size),), PoolingError)
    made = pooling_adaptive.adaptive_max_pool_backward(
        lifted(grad, rank), lifted(indices, rank), out=lifted(out, rank),
        **_input_sizes(input_size, rank),
    )  # fmt: skip
    return lowered(made, rank, out)


def adaptive_avg_pool(x: Any, output_size: OutputSize, *, out: Any = None) -> Any:
    """The mean of each of `output_size` windows that share the input out.

    x [N, C, L] or [N, C, H, W], or without N, f32, f16 or bf16; output_size an int, or one for each
    spatial dim, None keeps its size. Raises PoolingError.
    """
    rank, settings = _output(x, output_size)
    made = pooling_adaptive.adaptive_avg_pool(lifted(x, rank), out=lifted(out, rank), **settings)
    return lowered(made, rank, out)


def adaptive_avg_pool_backward(grad: Any, input_size: Sequence[int], *, out: Any = None) -> Any:
    """The gradient of `adaptive_avg_pool` for its input of `input_size`: all of its shape.

    grad has the result's shape, f32, f16 or bf16. Returns an array of the input's shape in grad's
    dtype. Raises PoolingError.
    """
    rank = spatial_rank(grad, (telling(grad, input_size),), PoolingError)
    made = pooling_adaptive.adaptive_avg_pool_backward(
        lifted(grad, rank), out=lifted(out, rank), **_input_sizes(input_size, rank)
    )
    return lowered(made, rank, out)
