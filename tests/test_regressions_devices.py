"""Bugs of devices, queues and events that once were; names tell the symptom."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import rudnn
from rudnn.dsl import In, Out, axes, exp, log, op, where
from rudnn.dsl import sum as sum_
from rudnn.dsl.declare import Declaration
from rudnn.dsl.dtypes import DType, f32, i32, u32
from rudnn.errors import DeviceError, LaunchError
from rudnn.runtime.bind import View, rows_aligned
from rudnn.runtime.device import current_queue
from rudnn.runtime.targets.vulkan.driver import VulkanDriver, driver
from rudnn.runtime.targets.vulkan.gpu import opened
from rudnn.runtime.targets.vulkan.launch import Call, _Pointer

needs_vulkan = pytest.mark.skipif(not driver().device_names(), reason="needs a Vulkan device")


def test_a_queue_entered_by_two_threads_gave_one_the_queue_of_the_other() -> None:
    device = rudnn.device("llvm")
    shared, own = rudnn.Queue(device), rudnn.Queue(device)
    entered, both, left = (threading.Event() for _ in range(3))
    found: dict[str, Any] = {}

    def first() -> None:
        with shared:
            entered.set()
            both.wait(10)
        found["first"] = current_queue(device)
        left.set()

    def second() -> None:
        entered.wait(10)
        with own:
            with shared:
                both.set()
                left.wait(10)
            found["second"] = current_queue(device)

    threads = [threading.Thread(target=f) for f in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"first": device.default_queue, "second": own}


@needs_vulkan
def test_a_queue_of_another_device_hid_the_one_around_it() -> None:
    device = rudnn.device("vulkan")
    outer = rudnn.Queue(device)
    with outer, rudnn.Queue(rudnn.device("llvm")):
        assert rudnn.empty((3,), device=device).queue is outer


@needs_vulkan
def test_a_queue_and_another_device_were_taken_together() -> None:
    queue = rudnn.Queue(rudnn.device("llvm"))
    assert rudnn.empty((3,), queue=queue, device="llvm").queue is queue
    for make in (rudnn.empty, rudnn.tensor):
        with pytest.raises(DeviceError, match="needs a queue of"):
            make((3,), queue=queue, device="vulkan")


@pytest.mark.parametrize("name", ["llvm", pytest.param("vulkan", marks=needs_vulkan)])
def test_kept_call_plans_kept_queues_and_their_workspaces(name: str) -> None:
    gone = []
    for _ in range(4):
        queue = rudnn.Queue(rudnn.device(name))
        x = rudnn.tensor(np.ones((2, 3), np.float32), queue=queue)
        assert (rudnn.nn.add(x, x, out=x).numpy() == 2).all()
        gone.append(weakref.ref(queue))
        del queue, x
    gc.collect()
    assert [queue() for queue in gone] == [None] * 4


@needs_vulkan
def test_a_queue_used_first_by_several_threads_left_its_stream_to_several_queues() -> None:
    queues, start = [rudnn.Queue(rudnn.device("vulkan"))], threading.Barrier(4)

    def use() -> None:
        start.wait(10)
        opened(0).stream(queues[0])

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queues.clear()
    gc.collect()
    idle = opened(0).idle
    assert len({id(stream) for stream in idle}) == len(idle)


@needs_vulkan
def test_events_of_two_devices_raised_an_attribute_error() -> None:
    here, there = (rudnn.device(name).default_queue.record() for name in ("llvm", "vulkan"))
    for later, earlier in ((here, there), (there, here)):
        with pytest.raises(DeviceError, match="needs two events of one device, got"):
            later.since(earlier)


@needs_vulkan
def test_an_event_before_the_other_was_five_centuries_after_it() -> None:
    queue = rudnn.device("vulkan").default_queue
    first, second = queue.record(), queue.record()
    assert second.since(first) == -first.since(second)
    assert -60 < first.since(second) <= 0


def test_memory_usage_took_no_name() -> None:
    assert rudnn.memory_usage("llvm") == rudnn.memory_usage()
    with pytest.raises(DeviceError, match="needs one of the devices"):
        rudnn.memory_usage("nowhere")


def _divided(dtype: DType) -> Declaration:
    results = tuple(Out("R", dtype=dtype, name=name) for name in ("q", "m", "chosen"))

    @op(out=results, example={"R": 9})
    def divided(a: Any = In("R", dtype=dtype), b: Any = In("R", dtype=dtype)) -> Any:
        """// and % by data, also where another value is selected."""
        r = axes("R")
        return a[r] // b[r], a[r] % b[r], where(b[r] != 0, a[r] // b[r], 9)

    return divided


@pytest.mark.parametrize("dtype", [i32, u32], ids=str)
@pytest.mark.parametrize("name", ["llvm", pytest.param("vulkan", marks=needs_vulkan)])
def test_an_integer_divided_by_0_in_the_data_ended_the_process(name: str, dtype: DType) -> None:
    least = -(2**31)
    numerators, divisors = [5, -5, 0, least, least, 7, -7, 7, 8], [0, 0, 0, -1, 0, -1, 2, -2, least]
    a, b = (np.array(values, np.int32).view(dtype.numpy) for values in (numerators, divisors))
    run = _divided(dtype)
    q, m, chosen = run(rudnn.tensor(a, device=name), rudnn.tensor(b, device=name))
    with np.errstate(all="ignore"):
        assert np.array_equal(q.numpy(), a // b) and np.array_equal(m.numpy(), a % b)
        assert np.array_equal(chosen.numpy(), np.where(b != 0, a // b, 9))


@needs_vulkan
def test_a_thread_started_kernels_on_a_workspace_that_another_had_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @op(out=Out("R"), example={"R": 2, "H": 5})
    def total(x: Any = In("R", "H")) -> Any:
        """Long rows, so that their parts are in the workspace."""
        r, h = axes("R", "H")
        return sum_(x[r, h], over=h)

    steps: list[tuple[str, int]] = []
    arena, start = VulkanDriver.arena, Call.__call__

    def take(self: VulkanDriver, queue: Any, nbytes: int) -> int:
        found = arena(self, queue, nbytes)
        steps.append(("take", threading.get_ident()))
        time.sleep(0.01)
        return found

    def begin(self: Call, packed: bytes, threads: int) -> int:
        steps.append(("start", threading.get_ident()))
        return start(self, packed, threads)

    x = rudnn.tensor(np.ones((2, 500), np.float32), device="vulkan")
    total(x)
    monkeypatch.setattr(VulkanDriver, "arena", take)
    monkeypatch.setattr(Call, "__call__", begin)
    threads = [threading.Thread(target=lambda: [total(x) for _ in range(3)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [step for step, _ in steps] == ["take", "start"] * 9
    assert all(steps[i][1] == steps[i + 1][1] for i in range(0, 18, 2))


def test_one_row_was_not_moved_by_16_bytes() -> None:
    assert rows_aligned(View(f32, (1, 8), (1, 1), aligned=True))  # as a pack without dims is bound
    assert rows_aligned(View(f32, (1, 3, 8), (7, 8, 1), aligned=True))
    assert not rows_aligned(View(f32, (2, 8), (9, 1), aligned=True))


@op(out=(Out("R", name="whole"), Out("R", "H", name="each")), example={"R": 4, "H": 5})
def of_each_other(x: Any = In("R", "H")) -> Any:
    """log and exp of what is log and exp already, of a row and of its elements."""
    r, h = axes("R", "H")
    most = log(sum_(exp(x[r, h]), over=h))
    again, once = exp(most), exp(x[r, h])
    twice = log(once) * log(once)
    whole = again * log(again) + exp(most * most) * exp(most * most)
    return whole, where(once > 1, exp(twice) * exp(twice) + log(exp(twice)) * once, twice)


@pytest.mark.parametrize("name", ["llvm", pytest.param("vulkan", marks=needs_vulkan)])
def test_functions_of_each_other_took_minutes_or_met_a_name_twice(name: str) -> None:
    """ "Binding of variable x conflicts"."""
    x = np.random.default_rng(3).uniform(-0.5, 0.5, (3, 19)).astype(np.float32)[:, :3]
    whole, each = (y.numpy() for y in of_each_other(rudnn.tensor(x, device=name)))
    x = x.astype(np.float64)
    most = np.log(np.exp(x).sum(1))
    np.testing.assert_allclose(whole, np.exp(most) * most + np.exp(2 * most**2), rtol=1e-5)
    want = np.where(x > 0, np.exp(2 * x**2) + x**2 * np.exp(x), x**2)
    np.testing.assert_allclose(each, want, rtol=1e-5, atol=1e-7)


def test_bytes_past_2_31_had_negative_indices_on_vulkan() -> None:
    """SPIR-V takes an index of 32 bits as signed; wider elements reach no device's limit."""
    call = object.__new__(Call)
    call.loaded = cast(Any, "kernel")

    def bound(itemsize: int, nbytes: int) -> Any:
        step = SimpleNamespace(pointers=[_Pointer(0, None, itemsize)], numbers=[], pack=_nothing)
        held = SimpleNamespace(
            address=64, nbytes=nbytes, offset=0, block=SimpleNamespace(buffer=None)
        )
        sized = cast(Any, SimpleNamespace(step=step, offsets=[0]))
        return call._bound(sized, [cast(Any, held)], (64,))[0]

    assert bound(1, 2**31) == [(None, 0, 2**31)]
    assert bound(2, 2**32 - 4) == [(None, 0, 2**32 - 4)]
    with pytest.raises(LaunchError, match="kernel needs tensors in memory of at most 2147483648"):
        bound(1, 2**31 + 1)


def _nothing(*_: int) -> bytes:
    return b""
