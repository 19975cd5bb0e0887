"""The host's processor: features, caches, what schedules may assume. No compiler needed."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

from ....dsl.errors import TargetError
from ....schedules.capability import Capability

# Baselines for artefacts that travel: (LLVM triple, LLVM cpu, vector bits, vector registers).
BASELINES: dict[str, tuple[str, str, int, int]] = {
    "x86-64-v2": ("x86_64-linux-gnu", "x86-64-v2", 128, 16),
    "x86-64-v3": ("x86_64-linux-gnu", "x86-64-v3", 256, 16),
    "x86-64-v4": ("x86_64-linux-gnu", "x86-64-v4", 512, 32),
    "aarch64": ("aarch64-linux-gnu", "generic", 128, 32),
}


@lru_cache(maxsize=1)
def features() -> frozenset[str]:
    """The instruction-set flags the kernel reports, empty where it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


@lru_cache(maxsize=1)
def model_name() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@lru_cache(maxsize=8)
def _cache_bytes(level: int, default: int) -> int:
    base = Path("/sys/devices/system/cpu/cpu0/cache")
    for index in sorted(base.glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            found = int((index / "level").read_text())
            text = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if found == level and kind in ("Data", "Unified") and text.endswith("K"):
            return int(text[:-1]) * 1024
    return default


@lru_cache(maxsize=8)
def capability(arch: str) -> Capability:
    """The record of `arch`, or of the host for "". Raises TargetError on an unknown name."""
    if arch:
        if arch not in BASELINES:
            raise TargetError(f"needs llvm or llvm: and one of {', '.join(BASELINES)}, got {arch}")
        _, _, bits, registers = BASELINES[arch]
        return Capability(
            "cores", vector_bits=bits, vector_registers=registers, cores=2, vector_ldexp=bits == 512
        )
    bits, registers = _host_vectors()
    return Capability(
        "cores", vector_bits=bits, vector_registers=registers, cores=cores(),
        vector_ldexp=bits == 512,  # AVX-512's vscalefps
        l1_bytes=_cache_bytes(1, 32 * 1024), l2_bytes=_cache_bytes(2, 512 * 1024),
    )  # fmt: skip


def _host_vectors() -> tuple[int, int]:
    flags = features()
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return 512, 32
    if {"avx2", "fma"} <= flags:
        return 256, 16
    return 128, 32 if platform.machine() in ("aarch64", "arm64") else 16


def identity(arch: str) -> str:
    """What machine code for `arch` depends on."""
    if arch:
        return arch
    return f"{platform.machine()} {model_name()} {' '.join(sorted(features()))} {capability('')}"


def tvm_target(arch: str) -> object:
    """The TVM target, host included."""
    import tvm

    if arch:
        triple, cpu, _, _ = BASELINES[arch]
    else:
        triple = f"{platform.machine()}-linux-gnu"
        cpu = tvm.get_global_func("target.llvm_get_system_cpu")()
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mtriple": triple})
    return target.with_host(target)
