"""A matrix product by a matrix unit, as a rule would write it: staged in shared memory."""

from __future__ import annotations

from typing import Any

from rudnn.runtime.device_code import DeviceFunction
from rudnn.runtime.plan import Argument, Launch, LaunchPlan, Slot
from rudnn.schedules.capability import MatrixUnit

STORED = {"float16": "float16", "bfloat16": "uint16"}
PAD = 8  # elements after each row in shared memory


def product(
    unit: MatrixUnit, target: Any, k: int, *, a_t: bool = False, b_t: bool = False, stages: int = 0
) -> tuple[DeviceFunction, LaunchPlan]:
    """C[32, 32] += A·B by four warps, each 16 × 16, 32 of `k` at a time.

    A is [m][k], or [k][m] with `a_t`; B is [n][k], or [k][n] with `b_t`. With `stages` tiles are
    copied asynchronously, so many steps ahead less one.
    """
    return _Product(unit, target, k, a_t, b_t, stages).build()


class _Product:
    def __init__(
        self, unit: MatrixUnit, target: Any, k: int, a_t: bool, b_t: bool, stages: int
    ) -> None:
        from tvm import tirx
        from tvm.ir import PointerType, PrimType

        self.unit, self.target, self.k, self.stages = unit, target, k, stages
        self.transposed = {"a": a_t, "b": b_t}
        self.t: Any = tirx
        stored = STORED[unit.operands]
        self.thread = tirx.Var("thread", "int32")
        self.at = tirx.Cast("int64", self.thread)
        self.params, self.globals = {}, {}
        for name, dtype in (("a", stored), ("b", stored), ("c", "float32")):
            self.params[name] = tirx.Var(f"{name}_data", PointerType(PrimType(dtype)))
            size = 32 * 32 if name == "c" else 32 * k
            self.globals[name] = tirx.decl_buffer((self.n(size),), dtype, name)
        self.tile = {n: 32 * (32 + PAD) for n in "ab"}
        ring = max(stages, 1)
        self.shared = {
            n: self.buffer(f"{n}_s", stored, ring * self.tile[n], "shared") for n in "ab"
        }
        self.result = self.buffer("c_s", "float32", 32 * (32 + PAD), "shared")
        self.fragments = {
            "a": self.buffer("a_f", stored, unit.a, "local"),
            "b": self.buffer("b_f", stored, unit.b, "local"),
            "c": self.buffer("c_f", "float32", 2 * unit.c, "local"),
        }

    def n(self, value: int, dtype: str = "int64") -> Any:
        return self.t.IntImm(dtype, value)

    def buffer(self, name: str, dtype: str, size: int, scope: str) -> Any:
        return self.t.decl_buffer((self.n(size),), dtype, name, scope=scope, data_alignment=16)

    def call(self, name: str, *arguments: Any) -> Any:
        return self.t.Evaluate(self.t.call_extern("void", name, *arguments))

    def unit_call(self, name: str, *arguments: Any) -> Any:
        return self.call(f"{self.unit.intrinsic}_{name}", *arguments)

    def place(self, buffer: Any, index: Any) -> Any:
        return self.t.address_of(buffer[index])

    def barrier(self) -> Any:
        return self.t.Evaluate(self.t.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))

    def fetch(self, step: Any) -> list[Any]:
        """Bring both tiles of a step to shared memory: a thread moves 8 elements of each."""
        moves = []
        row, column = self.at // self.n(4), self.at % self.n(4) * self.n(8)
        for name in "ab":
            into = row * self.n(32 + PAD) + column
            if self.stages:
                into = into + step % self.n(self.stages) * self.n(self.tile[name])
            if self.transposed[name]:  # rows are steps of k
                start = (step * self.n(32) + row) * self.n(32) + column
            else:
                start = row * self.n(self.k) + step * self.n(32) + column
            moves.append(self.move(name, into, start))
        return moves

    def move(self, name: str, into: Any, start: Any) -> Any:
        source, goal = self.globals[name], self.shared[name]
        if self.stages:
            return self.call(
                "rudnn_copy_async_16", self.place(goal, into), self.place(source, start)
            )
        lane = self.t.Var("lane", "int64")
        store = self.t.BufferStore(goal, source[start + lane], [into + lane])
        return self.t.For(lane, self.n(0), self.n(8), self.t.ForKind.VECTORIZED, store)

    def multiply(self, step: Any) -> list[Any]:
        """One step of a warp: its rows are 16·(warp / 2), its columns 16·(warp % 2)."""
        warp = self.at // self.n(32)
        first = {"a": warp // self.n(2) * self.n(16), "b": warp % self.n(2) * self.n(16)}
        calls = []
        for k in (0, 16):
            calls.append(self.load("a", step, first["a"], k))
            for j in range(2):
                calls.append(self.load("b", step, first["b"] + self.n(8 * j), k))
                c = self.place(self.fragments["c"], self.n(j * self.unit.c))
                a, b = (self.place(self.fragments[name], self.n(0)) for name in "ab")
                calls.append(self.unit_call("mma", c, a, b))
        return calls

    def load(self, name: str, step: Any, outer: Any, k: int) -> Any:
        stride = self.n(32 + PAD)
        other = self.transposed[name]
        index = self.n(k) * stride + outer if other else outer * stride + self.n(k)
        if self.stages:
            index = index + step % self.n(self.stages) * self.n(self.tile[name])
        fragment = self.place(self.fragments[name], self.n(0))
        tile = self.place(self.shared[name], index)
        return self.unit_call(f"load_{name}{'_t' if other else ''}", fragment, tile,
                              self.n(32 + PAD, "int32"))  # fmt: skip

    def loop(self) -> list[Any]:
        steps, step = self.k // 32, self.t.Var("step", "int64")
        if not self.stages:
            body = [*self.fetch(step), self.barrier(), *self.multiply(step), self.barrier()]
            return [self.serial(step, steps, body)]
        ahead = self.stages - 1
        commit, wait = self.call("rudnn_copy_async_commit"), f"rudnn_copy_async_wait_{ahead}"
        start: list[Any] = []
        for early in range(ahead):
            start += [*(self.fetch(self.n(early)) if early < steps else []), commit]
        more = self.t.SeqStmt(self.fetch(step + self.n(ahead)))
        guarded = self.t.IfThenElse(step + self.n(ahead) < self.n(steps), more, None)
        body = [guarded, commit, self.call(wait), self.barrier(), *self.multiply(step),
                self.barrier()]  # fmt: skip
        return [*start, self.serial(step, steps, body)]

    def serial(self, var: Any, extent: int, body: list[Any]) -> Any:
        inside = body[0] if len(body) == 1 else self.t.SeqStmt(body)
        return self.t.For(var, self.n(0), self.n(extent), self.t.ForKind.SERIAL, inside)

    def store(self) -> list[Any]:
        warp, stride = self.at // self.n(32), self.n(32 + PAD)
        row, column = warp // self.n(2) * self.n(16), warp % self.n(2) * self.n(16)
        calls = []
        for j in range(2):
            tile = self.place(self.result, row * stride + column + self.n(8 * j))
            c = self.place(self.fragments["c"], self.n(j * self.unit.c))
            calls.append(self.unit_call("store", tile, self.n(32 + PAD, "int32"), c))
        i = self.t.Var("i", "int64")
        flat = i * self.n(128) + self.at
        value = self.result[flat // self.n(32) * stride + flat % self.n(32)]
        write = self.t.BufferStore(self.globals["c"], value, [flat])
        return [*calls, self.barrier(), self.serial(i, 8, [write])]

    def build(self) -> tuple[DeviceFunction, LaunchPlan]:
        import tvm
        from tvm.ir import Range

        t = self.t
        buffers = (*self.shared.values(), self.result, *self.fragments.values())
        zero = [
            self.unit_call("zero", self.place(self.fragments["c"], self.n(j * self.unit.c)))
            for j in range(2)
        ]
        parts = [*(t.AllocBuffer(b) for b in buffers), *zero, *self.loop(), *self.store()]
        body: Any = t.SeqStmt(parts)
        for name, extent, var in (
            ("threadIdx.x", 128, self.thread), ("blockIdx.x", 1, t.Var("block", "int32")),
        ):  # fmt: skip
            size = self.n(extent, "int32")
            axis = t.IterVar(Range(0, size), var, t.IterVar.ThreadIndex, name)
            body = t.AttrStmt(axis, "thread_extent", size, body)
        declared = [t.DeclBuffer(b, data=self.params[n]) for n, b in self.globals.items()]
        function = t.PrimFunc(list(self.params.values()), t.SeqStmt([*declared, body]))
        for key, value in (
            ("global_symbol", "product_0"), ("target", self.target), ("tirx.noalias", True),
            ("tirx.is_global_func", True), ("calling_conv", 2),
        ):  # fmt: skip
            function = function.with_attr(key, value)
        p = t.transform
        passes = tvm.ir.transform.Sequential([
            p.FlattenBuffer(), p.VectorizeLoop(True), p.UnrollLoop(), p.StmtSimplify(),
            p.RemoveNoOp(),
        ])  # fmt: skip
        function = passes(tvm.IRModule({"product_0": function}))["product_0"]
        arguments = tuple(Argument("pointer", i) for i in range(3))
        launch = Launch("product_0", arguments, ("1", "1"), 128)
        slots = tuple(Slot("pointer", name) for name in "abc")
        plan = LaunchPlan("product", slots, "0", "0", (), (launch,))
        return DeviceFunction("product_0", function, launch), plan
