"""Bugs of calls that once were: results, contracts and arrays; names tell the symptom."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import rudnn
from rudnn import dsl, pooling
from rudnn.attention import AttentionOptions, attention, attention_backward
from rudnn.errors import NormalizationError, OperatorError, RudnnError
from rudnn.interpolation import interpolate
from rudnn.ops.paged_arrays import Place
from rudnn.paged_attention import DevicePlan, HostPlan
from rudnn.runtime.call import caller

softmax = rudnn.normalization.softmax_last_axis


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 200])
def test_dynamic_reduction_whose_tail_is_empty(tokens: int) -> None:
    """At exactly whole vectors the scalar tail has no elements; its sum was left unset."""
    x = np.random.default_rng(7).standard_normal((3, tokens), np.float32)
    np.testing.assert_allclose(total(x), x.sum(-1, dtype=np.float64), atol=1e-4)


@dsl.op(out=dsl.Out("B"), example={"B": 3, "T": 64})
def total(x: Any = dsl.In("B", "T")) -> Any:
    """Σ x over a dynamic axis."""
    b, t = dsl.axes("B", "T")
    return dsl.sum(x[b, t], over=t)


def test_out_is_checked_again_when_the_call_is_known() -> None:
    """A read-only array was written to once a call of its layout had been planned."""
    x = np.random.default_rng(9).standard_normal((3, 4), np.float32)
    softmax(x, out=np.empty((3, 4), np.float32))
    frozen = np.zeros((3, 4), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(NormalizationError, match="writeable"):
        softmax(x, out=frozen)
    assert (frozen == 0).all()
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(9, np.float32), (3, 4), (8, 4))
    with pytest.raises(NormalizationError, match="share memory"):
        softmax(x, out=overlapping)


def test_arrays_that_are_not_what_their_memory_says() -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    negative = torch.conj(z).imag  # a lazily negated view
    assert negative.is_neg()
    softmax(torch.zeros(3, 8)[:, ::2])  # the same layout, planned
    torch.testing.assert_close(softmax(negative), negative.softmax(-1))
    assert float(rudnn.nn.add(np.float32(3), np.float32(4))) == 7
    with pytest.raises(OperatorError, match="MaskedArray"):
        softmax(np.ma.masked_array(np.zeros((2, 3), np.float32)))
    with pytest.raises(RudnnError, match="needs"):
        softmax(torch.eye(3).to_sparse())


@pytest.mark.parametrize("shape", [-1, (2, -3), (2.5,), "ab", None])
def test_shapes_that_are_none(shape: Any) -> None:
    """NumPy's own errors came through."""
    with pytest.raises(OperatorError, match="needs a shape of integers ≥ 0"):
        rudnn.empty(shape)
    assert rudnn.empty(3).shape == rudnn.empty([np.int64(3)]).shape == (3,)


def test_ragged_data_is_no_tensor() -> None:
    with pytest.raises(OperatorError, match="needs what NumPy can make an array of"):
        rudnn.tensor([[1.0], [1.0, 2.0]])


def test_gradients_need_torch_tensors_throughout() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(OperatorError, match="torch tensors only"):
        rudnn.nn.add(x, np.ones((2, 3), np.float32))


@dsl.op(out=dsl.Out("R", "C"), example={"R": 5, "C": 7})
def shifted(x: Any = dsl.In("R", "C"), *, by: Any = dsl.Param(0, dtype=dsl.i64)) -> Any:
    """x moved by `by` along both axes, −1 where nothing comes from."""
    r, c = dsl.axes("R", "C")
    return x.at(r - by, c + by, fill=-1.0)


@pytest.mark.parametrize("by", [0, 2, -3, 100, 2**40, -(2**62)])
def test_reads_past_the_edge_by_a_distance_known_at_launch(by: int) -> None:
    """Loops split at a condition on `by` started before their array and wrote there."""
    x = np.random.default_rng(10).standard_normal((5, 7), np.float32)
    want = np.full_like(x, -1)
    for r in range(5):
        for c in range(7):
            if 0 <= r - by < 5 and 0 <= c + by < 7:
                want[r, c] = x[r - by, c + by]
    np.testing.assert_array_equal(shifted(x, by=by), want)


@dsl.op(out=dsl.Out("N"), example={"V": 5, "N": 7})
def gathered(x: Any = dsl.In("V"), index: Any = dsl.In("N", dtype=dsl.i64)) -> Any:
    """x at the given indices, which nobody has checked."""
    n = dsl.axes("N")
    return x[index[n]]


@dsl.op(out=dsl.Out("R"), example={"R": 5, "C": 7})
def greatest_number(x: Any = dsl.In("R", "C")) -> Any:
    """The greatest element that is a number."""
    r, c = dsl.axes("R", "C")
    return dsl.max(x[r, c], over=c, nan="ignore")


def test_unchecked_indices_stay_in_bounds() -> None:
    x = np.arange(5, dtype=np.float32)
    index = np.array([0, 4, 5, -1, 2**62, -(2**62), 2])
    np.testing.assert_array_equal(gathered(x, index), x[np.clip(index, 0, 4)])


@pytest.mark.parametrize("width", [1, 5, 64, 77, 256])
def test_extrema_that_ignore_nan(width: int) -> None:
    x = np.random.default_rng(11).standard_normal((40, width), np.float32)
    x[np.random.default_rng(12).random(x.shape) < 0.4] = np.nan
    want = np.where(np.isnan(x), -np.inf, x).max(-1)
    np.testing.assert_array_equal(greatest_number(x), want)


def test_out_reversed_over_its_input() -> None:
    """The stand-in for the result had forward strides where the kernel went backward."""
    y = np.random.default_rng(13).random((64, 64), np.float32)
    want = softmax(y.copy())
    for _ in range(20):
        fresh = y.copy()
        softmax(fresh, out=fresh[::-1, ::-1])
        np.testing.assert_array_equal(fresh[::-1, ::-1], want)


def test_second_derivatives_are_refused_not_dropped() -> None:
    p = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(OperatorError, match="second derivative"):
        torch.autograd.grad(rudnn.nn.gelu(p).sum(), p, create_graph=True)


@dsl.op(out=dsl.Out("N"), example={"N": 4})
def scaled(x: Any = dsl.In("N"), *, by: Any = dsl.Param()) -> Any:
    """x · by, and where x is positive one more."""
    n = dsl.axes("N")
    return x[n] * by + dsl.where(x[n] > 1, 1.0, 0.0)


def test_zeros_of_either_sign_are_different_settings() -> None:
    one = np.ones(1, np.float32)
    for by in (0.0, -0.0, 0.0):
        assert np.signbit(rudnn.nn.mul(one, np.float32(by)))[0] == np.signbit(by)
        scaled(one, by=by)
    assert len(caller(scaled).plans) == 2


def test_more_results_than_there_are_is_refused() -> None:
    q = np.ones((1, 1, 2, 4), np.float32)
    outs = (np.empty((1, 1, 2, 4), np.float32), np.empty((1, 1, 2), np.float32))
    with pytest.raises(RudnnError, match="at most 1"):
        rudnn.attention.attention(q, q, q, out=outs)
    with pytest.raises(RudnnError, match="one dtype"):
        packed = rudnn.nn.PackedWeight(np.ones((5, 4), np.float32))
        rudnn.nn.linear(np.ones((2, 4), np.float16), packed)


@pytest.mark.parametrize(("size", "needed"), [(2**40, "bytes"), (2**70, r"< 2\*\*63")])
def test_a_result_past_any_memory_is_refused(size: int, needed: str) -> None:
    """Its strides do not fit 64 bits: `struct.error` came out."""
    with pytest.raises(RudnnError, match=needed):
        rudnn.interpolation.interpolate(np.ones((1, 3, 4, 4), np.float32), size)


@pytest.mark.parametrize("odd", ["no", 1, None, np.ones(1)], ids=str)
def test_switches_took_whatever_python_calls_true(odd: Any) -> None:
    """`is_causal="no"` was causal."""
    x, rows = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 4), np.float32)
    plan = DevicePlan(HostPlan(4, 1, [[0]], [1], [0], [0]), Place(x, "x"))
    pages, causal = np.ones((1, 4, 1, 4), np.float32), AttentionOptions(is_causal=odd)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("is_causal", lambda: attention(x, x, x, options=causal)),
        ("is_causal", lambda: attention_backward(x, x, x, x, x, x[0], options=causal)),
        ("return_lse", lambda: attention(x, x, x, return_lse=odd)),
        ("causal", lambda: plan.attention(pages[0, :1], pages, pages, 1.0, odd)),
        ("ceil_mode", lambda: pooling.max_pool(x, 2, ceil_mode=odd)),
        ("return_indices", lambda: pooling.adaptive_max_pool(x, 2, odd)),
        ("count_include_pad", lambda: pooling.avg_pool(x, 2, count_include_pad=odd)),
        ("antialias", lambda: interpolate(x, 2, mode="bilinear", antialias=odd)),
        ("channels_last", lambda: rudnn.convolution.conv_plan(x, x, channels_last=odd)),
        ("zero_infinity", lambda: rudnn.ctc.ctc_loss(rows, [], [1], [0], zero_infinity=odd)),
    ]
    if odd is not None:
        calls += [("align_corners", lambda: interpolate(x, 2, None, "bilinear", odd))]
    for name, call in calls:
        with pytest.raises(RudnnError, match=f"needs {name} (True or False|among)"):
            call()


@pytest.mark.parametrize("kind", [np.float32, np.float64, Fraction, np.array, torch.tensor])
def test_numbers_of_other_kinds_were_refused(kind: Any) -> None:
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    want = interpolate(x, None, 1.5)
    np.testing.assert_array_equal(interpolate(x, None, kind(1.5)), want)
    np.testing.assert_array_equal(interpolate(x, None, [kind(1.5)] * 2), want)
    np.testing.assert_array_equal(scaled(x[0, 0, 0], by=kind(1.5)), scaled(x[0, 0, 0], by=1.5))
    for wrong in (True, np.True_, "1.5", 1.5j, np.ones(2)):
        with pytest.raises(RudnnError, match="needs scale_factor of 2 finite numbers"):
            interpolate(x, None, wrong)
    with pytest.raises(RudnnError, match="needs divisor_override of 1 number ≥ 1"):
        pooling.avg_pool(x, 2, divisor_override=kind(1.5))
