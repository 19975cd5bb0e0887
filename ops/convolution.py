"""Convolution over windows of three spatial dims; one and two dims are three of which the first
have size 1.

    out[n, o, q] = act(Σ_{i, k} x[n, g(o)·I + i, q·S + k·D − P] · weight[o, i, k] + bias[o])

with q, k, stride S, dilation D and padding P of three dims each, and g(o) the group of output
channel o. What lies outside x is 0. Padding at the end of a dim follows from the result's size.
Gradients gather: each element is one sum in one order, the same on every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dsl import (
    Declaration,
    Extent,
    In,
    Option,
    Out,
    Shared,
    axes,
    axis,
    dim,
    f32,
    op,
    require,
    sum,
    tensor,
    where,
)
from ..dsl.errors import ConvError
from .linear import ACTIVATIONS, activate, slope

DIRECT, IMPLICIT_GEMM = "direct", "implicit_gemm"
_SPATIAL, _RESULT, _KERNEL = ("D", "H", "W"), ("OD", "OH", "OW"), ("KD", "KH", "KW")
_WHOLE = tuple(f"{n}{d}" for n in "SPD" for d in _SPATIAL) + ("groups",)
_STATIC = ("C", "O", "I", *_SPATIAL, *_RESULT, *_KERNEL, *_WHOLE)
_EXAMPLE = {
    "N": 2, "C": 16, "O": 16, "I": 16, "groups": 1, "D": 1, "H": 14, "W": 14,
    "OD": 1, "OH": 14, "OW": 7, "KD": 1, "KH": 3, "KW": 3, "SD": 1, "SH": 1, "SW": 2,
    "PD": 0, "PH": 1, "PW": 1, "DD": 1, "DH": 1, "DW": 1,
}  # fmt: skip
# Stride, padding and dilation of the windows; a declaration reads them by their names as dims.
_STEPS = Shared(**{f"{n}{d}": Extent(0 if n == "P" else 1) for n in "SPD" for d in _SPATIAL})
_ACTIVATION = Option(None, ACTIVATIONS)
_STRATEGY = Option(DIRECT, (DIRECT, IMPLICIT_GEMM))


@dataclass(frozen=True)
class _Windows:
    """The windows along one dim."""

    letter: str
    size: Any
    kernel: Any
    stride: int
    padding: int
    dilation: int

    def place(self, window: Any, tap: Any) -> Any:
        """The place of a tap of a window."""
        return window * self.stride + tap * self.dilation - self.padding

    # A place h has taps k where S divides h + P − k·D. With g = gcd(S, D) and s = S/g these are
    # k = r + s·j of one residue r, if g divides h + P: each residue is a convolution of its own.

    @property
    def shared(self) -> int:
        return math.gcd(self.stride, self.dilation)

    @property
    def residues(self) -> int:
        return self.stride // self.shared

    @property
    def lowest(self) -> int:
        """The least window whose first tap of some residue is at a place ≥ 0."""
        return (self.padding - self.dilation * (self.residues - 1)) // self.stride

    def phase_axes(self) -> tuple[Any, Any, Any]:
        """(window, residue, step): window q, residue r and steps j of taps r + s·j."""
        d, s = self.letter, self.residues
        windows = (self.size - 1 + self.padding) // self.stride - self.lowest + 1
        steps = (self.kernel + (s - 1)) // s
        return axis(f"q{d}", windows), axis(f"r{d}", s), axis(f"j{d}", steps)

    def phase_of(self, place: Any) -> tuple[Any, Any, Any]:
        """(window, residue, whether there are taps) of a place."""
        g, s = self.shared, self.residues
        moved = place + self.padding
        inverse = pow(self.dilation // g, -1, s) if s > 1 else 0
        residue = (moved // g) * inverse % s
        window = (moved - residue * self.dilation) // self.stride - self.lowest
        return window, residue, moved % g == 0


def _windows() -> tuple[_Windows, ...]:
    """Windows of the three dims, and the contract of the sizes. Raises ConvError."""
    groups = dim("groups")
    for letter in _SPATIAL:
        require(dim(f"S{letter}") >= 1, "a stride ≥ 1", stride=dim(f"S{letter}"))
        require(dim(f"D{letter}") >= 1, "a dilation ≥ 1", dilation=dim(f"D{letter}"))
        require(dim(f"K{letter}") >= 1, "a kernel ≥ 1", kernel=dim(f"K{letter}"))
    require(groups >= 1, "groups ≥ 1", groups=groups)
    require(dim("C") == dim("I") * groups, "a weight of C / groups input channels",
            C=dim("C"), groups=groups, weight=dim("I"))  # fmt: skip
    require(dim("O") % groups == 0, "O divisible by groups", O=dim("O"), groups=groups)
    return tuple(_Windows(d, *(dim(f"{n}{d}") for n in ("", "K", "S", "P", "D"))) for d in _SPATIAL)


@dataclass(frozen=True)
class _Layout:
    """Where channels stand: after the batch, or last."""

    name: str
    last: bool

    def at(self, first: Any, channel: Any, spatial: Sequence[Any]) -> tuple[Any, ...]:
        return (first, *spatial, channel) if self.last else (first, channel, *spatial)


def _source_channel(o: Any, i: Any) -> Any:
    """The input channel that output channel o reads as its i-th."""
    groups = dim("groups")
    return i if groups == 1 else o // (dim("O") // groups) * dim("I") + i


def _product(layout: _Layout, x: Any, weight: Any, windows: Sequence[_Windows],
             point: tuple[Any, Any, Any], strategy: str = DIRECT) -> Any:  # fmt: skip
    """Σ_{i, k} x · weight. The implicit product of matrices sums over i and k as one axis."""
    n, o, q = point
    i, *taps = over = axes("I", *_KERNEL)
    if strategy == IMPLICIT_GEMM:
        depth = math.prod(dim(d) for d in _KERNEL)
        over = (axis("K", dim("I") * depth),)
        (rest,) = over
        i, taps = rest // depth, []
        for d in _KERNEL:
            depth = depth // dim(d)
            taps.append(rest // depth % dim(d))
    places = [w.place(a, k) for w, a, k in zip(windows, q, taps, strict=True)]
    read = x.at(*layout.at(n, _source_channel(o, i), places), fill=0.0)
    return sum(read * weight[layout.at(o, i, taps)], over=tuple(over))


def _local(layout: _Layout, grad: Any, x: Any, weight: Any, bias: Any, activation: Any,
           windows: Sequence[_Windows]) -> Any:  # fmt: skip
    """The gradient of the sums: grad · act′(z), with z computed again."""
    if activation is None:
        return grad
    n, o, *q = axes("N", "O", *_RESULT)
    z = _product(layout, x, weight, windows, (n, o, q))
    z = z if bias is None else z + bias[o]
    at = layout.at(n, o, q)
    return tensor("local", at, grad[at] * slope(z, activation))


def _data_gradient(
    layout: _Layout, grad: Any, weight: Any, windows: Sequence[_Windows]
) -> Any:  # fmt: skip
    """Σ_{o, k} grad[n, o, (h + P − k·D) / S] · weight[o, i, k] where S divides that."""
    n, c, *h = axes("N", "C", *_SPATIAL)
    if dim("groups") == 1:
        (o,) = over = (axes("O"),)
        i: Any = c
    else:
        fan = dim("O") // dim("groups")
        u = axis("u", fan)
        over, o, i = (u,), c // dim("I") * fan + u, c % dim("I")
    if all(w.stride == 1 for w in windows):
        taps = axes(*_KERNEL)
        places = [a + w.padding - k * w.dilation for w, a, k in zip(windows, h, taps, strict=True)]
        read = grad.at(*layout.at(n, o, places), fill=0.0)
        return sum(read * weight[layout.at(o, i, taps)], over=(*over, *taps))
    q, r, j = zip(*(w.phase_axes() for w in windows), strict=True)
    taps = [a + w.residues * b for w, a, b in zip(windows, r, j, strict=True)]
    places = [
        a + w.lowest - b * (w.dilation // w.shared) for w, a, b in zip(windows, q, j, strict=True)
    ]
    read = grad.at(*layout.at(n, o, places), fill=0.0)
    kernel = weight.at(*layout.at(o, i, taps), fill=0.0)
    phases = tensor("phases", (n, c, *r, *q), sum(read * kernel, over=(*over, *j)))
    window, residue, hit = zip(*(w.phase_of(a) for w, a in zip(windows, h, strict=True)),
                               strict=True)  # fmt: skip
    value: Any = phases[n, c, residue, window]
    for w, covered in zip(windows, hit, strict=True):
        value = value if w.shared == 1 else where(covered, value, 0.0)
    return value


def _weight_gradient(layout: _Layout, grad: Any, x: Any, windows: Sequence[_Windows]) -> Any:
    """Σ_{n, q} grad[n, o, q] · x[n, g(o)·I + i, q·S + k·D − P]."""
    n, o, i = axes("N", "O", "I")
    q, taps = axes(*_RESULT), axes(*_KERNEL)
    places = [w.place(a, k) for w, a, k in zip(windows, q, taps, strict=True)]
    read = x.at(*layout.at(n, _source_channel(o, i), places), fill=0.0)
    return sum(grad[layout.at(n, o, q)] * read, over=(n, *q))


def _bias_gradient(layout: _Layout, grad: Any) -> Any:
    n, o, *q = axes("N", "O", *_RESULT)
    return sum(f32(grad[layout.at(n, o, q)]), over=(n, *q))


def _declare(layout: _Layout) -> tuple[Declaration, Declaration]:
    """(forward, backward) of one layout."""
    image, result = layout.at("N", "C", _SPATIAL), layout.at("N", "O", _RESULT)
    kernel = layout.at("O", "I", _KERNEL)

    def declared(name: str, doc: str, *out: Out) -> Any:
        def wrap(fn: Any) -> Declaration:
            shown = {"x": image, "weight": kernel, "result": result}
            fn.__doc__ = doc.format(**{n: f"[{', '.join(d)}]" for n, d in shown.items()})
            return op(out=out if len(out) > 1 else out[0], static=_STATIC, example=_EXAMPLE,
                      error=ConvError, name=f"{name}{layout.name}")(fn)  # fmt: skip

        return wrap

    @declared("conv_forward", _FORWARD, Out(*result))
    def forward(
        x: Any = In(*image), weight: Any = In(*kernel), bias: Any = In("O", optional=True),
        activation: Any = _ACTIVATION, strategy: Any = _STRATEGY, *, groups: Any = Extent(1),
        OD: Any = Extent(), OH: Any = Extent(), OW: Any = Extent(),
        steps: Any = _STEPS,
    ) -> Any:  # fmt: skip
        n, o, *q = axes("N", "O", *_RESULT)
        total = _product(layout, x, weight, _windows(), (n, o, q), strategy)
        return activate(total if bias is None else total + bias[o], activation)

    @declared(
        "conv_backward",
        _BACKWARD,
        Out(*image, name="dx"),
        Out(*kernel, name="dweight", dtype=f32),
        Out("O", name="dbias", dtype=f32),
    )
    def backward(
        grad: Any = In(*result), x: Any = In(*image), weight: Any = In(*kernel),
        bias: Any = In("O", optional=True), activation: Any = _ACTIVATION, *,
        groups: Any = Extent(1), steps: Any = _STEPS,
    ) -> Any:  # fmt: skip
        windows = _windows()
        local = _local(layout, grad, x, weight, bias, activation, windows)
        return (
            _data_gradient(layout, local, weight, windows),
            _weight_gradient(layout, local, x, windows),
            _bias_gradient(layout, local),
        )

    forward.differentiable(backward, "x", "weight", "bias")
    return forward, backward


_FORWARD = """act(Σ x · weight + bias) over the windows, sums in f32.

x {x}, weight {weight}, bias [O] f32, f16 or bf16, all the same → {result} alike. Raises ConvError.
"""
_BACKWARD = """(dx, dweight, dbias) of the convolution.

grad {result}, x {x}, weight {weight}, bias [O] f32, f16 or bf16, all the same → dx as x, dweight
and dbias f32. Raises ConvError.
"""
_CHANNELS_FIRST = _Layout("", last=False)
conv_forward, conv_backward = _declare(_CHANNELS_FIRST)
conv_forward_nhwc, conv_backward_nhwc = _declare(_Layout("_nhwc", last=True))


@op(out=Out("N", "C", *_SPATIAL, name="dx"), static=_STATIC, example=_EXAMPLE, error=ConvError)
def conv_data_backward(
    grad: Any = In("N", "O", *_RESULT), weight: Any = In("O", "I", *_KERNEL), *,
    groups: Any = Extent(1),
    C: Any = Extent(), D: Any = Extent(), H: Any = Extent(), W: Any = Extent(),
    steps: Any = _STEPS,
) -> Any:  # fmt: skip
    """The gradient of `conv_forward` for x.

    grad [N, O, OD, OH, OW], weight [O, I, KD, KH, KW] f32, f16 or bf16, both the same →
    [N, C, D, H, W] alike. Raises ConvError.
    """
    return _data_gradient(_CHANNELS_FIRST, grad, weight, _windows())


@op(out=Out("O", "I", *_KERNEL, name="dweight", dtype=f32), static=_STATIC, example=_EXAMPLE,
    error=ConvError)  # fmt: skip
def conv_weight_backward(
    grad: Any = In("N", "O", *_RESULT), x: Any = In("N", "C", *_SPATIAL), *,
    groups: Any = Extent(1),
    I: Any = Extent(), KD: Any = Extent(), KH: Any = Extent(), KW: Any = Extent(),  # noqa: E741
    steps: Any = _STEPS,
) -> Any:  # fmt: skip
    """The gradient of `conv_forward` for its weight, f32.

    grad [N, O, OD, OH, OW], x [N, C, D, H, W] f32, f16 or bf16, both the same →
    [O, I, KD, KH, KW] f32. Raises ConvError.
    """
    return _weight_gradient(_CHANNELS_FIRST, grad, x, _windows())


@op(out=Out("O", name="dbias", dtype=f32), error=ConvError,
    example={"N": 2, "O": 16, "places": (14, 14)})  # fmt: skip
def conv_bias_backward(grad: Any = In("N", "O", "*places")) -> Any:
    """Σ grad over batch and places, f32: the gradient of `conv_forward` for its bias.

    grad [N, O, ...] f32, f16 or bf16 → [O] f32. Raises ConvError.
    """
    n, o, places = axes("N", "O", "*places")
    return sum(f32(grad[n, o, places]), over=(n, *places))
