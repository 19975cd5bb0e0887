"""What a convolution is told besides its tensors: options, strategies, windows and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dsl.errors import ConvError, require_host
from . import spatial

Numbers = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]
RANKS = 3


@dataclass(frozen=True)
class ConvOptions:
    """What a convolution computes, besides its tensors. A number counts for every spatial dim.

    Parameters
    ----------
    stride, dilation : int, or one for each spatial dim; ≥ 1
    padding : int, one int or one pair (before, after) for each spatial dim, "same" or "valid"
        Zeros around x. "same" keeps the size (stride 1 only; where the sum is odd, one more is
        after), "valid" is 0.
    groups : int
        Channels are convolved in this many groups, each with its own O / groups results.
    """

    stride: Numbers = 1
    padding: Padding = 0
    dilation: Numbers = 1
    groups: int = 1


@dataclass(frozen=True)
class Strategy:
    """How a convolution is computed: a constraint on the kernels, the same results."""


@dataclass(frozen=True)
class Direct(Strategy):
    """The sum over channels and taps as it stands; runs everything."""


@dataclass(frozen=True)
class ImplicitGemm(Strategy):
    """A product of matrices whose left one, the windows in rows, is never stored as a whole.

    Groups, and f32 in three spatial dims, fall back to `Direct`.
    """


@dataclass(frozen=True)
class Autotune(Strategy):
    """Whichever strategy and configuration is measured to be fastest."""


@dataclass(frozen=True)
class ConvPlan:
    """What a call will do: the strategy that runs, and the result's shape."""

    strategy: Strategy
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """Kernel, stride, padding and dilation of each spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def count(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The windows along each dim. Raises ConvError unless there is one."""
        made = []
        for size, k, s, (before, after), d in zip(
            sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True
        ):
            room = size + before + after - d * (k - 1) - 1
            require_host(room >= 0, "a kernel that fits the padded input",
                         f"kernel {k} with dilation {d} over {before} + {size} + {after}",
                         ConvError)  # fmt: skip
            made.append(room // s + 1)
        return tuple(made)

    def settings(self) -> dict[str, int]:
        """As the declarations have them: of three dims."""
        before = tuple(b for b, _ in self.padding)
        named = along("S", self.stride) | along("P", before, missing=0)
        return named | along("D", self.dilation) | {"groups": self.groups}


def along(name: str, values: Sequence[int], missing: int = 1) -> dict[str, int]:
    """{"KD": 1, "KH": 3, "KW": 5} of "K" and (3, 5)."""
    return spatial.along(name, values, missing, dims="DHW")


def numbers(name: str, given: Any, rank: int, least: int) -> tuple[int, ...]:
    """One number for all spatial dims, or one for each, as `rank` numbers ≥ `least`."""
    return spatial.numbers(name, given, rank, least, ConvError, below=spatial.LIMIT)


def _padding(given: Any, kernel: tuple[int, ...], stride: tuple[int, ...],
             dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Zeros before and after each spatial dim."""
    if isinstance(given, str):
        require_host(given in ("same", "valid"), 'padding "same" or "valid" where it is a name',
                     repr(given), ConvError)  # fmt: skip
        if given == "valid":
            return ((0, 0),) * len(kernel)
        require_host(set(stride) <= {1}, 'stride 1 with padding "same"', list(stride), ConvError)
        spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((s // 2, s - s // 2) for s in spans)
    paired = isinstance(given, Sequence) and any(isinstance(i, Sequence) for i in given)
    if not paired:
        return tuple((p, p) for p in numbers("padding", given, len(kernel), 0))
    require_host(len(given) == len(kernel), f"padding of {len(kernel)} pairs", repr(given),
                 ConvError)  # fmt: skip
    pairs = [numbers("padding", pair, 2, 0) for pair in given]
    return tuple((before, after) for before, after in pairs)


def window_of(options: ConvOptions, kernel: Sequence[int]) -> Window:
    """The options for a kernel of `kernel` taps. Raises ConvError."""
    rank = len(kernel)
    stride = numbers("stride", options.stride, rank, 1)
    dilation = numbers("dilation", options.dilation, rank, 1)
    require_host(all(k >= 1 for k in kernel), "a kernel ≥ 1", list(kernel), ConvError)
    (groups,) = numbers("groups", options.groups, 1, 1)
    padding = _padding(options.padding, tuple(kernel), stride, dilation)
    return Window(tuple(kernel), stride, padding, dilation, groups)
