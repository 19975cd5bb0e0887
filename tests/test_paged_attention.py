"""Paged attention and MLA: against dense attention, plans, splits, errors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from paged_schedules import (
    DECODE,
    DEPTH,
    HEADS,
    KV_HEADS,
    MIXED,
    PAGE,
    WIDTH,
    Schedule,
    close,
    dense,
    given,
    given_mla,
    mla_dense,
    refused,
)
from spirv_kernels import needs_vulkan

import rudnn
from rudnn.errors import DeviceError, WorkspaceError
from rudnn.paged_attention import DevicePlan, HostPlan, SplitWorkspace
from rudnn.runtime.device import host as host_device

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", [MIXED, DECODE], ids=["mixed", "decode"])
def test_pages_hold_what_dense_attention_sees(schedule: Any, causal: bool, dtype: Any) -> None:
    s = Schedule(*schedule)
    q, k, v = given(s, dtype)
    plan = DevicePlan.upload(s.host(), like=q)
    for _ in range(2):
        got = plan.attention(q, k, v, 0.2, causal)
        close(got, dense(s, q, k, v, 0.2, causal), np.dtype(dtype).name)
    out = np.full_like(got, np.nan)
    assert plan.attention(q, k, v, 0.2, causal, out=out) is out
    assert out.tobytes() == got.tobytes()


def test_one_sequence_is_rudnns_own_dense_attention() -> None:
    s = Schedule([90], [(0, p) for p in range(90)])
    q, k, v = given(s)
    got = DevicePlan.upload(s.host(), q).attention(q, k, v, 0.3, True)
    keys, values = (s.history(c, 0).transpose(1, 0, 2)[None] for c in (k, v))
    options = rudnn.attention.AttentionOptions(scale=0.3, is_causal=True)
    want = rudnn.attention.attention(q.transpose(1, 0, 2)[None], keys, values, options=options)
    np.testing.assert_allclose(got, want[0].transpose(1, 0, 2), rtol=0, atol=1e-6)


def test_shared_pages() -> None:
    s = Schedule([70, 90], [(0, 69), (1, 89), (1, 3)])
    s.share_prefix(0, 1, 4)
    q, k, v = given(s)
    got = DevicePlan.upload(s.host(), q).attention(q, k, v, 0.2, True)
    close(got, dense(s, q, k, v, 0.2, True))


def test_the_order_of_pages_does_not_change_a_bit() -> None:
    results = []
    for seed in (1, 2):
        s = Schedule(*MIXED, seed=seed)
        s.random = np.random.default_rng(7)
        results.append(DevicePlan.upload(s.host(), np.zeros(1, np.float32)).attention(
            *given(s), 0.2, True))  # fmt: skip
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_mla(dtype: Any) -> None:
    cases = [(5, False, MIXED), (5, True, DECODE), (70, True, DECODE)]
    for heads, causal, schedule in cases if dtype is np.float32 else cases[1:2]:
        s = Schedule(*schedule)
        arrays = given_mla(s, heads, dtype)
        plan = DevicePlan.upload(s.host(), arrays[0])
        got = plan.mla(*arrays, 0.15, causal)
        close(got, mla_dense(s, arrays, 0.15, causal), np.dtype(dtype).name)


@pytest.mark.parametrize("schedule", [MIXED, DECODE], ids=["mixed", "decode"])
def test_splits_agree_with_none_and_are_repeatable(schedule: Any) -> None:
    s = Schedule(*schedule)
    q, k, v = given(s)
    arrays = given_mla(s)
    plan = DevicePlan.upload(s.host(), q)
    whole, whole_mla = plan.attention(q, k, v, 0.2, True), plan.mla(*arrays, 0.15, True)
    for splits in range(2, 33, 5):
        space = SplitWorkspace(q, len(q), HEADS, WIDTH, splits)
        assert space.bytes() == 4 * len(q) * HEADS * splits * (WIDTH + 1)
        got = plan.attention_with_workspace(q, k, v, 0.2, True, space)
        close(got, whole.astype(np.float64))
        again = plan.attention_with_workspace(q, k, v, 0.2, True, space)
        assert got.tobytes() == again.tobytes()
        space = SplitWorkspace(q, len(q), 5, 40, splits)
        got = plan.mla_with_workspace(*arrays, 0.15, True, space)
        close(got, whole_mla.astype(np.float64))


def test_few_queries_with_long_histories_are_split_by_default() -> None:
    s = Schedule([3000], [(0, 2999)])
    q, k, v = given(s)
    plan = DevicePlan.upload(s.host(), q)
    assert 2 <= plan.splits(HEADS // KV_HEADS) <= 32
    close(plan.attention(q, k, v, 0.2, True), dense(s, q, k, v, 0.2, True))
    short = Schedule(*MIXED)
    assert DevicePlan.upload(short.host(), q).splits(3) == 1


def test_no_queries_no_sequences_no_pages() -> None:
    q = np.zeros((0, HEADS, DEPTH), np.float32)
    none = np.zeros((0, 3), int)
    for pages, tables, lengths in ((5, [[1]], [3]), (0, [], []), (0, none, [])):
        k, v = (np.zeros((pages, 4, KV_HEADS, n), np.float32) for n in (DEPTH, WIDTH))
        plan = DevicePlan.upload(HostPlan(4, pages, tables, lengths, [], []), like=q)
        assert plan.attention(q, k, v, 1.0, True).shape == (0, HEADS, WIDTH)
        new = np.zeros((0, KV_HEADS, WIDTH), np.float32)
        assert plan.append(q[:, :KV_HEADS], new, k, v)[0] is k
        assert plan.attention(q[:, :0], k, v, 1.0, True).shape == (0, 0, WIDTH)
    q, cache = np.ones((1, 2, 8), np.float32), np.zeros((0, 4, 1, 8), np.float32)
    plan = DevicePlan.upload(HostPlan(4, 0, [[]], [0], [0], [0]), q)
    assert not plan.attention(q, cache, cache, 1.0, False).any()


def test_offsets_past_32_bits() -> None:
    pages, page, depth = 4097, 512, 1024  # pages · page · depth > 2³¹
    k = np.zeros((pages, page, 1, depth), np.float16)  # untouched memory is not there
    v = np.zeros((pages, page, 1, 1), np.float16)
    random = np.random.default_rng(0)
    s = Schedule([2], [(0, 1)], page)
    s.pages, s.tables = pages, [[pages - 1]]
    k[-1, :2], v[-1, :2] = random.uniform(-1, 1, (2, 1, depth)), random.uniform(-1, 1, (2, 1, 1))
    q = random.uniform(-1, 1, (1, 1, depth)).astype(np.float16)
    got = DevicePlan.upload(s.host(), q).attention(q, k, v, 0.1, True)
    close(got, dense(s, q, k, v, 0.1, True), "float16")


def test_torch_tensors_give_torch_tensors() -> None:
    import torch

    s = Schedule(*MIXED)
    q, k, v = given(s)
    tensors = [torch.from_numpy(a) for a in (q, k, v)]
    plan = DevicePlan.upload(s.host(), like=tensors[0])
    got = plan.attention(*tensors, 0.2, True)
    assert isinstance(got, torch.Tensor)
    close(got.numpy(), dense(s, q, k, v, 0.2, True))
    space = SplitWorkspace(tensors[0], len(q), HEADS, WIDTH, 3)
    split = plan.attention_with_workspace(*tensors, 0.2, True, space)
    assert isinstance(split, torch.Tensor)
    close(split.numpy(), dense(s, q, k, v, 0.2, True))


# --- plans ---


def test_a_plan_keeps_nothing_of_the_caller() -> None:
    s = Schedule(*DECODE)
    lengths = np.array(s.lengths)
    plan_host = HostPlan(s.page, s.pages, s.tables, lengths, s.ids, s.positions)
    lengths[:] = -5
    s.tables[0][0] = -9
    q, k, v = given(Schedule(*DECODE))
    watched = [weakref.ref(a) for a in (q, k, v)]
    plan = DevicePlan.upload(plan_host, like=q)
    got = plan.attention(q, k, v, 0.2, True)
    close(got, dense(Schedule(*DECODE), q, k, v, 0.2, True))
    del q, k, v
    gc.collect()
    assert [w() for w in watched] == [None] * 3


@needs_vulkan
def test_a_plan_is_for_one_device_and_queue() -> None:
    s = Schedule(*DECODE)
    q, k, v = given(s)
    there = [rudnn.tensor(a, device="vulkan") for a in (q, k, v)]
    with pytest.raises(DeviceError, match="needs q on llvm:0, where the plan is, got vulkan:0"):
        DevicePlan.upload(s.host(), q).attention(*there, 0.2, True)
    plan = DevicePlan.upload(s.host(), there[0])
    with pytest.raises(DeviceError, match="needs q on vulkan:0, where the plan is, got llvm:0"):
        plan.attention(q, k, v, 0.2, True)
    close(plan.attention(*there, 0.2, True).numpy(), dense(s, q, k, v, 0.2, True))
    other = rudnn.Queue(there[0].device)
    moved = [a.to(other) for a in there]
    with pytest.raises(DeviceError, match="needs q on the queue of the plan, got another"):
        plan.attention(*moved, 0.2, True)
    space = SplitWorkspace(moved[0], len(q), HEADS, WIDTH, 2)
    with pytest.raises(DeviceError, match="needs workspace on the queue of the plan"):
        plan.attention_with_workspace(*there, 0.2, True, space)


def test_a_host_tensor_of_another_queue_is_refused() -> None:
    s = Schedule(*DECODE)
    first, second = (rudnn.Queue(host_device()) for _ in range(2))
    here = [rudnn.tensor(a, queue=first) for a in given(s)]
    there = [a.to(second) for a in here]
    plan = DevicePlan.upload(s.host(), here[0])
    plan.attention(*here, 0.2, True)
    with pytest.raises(DeviceError, match="needs q on the queue of the plan"):
        plan.attention(*there, 0.2, True)


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    def host(**changed: Any) -> Any:
        fits: dict[str, Any] = {"page_size": 4, "pages": 6, "tables": [[5, 0], [2]]}
        fits |= {"lengths": [7, 3], "sequence_ids": [0, 1], "positions": [6, 0]}
        return lambda: HostPlan(**(fits | changed))

    host()()
    refused("needs page_size a whole number ≥ 1, got 0", host(page_size=0))
    refused("needs pages a whole number ≥ 0, got True", host(pages=True))
    refused(r"needs tables\[0\] in 0 … 5, got 6 at 1", host(tables=[[5, 6], [2]]))
    refused(r"needs tables\[1\] in 0 … 5, got -1 at 0", host(tables=[[5, 0], [-1]]))
    host(tables=[[5, 0, -1], [2, 99]])()  # past the length
    refused(r"needs at least 2 pages in tables\[0\] for length 7, got 1", host(tables=[[5], [2]]))
    refused("needs tables of 2 dims, got 1 dims", host(tables=np.arange(3)))
    refused(r"needs tables\[0\] of integers, got float64", host(tables=[[0.5], [2]]))
    refused("needs a length for each of the tables, got 2 tables and 1 lengths", host(lengths=[7]))
    refused("needs lengths in 0 … 2147483647, got -1 at 1", host(lengths=[7, -1]))
    refused("needs lengths of integers, got float64", host(lengths=[7.0, 3.0]))
    refused("needs sequence_ids in 0 … 1, got 2 at 1", host(sequence_ids=[0, 2]))
    refused("needs a position for each of sequence_ids, got 2 .* 1 pos", host(positions=[6]))
    refused(r"needs positions\[0\] in 0 … 6, below the length of sequence 0, got 7",
            host(positions=[7, 0]))  # fmt: skip
    refused(r"needs positions\[1\] in 0 … 2", host(positions=[6, -1]))
    refused("needs positions of one dim, got 2 dims", host(positions=[[6, 0]]))


def test_the_keys_of_a_split_wrapped_round_at_32_bits() -> None:
    """They were whole pages, and then less than 0: nothing was attended to."""
    longest = 2**31 - 1
    tiles = HostPlan(2**30 + 1, 1, [[0, 0]], [longest], [0], [longest - 1]).tiles(1, True, 1)
    assert tiles.chunks == tiles.ends == longest and tiles.keys >= longest


def test_arrays_that_do_not_fit_are_refused() -> None:
    s = Schedule(*DECODE)
    q, k, v = given(s)
    plan = DevicePlan.upload(s.host(), q)

    def attend(q: Any = q, k: Any = k, v: Any = v, scale: Any = 0.2, **rest: Any) -> Any:
        return lambda: plan.attention(q, k, v, scale, True, **rest)

    refused(r"needs q of shape \[queries, Hq, D\] = \[6, Hq, D\], got \[5, 6, 24\]", attend(q[:5]))
    refused(r"needs k of shape .* = \[\d+, 16, Hkv, 24\]", attend(k=k[..., :23]))
    refused("needs k of shape", attend(k=k[1:]))
    refused("needs v of shape", attend(v=v[:, :, :1]))
    refused("needs Hq divisible by Hkv, got Hq=5, Hkv=2", attend(q[:, :5].copy()))
    refused(r"needs q contiguous, stride 144 at dim 0, got stride 168 there",
            attend(np.zeros((6, 7, 24), np.float32)[:, :6]))  # fmt: skip
    refused("needs k contiguous, stride 48 at dim 1, got stride -48",
            attend(k=k[:, ::-1]))  # fmt: skip
    refused("needs k of the query's dtype, f32, got f16", attend(k=k.astype(np.float16)))
    refused("needs q of dtype f32, f16 or bf16, got f64", attend(q.astype(np.float64)))
    for scale in (0.0, -1.0, np.nan, np.inf, "1"):
        refused("needs scale finite and > 0, got", attend(scale=scale))
    refused("needs out of shape", attend(out=np.empty((6, 6, 21), np.float32)))
    deep = np.zeros((6, 2, 1025), np.float32)
    cache = np.zeros((s.pages, PAGE, 1, 1025), np.float32)
    refused("needs D in 1 … 1024, got 1025", attend(deep, cache, cache))
    refused("needs D in 1 … 1024, got 0", attend(deep[..., :0], cache[..., :0], cache))
    q, qp, latent, kp = given_mla(s)
    refused("needs qp of shape", lambda: plan.mla(q, qp[:, :3], latent, kp, 0.1, True))
    wide = np.zeros((6, 5, 257), np.float32)
    refused("needs P in 1 … 256, got 257", lambda: plan.mla(q, wide, latent, kp, 0.1, True))
    both = np.zeros((s.pages, PAGE, 2, 40), np.float32)
    refused("needs latent of shape", lambda: plan.mla(q, qp, both, kp, 0.1, True))


def test_workspaces_say_their_size_and_are_for_one_shape() -> None:
    s = Schedule(*DECODE)
    q, k, v = given(s)
    for splits in (1, 33, 2.0, True):
        refused("needs splits in 2 … 32, got", lambda: SplitWorkspace(q, 6, HEADS, WIDTH, splits))  # noqa: B023
    with pytest.raises(WorkspaceError, match="at most 67108864 bytes, got 169082880 for queries="):
        SplitWorkspace(q, 320, 32, 128, 32)
    with pytest.raises(WorkspaceError, match="got 4398046511104 for queries=1048576, heads=256"):
        SplitWorkspace(q, *np.array([2**20, 256, 127], np.int32), 32)  # no such number in int32
    plan = DevicePlan.upload(s.host(), q)
    space = SplitWorkspace(q, 6, HEADS, WIDTH + 1, 2)
    refused(r"needs a workspace for \[queries, heads, value_dim\] = \[6, 6, 20\], got \[6, 6, 21\]",
            lambda: plan.attention_with_workspace(q, k, v, 0.2, True, space))  # fmt: skip
