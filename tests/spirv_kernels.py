"""Device functions written by hand, and running what the SPIR-V emitter makes of them."""

from __future__ import annotations

import math
import struct
import subprocess
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rudnn.runtime.cache import DiskCache
from rudnn.runtime.device import Device, Queue
from rudnn.runtime.plan import Argument, Launch, LaunchPlan, Slot
from rudnn.runtime.targets.vulkan import instance as instances
from rudnn.runtime.targets.vulkan.driver import driver
from rudnn.runtime.targets.vulkan.record import features_of
from rudnn.runtime.targets.vulkan.spirv import (
    Shader,
    SpirvFeatures,
    emit,
    pack,
)
from rudnn.runtime.targets.vulkan.tools import disassemble, find

Array = np.ndarray[Any, Any]
Make = Callable[..., Any]

needs_vulkan = pytest.mark.skipif(
    not driver().device_names(),
    reason="needs Vulkan: pip install 'rudnn[vulkan]'; apt install mesa-vulkan-drivers libvulkan1 "
    "vulkan-validationlayers",
)
THREADS = 64
N = 512
INTS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32")
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, math.inf, -math.inf, math.nan, 1e-40, 2049.0, 2051.0,
    # around f16's overflow, its least normal and its least denormal, with ties
    65504.0, 65519.0, 65520.0, 65535.0, 6.1e-5, 6.097e-5, -3.1e-5, 1e-7, 6e-8, 2.0**-25, 3e-8,
]  # fmt: skip


@lru_cache(maxsize=1)
def device_features() -> SpirvFeatures:
    return features_of(instances.physical_devices()[0].facts)


def i64(value: int) -> Any:
    from tvm import tirx

    return tirx.IntImm("int64", value)


def f32(value: float) -> Any:
    from tvm import tirx

    return tirx.const(value, "float32")


def builtin(name: str, *arguments: Any, dtype: str = "int32") -> Any:
    from tvm import tirx

    return tirx.call_intrin(dtype, f"tirx.{name}", *arguments)


def array(count: int, dtype: str, scope: str) -> Any:
    from tvm import tirx

    return tirx.decl_buffer((i64(count),), dtype, scope, scope=scope)


def sync() -> Any:
    from tvm import tirx

    return tirx.Evaluate(builtin("tvm_storage_sync", "shared"))


def function(make: Make, buffers: Sequence[tuple[str, int]], numbers: Sequence[str] = ()) -> Any:
    """The device function whose body is `make(block, thread, buffers, numbers)`.

    `buffers` are dtypes with the alignment of the address in bytes.
    """
    import tvm
    from tvm import tirx
    from tvm.ir import PointerType, PrimType, Range

    pointers = [tirx.Var(f"p{i}", PointerType(PrimType(d))) for i, (d, _) in enumerate(buffers)]
    declared = [
        tirx.decl_buffer((i64(2**20),), d, f"b{i}", data_alignment=a, strides=[i64(1)])
        for i, (d, a) in enumerate(buffers)
    ]
    variables = [tirx.Var(f"n{i}", d) for i, d in enumerate(numbers)]
    axes = {tag: tirx.Var(tag[:-2], "int32") for tag in ("threadIdx.x", "blockIdx.x")}
    thread, block = (tirx.Cast("int64", axis) for axis in axes.values())
    body = make(block, thread, declared, variables)
    for (tag, axis), extent in zip(axes.items(), (THREADS, 2**16), strict=True):
        iter_var = tirx.IterVar(Range(0, extent), axis, tirx.IterVar.ThreadIndex, tag)
        body = tirx.AttrStmt(iter_var, "thread_extent", tirx.IntImm("int32", extent), body)
    views = [tirx.DeclBuffer(b, data=p) for b, p in zip(declared, pointers, strict=True)]
    made = tirx.PrimFunc([*pointers, *variables], tirx.SeqStmt([*views, body]))
    target = tvm.target.Target({"kind": "vulkan"}).with_host("llvm")
    for key, value in (("global_symbol", "kernel"), ("target", target), ("calling_conv", 2)):
        made = made.with_attr(key, value)
    t = tirx.transform
    passes = tvm.ir.transform.Sequential([
        t.FlattenBuffer(), t.VectorizeLoop(True), t.UnrollLoop(), t.StmtSimplify(), t.RemoveNoOp(),
        t.LowerIntrin(),
    ])  # fmt: skip
    return passes(tvm.IRModule({"kernel": made}))["kernel"]


def checked(made: Any, features: SpirvFeatures, environment: str = "vulkan1.2") -> Shader:
    """The shader, clean under spirv-val."""
    return validated(emit(made, features), environment)


def validated(shader: Shader, environment: str = "vulkan1.2") -> Shader:
    """The shader, which spirv-val has nothing to say about."""
    command = [find("spirv-val"), "--target-env", environment, "-"]
    done = subprocess.run(command, input=shader.words, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode() + disassemble(shader.words)
    return shader


class Runner:
    """Runs device functions on the first device."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, DiskCache(folder / "cache")
        name = driver().device_names()[0]
        self.queue = Queue(Device("vulkan", 0, name, driver()))

    def __call__(
        self,
        made: Any,
        arrays: Sequence[Array],
        numbers: Sequence[float | int] = (),
        features: SpirvFeatures | None = None,
        skip: int = 0,
    ) -> Shader:
        """Run on `arrays`, which lie `skip` elements into their memory, with N // 64 blocks."""
        shader = checked(made, features or device_features())
        binary = self.folder / "kernel.spvs"
        binary.write_bytes(pack([shader]))
        plan = self._plan(arrays, numbers)
        call = driver().load(binary, plan, self.cache, 0).on(self.queue)
        memories = [driver().allocate(a.nbytes + skip * a.itemsize, self.queue) for a in arrays]
        places = [m.address + skip * a.itemsize for m, a in zip(memories, arrays, strict=True)]
        for place, data in zip(places, arrays, strict=True):
            driver().copy_in(place, memoryview(data.view(np.uint8)), self.queue)
        words = struct.pack(f"<{len(places)}q", *places)
        for number in numbers:
            is_float = isinstance(number, float)
            words += struct.pack("<f4x" if is_float else "<q", number)
        assert call(words, 0) == 0
        for place, data in zip(places, arrays, strict=True):
            driver().copy_out(place, memoryview(data.view(np.uint8)), self.queue)
        return shader

    def _plan(self, arrays: Sequence[Array], numbers: Sequence[float | int]) -> LaunchPlan:
        # of a slot's dtype the driver wants the size
        slots = [Slot("pointer", f"b{i}", dtype=f"int{8 * a.itemsize}")
                 for i, a in enumerate(arrays)]  # fmt: skip
        kinds = ["float32" if isinstance(n, float) else "int64" for n in numbers]
        slots += [Slot("scalar", f"n{i}", dtype=k) for i, k in enumerate(kinds)]
        arguments = [Argument("pointer", i) for i in range(len(arrays))]
        arguments += [Argument(k, len(arrays) + i) for i, k in enumerate(kinds)]
        launch = Launch("kernel", tuple(arguments), (str(N // THREADS), "1"), THREADS)
        return LaunchPlan("kernel", tuple(slots), "0", "0", (), (launch,))


def pointwise(
    run: Runner,
    inputs: Sequence[Array],
    outputs: Sequence[tuple[Make, str]],
    features: SpirvFeatures | None = None,
) -> list[Array]:
    """Each output is (function of the inputs' elements, dtype); all in one kernel."""
    from tvm import tirx

    def make(block: Any, thread: Any, buffers: Any, _: Any) -> Any:
        i = block * i64(THREADS) + thread
        values = [b[i] for b in buffers[: len(inputs)]]
        stores = [
            tirx.BufferStore(b, f(*values), [i])
            for (f, _), b in zip(outputs, buffers[len(inputs) :], strict=True)
        ]
        return tirx.SeqStmt(stores) if len(stores) > 1 else stores[0]

    dtypes = [str(a.dtype) for a in inputs] + [dtype for _, dtype in outputs]
    results = [np.zeros(N, dtype) for _, dtype in outputs]
    run(function(make, [(d, 1) for d in dtypes]), [*inputs, *results], features=features)
    return results


def samples(dtype: str, seed: int = 0) -> Array:
    """N values: special ones, all magnitudes, small integers."""
    rng = np.random.default_rng(seed)
    size = np.dtype(dtype).itemsize
    data = np.frombuffer(rng.bytes(N * size), dtype).copy()
    if dtype in FLOATS:
        with np.errstate(over="ignore"):
            data[: len(SPECIAL)] = np.array(SPECIAL, np.float32).astype(dtype)
        scale = 10.0 ** rng.integers(-9, 5, 192)
        data[64:256] = (rng.standard_normal(192) * scale).astype(dtype)
        data[256:320] = rng.integers(-120, 120, 64)
    else:
        info = np.iinfo(dtype)
        data[:8] = [0, 1, 5, 7, info.max, info.max - 1, info.min, info.min + 1]
        data[100:200] = rng.integers(0, 100, 100)
    return data


def differing(got: Array, want: Array) -> Array:
    """Where the bits differ; any NaN is as good as another."""
    if got.dtype.kind != "f":
        return got != want
    bits = f"u{got.itemsize}"
    return (got.view(bits) != want.view(bits)) & ~(np.isnan(got) & np.isnan(want))


def fits(values: Array, dtype: str) -> Array:
    """Where an integer type holds the values, towards zero."""
    info, whole = np.iinfo(dtype), np.trunc(values.astype(np.float64))
    return (whole >= float(info.min)) & (whole < float(info.max) + 1) & np.isfinite(whole)
