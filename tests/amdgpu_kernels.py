"""Device functions for the tests of the ROCm target, written out statement by statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rudnn.runtime.device_code import DeviceFunction
from rudnn.runtime.plan import Argument, Launch
from rudnn.schedules.capability import MatrixUnit

STORED = {"float16": "float16", "bfloat16": "uint16"}
PAD = 8  # elements after each row in shared memory


def number(value: int, dtype: str = "int64") -> Any:
    from tvm import tirx

    return tirx.IntImm(dtype, value)


def buffer(name: str, dtype: str, size: int, scope: str = "global") -> Any:
    from tvm import tirx

    return tirx.decl_buffer((number(size),), dtype, name, scope=scope, data_alignment=16)


def barrier() -> Any:
    from tvm import tirx

    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def device_function(
    name: str, threads: int, buffers: Sequence[Any], body: Sequence[Any], thread: Any,
    numbers: Sequence[Any] = (),
) -> DeviceFunction:  # fmt: skip
    """One block of `threads`, whose index is the int32 variable `thread`.

    Its parameters are the global `buffers`, then the variables `numbers`, all from one slot.
    """
    from tvm import tirx
    from tvm.ir import PointerType, PrimType, Range

    inside: Any = body[0] if len(body) == 1 else tirx.SeqStmt(list(body))
    axes = (("threadIdx.x", threads, thread), ("blockIdx.x", 1, tirx.Var("block", "int32")))
    for tag, extent, var in axes:
        size = number(extent, "int32")
        axis = tirx.IterVar(Range(0, size), var, tirx.IterVar.ThreadIndex, tag)
        inside = tirx.AttrStmt(axis, "thread_extent", size, inside)
    params = [tirx.Var(f"{b.name}_data", PointerType(PrimType(str(b.dtype)))) for b in buffers]
    declared = [tirx.DeclBuffer(b, data=p) for b, p in zip(buffers, params, strict=True)]
    function = tirx.PrimFunc([*params, *numbers], tirx.SeqStmt([*declared, inside]))
    for key, value in (
        ("global_symbol", name), ("tirx.noalias", True), ("tirx.is_global_func", True),
        ("calling_conv", 2),
    ):  # fmt: skip
        function = function.with_attr(key, value)
    arguments = tuple(Argument("pointer", i) for i in range(len(params)))
    arguments += tuple(Argument(str(n.ty.dtype), len(params)) for n in numbers)
    return DeviceFunction(name, function, Launch(name, arguments, ("1", "1"), threads))


def product(unit: MatrixUnit, wave: int, a_t: bool, b_t: bool) -> DeviceFunction:
    """c = 2 A·B of two tiles, one by each of two wavefronts.

    a [2, 16, 16] is [m][k], or [k][m] with `a_t`; b [2, 16, 16] is [n][k], or [k][n] with `b_t`;
    c [2, 16, 16] f32.
    """
    from tvm import tirx

    stored, row = STORED[unit.operands], 16 + PAD
    thread = tirx.Var("thread", "int32")
    at = tirx.Cast("int64", thread)
    tile, lane = at // number(wave), at % number(wave)
    arrays = {n: buffer(n, "float32" if n == "c" else stored, 512) for n in "abc"}
    shared = {n: buffer(f"{n}_s", str(arrays[n].dtype), 2 * 16 * row, "shared") for n in "abc"}
    fragments = {
        n: buffer(f"{n}_f", str(arrays[n].dtype), getattr(unit, n), "local") for n in "abc"
    }

    def call(name: str, *arguments: Any) -> Any:
        return tirx.Evaluate(tirx.call_extern("void", f"{unit.intrinsic}_{name}", *arguments))

    def fragment(name: str) -> Any:
        return tirx.address_of(fragments[name][number(0)])

    def tile_of(name: str) -> Any:
        return tirx.address_of(shared[name][tile * number(16 * row)])

    def each(into: Any, out_of: Any, name: str) -> Any:
        i = tirx.Var(f"{name}_i", "int64")
        flat = i * number(wave) + lane
        compact = tile * number(256) + flat
        padded = tile * number(16 * row) + flat // number(16) * number(row) + flat % number(16)
        places = (padded, compact) if into.scope() == "shared" else (compact, padded)
        store = tirx.BufferStore(into, out_of[places[1]], [places[0]])
        return tirx.For(i, number(0), number(256 // wave), tirx.ForKind.SERIAL, store)

    stride = number(row, "int32")
    body = [
        *(tirx.AllocBuffer(b) for b in (*shared.values(), *fragments.values())),
        *(each(shared[n], arrays[n], n) for n in "ab"),
        barrier(),
        call("zero", fragment("c")),
        call(f"load_a{'_t' if a_t else ''}", fragment("a"), tile_of("a"), stride),
        call(f"load_b{'_t' if b_t else ''}", fragment("b"), tile_of("b"), stride),
        *(call("mma", fragment("c"), fragment("a"), fragment("b")) for _ in range(2)),
        call("store", tile_of("c"), stride, fragment("c")),
        barrier(),
        each(arrays["c"], shared["c"], "c"),
    ]
    return device_function("product", 2 * wave, list(arrays.values()), body, thread)


def exchange(dtype: str, wave: int, down: int | None, width: int) -> DeviceFunction:
    """out[i] = x of another thread: `down` further, or, for None, of lane 3 i + 1 of its run."""
    from tvm import tirx

    stored = "uint8" if dtype == "bool" else dtype
    thread = tirx.Var("thread", "int32")
    at = tirx.Cast("int64", thread)
    x, out = buffer("x", stored, 2 * wave), buffer("out", stored, 2 * wave)
    value = x[at] != tirx.const(0, "uint8") if dtype == "bool" else x[at]
    name, which = ("tvm_warp_shuffle", thread * 3 + 1) if down is None else (
        "tvm_warp_shuffle_down", number(down, "int32"))  # fmt: skip
    mask = tirx.const(0xFFFFFFFF, "uint32")
    moved = tirx.call_intrin(dtype, f"tirx.{name}", mask, value, which, width, wave)
    store = tirx.BufferStore(out, tirx.Cast(stored, moved), [at])
    return device_function("exchange", 2 * wave, [x, out], [store], thread)


def reverse(threads: int, synchronised: bool, through_global: bool = False) -> DeviceFunction:
    """out[i] = x[threads − 1 − i], handed over in shared memory, or in `out` itself first."""
    from tvm import tirx

    thread = tirx.Var("thread", "int32")
    at = tirx.Cast("int64", thread)
    other = number(threads - 1) - at
    x, out = buffer("x", "float32", threads), buffer("out", "float32", threads)
    between = out if through_global else buffer("between", "float32", threads, "shared")
    kept = buffer("kept", "float32", 1, "local")
    wait = [barrier()] if synchronised else []
    body = [
        *(tirx.AllocBuffer(b) for b in (between, kept) if b.scope() != "global"),
        tirx.BufferStore(between, x[at], [at]), *wait,
        tirx.BufferStore(kept, between[other], [number(0)]), *wait,
        tirx.BufferStore(out, kept[number(0)], [at]),
    ]  # fmt: skip
    return device_function("reverse", threads, [x, out], body, thread)


def total(kinds: Sequence[str]) -> DeviceFunction:
    """out[0] = the sum of numbers of the given types."""
    from tvm import tirx

    numbers = [tirx.Var(f"v{i}", kind) for i, kind in enumerate(kinds)]
    value = sum((tirx.Cast("int64", v) for v in numbers), tirx.const(0, "int64"))
    out = buffer("out", "int64", 1)
    store = tirx.BufferStore(out, value, [number(0)])
    return device_function("total", 1, [out], [store], tirx.Var("thread", "int32"), numbers)
