"""Convolution as called: one to three spatial dims, padding by name, strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dsl.dtypes import f32
from ..dsl.errors import ConvError, require_host
from ..runtime.arrays import Kind, kind_of
from ..runtime.settings import flag
from . import convolution as declared
from .convolution_options import (
    RANKS,
    Autotune,
    ConvOptions,
    ConvPlan,
    Direct,
    ImplicitGemm,
    Strategy,
    Window,
    along,
    numbers,
    window_of,
)


def _shape(name: str, array: Any, dims: Sequence[int], layout: str) -> tuple[int, ...]:
    """The array's shape; raises ConvError unless its rank is among `dims`."""
    kind_of(array, name)
    shape = tuple(array.shape)
    require_host(len(shape) in dims, f"{name} of shape {layout}", list(shape), ConvError)
    return shape


def _lifted(x: Any, last: bool = False) -> Any:
    """A view of three spatial dims; None stays None."""
    if x is None:
        return None
    spare = (None,) * (RANKS + 2 - len(x.shape))
    return x[(slice(None), *spare)] if last else x[(slice(None), slice(None), *spare)]


def _lowered(made: Any, rank: int, out: Any, last: bool = False) -> Any:
    """The result with `rank` spatial dims; `out` itself where it was given."""
    if out is not None or rank == RANKS:
        return made if out is None else out
    ones = (0,) * (RANKS - rank)
    return made[(slice(None), *ones)] if last else made[(slice(None), slice(None), *ones)]


def _chosen(strategy: Strategy | None, x: Any, window: Window) -> Strategy:
    """What runs. Raises ConvError for a strategy that cannot."""
    if strategy is not None and not isinstance(strategy, (Direct, ImplicitGemm)):
        missing = "a tuner" if isinstance(strategy, Autotune) else (
            "to be one of the strategies of rudnn.convolution"
        )  # fmt: skip
        raise ConvError(f"{type(strategy).__name__} needs {missing}, got none here")
    kind: Kind = kind_of(x, "x")
    narrow = kind.dtype(kind.layout(x)[0]) != f32
    if window.groups > 1 or (len(window.kernel) == RANKS and not narrow):
        return Direct()
    if strategy is not None:
        return strategy
    return ImplicitGemm() if narrow and kind.device(x).capability.matrix else Direct()


def _planned(
    x: Any, weight: Any, options: ConvOptions, strategy: Strategy | None, last: bool
) -> tuple[ConvPlan, Window]:
    shapes = ("[N, *spatial, C]", "[O, *kernel, C/groups]") if last else (
        "[N, C, *spatial]", "[O, C/groups, *kernel]"
    )  # fmt: skip
    kernel = _shape("weight", weight, (3, 4, 5), shapes[1])
    image = _shape("x", x, (len(kernel),), shapes[0])
    spatial = slice(1, -1) if last else slice(2, None)
    window = window_of(options, kernel[spatial])
    counts = window.count(image[spatial])
    shape = (image[0], *counts, kernel[0]) if last else (image[0], kernel[0], *counts)
    return ConvPlan(_chosen(strategy, x, window), shape), window


def conv_plan(
    x: Any,
    weight: Any,
    bias: Any = None,
    options: ConvOptions = ConvOptions(),
    strategy: Strategy | None = None,
    *,
    channels_last: bool = False,
) -> ConvPlan:
    """What `conv_forward`, or `conv_forward_nhwc` with `channels_last`, will do with these.

    `strategy` of the plan is the one that runs: `ImplicitGemm` gives way to `Direct` for groups and
    for f32 in three dims. Nothing is computed. Raises ConvError.
    """
    last = flag("channels_last", channels_last, ConvError)
    return _planned(x, weight, options, strategy, last)[0]


def _forward(
    x: Any, weight: Any, bias: Any, options: ConvOptions, strategy: Strategy | None,
    activation: str | None, out: Any, last: bool,
) -> Any:  # fmt: skip
    plan, window = _planned(x, weight, options, strategy, last)
    rank = len(window.kernel)
    counts = plan.shape[1:-1] if last else plan.shape[2:]
    gemm = isinstance(plan.strategy, ImplicitGemm)
    run = declared.conv_forward_nhwc if last else declared.conv_forward
    made = run(
        _lifted(x, last), _lifted(weight, last), bias, activation,
        declared.IMPLICIT_GEMM if gemm else declared.DIRECT,
        out=_lifted(out, last), **window.settings(), **along("O", counts),
    )  # fmt: skip
    return _lowered(made, rank, out, last)


def conv_forward(
    x: Any,
    weight: Any,
    bias: Any = None,
    options: ConvOptions = ConvOptions(),
    strategy: Strategy | None = None,
    *,
    activation: str | None = None,
    out: Any = None,
) -> Any:
    """activation(convolution of x with weight + bias), over one to three spatial dims.

    Parameters
    ----------
    x : array [N, C, *spatial], f32, f16 or bf16
        Any strides.
    weight : array [O, C / groups, *kernel] of x's dtype
    bias : array [O] of x's dtype, optional
    options : ConvOptions
    strategy : Strategy, optional
        `Direct`, `ImplicitGemm`, or None: by dtype and device; see `conv_plan`.
    activation : None, "relu", "gelu" (erf), "gelu_tanh" or "silu"
    out : array [N, O, *windows], optional

    Returns
    -------
    array [N, O, *windows] in x's dtype, with ⌊(size + padding − dilation·(kernel − 1) − 1) /
    stride⌋ + 1 windows along each dim. Sums are f32.

    Raises
    ------
    ConvError
        On shapes, dtypes, options or a strategy that do not fit.
    """
    return _forward(x, weight, bias, options, strategy, activation, out, last=False)


def conv_forward_nhwc(
    x: Any,
    weight: Any,
    bias: Any = None,
    options: ConvOptions = ConvOptions(),
    strategy: Strategy | None = None,
    *,
    activation: str | None = None,
    out: Any = None,
) -> Any:
    """`conv_forward` with channels last in every tensor.

    x [N, *spatial, C], weight [O, *kernel, C / groups], bias [O] → [N, *windows, O]. Raises
    ConvError.
    """
    return _forward(x, weight, bias, options, strategy, activation, out, last=True)


def conv_data_backward(
    grad: Any,
    weight: Any,
    input_size: Sequence[int],
    options: ConvOptions = ConvOptions(),
    *,
    out: Any = None,
) -> Any:
    """The gradient of `conv_forward` for its input.

    Parameters
    ----------
    grad : array [N, O, *windows], f32, f16 or bf16
    weight : array [O, C / groups, *kernel] of grad's dtype
    input_size : the input's spatial dims, or its whole shape
    options : ConvOptions, as of the forward
    out : array [N, C, *spatial], optional

    Returns
    -------
    array [N, C, *spatial] in grad's dtype, each element summed in one order.

    Raises
    ------
    ConvError
        On shapes, dtypes or options that do not fit.
    """
    kernel = _shape("weight", weight, (3, 4, 5), "[O, C/groups, *kernel]")
    given = _shape("grad", grad, (len(kernel),), "[N, O, *windows]")
    window = window_of(options, kernel[2:])
    rank, channels = len(window.kernel), kernel[1] * window.groups
    size = _input_size(input_size, rank, (given[0], channels))
    _require_windows(given, window.count(size))
    made = declared.conv_data_backward(
        _lifted(grad), _lifted(weight), out=_lifted(out), C=channels, **window.settings(),
        **along("", size),
    )  # fmt: skip
    return _lowered(made, rank, out)


def _input_size(given: Sequence[int], rank: int, lead: tuple[int, int]) -> tuple[int, ...]:
    """The spatial dims of an input given whole or by them alone."""
    sizes = numbers("input_size", tuple(given)[-rank:], rank, 0)
    whole = tuple(given) == (*lead, *sizes)
    require_host(whole or len(given) == rank,
                 f"input_size of {rank} spatial dims, or with [N, C] = {list(lead)} before them",
                 list(given), ConvError)  # fmt: skip
    return sizes


def _require_windows(grad: tuple[int, ...], counts: tuple[int, ...]) -> None:
    require_host(grad[2:] == counts, f"grad of {list(counts)} windows", list(grad), ConvError)


def conv_weight_backward(
    grad: Any,
    x: Any,
    kernel_size: Sequence[int],
    options: ConvOptions = ConvOptions(),
    *,
    out: Any = None,
) -> Any:
    """The gradient of `conv_forward` for its weight, f32.

    Parameters
    ----------
    grad : array [N, O, *windows], f32, f16 or bf16
    x : array [N, C, *spatial] of grad's dtype
    kernel_size : the weight's kernel dims, or its whole shape [O, C / groups, *kernel]
    options : ConvOptions, as of the forward
    out : array [O, C / groups, *kernel], f32, optional

    Returns
    -------
    array [O, C / groups, *kernel] f32, each element summed in one order.

    Raises
    ------
    ConvError
        On shapes, dtypes or options that do not fit.
    """
    image = _shape("x", x, (3, 4, 5), "[N, C, *spatial]")
    given = _shape("grad", grad, (len(image),), "[N, O, *windows]")
    rank = len(image) - 2
    kernel = numbers("kernel_size", tuple(kernel_size)[-rank:], rank, 1)
    window = window_of(options, kernel)
    require_host(image[1] % window.groups == 0, "C divisible by groups",
                 f"C={image[1]}, groups={window.groups}", ConvError)  # fmt: skip
    share = image[1] // window.groups
    whole = tuple(kernel_size) == (given[1], share, *kernel)
    require_host(whole or len(kernel_size) == rank,
                 f"kernel_size of {rank} dims, or [{given[1]}, {share}, *kernel]",
                 list(kernel_size), ConvError)  # fmt: skip
    _require_windows(given, window.count(image[2:]))
    made = declared.conv_weight_backward(
        _lifted(grad), _lifted(x), out=_lifted(out), I=share, **window.settings(),
        **along("K", kernel),
    )  # fmt: skip
    return _lowered(made, rank, out)


def conv_bias_backward(grad: Any, *, out: Any = None) -> Any:
    """Σ grad [N, O, *windows] over batch and windows → [O] f32. Raises ConvError."""
    _shape("grad", grad, (3, 4, 5), "[N, O, *windows]")
    return declared.conv_bias_backward(grad, out=out)
