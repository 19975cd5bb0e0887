"""The SPIR-V emitter: vectors, control flow, exchange in a block, matrices, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from spirv_kernels import (
    THREADS,
    N,
    Runner,
    array,
    builtin,
    checked,
    device_features,
    differing,
    f32,
    function,
    i64,
    needs_vulkan,
    samples,
    sync,
)

from rudnn.dsl.errors import CompileError, LoadError
from rudnn.runtime.targets.vulkan import instance as instances
from rudnn.runtime.targets.vulkan.spirv import BASELINE, emit, matrix_unit, pack, unpack
from rudnn.runtime.targets.vulkan.tools import disassemble

pytestmark = pytest.mark.usefixtures("vulkan_is_silent")


def vector(lanes: int, write: Callable[[Any], Any]) -> Any:
    """A vectorised loop."""
    from tvm import tirx

    lane = tirx.Var("lane", "int64")
    return tirx.For(lane, i64(0), i64(lanes), tirx.ForKind.VECTORIZED, write(lane))


def moves(dtype: str, lanes: int, alignment: int) -> Any:
    """Each block writes its runs of `lanes` elements in reverse order, through shared memory."""
    from tvm import tirx

    def make(block: Any, thread: Any, buffers: Any, _: Any) -> Any:
        tile, held = array(THREADS * lanes, dtype, "shared"), array(lanes, dtype, "local")
        here, there = thread * i64(lanes), (i64(THREADS - 1) - thread) * i64(lanes)
        base = (block * i64(THREADS) + thread) * i64(lanes)
        x, y = buffers
        return tirx.SeqStmt([
            tirx.AllocBuffer(tile), tirx.AllocBuffer(held),
            vector(lanes, lambda v: tirx.BufferStore(tile, x[base + v], [here + v])), sync(),
            vector(lanes, lambda v: tirx.BufferStore(held, tile[there + v], [v])),
            vector(lanes, lambda v: tirx.BufferStore(y, held[v], [base + v])),
        ])  # fmt: skip

    return function(make, [(dtype, alignment)] * 2)


@needs_vulkan
@pytest.mark.parametrize("lanes", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint16", "int64"])
def test_vector_moves(run: Runner, dtype: str, lanes: int) -> None:
    x = np.resize(samples(dtype), N * lanes)
    y = np.zeros_like(x)
    aligned = moves(dtype, lanes, 16)
    shader = run(aligned, [x, y], skip=16 // x.itemsize)
    want = x.reshape(-1, THREADS, lanes)[:, ::-1].reshape(-1)
    assert not differing(y, want).any()
    assert shader.readonly == (True, False)
    wide = min(lanes * x.itemsize, 16)
    text = disassemble(shader.words)
    assert (f"ArrayStride {wide}\n" in text) == (wide >= 4), text
    y[:] = 0
    run(moves(dtype, lanes, x.itemsize), [x, y], skip=1)  # any address
    assert not differing(y, want).any()


@needs_vulkan
def test_vector_arithmetic(run: Runner) -> None:
    from tvm import tirx

    x, y = samples("float16"), np.zeros(N + 8, np.float16)
    x = np.resize(np.nan_to_num(x, posinf=1, neginf=-1), 4 * N)
    y = np.zeros(4 * N + 8, np.float16)

    def make(block: Any, thread: Any, buffers: Any, numbers: Any) -> Any:
        base = (block * i64(THREADS) + thread) * i64(4)
        value, (shift, scale) = tirx.Var("value", "float32"), numbers

        def write(lane: Any) -> Any:
            inner = tirx.if_then_else(thread > i64(3), value - f32(1), f32(7))
            result = tirx.Select(value > f32(0), value * scale + f32(1), inner)
            bound = tirx.Let(value, tirx.Cast("float32", buffers[0][base + lane]), result)
            stored = tirx.Cast("float16", bound)
            return tirx.BufferStore(buffers[1], stored, [base + lane + shift])

        return vector(4, write)

    run(function(make, [("float16", 16)] * 2, ("int64", "float32")), [x, y], (3, 2.0))
    wide, thread = x.astype(np.float32), np.arange(4 * N) // 4 % THREADS
    other = np.where(thread > 3, wide - 1, np.float32(7))
    with np.errstate(over="ignore"):
        want = np.where(wide > 0, wide * 2 + 1, other).astype(np.float16)
    assert not differing(y[3 : 4 * N + 3], want).any()
    assert not y[:3].any() and not y[4 * N + 3 :].any()


@needs_vulkan
def test_control_flow(run: Runner) -> None:
    """A while loop with branches (steps to 1 of Collatz), then a loop of nested branches."""
    from tvm import tirx

    def make(block: Any, thread: Any, buffers: Any, numbers: Any) -> Any:
        state, i = array(2, "int64", "local"), block * i64(THREADS) + thread
        value, count = state[i64(0)], state[i64(1)]

        def put(place: int, new: Any) -> Any:
            return tirx.BufferStore(state, new, [i64(place)])

        even = tirx.EQ(tirx.truncmod(value, i64(2)), i64(0))
        step = tirx.IfThenElse(
            even, put(0, tirx.truncdiv(value, i64(2))), put(0, value * i64(3) + i64(1))
        )
        k, twice = tirx.Var("k", "int64"), tirx.Var("twice", "int64")
        inner = tirx.IfThenElse(twice < i64(60), put(1, count + twice), put(1, count - i64(1)))
        guarded = tirx.SeqStmt(
            [tirx.Bind(twice, k * i64(2)), tirx.IfThenElse(twice > thread, inner, None)]
        )
        return tirx.SeqStmt([
            tirx.AllocBuffer(state), put(0, buffers[0][i]), put(1, i64(0)),
            tirx.While(value != i64(1), tirx.SeqStmt([step, put(1, count + i64(1))])),
            tirx.For(k, i64(2), numbers[0], tirx.ForKind.SERIAL, guarded),
            tirx.BufferStore(buffers[1], count, [i]),
        ])  # fmt: skip

    x, y = np.arange(1, N + 1), np.zeros(N, np.int64)
    run(function(make, [("int64", 8)] * 2, ("int64",)), [x, y], (31,))

    def reference(value: int, thread: int) -> int:
        count = 0
        while value != 1:
            value, count = (value * 3 + 1 if value % 2 else value // 2), count + 1
        for twice in range(4, 66, 2):
            if twice > thread:
                count += twice if twice < 60 else -1
        return count

    assert y.tolist() == [reference(int(v), i % THREADS) for i, v in enumerate(x)]


@needs_vulkan
def test_only_the_side_taken_is_read(run: Runner) -> None:
    """The other side would read far outside a local array."""
    from tvm import tirx

    def make(block: Any, thread: Any, buffers: Any, _: Any) -> Any:
        held, i = array(4, "float32", "local"), block * i64(THREADS) + thread
        index = tirx.Cast("int64", buffers[1][i])
        inside = tirx.all(index >= i64(0), index < i64(4))
        k = tirx.Var("k", "int64")
        fill = tirx.BufferStore(held, buffers[0][i] + tirx.Cast("float32", k), [k])
        return tirx.SeqStmt([
            tirx.AllocBuffer(held), tirx.For(k, i64(0), i64(4), tirx.ForKind.SERIAL, fill),
            tirx.BufferStore(buffers[2], tirx.if_then_else(inside, held[index], f32(-1)), [i]),
        ])  # fmt: skip

    x, index, y = samples("float32"), samples("int32"), np.zeros(N, np.float32)
    index[::2] = np.arange(N // 2) % 5
    run(function(make, [("float32", 4), ("int32", 4), ("float32", 4)]), [x, index, y])
    inside = (index >= 0) & (index < 4)
    assert not differing(y, np.where(inside, x + index.astype(np.float32), np.float32(-1))).any()


@needs_vulkan
def test_exchange_in_a_block(run: Runner) -> None:
    """Through shared bools, and through global memory."""
    from tvm import tirx

    def make(block: Any, thread: Any, buffers: Any, _: Any) -> Any:
        positive, start = array(THREADS, "bool", "shared"), block * i64(THREADS)
        x, sums, flags = buffers
        i, after = start + thread, tirx.truncmod(thread + i64(1), i64(THREADS))
        only = tirx.And(positive[i64(THREADS - 1) - thread], tirx.Not(positive[thread]))
        return tirx.SeqStmt([
            tirx.AllocBuffer(positive), tirx.BufferStore(positive, x[i] > f32(0), [thread]),
            tirx.BufferStore(sums, x[i] + f32(1), [i]), sync(),
            tirx.BufferStore(sums, sums[start + after], [i + i64(N)]),
            tirx.BufferStore(flags, only, [i]),
        ])  # fmt: skip

    x = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    sums, flags = np.zeros(2 * N, np.float32), np.zeros(N, np.bool_)
    run(function(make, [("float32", 4), ("float32", 4), ("bool", 1)]), [x, sums, flags])
    rows = x.reshape(-1, THREADS)
    assert np.array_equal(sums[N:].reshape(rows.shape), np.roll(rows + 1, -1, 1))
    assert np.array_equal(flags.reshape(rows.shape), (rows > 0)[:, ::-1] & ~(rows > 0))


@needs_vulkan
@pytest.mark.parametrize("width", [8, 4, 2])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_shuffles(run: Runner, dtype: str, width: int) -> None:
    from tvm import tirx

    subgroup = instances.physical_devices()[0].facts.subgroup
    if not device_features().shuffle or subgroup < 8:
        pytest.skip("needs a device with subgroup shuffles")

    def make(block: Any, thread: Any, buffers: Any, _: Any) -> Any:
        x, down, picked = buffers
        i, mask = block * i64(THREADS) + thread, builtin("tvm_warp_activemask", dtype="uint32")
        sizes = (tirx.const(width, "int32"), tirx.const(subgroup, "int32"))
        half = tirx.const(width // 2, "int32")
        partner = tirx.truncmod(tirx.Cast("int32", thread) + 1, width)
        return tirx.SeqStmt([
            tirx.BufferStore(
                down, builtin("tvm_warp_shuffle_down", mask, x[i], half, *sizes, dtype=dtype), [i]
            ),
            tirx.BufferStore(
                picked, builtin("tvm_warp_shuffle", mask, x[i], partner, *sizes, dtype=dtype), [i]
            ),
        ])  # fmt: skip

    x = np.arange(N).astype(dtype)
    down, picked = np.zeros_like(x), np.zeros_like(x)
    assert run(function(make, [(dtype, 4)] * 3), [x, down, picked]).subgroup
    rows = x.reshape(-1, width)
    kept = rows[:, width - width // 2 :]  # past the end a lane keeps its own
    want = np.concatenate([rows[:, width // 2 :], kept], 1)
    assert np.array_equal(down.reshape(rows.shape), want)
    assert np.array_equal(picked.reshape(rows.shape), np.roll(rows, -1, 1))


@needs_vulkan
@pytest.mark.parametrize("native", [True, False])
def test_atomic_add(run: Runner, native: bool) -> None:
    from tvm import tirx

    if native and not device_features().atomic_float32_add:
        pytest.skip("needs a device that adds floats atomically")

    def make(block: Any, thread: Any, buffers: Any, _: Any) -> Any:
        x, place, sums = buffers
        i = block * i64(THREADS) + thread
        address = builtin("address_of", sums[tirx.Cast("int64", place[i])], dtype="handle")
        return tirx.Evaluate(tirx.call_extern("float32", "rudnn_atomic_add_f32", address, x[i]))

    rng = np.random.default_rng(0)
    x = rng.integers(0, 100, N).astype(np.float32)
    place, sums = rng.integers(0, 10, N).astype(np.int32), np.ones(10, np.float32)
    made = function(make, [("float32", 4), ("int32", 4), ("float32", 4)])
    features = replace(device_features(), atomic_float32_add=native)
    shader = run(made, [x, place, sums], features=features)
    assert shader.readonly == (True, True, False)
    assert np.array_equal(sums, 1 + np.bincount(place, x, 10))


@needs_vulkan
def test_many_numbers_lie_in_a_buffer(run: Runner) -> None:
    from tvm import tirx

    def make(block: Any, thread: Any, buffers: Any, numbers: Any) -> Any:
        i, total = block * i64(THREADS) + thread, i64(0)
        for k, number in enumerate(numbers[:-1]):
            total = total + number * i64(k + 1)
        value = buffers[0][i] + total + tirx.Cast("int64", numbers[-1])
        return tirx.BufferStore(buffers[1], value, [i])

    x, y = samples("int64") // 2, np.zeros(N, np.int64)
    made = function(make, [("int64", 8)] * 2, ("int64",) * 20 + ("float32",))
    shader = run(made, [x, y], (*range(-5, 15), 3.5))
    assert shader.in_buffer and shader.block_bytes > device_features().push_bytes
    assert np.array_equal(y, x + sum((k + 1) * (k - 5) for k in range(20)) + 3)


@pytest.mark.parametrize("operands", ["float16", "bfloat16"])
def test_cooperative_matrices(operands: str) -> None:
    """Every function of a matrix unit, fragments in arrays and in a loop."""
    from tvm import tirx

    unit = matrix_unit((16, 16, 16), operands, 32)
    stored = "float16" if operands == "float16" else "uint16"

    def make(block: Any, thread: Any, buffers: Any, _: Any) -> Any:
        tiles, result = array(768, stored, "shared"), array(256, "float32", "shared")
        a, b, c = (array(2 * unit.a, stored, "local"), array(unit.b, stored, "local"),
                   array(unit.c, "float32", "local"))  # fmt: skip

        def at(buffer: Any, index: Any) -> Any:
            return builtin("address_of", buffer[index], dtype="handle")

        def call(name: str, *arguments: Any) -> Any:
            return tirx.Evaluate(tirx.call_extern("void", f"{unit.intrinsic}_{name}", *arguments))

        def load(name: str, fragment: Any, start: int) -> Any:
            return call(name, fragment, at(tiles, i64(start)), tirx.const(16, "int32"))

        k = tirx.Var("k", "int64")
        mma = call("mma", at(c, i64(0)), at(a, k * i64(unit.a)), at(b, i64(0)))
        return tirx.SeqStmt([
            *(tirx.AllocBuffer(buffer) for buffer in (tiles, result, a, b, c)),
            tirx.BufferStore(tiles, buffers[0][thread], [thread]), sync(),
            call("zero", at(c, i64(0))),
            load("load_a", at(a, i64(0)), 0), load("load_a_t", at(a, i64(unit.a)), 256),
            load("load_b", at(b, i64(0)), 512), load("load_b_t", at(b, i64(0)), 512),
            tirx.For(k, i64(0), i64(2), tirx.ForKind.SERIAL, mma),
            call("store", at(result, i64(0)), tirx.const(16, "int32"), at(c, i64(0))), sync(),
            tirx.BufferStore(buffers[1], result[thread], [thread]),
        ])  # fmt: skip

    made = function(make, [(stored, 16), ("float32", 4)])
    shader = checked(made, replace(BASELINE, matrix=(unit,)), "vulkan1.3")
    text = disassemble(shader.words)
    counts = {f"OpCooperativeMatrix{name}KHR": n for name, n in
              (("Load", 4), ("Store", 1), ("MulAdd", 1))}  # fmt: skip
    assert {name: text.count(f"{name} ") for name in counts} == counts
    assert shader.subgroup and "OpMemoryModel Logical Vulkan" in text
    with pytest.raises(CompileError, match="needs a function known"):
        emit(made, BASELINE)


def copy(dtype: str = "float32") -> Any:
    from tvm import tirx

    def make(block: Any, thread: Any, buffers: Any, _: Any) -> Any:
        i = block * i64(THREADS) + thread
        return tirx.BufferStore(buffers[1], buffers[0][i], [i])

    return function(make, [(dtype, 4)] * 2)


@pytest.mark.parametrize(
    ("dtype", "lack", "message"),
    [
        ("int8", "int8", "8-bit integers"), ("int16", "storage16", "16-bit elements in buffers"),
        ("float16", "float16", "16-bit floats"), ("int64", "int64", "64-bit integers"),
    ],
)  # fmt: skip
def test_what_a_device_lacks_is_told(dtype: str, lack: str, message: str) -> None:
    with pytest.raises(CompileError, match=f"needs a Vulkan device with {message}"):
        emit(copy(dtype), replace(BASELINE, **{lack: False}))


def test_unknown_code_is_refused() -> None:
    from tvm import tirx

    def make(block: Any, thread: Any, buffers: Any, _: Any) -> Any:
        return tirx.BufferStore(buffers[1], tirx.erf(buffers[0][thread]), [thread])

    with pytest.raises(CompileError, match="needs a function known to the SPIR-V emitter"):
        emit(function(make, [("float32", 4)] * 2), BASELINE)
    with pytest.raises(CompileError, match="needs a type that SPIR-V kernels have, got float64"):
        emit(copy("float64"), BASELINE)


def test_shaders_in_a_file() -> None:
    shaders = (checked(copy(), BASELINE), replace(checked(copy("int8"), BASELINE), name="other"))
    data = pack(shaders)
    assert unpack(data) == shaders
    for damaged in (b"", data[:-1], data + b"\0", b"X" + data[1:], data[:40], b"\x7fELF" * 9):
        with pytest.raises(LoadError, match="needs a file of SPIR-V shaders"):
            unpack(damaged)
