"""Device functions to CUDA C++: TVM's source generator, and the functions its calls need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....dsl.errors import CompileError
from ...embed.header import C_WORDS
from ...locks import fork_safe_lock

if TYPE_CHECKING:
    from ...device_code import DeviceFunction

PRELUDE = Path(__file__).with_name("prelude.cuh")
_CALLS = re.compile(r"\brudnn_(?:m16n8k16|copy_async|atomic_add)_")
_LEAST_INT = re.compile(r"-2147483648(?![\w.])")  # in C the negative of a long
# A vector from registers to memory. Written as an assignment, NVRTC stores its elements one by one.
_VECTOR_STORE = re.compile(
    r"^( *)\*\((float[24]|uint[24])\*\)\((\w+_data \+ .*)\) = (\*\(\2\*\)\(.*\));$", re.M
)
# Besides words of C++: what TVM's code calls by these names.
_WORDS = C_WORDS | {"half", "half2", "uint", "min", "max", "abs"}
_CALLBACK = "tvm_callback_cuda_compile"
_LOCK = fork_safe_lock()  # of the callback, which is the process's


def tvm_target(arch: str) -> Any:
    """TVM's name for an architecture; loads TVM."""
    from ...tvm_import import load_tvm

    load_tvm()
    import tvm

    return tvm.target.Target({"kind": "cuda", "arch": arch}).with_host("llvm")


def generate(functions: Sequence[DeviceFunction], target: Any) -> str:
    """One translation unit with a kernel for each function. Raises CompileError."""
    import tvm
    from tvm import tirx

    module = tvm.IRModule({f.name: _renamed(f.function) for f in functions})
    try:
        module = tirx.transform.LowerIntrin()(module)
        with _without_compiling():
            built = tvm.get_global_func("target.build.cuda")(module, target)
        text = str(built.inspect_source("cuda"))
    except Exception as error:  # TVM raises several kinds here
        raise CompileError(f"TVM cannot write {functions[0].name} as CUDA: {error}") from error
    text = _LEAST_INT.sub("(-2147483647 - 1)", text)
    text = _VECTOR_STORE.sub(r"\1__stwb((\2*)(\3), \4);", text)
    return f"{PRELUDE.read_text('utf-8')}\n{text}" if _CALLS.search(text) else text


def _renamed(function: Any) -> Any:
    """`function` with other names for variables that are called by a word of C++."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Var

    renamed: dict[int, Any] = {}

    def rename(var: Var, _: Any = None) -> Any:
        if var.name not in _WORDS:
            return var
        key = int(var.__chandle__())
        if key not in renamed:
            renamed[key] = tirx.Var(f"{var.name}_", var.ty)
        return renamed[key]

    params = [rename(p) for p in function.params]
    body = tvm_ffi.structural_map(function.body, (), (Var, rename))
    return tirx.PrimFunc(params, body, function.ret_type, function.attrs)


@contextmanager
def _without_compiling() -> Iterator[None]:
    """TVM compiles what it writes by a callback: for a moment it is one that does nothing."""
    import tvm
    import tvm_ffi

    def nothing(_code: str, _target: Any = None) -> bytes:
        return b" "

    with _LOCK:
        former = tvm.get_global_func(_CALLBACK, allow_missing=True)
        tvm_ffi.register_global_func(_CALLBACK, nothing, override=True)
        try:
            yield
        finally:
            if former is None:
                tvm_ffi.registry.remove_global_func(_CALLBACK)
            else:
                tvm_ffi.register_global_func(_CALLBACK, former, override=True)
