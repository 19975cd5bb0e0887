"""Attention against the float64 oracle and torch: options, dtypes, shapes, masks, errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_cases import CASES, DTYPES, Array, Case, close, expected, inputs, normal, poison

from rudnn.dsl.errors import AttentionError, RudnnError
from rudnn.ops.attention import (
    AttentionOptions,
    Autotune,
    Fallback,
    FlashAccelerated,
    FlashUnit,
    Strategy,
    attention,
)

TOLERANCE = {"f32": 4e-6, "f16": 2e-3, "bf16": 2e-2}
# B, Hq, Hkv, Q, K: all dynamic, so one kernel serves the whole list
DYNAMIC = [
    (2, 6, 3, 37, 133), (1, 1, 1, 1, 1), (1, 4, 4, 64, 128), (2, 8, 2, 1, 300), (1, 2, 1, 130, 20),
    (0, 2, 2, 5, 5), (2, 2, 2, 0, 5), (2, 4, 2, 5, 0), (1, 2, 2, 16, 17),
]  # fmt: skip
HEADS = [(1, 1), (7, 3), (16, 40), (64, 64), (100, 1), (257, 512), (512, 31)]

pytestmark = pytest.mark.usefixtures("poisoned")


def check(case: Case, sizes: tuple[int, ...], heads: tuple[int, int], dtype: str) -> None:
    arrays = inputs(case, sizes, heads, DTYPES[dtype])
    want, want_lse = expected(arrays, case.options)
    out = poison(want.shape, DTYPES[dtype])
    lse = poison(want_lse.shape, np.float32)
    got = attention(*arrays, options=case.options, return_lse=True, out=(out, lse))
    assert got[0] is out and got[1] is lse
    close(out, want, TOLERANCE[dtype])
    close(lse, want_lse, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_options_dtypes_and_dynamic_sizes(name: str, dtype: str) -> None:
    for sizes in DYNAMIC:
        check(CASES[name], sizes, (33, 17), dtype)


@pytest.mark.parametrize("heads", HEADS)
def test_head_sizes(heads: tuple[int, int]) -> None:
    for sizes in ((1, 2, 1, 37, 70), (1, 2, 2, 3, 140)):
        check(CASES["padding"], sizes, heads, "f32")


@pytest.mark.parametrize("name", ["plain", "all"])
def test_without_lse_the_result_is_the_same(name: str) -> None:
    arrays = inputs(CASES[name], (2, 6, 3, 37, 133), (33, 17), np.float32)
    options = CASES[name].options
    for strategy in (None, Fallback()):
        both = attention(*arrays, options=options, strategy=strategy, return_lse=True)
        alone = attention(*arrays, options=options, strategy=strategy)
        assert np.array_equal(alone, both[0])


@pytest.mark.parametrize("name", ["plain", "top_left", "mask", "bias"])
def test_agrees_with_torch(name: str) -> None:
    import torch

    case = CASES[name]
    arrays = [None if a is None else torch.from_numpy(a)
              for a in inputs(case, (2, 4, 2, 70, 90), (32, 24), np.float32)]  # fmt: skip
    got = attention(*arrays, options=case.options)
    want = torch.nn.functional.scaled_dot_product_attention(
        *arrays[:3], attn_mask=arrays[4] if arrays[3] is None else arrays[3],
        is_causal=case.options.is_causal, enable_gqa=True,
    )  # fmt: skip
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=4e-6)


def views(a: Array) -> dict[str, Array]:
    """Arrays equal to `a` in strange layouts."""
    wide = np.full([2 * s for s in a.shape], np.nan, a.dtype)
    wide[tuple(slice(0, 2 * s, 2) for s in a.shape)] = a
    return {
        "transposed": np.ascontiguousarray(a.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0),
        "heads inside": np.ascontiguousarray(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        "reversed": np.ascontiguousarray(a[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
        "sparse": wide[tuple(slice(0, 2 * s, 2) for s in a.shape)],
    }


@pytest.mark.parametrize("kind", ["transposed", "heads inside", "reversed", "sparse"])
def test_any_strides(kind: str) -> None:
    plain = inputs(Case("bhqk", "bhqk"), (2, 4, 2, 21, 33), (12, 20), np.float32)
    strange = [views(a)[kind] for a in plain]
    out = views(poison((2, 4, 21, 20), np.float32))[kind]
    result = attention(*strange, out=out)
    assert result is out
    close(out, expected(plain, AttentionOptions())[0], TOLERANCE["f32"])


def test_broadcast_inputs_of_stride_0() -> None:
    rng = np.random.default_rng(0)
    query = np.broadcast_to(normal(rng, 1, 1, 9, 8), (2, 4, 9, 8))
    key = np.broadcast_to(normal(rng, 1, 1, 1, 8), (2, 2, 30, 8))
    value = np.broadcast_to(normal(rng, 1, 2, 30, 1), (2, 2, 30, 5))
    got = attention(query, key, value)
    close(got, expected([query, key, value, None, None], AttentionOptions())[0], 4e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pattern", ["b11k", "bhqk"])
def test_masked_keys_and_values_have_no_influence(pattern: str, bad: float) -> None:
    arrays = inputs(Case(mask=pattern), (2, 2, 1, 70, 150), (16, 24), np.float32)
    gone = ~arrays[3].any(axis=(1, 2)) if pattern == "bhqk" else ~arrays[3][:, 0, 0]
    if pattern == "bhqk":
        arrays[3][..., 5:9] = False
        gone[:, 5:9] = True
    want = attention(*arrays, return_lse=True)
    for which in (1, 2):
        arrays[which] = np.where(gone[:, None, :, None], np.float32(bad), arrays[which])
    got = attention(*arrays, return_lse=True)
    assert np.isfinite(got[0]).all()
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_keys_after_a_causal_row_have_no_influence(alignment: str) -> None:
    options = AttentionOptions(is_causal=True, causal_alignment=alignment)
    arrays = inputs(Case(), (1, 1, 1, 70, 200), (8, 8), np.float32)
    want = attention(*arrays, options=options)
    at = 40
    arrays[1][:, :, at] = np.nan
    arrays[2][:, :, at + 1] = np.inf
    got = attention(*arrays, options=options)
    first = at if alignment == "top_left" else max(0, at - 130)
    np.testing.assert_array_equal(got[:, :, :first], want[:, :, :first])
    assert np.isnan(got[:, :, first + 1 :]).all()


def test_a_nan_that_counts_reaches_its_rows_only() -> None:
    arrays = inputs(Case(), (1, 1, 1, 40, 50), (8, 8), np.float32)
    want = attention(*arrays)
    arrays[0][0, 0, 7, 3] = np.nan
    got = attention(*arrays)
    assert np.isnan(got[0, 0, 7]).all()
    assert np.array_equal(np.delete(got, 7, 2), np.delete(want, 7, 2))
    arrays[0][0, 0, 7, 3] = 0
    arrays[2][0, 0, 11, 2] = np.nan
    got = attention(*arrays)
    assert np.isnan(got[..., 2]).all() and np.isfinite(np.delete(got, 2, 3)).all()


@pytest.mark.parametrize("how", ["mask", "bias"])
def test_rows_that_keep_nothing_are_0(how: str) -> None:
    arrays = inputs(Case(), (2, 2, 2, 20, 140), (8, 8), np.float32)
    keep = np.ones((1, 1, 20, 1), bool)
    keep[:, :, 3:9] = False
    if how == "mask":
        arrays[3] = keep
        arrays[2][0, 0, 4] = np.inf
        arrays[2][0, 0, 4] = np.where(np.arange(8) < 4, np.inf, 1)
    else:
        arrays[4] = np.where(keep, 0, -np.inf).astype(np.float32)
    out, lse = attention(*arrays, return_lse=True)
    assert not out[:, :, 3:9].any() and np.isneginf(lse[:, :, 3:9]).all()
    assert np.isfinite(np.delete(lse, slice(3, 9), 2)).all()
    want, want_lse = expected(arrays, AttentionOptions())
    close(out, want, 4e-6)
    close(lse, want_lse, 1e-5)


def test_a_very_negative_bias_is_a_number() -> None:
    arrays = inputs(Case(), (1, 1, 1, 5, 9), (8, 8), np.float32)
    want = attention(*arrays)
    arrays[4] = np.full((1, 1, 1, 1), -1e30, np.float32)
    got, lse = attention(*arrays, return_lse=True)
    assert np.isfinite(got).all() and (lse < -9e29).all()
    np.testing.assert_allclose(got.sum(), np.broadcast_to(arrays[2].mean(2, keepdims=True),
                                                          want.shape).sum(), rtol=1e-4)  # fmt: skip


def test_large_scores_do_not_overflow() -> None:
    arrays = inputs(Case(), (1, 2, 2, 33, 300), (64, 16), np.float32)
    arrays[0] *= 1e4
    close(attention(*arrays), expected(arrays, AttentionOptions())[0], 1e-3)


def error(match: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(AttentionError, match=match) as info:
        attention(*args, **kwargs)
    assert isinstance(info.value, RudnnError) and isinstance(info.value, ValueError)


def test_errors_say_what_was_needed() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, 1, h, 5, 8) for h in (6, 4, 4))
    error("needs Hq divisible by Hkv, got Hq=6, Hkv=4", q, k, v)
    q = normal(rng, 1, 4, 5, 8)
    error("needs one size of D, got D=8", q, k[..., :7], v)
    error("needs one size of K", q, k, v[:, :, :3])
    error("needs query of shape", q[0], k, v)
    error("needs mask of dtype bool, got", q, k, v, np.ones((5, 5), np.float32))
    error("needs mask broadcastable to", q, k, v, np.ones((5, 4), bool))
    error("needs attn_bias of dtype", q, k, v, None, np.ones((5, 5)))
    error("needs query and key of one dtype", q, k.astype(np.float16), v)
    error("needs query of dtype", *(a.astype(np.float64) for a in (q, k, v)))
    error("needs query of dtype", *(a.astype(np.int32) for a in (q, k, v)))
    for scale in (np.nan, np.inf):
        error("needs scale finite", q, k, v, options=AttentionOptions(scale=scale))
    for cap in (0.0, -1.0, np.nan, np.inf):
        error("needs softcap finite and > 0", q, k, v, options=AttentionOptions(softcap=cap))
    wrong = AttentionOptions(causal_alignment="left")
    error("needs causal_alignment among", q, k, v, options=wrong)
    error("needs out of shape", q, k, v, out=np.empty((1, 4, 5, 7), np.float32))


def test_a_strategy_that_is_none_is_refused() -> None:
    q = np.zeros((1, 1, 2, 4), np.float32)
    error("Autotune needs a tuner, got none here", q, q, q, strategy=Autotune())
    for wrong in ("fast", FlashUnit):
        error("needs strategy to be one of those of rudnn.attention", q, q, q, strategy=wrong)


@pytest.mark.parametrize("strategy", [Fallback(), FlashUnit(), FlashAccelerated()], ids=str)
def test_every_strategy_computes_the_same(strategy: Strategy) -> None:
    """Mask, bias, cap and causal rows at once; what is masked is NaN."""
    case = CASES["all"]
    for sizes in ((2, 6, 3, 37, 133), (1, 2, 2, 130, 20), (2, 4, 2, 5, 0)):
        arrays = inputs(case, sizes, (33, 17), np.float32)
        want, want_lse = expected(arrays, case.options)
        gone = np.broadcast_to(~arrays[3].any(axis=1), (sizes[0], 1, sizes[4]))[:, 0]
        arrays[1], arrays[2] = (
            np.where(gone[:, None, :, None], np.float32(np.nan), a) for a in arrays[1:3]
        )
        out, lse = poison(want.shape, np.float32), poison(want_lse.shape, np.float32)
        attention(*arrays, options=case.options, strategy=strategy, return_lse=True, out=(out, lse))
        close(out, want, TOLERANCE["f32"])
        close(lse, want_lse, 1e-5)


def test_fallback_lets_a_nan_that_counts_through_and_no_other() -> None:
    arrays = inputs(CASES["all"], (1, 2, 2, 12, 30), (8, 8), np.float32)
    arrays[3][:] = True
    arrays[3][..., 5] = False
    arrays[2][0, 0, 5] = arrays[2][0, 1, 7] = np.nan
    got = attention(*arrays, options=AttentionOptions(), strategy=Fallback())
    assert np.isfinite(got[:, 0]).all() and np.isnan(got[:, 1]).all()


def resident_peak() -> int:
    """The most memory that the process has had since it was last asked to forget, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(x for x in status.splitlines() if x.startswith("VmHWM")).split()[1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize(("strategy", "fits"), [(None, True), (Fallback(), False)], ids=str)
def test_tiled_memory_does_not_grow_with_the_scores(strategy: Strategy | None, fits: bool) -> None:
    """The scores would take 128 MiB; `Fallback` does keep their weights."""
    arrays = [np.ones((1, 8, 2048, 64), np.float32) for _ in range(3)]
    attention(*(a[:, :, :64] for a in arrays), strategy=strategy)
    out = np.ones((1, 8, 2048, 64), np.float32)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    attention(*arrays, strategy=strategy, out=out)
    assert (resident_peak() - before < 16 * 2**20) == fits
    np.testing.assert_allclose(out, 1, rtol=1e-5)
