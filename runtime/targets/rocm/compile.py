"""Device functions to one AMDGPU code object.

TVM makes optimised LLVM IR of them, the prelude linked in and inlined. That text is mended (TVM
gives every kernel 256 threads at most, a triple of old, and its conversions of half precision) and
compiled by the LLVM in TVM a second time.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....dsl.errors import CompileError
from ...locks import fork_safe_lock
from ...names import hide_values
from ...plan import Launch, LaunchPlan
from . import intrinsics, linker, matrix
from .capability import Arch
from .quiet import quiet

if TYPE_CHECKING:
    from ....schedules.program import Program
    from ...device_code import DeviceFunction

_TRIPLE = "amdgcn-amd-amdhsa"
_PRELUDE = Path(__file__).with_name("prelude.ll")
_MATRIX = ("load_a", "load_a_t", "load_b", "load_b_t", "mma", "zero", "store")
_LOCK = fork_safe_lock()  # of TVM's backend: callbacks and LLVM's options are the process's
_CURRENT = threading.local()  # `prelude`: path of the text that the backend is to link


@dataclass(frozen=True)
class Code:
    """Compiled device functions: LLVM IR, and the object and assembly made of it on demand."""

    ir: str

    def object(self) -> bytes:
        """A relocatable object file."""
        return _emit(self.ir, "o")

    def assembly(self) -> str:
        """Assembly with the metadata that tells registers, spills and memory."""
        return _emit(self.ir, "s").decode()

    def link(self) -> bytes:
        """A code object that HIP loads."""
        return linker.link(self.object())


def build(program: Program, entry: str, arch: Arch) -> tuple[Code, LaunchPlan]:
    """The code of a program and its launch plan. Raises CompileError."""
    from ...device_code import lower

    functions, plan = lower(program, entry, _target(arch.name))
    return compile_functions(functions, arch), plan


def compile_functions(functions: Sequence[DeviceFunction], arch: Arch) -> Code:
    """Code for device functions as `device_code.lower` makes them. Raises CompileError."""
    import tvm
    from tvm import tirx

    if not functions:
        return Code(_mended("", {}, arch))
    target = _target(arch.name)
    externs = ["rudnn_atomic_add_f32"]
    externs += [f"{u.intrinsic}_{f}" for u in arch.capability.matrix for f in _MATRIX]
    module = {}
    for device in functions:
        _check(device.launch, arch)
        lowered = intrinsics.lower(device.function, arch.wave, externs)
        body, _ = hide_values(lowered.body)  # the prelude has what writes the cells
        hidden = tirx.PrimFunc(lowered.params, body, lowered.ret_type, lowered.attrs)
        module[device.name] = hidden.with_attr("target", target)
    lowered_module = tirx.transform.LowerIntrin()(tvm.IRModule(module))
    ir = _optimised(lowered_module, target, arch)
    return Code(_mended(ir, {d.name: d.launch.block for d in functions}, arch))


def _check(launch: Launch, arch: Arch) -> None:
    limits = arch.capability
    if launch.shared > limits.shared_bytes:
        raise CompileError(
            f"{launch.entry} needs at most {limits.shared_bytes} bytes of shared memory on "
            f"{arch.name}, got {launch.shared}"
        )
    if not 0 < launch.block <= limits.max_threads:
        raise CompileError(
            f"{launch.entry} needs 1 to {limits.max_threads} threads a block on {arch.name}, "
            f"got {launch.block}"
        )


@lru_cache(maxsize=32)
def _target(arch: str) -> Any:
    import tvm

    with quiet():
        return tvm.target.Target({"kind": "rocm", "mcpu": arch}).with_host("llvm")


@lru_cache(maxsize=1)
def _register() -> None:
    """Take the place of the callbacks in which TVM looks for a ROCm of its own."""
    import tvm_ffi

    def link(code: Any) -> Any:
        return code  # the object is of no use: see the module's text

    def bitcode(_: Any = None) -> list[str]:
        return [_CURRENT.prelude]

    for name, function in (("link", link), ("bitcode_path", bitcode)):
        tvm_ffi.register_global_func(f"tvm_callback_rocm_{name}", function, override=True)


def _optimised(module: Any, target: Any, arch: Arch) -> str:
    """TVM's LLVM IR of a lowered module, the prelude inlined."""
    import tvm

    parts = [_PRELUDE.read_text()]
    parts += [matrix.functions(unit, arch.family) for unit in arch.capability.matrix]
    with _LOCK, tempfile.TemporaryDirectory(prefix="rudnn-") as folder, quiet():
        _register()
        prelude = Path(folder, "prelude.ll")
        prelude.write_text("".join(parts))
        _CURRENT.prelude = str(prelude)
        try:
            built = tvm.get_global_func("target.build.rocm")(module, target)
            return str(built.inspect_source("llvm"))
        except Exception as error:  # TVM raises several kinds here
            raise CompileError(f"LLVM refused the kernel for {arch.name}: {error}") from error


def _emit(ir: str, kind: str) -> bytes:
    """LLVM IR compiled to an object ("o") or assembly ("s")."""
    import tvm

    with _LOCK, tempfile.TemporaryDirectory(prefix="rudnn-") as folder:
        source, result = Path(folder, "kernel.ll"), Path(folder, f"kernel.{kind}")
        source.write_text(ir)
        try:
            module = tvm.get_global_func("ffi.Module.load_from_file.ll")(str(source), "ll")
            module.write_to_file(str(result), kind)
        except Exception as error:
            raise CompileError(f"LLVM refused the kernel: {error}") from error
        return result.read_bytes()


# TVM puts its conversions of half precision, which AMD devices have instructions for, into every
# module, and names alias types by an address of this process.
_CONVERSION = re.compile(r"^define [^\n]*section \"\.text\.tvm\.fp16\.conv\".*?^}\n", re.M | re.S)
_ALIAS_TYPE = re.compile(r'(?<=!")0x[0-9a-f]+')
_KERNEL = re.compile(r"^define [^\n]*amdgpu_kernel void @(\w+)\([^\n]*?( #\d+) [^\n]*\{$", re.M)
_GROUP_SIZE = re.compile(r'"amdgpu-flat-work-group-size"="[\d,]+"')


def _mended(ir: str, blocks: dict[str, int], arch: Arch) -> str:
    """LLVM IR with each kernel's own number of threads, for the LLVM target of `arch`."""
    ir = _CONVERSION.sub("", ir).replace("dllexport ", "")
    ir = re.sub(r"^target triple = .*$", f'target triple = "{_TRIPLE}"', ir, flags=re.M)
    numbers: dict[str, str] = {}
    ir = _ALIAS_TYPE.sub(lambda m: numbers.setdefault(m[0], f"buffer{len(numbers)}"), ir)
    groups = dict(re.findall(r"^attributes( #\d+) = \{(.*)\}$", ir, re.M))
    made: dict[int, str] = {}

    def own_group(match: re.Match[str]) -> str:
        block = blocks[match[1]]
        size = f'"amdgpu-flat-work-group-size"="{block},{block}"'
        group = f" #{9000 + block}"
        made[block] = f"attributes{group} = {{{_GROUP_SIZE.sub(size, groups[match[2]])}}}\n"
        return match[0].replace(match[2], group)

    ir = _KERNEL.sub(own_group, ir)
    target = json.dumps({"kind": "llvm", "mtriple": _TRIPLE, "mcpu": arch.name})
    target = target.replace('"', "\\22")
    flags = (
        "!llvm.module.flags = !{!9000, !9001}\n"
        f'!9000 = !{{i32 2, !"tvm_target", !"{target}"}}\n'
        '!9001 = !{i32 1, !"amdhsa_code_object_version", i32 500}\n'
    )
    return "".join([ir, *made.values(), flags])
