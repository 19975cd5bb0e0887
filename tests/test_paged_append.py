"""Appending to paged caches: in place, copied where others look, refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_schedules import (
    DEPTH,
    HEADS,
    KV_HEADS,
    PAGE,
    WIDTH,
    Array,
    Schedule,
    close,
    dense,
    given_mla,
    mla_dense,
    refused,
)
from spirv_kernels import needs_vulkan

import rudnn
from rudnn.paged_attention import DevicePlan, HostPlan, SplitWorkspace

pytestmark = pytest.mark.usefixtures("poisoned")


def appended(s: Schedule, k: Array, v: Array, caches: tuple[Array, Array]) -> list[Array]:
    want = [c.copy() for c in caches]
    for i, (sequence, position) in enumerate(zip(s.ids, s.positions, strict=True)):
        at = s.tables[sequence][position // s.page], position % s.page
        want[0][at], want[1][at] = k[i], v[i]
    return want


def fresh(s: Schedule) -> tuple[Array, Array, Array, Array]:
    k, v = (s.unit(len(s.ids), KV_HEADS, n).astype(np.float32) for n in (DEPTH, WIDTH))
    return k, v, s.cache(KV_HEADS, DEPTH), s.cache(KV_HEADS, WIDTH)


APPENDED = ([40, 33, 0, 1], [*((0, p) for p in range(10, 40)), (3, 0), (1, 32), (1, 5)])


def test_append_writes_in_place_what_is_the_callers_alone() -> None:
    s = Schedule(*APPENDED)
    k, v, keys, values = fresh(s)
    want = appended(s, k, v, (keys, values))
    plan = DevicePlan.upload(s.host(), k)
    places = keys.ctypes.data, values.ctypes.data
    keys, values = plan.append(k, v, keys, values)
    assert (keys.ctypes.data, values.ctypes.data) == places
    np.testing.assert_array_equal(keys, want[0])
    np.testing.assert_array_equal(values, want[1])


@pytest.mark.parametrize("kind", ["numpy", "torch", "rudnn"])
@pytest.mark.parametrize("how", ["view", "name", "both", "alone"])
def test_append_copies_what_others_look_at(kind: str, how: str) -> None:
    import torch

    def made(array: Array) -> Any:
        return {"numpy": np.copy, "torch": torch.tensor, "rudnn": rudnn.tensor}[kind](array)

    s = Schedule(*APPENDED)
    k, v, keys, values = fresh(s)
    before, want = keys.copy(), appended(s, k, v, (keys, values))
    cache, other = made(keys), made(values)
    other_key = cache[:1] if how == "view" else cache if how == "name" else None
    plan = DevicePlan.upload(s.host(), cache)
    if how == "both":
        got = plan.append(made(k), made(k), cache, cache)
    else:
        got = plan.append(made(k), made(v), cache, other)
        np.testing.assert_array_equal(np.asarray(got[1]), want[1])
    np.testing.assert_array_equal(np.asarray(got[0]), want[0])
    if how == "alone":
        assert got[0] is cache and got[1] is other
    else:
        assert got[0] is not cache
        np.testing.assert_array_equal(np.asarray(cache), before)
    del other_key


def test_append_copies_what_torch_has_from_numpy() -> None:
    """The array behind the tensor was written."""
    import torch

    s = Schedule(*APPENDED)
    k, v, keys, values = fresh(s)
    before, want = keys.copy(), appended(s, k, v, (keys, values))
    given = [torch.from_numpy(a) for a in (k, v, keys, values)]
    plan = DevicePlan.upload(s.host(), given[0])
    got = plan.append(*given)
    np.testing.assert_array_equal(got[0].numpy(), want[0])
    np.testing.assert_array_equal(keys, before)


def test_append_of_read_only_memory_copies() -> None:
    s = Schedule(*APPENDED)
    k, v, keys, values = fresh(s)
    want = appended(s, k, v, (keys, values))
    keys.flags.writeable = False
    got = DevicePlan.upload(s.host(), k).append(k, v, keys, values)
    np.testing.assert_array_equal(got[0], want[0])
    assert np.isnan(keys).any() and got[1] is values


def test_append_refuses_two_writes_to_a_slot() -> None:
    s = Schedule([40, 33], [(0, 5), (1, 2), (0, 5)])
    k, v, keys, values = fresh(s)
    before = keys.copy()
    plan = DevicePlan.upload(s.host(), k)
    page = s.tables[0][0]
    refused(f"needs a slot for each key that is appended, got place 5 of page {page} "
            "for queries 0 and 2", lambda: plan.append(k, v, keys, values))  # fmt: skip
    np.testing.assert_array_equal(keys, before)
    s = Schedule([40, 33], [(0, 5), (1, 5)])
    s.share_prefix(0, 1, 1)
    plan = DevicePlan.upload(s.host(), k)
    refused("for queries 0 and 1", lambda: plan.append(k[:2], v[:2], keys, values))
    plan = DevicePlan.upload(HostPlan(PAGE, s.pages, [[]], [0], [0], [0]), k)
    refused("needs lengths that include what is appended, got length 0 of sequence 0",
            lambda: plan.append(k[:1], v[:1], keys, values))  # fmt: skip
    refused("needs key_cache of shape", lambda: plan.append(k[:1], v[:1], keys[1:], values))


@needs_vulkan
def test_on_vulkan_decoding_step_by_step() -> None:
    s = Schedule([35, 20], [(0, 34), (1, 19)])
    k, v, keys, values = fresh(s)
    want = appended(s, k, v, (keys, values))
    there = [rudnn.tensor(a, device="vulkan") for a in (k, v, keys, values)]
    plan = DevicePlan.upload(s.host(), there[0])
    caches = plan.append(*there)
    np.testing.assert_array_equal(caches[0].numpy(), want[0])
    np.testing.assert_array_equal(there[2].numpy(), keys)  # `there` holds it too
    q = s.unit(2, HEADS, DEPTH).astype(np.float32)
    q_there = rudnn.tensor(q, device="vulkan")
    got = plan.attention(q_there, *caches, 0.2, True)
    close(got.numpy(), dense(s, q, *want, 0.2, True))
    space = SplitWorkspace(q_there, 2, HEADS, WIDTH, 4)
    close(plan.attention_with_workspace(q_there, *caches, 0.2, True, space).numpy(),
          dense(s, q, *want, 0.2, True))  # fmt: skip
    mla = given_mla(s)
    close(plan.mla(*(rudnn.tensor(a, device="vulkan") for a in mla), 0.15, True).numpy(),
          mla_dense(s, mla, 0.15, True))  # fmt: skip
