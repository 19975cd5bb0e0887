"""Properties over random shapes, strides and values. Static sizes come from a short list, so that
few kernels are compiled; everything else is free."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import rudnn

Array = np.ndarray[Any, Any]
relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
last = st.sampled_from([1, 7, 16, 33, 64])
lead = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def views(draw: st.DrawFn, lead_shape: tuple[int, ...], width: int) -> Array:
    """An array [*lead, width] seen through steps, reversals, permutations and broadcasts."""
    shape = (*lead_shape, width)
    steps = [draw(st.sampled_from([1, 1, 2, -1, 0])) for _ in shape]
    base_shape = [1 if s == 0 else n * abs(s) for n, s in zip(shape, steps, strict=True)]
    order = draw(st.permutations(range(len(shape))))
    seed = draw(st.integers(0, 2**16))
    numbers = np.random.default_rng(seed).standard_normal([base_shape[i] for i in order])
    base = numbers.astype(np.float32).transpose(np.argsort(order))
    index = tuple(slice(None, None, s if s else 1) for s in steps)
    return np.broadcast_to(base[index], shape)


@relaxed
@given(st.data())
def test_softmax_of_any_view(data: st.DataObject) -> None:
    x = data.draw(views(data.draw(lead), data.draw(last)))
    y = rudnn.normalization.softmax_last_axis(x)
    wide = x.astype(np.float64)
    e = np.exp(wide - wide.max(axis=-1, keepdims=True, initial=-np.inf))
    np.testing.assert_allclose(y, e / e.sum(axis=-1, keepdims=True), atol=1e-6)


@relaxed
@given(st.data())
def test_broadcasting_add_is_numpys(data: st.DataObject) -> None:
    shapes = data.draw(hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=5))
    a, b = (
        np.random.default_rng(i).standard_normal(s).astype(np.float32)
        for i, s in enumerate(shapes.input_shapes)
    )
    np.testing.assert_array_equal(rudnn.nn.add(a, b), a + b)


@relaxed
@given(st.data())
def test_linear_of_any_view(data: st.DataObject) -> None:
    x = data.draw(views(data.draw(lead), 33))
    w = data.draw(views((19,), 33))
    want = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(rudnn.nn.linear(x, w), want, atol=1e-4)


@relaxed
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 4), last), elements=st.floats(width=32)))
def test_softmax_of_any_values_is_a_distribution_or_nan(x: Array) -> None:
    y = rudnn.normalization.softmax_last_axis(x)
    hopeless = ~np.isfinite(x.max(axis=-1)) | np.isnan(x).any(axis=-1)
    np.testing.assert_allclose(y[~hopeless].sum(axis=-1), 1, rtol=1e-5)
    assert np.isnan(y[hopeless]).all()
