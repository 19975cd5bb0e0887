"""Convolution at its edges, against torch: layouts, ranks, padding, groups, gradients, errors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rudnn
from rudnn.convolution import (
    Autotune,
    ConvOptions,
    Direct,
    ImplicitGemm,
    conv_bias_backward,
    conv_data_backward,
    conv_forward,
    conv_forward_nhwc,
    conv_plan,
    conv_weight_backward,
)
from rudnn.errors import ConvError
from rudnn.ops import convolution as declared
from rudnn.samples import specialise
from rudnn.schedules.capability import Capability
from rudnn.schedules.cpu import rules
from rudnn.schedules.cpu.windows import WindowSums
from rudnn.schedules.program import groups_of
from rudnn.schedules.rule import choose

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Edge:
    """Shapes of x and weight, and options as torch has them; `pairs` are asymmetric padding."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    pairs: tuple[tuple[int, int], ...] | None = None

    @property
    def options(self) -> ConvOptions:
        padding = self.padding if self.pairs is None else self.pairs
        return ConvOptions(self.stride, padding, self.dilation, self.groups)

    def torch(self, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        if self.pairs is not None:
            x = F.pad(x, [p for pair in reversed(self.pairs) for p in pair])
        conv = CONV[len(self.weight) - 2]
        return conv(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


EDGES = {
    "1x1, 104 channels": Edge((2, 104, 7, 5), (440, 104, 1, 1)),
    "1x1, 440 channels": Edge((2, 440, 3, 3), (104, 440, 1, 1)),
    "one element": Edge((1, 1, 1, 1), (1, 1, 1, 1)),
    "3x3": Edge((2, 16, 20, 19), (24, 16, 3, 3), padding=1),
    "7x7 stride 2": Edge((1, 3, 30, 33), (16, 3, 7, 7), stride=2, padding=3),
    "1-D": Edge((2, 6, 9), (4, 6, 3), padding=1),
    "1-D, longer than a block": Edge((1, 2, 1500), (3, 2, 11), padding=5, dilation=3),
    "3-D": Edge((2, 3, 5, 6, 7), (4, 3, 2, 3, 3), stride=(1, 2, 1), padding=(0, 1, 2)),
    "depthwise": Edge((2, 20, 9, 9), (20, 1, 3, 3), padding=1, groups=20),
    "two results a channel": Edge((2, 5, 9, 9), (10, 1, 3, 3), padding=1, groups=5),
    "grouped": Edge((2, 24, 10, 11), (36, 4, 3, 3), padding=1, groups=6),
    "kernel larger than the image": Edge((1, 2, 3, 3), (2, 2, 5, 5), padding=1),
    "stride over the kernel": Edge((1, 2, 13, 12), (3, 2, 2, 2), stride=5),
    "stride over the kernel, 1x1": Edge((2, 4, 13, 12), (6, 4, 1, 1), stride=3),
    "dilation": Edge((1, 2, 12, 15), (3, 2, 3, 3), dilation=(2, 3), padding=(2, 4)),
    "stride and dilation share 2": Edge((1, 3, 17, 18), (4, 3, 3, 3), stride=(4, 2),
                                        dilation=(2, 4), padding=3),
    "stride 3, dilation 2": Edge((1, 3, 17, 18), (4, 3, 3, 4), stride=3, dilation=2, padding=2),
    "padding on one side": Edge((1, 2, 12, 12), (3, 2, 3, 2), pairs=((0, 1), (2, 0))),
    "same": Edge((1, 2, 12, 12), (3, 2, 4, 3), padding="same", dilation=2),
    "valid": Edge((1, 2, 12, 12), (3, 2, 4, 3), padding="valid"),
    "wide padding": Edge((1, 2, 4, 4), (3, 2, 3, 3), padding=6),
    "long kernel": Edge((1, 3, 40), (5, 3, 37), padding=4),
    "kernel as large as the image": Edge((2, 3, 9, 9), (5, 3, 9, 9)),
}  # fmt: skip
NAMES = pytest.mark.parametrize("name", EDGES)


def drawn(edge: Edge, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, weight and bias; results stay near 1."""
    torch.manual_seed(0)
    x, weight = torch.randn(edge.x), torch.randn(edge.weight)
    weight = weight / float(np.sqrt(np.prod(edge.weight[1:])))
    return x.to(dtype), weight.to(dtype), torch.randn(edge.weight[0]).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert got.shape == want.shape
    scale = max(float(want.abs().max()), 1e-3) if want.numel() else 1.0
    assert float((got.double() - want.double()).abs().max()) <= TOLERANCE[dtype] * scale


@NAMES
def test_forward(name: str) -> None:
    edge = EDGES[name]
    x, weight, bias = drawn(edge)
    want = edge.torch(x.double(), weight.double(), bias.double())
    close(conv_forward(x, weight, bias, edge.options), want)
    last = conv_forward_nhwc(x.movedim(1, -1), weight.movedim(1, -1), bias, edge.options)
    close(last.movedim(-1, 1), want)


@NAMES
def test_gradients(name: str) -> None:
    edge = EDGES[name]
    x, weight, _ = drawn(edge)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    result = edge.torch(*wide, None)
    grad = torch.randn(result.shape)
    dx, dweight = torch.autograd.grad(result, wide, grad.double())
    close(conv_data_backward(grad, weight, x.shape[2:], edge.options), dx)
    close(conv_weight_backward(grad, x, weight.shape, edge.options), dweight)
    close(conv_bias_backward(grad), grad.double().sum((0, *range(2, grad.ndim))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["3x3", "7x7 stride 2", "depthwise", "3-D"])
def test_narrow(name: str, dtype: torch.dtype) -> None:
    edge = EDGES[name]
    x, weight, bias = drawn(edge, dtype)
    want = edge.torch(x.double(), weight.double(), bias.double())
    got = conv_forward(x, weight, bias, edge.options)
    assert got.dtype == dtype
    close(got, want, dtype)
    grad = torch.randn(want.shape).to(dtype)
    dweight = conv_weight_backward(grad, x, weight.shape, edge.options)
    wide = weight.double().requires_grad_()
    (exact,) = torch.autograd.grad(edge.torch(x.double(), wide, None), wide, grad.double())
    assert dweight.dtype == torch.float32
    close(dweight, exact)  # exact products, f32 sums


@pytest.mark.parametrize("activation", declared.ACTIVATIONS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_autograd(activation: str | None, layout: str) -> None:
    edge = EDGES["3x3"]
    leaves = [t.requires_grad_() for t in drawn(edge)]
    x, weight, bias = leaves
    if layout == "nhwc":
        made = conv_forward_nhwc(x.movedim(1, -1), weight.movedim(1, -1), bias, edge.options,
                                 activation=activation)  # fmt: skip
        made = made.movedim(-1, 1)
    else:
        made = conv_forward(x, weight, bias, edge.options, activation=activation)
    acts = {None: lambda t: t, "relu": F.relu, "gelu": F.gelu, "silu": F.silu,
            "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}  # fmt: skip
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = acts[activation](edge.torch(*wide))
    close(made.detach(), want.detach())
    grad = torch.randn(want.shape)
    for got, exact in zip(torch.autograd.grad(made, leaves, grad),
                          torch.autograd.grad(want, wide, grad.double()), strict=True):  # fmt: skip
        close(got, exact)


def test_empty_batch() -> None:
    x, weight, _ = drawn(EDGES["3x3"])
    options = EDGES["3x3"].options
    assert conv_forward(x[:0], weight, None, options).shape == (0, 24, 20, 19)
    grad = torch.empty(0, 24, 20, 19)
    assert conv_data_backward(grad, weight, (20, 19), options).shape == (0, 16, 20, 19)
    assert not conv_weight_backward(grad, x[:0], (3, 3), options).any()


def test_views() -> None:
    """Strides of any kind: channels last in memory, steps, a broadcast batch."""
    edge = EDGES["3x3"]
    x, weight, _ = drawn(edge)
    for view in (
        x.to(memory_format=torch.channels_last),
        torch.stack((x, x), -1)[..., 0],
        x.flip(3).flip(3),
        x[:1].expand(2, -1, -1, -1),
    ):
        close(conv_forward(view, weight, None, edge.options), edge.torch(view, weight, None))


def test_out() -> None:
    edge = EDGES["1-D"]
    x, weight, bias = (t.numpy() for t in drawn(edge))
    out = np.full((2, 4, 9), np.nan, np.float32)
    assert conv_forward(x, weight, bias, edge.options, out=out) is out
    assert np.array_equal(out, conv_forward(x, weight, bias, edge.options))
    tensor = rudnn.tensor(x)
    made = conv_forward(tensor, rudnn.tensor(weight), rudnn.tensor(bias), edge.options)
    assert np.array_equal(made.numpy(), out)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_covered_has_no_influence(bad: float) -> None:
    """Windows between the lines are computed along; nothing of them may be seen."""
    edge = Edge((2, 16, 12, 13), (16, 16, 3, 3), padding=1)
    x, weight, _ = drawn(edge)
    x[:, :, 5, 12] = bad
    got = conv_forward(x, weight, None, edge.options)
    hit = torch.zeros(12, 13, dtype=torch.bool)
    hit[4:7, 11:] = True
    assert torch.equal(~got.isfinite(), hit.expand(2, 16, -1, -1))
    grad = torch.randn(2, 16, 12, 13)
    dweight = conv_weight_backward(grad, x, (3, 3), edge.options)
    assert torch.equal(dweight.isfinite()[0, 0], torch.tensor([[True, False, False]] * 3))
    x[:, :, 5, 12] = 0
    x[:, :, 0, 0] = bad  # no window has it at the last tap of a line or column
    dweight = conv_weight_backward(grad, x, (3, 3), edge.options)
    assert torch.equal(dweight.isfinite()[0, 0], torch.tensor([[False, False, True],
                       [False, False, True], [True, True, True]]))  # fmt: skip


def test_deterministic() -> None:
    """The same bits whatever the number of threads."""
    edge = EDGES["grouped"]
    x, weight, _ = drawn(edge)
    grad = torch.randn(edge.torch(x, weight, None).shape)
    calls = [
        lambda: conv_forward(x, weight, None, edge.options),
        lambda: conv_data_backward(grad, weight, (10, 11), edge.options),
        lambda: conv_weight_backward(grad, x, (3, 3), edge.options),
    ]
    for call in calls:
        first = call()
        assert all(torch.equal(first, call()) for _ in range(3))


# --- strategies ---


def test_plan() -> None:
    f32, f16 = torch.zeros(2, 8, 9, 9), torch.zeros(2, 8, 9, 9, dtype=torch.float16)
    weight = torch.zeros(4, 8, 3, 3)
    plan = conv_plan(f32, weight)
    assert plan.strategy == Direct()
    assert plan.shape == (2, 4, 7, 7)
    assert conv_plan(f32, weight, strategy=ImplicitGemm()).strategy == ImplicitGemm()
    assert conv_plan(f16, weight.half(), strategy=ImplicitGemm()).strategy == ImplicitGemm()
    last = conv_plan(f32.movedim(1, -1), weight.movedim(1, -1), channels_last=True)
    assert last.shape == (2, 7, 7, 4)


def test_plan_falls_back_to_direct() -> None:
    """As the seed says: groups, and f32 in three dims."""
    grouped, weight = torch.zeros(2, 8, 9, 9), torch.zeros(4, 4, 3, 3)
    options = ConvOptions(groups=2)
    assert conv_plan(grouped, weight, None, options, ImplicitGemm()).strategy == Direct()
    solid, weight = torch.zeros(1, 2, 5, 5, 5), torch.zeros(2, 2, 3, 3, 3)
    assert conv_plan(solid, weight, strategy=ImplicitGemm()).strategy == Direct()
    narrow = conv_plan(solid.half(), weight.half(), strategy=ImplicitGemm())
    assert narrow.strategy == ImplicitGemm()


@pytest.mark.parametrize("name", ["3x3", "7x7 stride 2", "dilation", "1-D"])
def test_strategies_agree(name: str) -> None:
    edge = EDGES[name]
    x, weight, bias = drawn(edge)
    direct = conv_forward(x, weight, bias, edge.options, Direct())
    close(conv_forward(x, weight, bias, edge.options, ImplicitGemm()), direct)


def test_rules() -> None:
    """The patterns find the schedules made for them, whatever the operator is called."""
    from rudnn.runtime.device import device

    def chosen(declaration: Any, **dims: int) -> set[str]:
        graph = specialise(declaration, dims).graph
        caps = device("llvm").capability
        return {choose(rules(), g, caps).name for g in groups_of(graph)}

    plain, deep = {"SW": 1, "OW": 14}, {"groups": 16, "I": 1}
    assert chosen(declared.conv_forward, **plain) == {"windows"}
    assert chosen(declared.conv_forward, **plain, **deep) == {"windows"}
    assert chosen(declared.conv_data_backward, **plain) == {"windows"}
    assert chosen(declared.conv_data_backward) == {"windows", "pointwise"}
    assert chosen(declared.conv_weight_backward) == {"tap_sums"}
    assert chosen(declared.conv_weight_backward, **deep) == {"tap_sums"}


@pytest.mark.parametrize("strips", [False, True])
def test_tiles_and_strips_in_either_order(strips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes differ, because a kernel is kept by what it computes."""
    default = WindowSums.default
    forced = {"rows": 6, "vectors": 1, "strips": strips}
    monkeypatch.setattr(WindowSums, "default", lambda *a: replace(default(*a), **forced))
    edge = Edge((2, 9, 11 + strips, 13), (20, 9, 3, 3), padding=1)
    x, weight, bias = drawn(edge)
    close(conv_forward(x, weight, bias, edge.options), edge.torch(x, weight, bias))


@pytest.mark.parametrize(("registers", "bits"), [(16, 128), (16, 256), (32, 512)])
def test_registers_hold_the_sums(registers: int, bits: int) -> None:
    """14 sums of the gradient of a 7-wide kernel, with 2 vectors and a number, spilled."""
    caps = Capability("cores", vector_bits=bits, vector_registers=registers)

    def config(declaration: Any, **dims: int) -> Any:
        (group,) = groups_of(specialise(declaration, dims).graph)
        return choose(rules(), group, caps).default(group, caps)

    made = config(declared.conv_forward, SW=1, OW=14)
    assert (made.rows + 1) * made.vectors < registers
    made = config(declared.conv_weight_backward, KW=7, PW=3)
    assert (made.tall * made.wide + 1) * made.vectors < registers


# --- errors ---

X, WEIGHT = (2, 8, 9, 9), (4, 8, 3, 3)
REFUSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], ConvOptions, str]] = {
    "channels": ((2, 7, 9, 9), WEIGHT, ConvOptions(), "C / groups"),
    "rank": ((2, 8, 9), WEIGHT, ConvOptions(), r"x of shape \[N, C, \*spatial\]"),
    "weight": (X, (4, 8), ConvOptions(), r"weight of shape \[O, C/groups, \*kernel\]"),
    "groups": (X, (5, 4, 3, 3), ConvOptions(groups=2), "O divisible by groups"),
    "no groups": (X, WEIGHT, ConvOptions(groups=0), "groups of 1 number ≥ 1"),
    "stride": (X, WEIGHT, ConvOptions(stride=0), "stride of 2 numbers ≥ 1"),
    "great stride": (X, WEIGHT, ConvOptions(stride=2**32), r"≥ 1 and < 2\*\*31"),
    "strides": (X, WEIGHT, ConvOptions(stride=(1, 1, 1)), "stride of 2 numbers"),
    "dilation": (X, WEIGHT, ConvOptions(dilation=-1), "dilation of 2 numbers ≥ 1"),
    "padding": (X, WEIGHT, ConvOptions(padding=-1), "padding of 2 numbers ≥ 0"),
    "pairs": (X, WEIGHT, ConvOptions(padding=((1, 1),)), "padding of 2 pairs"),
    "name": (X, WEIGHT, ConvOptions(padding="full"), "same"),
    "same with stride": (X, WEIGHT, ConvOptions(2, "same"), "stride 1"),
    "kernel": (X, (4, 8, 10, 3), ConvOptions(), "fits the padded input"),
    "empty kernel": (X, (4, 8, 0, 3), ConvOptions(), "kernel ≥ 1"),
    "no number": (X, WEIGHT, ConvOptions(stride=1.5), "stride"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    x, weight, options, needs = REFUSED[name]
    with pytest.raises(ConvError, match=f"needs .*{needs}|{needs}"):
        conv_forward(np.zeros(x, np.float32), np.zeros(weight, np.float32), None, options)


def test_refused_tensors() -> None:
    x, weight = np.zeros(X, np.float32), np.zeros(WEIGHT, np.float32)
    with pytest.raises(ConvError, match="dtype"):
        conv_forward(x, weight.astype(np.float16))
    with pytest.raises(ConvError, match="dtype"):
        conv_forward(x.astype(np.float64), weight.astype(np.float64))
    with pytest.raises(ConvError, match="bias"):
        conv_forward(x, weight, np.zeros((4, 1), np.float32))
    with pytest.raises(ConvError, match="activation"):
        conv_forward(x, weight, activation="tanh")
    with pytest.raises(ConvError, match="out of shape"):
        conv_forward(x, weight, out=np.zeros((2, 4, 9, 9), np.float32))


def test_refused_strategy() -> None:
    x, weight = np.zeros(X, np.float32), np.zeros(WEIGHT, np.float32)
    with pytest.raises(ConvError, match="Autotune needs a tuner, got none here"):
        conv_forward(x, weight, strategy=Autotune())
    with pytest.raises(ConvError, match="strategies"):
        conv_plan(x, weight, strategy="direct")  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "needs"), list(itertools.product([(9,), (1, 8, 9, 9)],
                                                                   ["input_size"])))  # fmt: skip
def test_refused_input_size(size: tuple[int, ...], needs: str) -> None:
    grad, weight = np.zeros((2, 4, 7, 7), np.float32), np.zeros(WEIGHT, np.float32)
    with pytest.raises(ConvError, match=needs):
        conv_data_backward(grad, weight, size)


def test_refused_gradients() -> None:
    grad, x = np.zeros((2, 4, 7, 7), np.float32), np.zeros(X, np.float32)
    with pytest.raises(ConvError, match=r"grad of \[8, 8\] windows"):
        conv_data_backward(grad, np.zeros(WEIGHT, np.float32), (10, 10))
    with pytest.raises(ConvError, match=r"grad of \[8, 8\] windows"):
        conv_weight_backward(grad, x, (2, 2))
    with pytest.raises(ConvError, match="C divisible by groups"):
        conv_weight_backward(grad, x, (3, 3), ConvOptions(groups=3))
