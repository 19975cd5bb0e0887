"""`linear` and `matmul` as called: a weight may come packed, leading dims broadcast."""

from __future__ import annotations

from typing import Any

from ..dsl.errors import NNError, require_host
from ..runtime.arrays import kind_of
from . import linear as declared


class PackedWeight:
    """A weight [N, K] laid out once for repeated `linear` calls, as its device likes it.

    Keeps a copy; later changes of the array it was made of have no influence.
    """

    __slots__ = ("dtype", "panels", "plain", "shape")

    def __init__(self, weight: Any) -> None:
        kind = kind_of(weight, "weight")
        shape = tuple(weight.shape)
        require_host(len(shape) == 2, "a weight of shape [N, K]", list(shape), NNError)
        width = kind.device(weight).capability.panel_width
        if kind.name == "torch":
            weight = weight.detach()
        self.shape = shape
        self.dtype = kind.dtype(kind.layout(weight)[0])
        self.panels = self.plain = None
        if width:
            self.panels = declared.pack_weight(weight, P=-(-shape[0] // width), L=width)
        else:
            self.plain = kind.contiguous(weight)

    def __repr__(self) -> str:
        return f"PackedWeight({list(self.shape)})"


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    *,
    out: Any = None,
) -> Any:
    """activation(x·weightᵀ + bias) + residual.

    Parameters
    ----------
    x : array [..., K], f32, f16 or bf16
    weight : array [N, K] of x's dtype, or `PackedWeight`
    bias : array [N], optional
    activation : None, "relu", "gelu" (erf), "gelu_tanh" or "silu"
    residual : array [..., N], optional, added last
    out : array [..., N], optional

    Raises
    ------
    NNError
        On shapes, dtypes or an activation that do not fit.
    """
    if isinstance(weight, PackedWeight):
        kind = kind_of(x, "x")
        dtype = kind.dtype(kind.layout(x)[0])
        require_host(
            dtype == weight.dtype,
            "x and weight of one dtype",
            f"{dtype} and {weight.dtype}",
            NNError,
        )
        if weight.plain is not None:
            return declared.linear(x, weight.plain, bias, activation, residual, out=out)
        return declared.linear_packed(
            x, weight.panels, bias, activation, residual, N=weight.shape[0], out=out
        )
    return declared.linear(x, weight, bias, activation, residual, out=out)


def matmul(a: Any, b: Any, *, out: Any = None) -> Any:
    """a [..., M, K] · b [..., K, N], leading dims broadcast, sums in f32.

    f32, f16 or bf16, both the same. Raises NNError on shapes that do not fit, OperatorError on
    what is no array.
    """
    kind_a, kind_b = kind_of(a, "a"), kind_of(b, "b")
    require_host(a.ndim >= 2 and b.ndim >= 2, "matrices of 2 dims or more",
                 f"{a.ndim} and {b.ndim}", NNError)  # fmt: skip
    lead_a, lead_b = tuple(a.shape[:-2]), tuple(b.shape[:-2])
    if lead_a != lead_b:
        import numpy as np

        try:
            lead = np.broadcast_shapes(lead_a, lead_b)
        except ValueError:
            raise NNError(
                f"matmul needs leading dims that broadcast, got {list(lead_a)} and {list(lead_b)}"
            ) from None
        a = kind_a.expand(a, (*lead, *a.shape[-2:]))
        b = kind_b.expand(b, (*lead, *b.shape[-2:]))
    return declared.batched_matmul(a, b, out=out)
