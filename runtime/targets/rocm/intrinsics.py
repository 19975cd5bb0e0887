"""TIR calls that TVM's AMDGPU backend lacks or gets wrong, as calls of the prelude.

What is neither lowered here nor known to be safe is refused: LLVM ends the process on a function
that it has no instructions for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ....dsl.errors import CompileError

_SAFE = frozenset({
    "abs", "address_of", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "fabs",
    "floor", "if_then_else", "isnan", "likely", "reinterpret", "shift_left", "shift_right",
    "sqrt",
})  # fmt: skip
_EXTERNS = ("call_extern", "call_pure_extern")


def lower(function: Any, wave: int, externs: Iterable[str]) -> Any:
    """Barriers, shuffles and masks of `function` as calls of the prelude.

    `externs` are the functions it may call by itself. Raises CompileError on any other call.
    """
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Call

    calls = _Calls(_Facts.of(function), wave, frozenset(externs))
    body = tvm_ffi.structural_map(function.body, (Call, calls.lower))
    if calls.problem:
        raise CompileError(calls.problem)
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


@dataclass
class _Facts:
    """A function's thread axis, and whether it reads global memory that it writes."""

    thread: Any = None
    reads_what_it_writes: bool = False

    @staticmethod
    def of(function: Any) -> _Facts:
        import tvm_ffi
        from tvm import tirx
        from tvm.ir import TensorLoad

        facts = _Facts()
        data: dict[int, int] = {}
        read: set[int] = set()
        written: set[int] = set()

        def memory(buffer: Any) -> int:
            key = int(buffer.__chandle__())
            return data.get(key, key)

        def visit(node: Any) -> None:
            if isinstance(node, tirx.AttrStmt) and node.attr_key == "thread_extent":
                if node.node.thread_tag == "threadIdx.x":
                    facts.thread = node.node.var
            elif isinstance(node, tirx.DeclBuffer):
                data[int(node.buffer.__chandle__())] = int(node.data.__chandle__())
            elif isinstance(node, tirx.BufferStore) and node.buffer.scope() == "global":
                written.add(memory(node.buffer))
            elif isinstance(node, TensorLoad) and node.source.scope() == "global":
                read.add(memory(node.source))

        kinds = (tirx.AttrStmt, tirx.DeclBuffer, tirx.BufferStore, TensorLoad)
        tvm_ffi.structural_walk(function.body, (kinds, visit))
        facts.reads_what_it_writes = bool(read & written)
        return facts


@dataclass
class _Calls:
    facts: _Facts
    wave: int
    externs: frozenset[str]
    problem: str = ""  # the first call that is refused: an error would lose its type on the way out

    def refuse(self, needs: str, call: Any) -> Any:
        self.problem = self.problem or f"needs {needs}"
        return call

    def lower(self, call: Any) -> Any:
        name = str(getattr(call.op, "name", call.op)).split(".")[-1]
        if name == "tvm_storage_sync":
            return self.barrier(call)
        if name == "tvm_warp_activemask":
            return _number(-1, str(call.ty.dtype))
        if name in ("tvm_warp_shuffle", "tvm_warp_shuffle_down"):
            return self.shuffle(name, call)
        if name in _EXTERNS:
            wanted = str(call.args[0].value)
            if wanted not in self.externs:
                return self.refuse(f"functions of the ROCm prelude, got {wanted}", call)
            return call
        if name not in _SAFE:
            return self.refuse(f"operations that AMD devices have, got {name}", call)
        return call

    def barrier(self, call: Any) -> Any:
        scope = str(call.args[0].value)
        if scope != "shared":
            return self.refuse(f"barriers of shared memory, got one of {scope}", call)
        # A block that reads global memory it wrote wants that in order too.
        whole = self.facts.reads_what_it_writes
        return _extern("void", "rudnn_barrier" if whole else "rudnn_barrier_shared")

    def shuffle(self, name: str, call: Any) -> Any:
        """A value of another lane, moved as bits of 32 or 64."""
        import tvm
        from tvm import tirx

        _, value, which, width, _ = call.args
        width, dtype = int(width), str(value.ty.dtype)
        bits, lanes = int(tvm.DataType(dtype).bits), int(tvm.DataType(dtype).lanes)
        if self.facts.thread is None or lanes != 1:
            return self.refuse(f"shuffles of scalars inside a launch, got one of {dtype}", call)
        if not 0 < width <= self.wave or width & (width - 1):
            return self.refuse(f"shuffles of a power of two ≤ {self.wave}, got {width}", call)
        word = "int64" if bits == 64 else "int32"
        whole = tirx.Cast(word, _bits(value, dtype, f"int{bits}"))
        lane = self.source(name, tirx.Cast("int32", which), width)
        moved = _extern(word, f"rudnn_shuffle_i{word[3:]}", whole, lane)
        if dtype == "bool":
            return moved != _number(0)
        return _bits(tirx.Cast(f"int{bits}", moved), f"int{bits}", dtype)

    def source(self, name: str, which: Any, width: int) -> Any:
        """The lane of the wavefront to take a value from."""
        from tvm import tirx

        lane = tirx.bitwise_and(self.facts.thread, _number(self.wave - 1))
        place = tirx.bitwise_and(lane, _number(width - 1))
        if name == "tvm_warp_shuffle":
            return (lane - place) + tirx.bitwise_and(which, _number(width - 1))
        return tirx.Select(place + which < _number(width), lane + which, lane)


def _bits(value: Any, have: str, want: str) -> Any:
    """The bits of a value of one type as another of the same width; bool as a number."""
    from tvm import tirx

    if have == "bool":
        return value
    return value if have == want else tirx.reinterpret(want, value)


def _number(value: int, dtype: str = "int32") -> Any:
    from tvm import tirx

    return tirx.const(value, dtype)


def _extern(dtype: str, name: str, *arguments: Any) -> Any:
    from tvm import tirx

    return tirx.call_extern(dtype, name, *arguments)
