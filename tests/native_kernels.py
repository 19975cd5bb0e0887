"""Kernels in C with the shape of a compiled object: weak pointer variables, tasks, an entry."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys

import pytest

from rudnn.runtime.targets.llvm import loader, toolchain

NO_COMPILER = "needs a C compiler: apt install gcc"
needs_compiler = pytest.mark.skipif(toolchain.find_compiler() is None, reason=NO_COMPILER)

KERNELS = r"""
#include <stdint.h>
#include <string.h>
typedef struct { void *sync; int32_t num_task; } env_t;
typedef int (*task_t)(int, env_t *, void *);
__attribute__((weak)) int (*__TVMBackendParallelLaunch)(task_t, void *, int) = 0;
__attribute__((weak)) void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = 0;
__attribute__((weak)) int (*__TVMBackendFreeWorkspace)(int, int, void *) = 0;
void TVMFFIErrorSetRaisedFromCStrParts(const char *, const char **, int32_t);

/* args: num_task, extent, out (int64[extent], each iteration adds 1), value to return at fail_at */
static int count(int id, env_t *env, void *cdata) {
    const int64_t *a = cdata;
    int64_t step = (a[1] + env->num_task - 1) / env->num_task;
    for (int64_t i = id * step; i < (id + 1) * step && i < a[1]; ++i) {
        if (i == a[4]) {
            const char *parts[] = {"row is ", "bad"};
            TVMFFIErrorSetRaisedFromCStrParts("ValueError", parts, 2);
            return (int)a[3];
        }
        ((int64_t *)a[2])[i] += 1;
    }
    return 0;
}
int32_t counts(const int64_t *a) { return __TVMBackendParallelLaunch(count, (void *)a, (int)a[0]); }

/* args: outer, inner, out (int64[outer][inner]) */
static int outer(int id, env_t *env, void *cdata) {
    const int64_t *a = cdata;
    for (int64_t i = id; i < a[0]; i += env->num_task) {
        int64_t inner[5] = {0, a[1], a[2] + 8 * i * a[1], 0, -1};
        if (counts(inner)) return 1;
    }
    return 0;
}
int32_t nested(const int64_t *a) { return __TVMBackendParallelLaunch(outer, (void *)a, 0); }

/* args: rows, out (float[rows]): sums scratch of 3000 floats, written first if args[2] */
static int sum(int id, env_t *env, void *cdata) {
    const int64_t *a = cdata;
    for (int64_t r = id; r < a[0]; r += env->num_task) {
        float *w = __TVMBackendAllocWorkspace(1, 0, 12000, 2, 32), s = 0;
        if (!w || (uintptr_t)w % 64) return 3;
        for (int i = 0; a[2] && i < 3000; ++i) w[i] = 1.0f;
        for (int i = 0; i < 3000; ++i) s += w[i];
        ((float *)a[1])[r] = s;
        if (__TVMBackendFreeWorkspace(1, 0, w)) return 4;
    }
    return 0;
}
int32_t scratch(const int64_t *a) { return __TVMBackendParallelLaunch(sum, (void *)a, 0); }

#ifdef __x86_64__
#include <xmmintrin.h>
static int tiny(int id, env_t *env, void *cdata) {
    volatile float x = 1e-38f, y = 0.1f;
    ((float *)cdata)[id] = x * y;
    for (volatile int spin = 0; spin < 20000; ++spin) {}
    return 0;
}
/* args: out (float[64]), whether to flush subnormals in the caller */
int32_t subnormals(const int64_t *a) {
    unsigned csr = _mm_getcsr();
    if (a[1]) _mm_setcsr(csr | 0x8000);
    int rc = __TVMBackendParallelLaunch(tiny, (void *)a[0], 64);
    _mm_setcsr(csr);
    return rc;
}
#endif
"""


def pack(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def ones(function: loader.Kernel, extent: int, num_task: int = 0) -> bool:
    """Whether a parallel loop runs each iteration exactly once."""
    out = (ctypes.c_int64 * extent)()
    rc = function(pack(num_task, extent, ctypes.addressof(out), 0, -1))
    return rc == 0 and all(value == 1 for value in out)


def script(code: str, *arguments: object, **environment: str) -> str:
    """Run Python code in a process of its own, which must end well; its output."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PRELUDE = """
import ctypes, os, signal, struct, sys, threading, warnings
from pathlib import Path
from rudnn.runtime.cache import DiskCache
from rudnn.runtime.targets.llvm import loader, toolchain
warnings.simplefilter("ignore")  # forking with threads is the point
cache = DiskCache(sys.argv[1])

def ones(function, extent, lead=(0,)):
    out = (ctypes.c_int64 * extent)()
    args = (*lead, extent, ctypes.addressof(out), 0, -1)
    return function(struct.pack(f"<{len(args)}q", *args)) == 0 and list(out) == [1] * extent

def in_child(check):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if check() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
