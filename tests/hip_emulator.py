"""Running ROCm without a GPU: a stub of HIP, and AMDGPU LLVM IR compiled for this processor.

`native/amdgpu_emulator.c` makes a kernel's threads coroutines; `stubs/libhip_stub.c` is a driver
whose modules are libraries of such kernels. With both in place an operator's whole path runs:
optimised IR, argument packing, launches, memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from cuda_emulator import STUBS, Stub, built

from rudnn.runtime import device
from rudnn.runtime.targets.rocm import capability, compile, driver, hip, target

NATIVE = Path(__file__).parent / "native"

_MATRIX = {
    "mfma.f32.16x16x16f16": 0, "mfma.f32.16x16x16bf16.1k": 1,
    "wmma.f32.16x16x16.f16.v8f32.v16f16": 2, "wmma.f32.16x16x16.bf16.v8f32.v16i16": 3,
    "wmma.f32.16x16x16.f16.v8f32.v8f16": 4, "wmma.f32.16x16x16.bf16.v8f32.v8i16": 5,
}  # fmt: skip
_PLAIN = {
    "workitem.id.x": "i32 @rudnn_emulated_thread()", "s.barrier": "void @rudnn_emulated_barrier()",
    "ds.bpermute": "i32 @rudnn_emulated_permute(i32, i32)",
}  # fmt: skip
# A lane's value for all: what LLVM makes of exchanges whose source is one lane.
_ONE_LANE = {
    "readlane.i32": """
define internal i32 @readlane.i32(i32 %value, i32 %lane) {
  %address = shl i32 %lane, 2
  %found = call i32 @rudnn_emulated_permute(i32 %address, i32 %value)
  ret i32 %found
}
""",
    "readlane.f32": """
define internal float @readlane.f32(float %value, i32 %lane) {
  %bits = bitcast float %value to i32
  %address = shl i32 %lane, 2
  %found = call i32 @rudnn_emulated_permute(i32 %address, i32 %bits)
  %result = bitcast i32 %found to float
  ret float %result
}
""",
    "readlane.i64": """
define internal i64 @readlane.i64(i64 %value, i32 %lane) {
  %address = shl i32 %lane, 2
  %low = trunc i64 %value to i32
  %shifted = lshr i64 %value, 32
  %high = trunc i64 %shifted to i32
  %low_found = call i32 @rudnn_emulated_permute(i32 %address, i32 %low)
  %high_found = call i32 @rudnn_emulated_permute(i32 %address, i32 %high)
  %low_wide = zext i32 %low_found to i64
  %high_wide = zext i32 %high_found to i64
  %high_moved = shl i64 %high_wide, 32
  %result = or i64 %high_moved, %low_wide
  ret i64 %result
}
""",
}
_SIZES = {"i64": 8, "ptr": 8, "double": 8, "float": 4, "i32": 4, "half": 2, "i16": 2, "i8": 1,
          "i1": 1}  # fmt: skip


class NotEmulated(Exception):
    """IR with something the emulator does not know."""


def emulated(ir: str, wave: int) -> bytes:
    """A module for the stub: a shared library that runs the kernels of AMDGPU LLVM IR."""
    import tvm

    with tempfile.TemporaryDirectory(prefix="rudnn-test-") as folder:
        source, made = Path(folder, "kernel.ll"), Path(folder, "kernel.o")
        source.write_text(translated(ir, wave))
        module = tvm.get_global_func("ffi.Module.load_from_file.ll")(str(source), "ll")
        module.write_to_file(str(made), "o")
        result = Path(folder, "kernel.so")
        command = ("cc", "-shared", "-Wl,-Bsymbolic", "-o", result, made, _emulator(), "-lm")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return result.read_bytes()


@lru_cache(maxsize=1)
def _emulator() -> str:
    source = (NATIVE / "amdgpu_emulator.c").read_bytes()
    command = ("cc", "-O2", "-fPIC", "-c", "-o", "{out}", "-xc", "-")
    return str(built("emulator.o", [source], command))


def translated(ir: str, wave: int) -> str:
    """AMDGPU LLVM IR as IR for this processor, its instructions calls of the emulator."""
    shared = re.findall(r"^(@[\w.]+) = [^\n]*addrspace\(3\) global \[(\d+) x (\w+)\]", ir, re.M)
    sizes = {name: int(count) * _SIZES[kind] for name, count, kind in shared}
    defined = re.findall(
        r"^define amdgpu_kernel void @(\w+)\(([^\n]*)\)[^\n()]*\{\n(.*?)^\}", ir, re.M | re.S
    )
    for pattern, by in (
        (r" addrspace\(\d+\)", ""), (r"\baddrspacecast\b", "bitcast"), (r" amdgpu_kernel", ""),
        (r"^target [^\n]*\n", ""), (r' syncscope\("[^"]*"\)', ""), (r", !mmra !\d+", ""),
        (r"^declare [^\n]*@llvm\.amdgcn\.[^\n]*\n", ""),
        (r'"target-(cpu|features)"(="[^"]*")?', ""),
        (r"^!llvm\.module\.flags = [^\n]*\n|^!900\d = [^\n]*\n", ""),
        (r"@llvm\.amdgcn\.workgroup\.id\.([xyz])\(\)",
         lambda m: f"@rudnn_emulated_block(i32 {'xyz'.index(m[1])})"),
    ):  # fmt: skip
        ir = re.sub(pattern, by, ir, flags=re.M)
    parts = ["declare i32 @rudnn_emulated_block(i32)\n"]
    for name, declaration in _PLAIN.items():
        ir = ir.replace(f"@llvm.amdgcn.{name}(", declaration.split(" ", 1)[1].split("(")[0] + "(")
        parts.append(f"declare {declaration}\n")
    for name, kind in _MATRIX.items():
        if f"@llvm.amdgcn.{name}(" in ir:
            ir = ir.replace(f"@llvm.amdgcn.{name}(", f"@matrix_{kind}(")
            parts.append(_matrix(kind))
    for name, definition in _ONE_LANE.items():
        if f"@llvm.amdgcn.{name}(" in ir:
            ir = ir.replace(f"@llvm.amdgcn.{name}(", f"@{name}(")
            parts.append(definition)
    left = set(re.findall(r"@llvm\.amdgcn\.[\w.]+", ir))
    if left:
        raise NotEmulated(", ".join(sorted(left)))
    if "@matrix_" in ir:
        parts.append("declare void @rudnn_emulated_matrix(i32, ptr, ptr, ptr)\n")
    parts.append("declare void @rudnn_emulated_poison(ptr, i64)\n")
    parts.append("declare ptr @rudnn_emulate(ptr, ptr, i32, i32, i32, i32, ptr)\n")
    for name, parameters, body in defined:
        used = (n for n in sizes if re.search(rf"{re.escape(n)}(?![\w.])", body))
        parts += [_wrapper(name, parameters), _poison(name, {n: sizes[n] for n in used})]
        parts.append(_entry(name, wave))
    return ir + "".join(parts) + _flags()


def _matrix(kind: int) -> str:
    """A function on vectors for one matrix instruction."""
    count, results = ((4, 4), (16, 8), (8, 8))[kind // 2]
    operand = f"<{count} x {'i16' if kind & 1 else 'half'}>"
    extra = ", i32 %x, i32 %y, i32 %z" if kind < 2 else ""
    total = f"<{results} x float>"
    return f"""
define internal {total} @matrix_{kind}({operand} %a, {operand} %b, {total} %c{extra}) {{
  %pa = alloca {operand}
  %pb = alloca {operand}
  %pc = alloca {total}
  store {operand} %a, ptr %pa
  store {operand} %b, ptr %pb
  store {total} %c, ptr %pc
  call void @rudnn_emulated_matrix(i32 {kind}, ptr %pa, ptr %pb, ptr %pc)
  %sum = load {total}, ptr %pc
  ret {total} %sum
}}
"""


def _wrapper(name: str, parameters: str) -> str:
    """`run_NAME`, which takes a kernel's parameters out of a launch's packed bytes."""
    lines, arguments, offset = [], [], 0
    # Attributes hold commas too: initializes((0, 4)).
    each = re.split(rf", (?=(?:{'|'.join(_SIZES)})\b)", parameters)
    for i, parameter in enumerate(p for p in each if p):
        kind = parameter.split()[0]
        size = _SIZES[kind]
        offset = -(-offset // size) * size
        lines.append(f"  %p{i} = getelementptr i8, ptr %packed, i64 {offset}\n"
                     f"  %v{i} = load {kind}, ptr %p{i}, align 1\n")  # fmt: skip
        arguments.append(f"{kind} %v{i}")
        offset += size
    call = f"  call void @{name}({', '.join(arguments)})\n"
    return (
        f"define internal void @run_{name}(ptr %packed) {{\n{''.join(lines)}{call}  ret void\n}}\n"
    )


def _poison(name: str, shared: dict[str, int]) -> str:
    """`poison_NAME`, which spoils the shared memory that a kernel uses."""
    lines = [
        f"  call void @rudnn_emulated_poison(ptr {n}, i64 {size})\n" for n, size in shared.items()
    ]
    return f"define internal void @poison_{name}() {{\n{''.join(lines)}  ret void\n}}\n"


def _entry(name: str, wave: int) -> str:
    """`NAME__run`, as the stub calls it."""
    return f"""
define ptr @{name}__run(ptr %packed, i32 %x, i32 %y, i32 %z, i32 %block) {{
  %told = call ptr @rudnn_emulate(ptr @run_{name}, ptr @poison_{name}, i32 {wave}, i32 %x, i32 %y,
                                  i32 %block, ptr %packed)
  ret ptr %told
}}
"""


def _flags() -> str:
    """The module flags that name this processor. Without fused multiply-add, where it has one.

    LLVM fuses where it sees fit, so that two kernels of the same operations may differ in the last
    bit; here they are to be comparable.
    """
    from rudnn.runtime.targets.llvm import cpu

    kind: dict[str, Any] = json.loads(str(cpu.tvm_target(""))) | {"tag": ""}
    kind |= {"mattr": ["-fma"]} if "x86_64" in kind["mtriple"] else {}
    target = json.dumps(kind).replace('"', "\\22")
    return f'!llvm.module.flags = !{{!9000}}\n!9000 = !{{i32 2, !"tvm_target", !"{target}"}}\n'


@lru_cache(maxsize=1)
def stub_library() -> Path:
    """The stub of libamdhip64.so."""
    inputs = [(STUBS / name).read_bytes() for name in ("libhip_stub.c", "libcuda_stub.c")]
    command = ("cc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", "{out}",
               str(STUBS / "libhip_stub.c"), "-ldl")  # fmt: skip
    return built("libhip_stub.so", inputs, command)


@lru_cache(maxsize=1)
def _version() -> str:
    sources = (Path(__file__), NATIVE / "amdgpu_emulator.c")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


@contextmanager
def emulated_rocm(arch: str) -> Iterator[HipStub]:
    """The device `rocm:0`, an `arch` whose kernels run on the CPU."""
    wave = capability.record(arch).wave
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hip.LIBRARY, str(stub_library()))
        patch.setenv("STUB_ARCH", arch)
        patch.setattr(compile.Code, "link", lambda code: emulated(code.ir, wave))
        patch.setattr(target.Rocm, "identity", lambda *_: f"{arch} emulated {_version()}")
        patch.setattr(driver, "driver", lru_cache(driver.HipDriver))
        patch.setattr(device, "_INTERNED", {})
        patch.setattr(device, "_DEFAULTS", {})
        yield HipStub()


class HipStub(Stub):
    """The stub's own functions: its log of calls, and faults to come."""

    library = staticmethod(stub_library)
