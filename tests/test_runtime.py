"""The runtime: kinds of array, layouts, queues, budgets, errors, threads, a fork."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import rudnn
from rudnn import dsl
from rudnn.errors import (
    DeviceError,
    NormalizationError,
    OperatorError,
    RudnnError,
    WorkspaceError,
)
from rudnn.runtime import compiler

softmax = rudnn.normalization.softmax_last_axis


def reference(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    e = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def test_kind_in_is_kind_out() -> None:
    x = np.random.default_rng(0).standard_normal((5, 9), np.float32)
    assert type(softmax(x)) is np.ndarray
    assert type(softmax(torch.from_numpy(x))) is torch.Tensor
    made = softmax(rudnn.tensor(x))
    assert type(made) is rudnn.Tensor and made.device is rudnn.device("llvm:0")
    np.testing.assert_array_equal(made.numpy(), softmax(x))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dlpack_both_ways_shares_memory(dtype: str) -> None:
    given = torch.arange(6.0).reshape(2, 3).to(getattr(torch, dtype))
    tensor = rudnn.from_dlpack(given)
    given[1, 2] = 9
    assert float(tensor.numpy()[1, 2]) == 9
    back = torch.from_dlpack(tensor)
    back[0, 0] = 7
    assert float(given[0, 0]) == 7 and back.dtype == given.dtype
    del given, tensor
    assert float(back[1, 2]) == 9


def test_dlpack_memory_is_released() -> None:
    import gc
    import weakref

    array = np.zeros((256, 256), np.float32)
    watch = weakref.ref(array)
    capsule = rudnn.Tensor(array, rudnn.dsl.f32, rudnn.device().default_queue).__dlpack__()
    del array, capsule
    gc.collect()
    assert watch() is None


STRIDED = {
    "transposed": lambda x: x.T,
    "stepped": lambda x: x[::3, 1::2],
    "reversed": lambda x: x[::-1, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:, :1], (x.shape[0], 7)),
    "fortran": np.asfortranarray,
    "four dims": lambda x: x[:24, :32].reshape(4, 6, 4, 8).transpose(2, 0, 3, 1)[::2],
}


@pytest.mark.parametrize("view", STRIDED)
def test_views_are_read_where_they_are(view: str) -> None:
    x = STRIDED[view](np.random.default_rng(1).standard_normal((37, 45), np.float32))
    np.testing.assert_allclose(softmax(x), reference(x), atol=1e-6)


def test_unaligned_and_unevenly_strided_arrays() -> None:
    raw = np.zeros(4 * 64 + 1, np.uint8)
    x = raw[1:].view(np.float32).reshape(8, 8)
    x[...] = np.random.default_rng(2).standard_normal((8, 8))
    np.testing.assert_allclose(softmax(x), reference(x), atol=1e-6)
    packed = np.zeros(8, np.dtype([("tag", "u1"), ("value", "f4")]))
    packed["value"] = np.arange(8)
    np.testing.assert_allclose(softmax(packed["value"]), reference(packed["value"]), atol=1e-6)


def test_out_receives_the_result_even_when_it_is_the_input() -> None:
    x = np.random.default_rng(3).standard_normal((6, 10), np.float32)
    want = softmax(x)
    out = np.full((6, 20), np.nan, np.float32)[:, ::2]
    assert softmax(x, out=out) is out
    np.testing.assert_array_equal(out, want)
    buffer = np.zeros(70, np.float32)
    shifted, target = buffer[:60].reshape(6, 10), buffer[7:67].reshape(6, 10)
    shifted[...] = x
    softmax(shifted, out=target)
    np.testing.assert_array_equal(target, want)


def test_bad_arguments_name_what_was_needed() -> None:
    x = np.zeros((4, 8), np.float32)
    cases = [
        (lambda: softmax(x.astype(np.float64)), NormalizationError, "f32, f16 or bf16, got f64"),
        (lambda: softmax(x.astype(">f4")), NormalizationError, "dtype known here"),
        (lambda: softmax(np.zeros((4, 0), np.float32)), NormalizationError, "not empty"),
        (lambda: softmax([1.0, 2.0]), OperatorError, "needs a NumPy array"),
        (lambda: softmax(x, out=np.zeros((4, 7), np.float32)), NormalizationError, "[4, 8]"),
        (lambda: softmax(x, out=x.astype(np.float16)), NormalizationError, "f32"),
        (lambda: softmax(x.view(), out=_read_only(x)), NormalizationError, "writeable"),
        (lambda: softmax(torch.zeros(2, 2, device="meta")), DeviceError, "meta"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match="needs") as caught:
            call()
        assert text in str(caught.value)
    with pytest.raises(TypeError, match="missing"):
        softmax()


def _read_only(x: np.ndarray) -> np.ndarray:
    copy = x.copy()
    copy.flags.writeable = False
    return copy


def test_two_queues_in_one_call_are_refused() -> None:
    device = rudnn.device()
    with rudnn.Queue(device):
        a = rudnn.tensor(np.ones((2, 3), np.float32))
    b = rudnn.tensor(np.ones((2, 3), np.float32))
    assert a.queue is not b.queue
    with pytest.raises(DeviceError, match="one queue"):
        rudnn.nn.add(a, b)
    rudnn.nn.add(a, a)


def test_workspace_over_budget_is_refused_before_anything_is_touched(monkeypatch) -> None:
    monkeypatch.setenv("RUDNN_WORKSPACE_BYTES", "1000")
    x, w = np.ones((64, 96), np.float32), np.ones((80, 96), np.float32)
    out = np.full((64, 80), 5, np.float32)
    with pytest.raises(WorkspaceError, match="budget is 1000"):
        rudnn.nn.linear(x, w, out=out)
    assert (out == 5).all()


def test_memory_usage_tells_of_tensors_and_workspaces() -> None:
    before = rudnn.memory_usage().tensors
    tensor = rudnn.empty((1000,), "f32")
    assert rudnn.memory_usage().tensors - before == 4000
    del tensor
    assert rudnn.memory_usage().tensors == before
    rudnn.nn.linear(np.ones((2, 96), np.float32), np.ones((80, 96), np.float32))
    assert rudnn.memory_usage().workspace >= 96 * 96 * 4


def test_a_fork_may_go_on_calling() -> None:
    x = np.random.default_rng(4).standard_normal((400, 300), np.float32)
    want = softmax(x)

    def child() -> None:
        fresh = np.random.default_rng(5).standard_normal((3, 11), np.float32)
        same = np.array_equal(softmax(x), want)
        right = np.allclose(softmax(fresh), reference(fresh), atol=1e-6)  # compiles in the child
        os._exit(0 if same and right else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    np.testing.assert_array_equal(softmax(x), want)


@pytest.mark.usefixtures("poisoned")
def test_poisoned_workspace_does_not_reach_results() -> None:
    x, w = np.ones((65, 33), np.float32), np.ones((19, 33), np.float32)
    np.testing.assert_array_equal(rudnn.nn.linear(x, w), np.full((65, 19), 33, np.float32))
    g = np.ones(33, np.float32)
    made = rudnn.normalization.layer_norm_backward(x, x, g)
    assert all(np.isfinite(m).all() for m in made)


def test_gradients_of_what_has_no_backward_are_refused() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(OperatorError, match="no backward"):
        rudnn.nn.top_k(x, 2)
    with torch.no_grad():
        assert rudnn.nn.top_k(x, 2).values.shape == (4, 2)


@dsl.op(out=dsl.Out("N", dtype=dsl.bf16), example={"N": 64}, name="to_bf16")
def to_bf16(x: Any = dsl.In("N", dtype=dsl.f32)) -> Any:
    """x rounded to bf16."""
    n = dsl.axes("N")
    return x[n]


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    near = np.concatenate([bits + d for d in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    x = near.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = x.astype(ml_dtypes.bfloat16)
    got = to_bf16(x)
    nan = np.isnan(x)
    assert np.isnan(got[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(got[~nan].view(np.uint16), want[~nan].view(np.uint16))


@pytest.mark.usefixtures("own_cache")
def test_one_thread_waits_while_another_compiles(monkeypatch) -> None:
    built = []
    build = compiler.build
    monkeypatch.setattr(compiler, "build", lambda *a: built.append(a) or build(*a))
    x = np.random.default_rng(6).standard_normal((2, 173), np.float32)
    results: list[np.ndarray] = []
    compiler.disk_cache().clear()
    threads = [threading.Thread(target=lambda: results.append(softmax(x))) for _ in range(4)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert len(results) == 4 and all(np.array_equal(r, results[0]) for r in results)
    assert len(built) == 1


@pytest.mark.usefixtures("own_cache")
def test_kernels_stay_in_memory_when_the_disk_cache_is_cleared(monkeypatch) -> None:
    x = np.random.default_rng(8).standard_normal((3, 29), np.float32)
    want = softmax(x)
    compiler.disk_cache().clear()
    monkeypatch.setattr(compiler, "build", lambda *a: pytest.fail("compiled again"))
    np.testing.assert_array_equal(softmax(np.tile(x, (2, 1)))[:3], want)


def test_gradient_narrower_than_the_broadcast_is_refused() -> None:
    """grad [1, 4] beside a [3, 4] was read as 12 elements."""
    grad, a = np.ones((1, 4), np.float32), np.ones((3, 4), np.float32)
    for short in (grad, grad[0]):
        with pytest.raises(RudnnError, match="broadcastable"):
            rudnn.nn.mul_backward(short, a, a)


def test_contracts_see_numbers_as_the_kernel_does() -> None:
    x, g = np.ones((2, 4), np.float32), np.ones(4, np.float32)
    with pytest.raises(NormalizationError, match="epsilon"):
        rudnn.normalization.rms_norm(x, g, epsilon=1e-60)
    q = np.ones((1, 1, 2, 4), np.float32)
    with pytest.raises(RudnnError, match="scale finite"):
        options = rudnn.attention.AttentionOptions(scale=1e39)
        rudnn.attention.attention(q, q, q, options=options)


def test_results_are_on_the_queue_of_the_inputs() -> None:
    with rudnn.Queue(rudnn.device()) as queue:
        a = rudnn.tensor(np.ones((2, 3), np.float32))
    b = rudnn.nn.add(a, a)
    assert b.queue is queue
    rudnn.nn.add(a, b)


def test_out_that_cannot_hold_results_is_refused() -> None:
    x = np.ones((3, 4), np.float32)
    same = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (3, 4), (0, 4))
    records = np.zeros((3, 4), np.dtype([("tag", "u1"), ("value", "f4")]))["value"]
    grad = torch.zeros(3, 4, requires_grad=True)
    for out in (same, records, torch.zeros(1, 4).expand(3, 4), grad):
        with pytest.raises(RudnnError, match="out"):
            softmax(x, out=out)


def test_writing_into_a_tensor_that_autograd_saved_is_noticed() -> None:
    a = torch.ones(2, 3, requires_grad=True)
    saved = torch.ones(2, 3)
    y = (a * saved).sum()
    rudnn.nn.add(torch.ones(2, 3), torch.ones(2, 3), out=saved)
    with pytest.raises(RuntimeError, match="modified"):
        y.backward()


def test_settings_are_told_apart_by_type() -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert rudnn.nn.top_k(x, np.int64(2)).values.shape == (2, 2)
    rudnn.nn.top_k(x, 1)
    for k in (True, 1.0):
        with pytest.raises(OperatorError, match="size"):
            rudnn.nn.top_k(x, k)
