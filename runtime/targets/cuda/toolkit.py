"""CUDA C++ to machine code: NVRTC from pip or from a toolkit, or nvcc where it is asked for."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ....dsl.errors import CompileError

HINT = "pip install 'rudnn[cuda]'"
COMPILER = "RUDNN_CUDA_COMPILER"  # "nvrtc", the default, or "nvcc"
_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_LOG = 4000  # characters of a compiler's complaints worth showing
# No warnings: TVM's sources have many. The assembler tells what each kernel needs.
_FLAGS = ("--std=c++17", "--disable-warnings", "--ptxas-options=-v")
_STACK = re.compile(r"properties for (\w+)\s+(?:ptxas[ .]+)?([1-9]\d*) bytes stack frame")

# What TVM's sources include, a hundred thousand lines in the toolkit's version: these declare the
# names that are used, and a kernel compiles in 40 ms instead of 1 s.
_HEADERS = {
    "cuda/std/cstdint": """
namespace cuda { namespace std {
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
} }
""",
    "cuda/std/type_traits": """
namespace cuda { namespace std {
template <class A, class B> constexpr bool is_same_v = false;
template <class A> constexpr bool is_same_v<A, A> = true;
template <class A, class B> struct is_same { static constexpr bool value = is_same_v<A, B>; };
template <class A> struct is_integral;
template <class A> struct is_signed;
template <class A> struct is_unsigned;
template <class A> struct is_floating_point;
template <bool C, class A = void> struct enable_if;
template <bool C, class A, class B> struct conditional;
} }
""",
}


@dataclass(frozen=True)
class Nvrtc:
    """The library and the folder of the toolkit's headers."""

    library: Path
    include: Path

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        _library(self.library).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"


@lru_cache(maxsize=1)
def find_nvrtc() -> Nvrtc | None:
    """NVRTC, of the pip packages first; None where there is none."""
    for library, include in _candidates():
        if not (include / "cuda_fp16.h").is_file():
            continue
        try:
            _library(library)
        except OSError:
            continue
        return Nvrtc(library, include)
    return None


def _candidates() -> Iterator[tuple[Path, Path]]:
    """Pairs of a library and a header folder that may be there, the preferred ones first."""
    packages = importlib.util.find_spec("nvidia")
    for place in packages.submodule_search_locations or () if packages else ():
        for library in sorted(Path(place).glob("*/lib/libnvrtc.so.*"), reverse=True):
            yield library, library.parents[1] / "include"  # one folder for all of CUDA 13
            yield library, Path(place) / "cuda_runtime" / "include"  # a folder a package before
    for root in _toolkits():
        for library in (root / "lib64" / "libnvrtc.so", root / "lib" / "libnvrtc.so"):
            if library.exists():
                yield library, root / "include"
    if name := ctypes.util.find_library("nvrtc"):
        yield Path(name), Path("/usr/include")


def _toolkits() -> list[Path]:
    named = [os.environ.get(key, "") for key in ("CUDA_HOME", "CUDA_PATH")]
    return [Path(root) for root in (*named, "/usr/local/cuda") if root]


def find_nvcc() -> str | None:
    """The path of nvcc, if it is anywhere usual."""
    places = [str(root / "bin") for root in _toolkits()]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(places))


def compiler_name() -> str:
    """Which compiler was asked for. Raises CompileError for one that is not known."""
    name = os.environ.get(COMPILER) or "nvrtc"
    if name not in ("nvrtc", "nvcc"):
        raise CompileError(f"needs {COMPILER}=nvrtc or nvcc, got {name}")
    return name


@lru_cache(maxsize=4)
def identity(compiler: str) -> str:
    """The compiler and its version, told without running it."""
    if compiler == "nvcc":
        path = find_nvcc()
        stamp = Path(path).resolve() if path else None
        return f"nvcc {stamp} {stamp.stat().st_mtime_ns}" if stamp else "nvcc"
    for package in _PACKAGES:
        try:
            return f"nvrtc {version(package)}"
        except PackageNotFoundError:
            continue
    found = find_nvrtc()
    return f"nvrtc {found.version()}" if found else "nvrtc"


def cubin(source: str, arch: str, name: str) -> tuple[bytes, str]:
    """Machine code of a translation unit, and the unit as it was compiled.

    `name` is for messages. Multiplications and additions are fused, nothing else is relaxed:
    denormals, division and square root are as in IEEE 754. Raises CompileError.
    """
    code, log = _compile(source, arch, name)
    roomy = _with_room(source, _STACK.findall(log))
    return (code, source) if roomy == source else (_compile(roomy, arch, name)[0], roomy)


def _with_room(source: str, crowded: Sequence[tuple[str, str]]) -> str:
    """The unit with more registers for the kernels that did not fit into theirs.

    The assembler limits registers so that many blocks run side by side, and would rather spill::

        before::  __launch_bounds__(256) softmax_0(
        after::   __launch_bounds__(256, 1) softmax_0(
    """
    for kernel, _ in crowded:
        bounds = re.compile(rf"(?<=__launch_bounds__\()(\d+)(?=\) {kernel}\()")
        source = bounds.sub(r"\1, 1", source)
    return source


def _compile(source: str, arch: str, name: str) -> tuple[bytes, str]:
    """Machine code and the compiler's log."""
    if compiler_name() == "nvcc":
        return _by_nvcc(source, arch, name)
    found = find_nvrtc()
    if found is None:
        raise CompileError(f"needs NVRTC to compile {name} for {arch}, found none: {HINT}")
    return _by_nvrtc(found, source, arch, name)


@lru_cache(maxsize=4)
def _library(path: Path) -> Any:
    return ctypes.CDLL(str(path))


def _by_nvrtc(nvrtc: Nvrtc, source: str, arch: str, name: str) -> tuple[bytes, str]:
    c = _library(nvrtc.library)
    options = (f"--gpu-architecture={arch}", *_FLAGS, f"-I{nvrtc.include}")
    program = ctypes.c_void_p()
    bodies = (ctypes.c_char_p * len(_HEADERS))(*(text.encode() for text in _HEADERS.values()))
    names = (ctypes.c_char_p * len(_HEADERS))(*(header.encode() for header in _HEADERS))
    code = c.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), f"{name}.cu".encode(), len(_HEADERS), bodies, names
    )
    if code:
        raise CompileError(f"NVRTC cannot start on {name}: error {code}")
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = c.nvrtcCompileProgram(program, len(options), flags)
        log = _output(c.nvrtcGetProgramLogSize, c.nvrtcGetProgramLog, program).decode(
            "utf-8", "replace"
        )
        if failed:
            raise CompileError(f"NVRTC cannot compile {name} for {arch}:\n{log[:_LOG]}")
        return _output(c.nvrtcGetCUBINSize, c.nvrtcGetCUBIN, program), log
    finally:
        c.nvrtcDestroyProgram(ctypes.byref(program))


def _output(size: Any, fetch: Any, program: Any) -> bytes:
    """A result of NVRTC, which tells its size first."""
    count = ctypes.c_size_t()
    size(program, ctypes.byref(count))
    buffer = ctypes.create_string_buffer(count.value)
    fetch(program, buffer)
    return buffer.raw


def _by_nvcc(source: str, arch: str, name: str) -> tuple[bytes, str]:
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompileError(f"needs nvcc, as {COMPILER} says, found none: unset it, and {HINT}")
    with tempfile.TemporaryDirectory(prefix="rudnn-") as folder:
        unit, out = Path(folder, f"{name}.cu"), Path(folder, f"{name}.cubin")
        unit.write_text(source, "utf-8")
        command = [nvcc, f"-arch={arch}", *_FLAGS, "-cubin", "-o", str(out),
                   str(unit)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"nvcc cannot compile {name} for {arch}:\n{done.stderr[:_LOG]}")
        return out.read_bytes(), done.stderr
