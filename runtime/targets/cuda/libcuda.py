"""The CUDA driver API through ctypes, and its error codes as typed errors."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

from ....dsl.errors import (
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    OutOfMemoryError,
    RudnnError,
)

LIBRARY = "RUDNN_CUDA_LIBRARY"  # another file than the driver's own

STREAM_NON_BLOCKING = 1
CAPTURE_RELAXED = 2
ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR, ATTRIBUTE_POOLS = 75, 76, 115
POOL_RELEASE_THRESHOLD = 4
PARAM_END, PARAM_BUFFER, PARAM_SIZE = 0, 1, 2  # tags of cuLaunchKernel's `extra`

_KINDS = {
    "u": ctypes.c_uint, "i": ctypes.c_int, "p": ctypes.c_void_p, "d": ctypes.c_uint64,
    "z": ctypes.c_size_t, "b": ctypes.c_ubyte, "s": ctypes.c_char_p, "f": ctypes.c_float,
}  # fmt: skip
# Parameters by kind: d is an address on the device, p a handle or a pointer to a result.
_FUNCTIONS = {
    "cuInit": "u", "cuGetErrorName": "ip", "cuGetErrorString": "ip",
    "cuDeviceGetCount": "p", "cuDeviceGet": "pi", "cuDeviceGetName": "pii",
    "cuDeviceGetAttribute": "pii", "cuDevicePrimaryCtxRetain": "pi",
    "cuDeviceGetDefaultMemPool": "pi", "cuMemPoolSetAttribute": "pip",
    "cuCtxPushCurrent_v2": "p", "cuCtxPopCurrent_v2": "p", "cuCtxSynchronize": "",
    "cuModuleLoadData": "pp", "cuModuleGetFunction": "pps", "cuModuleUnload": "p",
    "cuStreamCreate": "pu", "cuStreamDestroy_v2": "p", "cuStreamSynchronize": "p",
    "cuStreamBeginCapture_v2": "pi", "cuStreamEndCapture": "pp",
    "cuLaunchKernel": "puuuuuuuppp",
    "cuGraphInstantiateWithFlags": "ppd", "cuGraphLaunch": "pp", "cuGraphDestroy": "p",
    "cuGraphExecDestroy": "p",
    "cuMemAllocAsync": "pzp", "cuMemFreeAsync": "dp", "cuMemAlloc_v2": "pz", "cuMemFree_v2": "d",
    "cuMemGetInfo_v2": "pp", "cuMemcpyHtoDAsync_v2": "dpzp", "cuMemcpyDtoHAsync_v2": "pdzp",
    "cuMemcpyDtoDAsync_v2": "ddzp", "cuMemsetD8Async": "dbzp",
    "cuEventCreate": "pu", "cuEventRecord": "pp", "cuEventSynchronize": "p",
    "cuEventElapsedTime": "ppp", "cuEventDestroy_v2": "p",
}  # fmt: skip

_OUT_OF_MEMORY, _LAUNCH_TIMEOUT = 2, 702
# After one of these every call on the context fails: a device that is gone, memory or links that
# failed, exceptions in a kernel, a context that someone destroyed.
_LOST = frozenset({46, 214, 220, 226, 700, 709, 710, 714, 715, 716, 717, 718, 719, 999})


class Library:
    """The driver's functions as attributes; each returns an error code, 0 for success."""

    def __init__(self, path: str) -> None:
        self.path = path
        c = ctypes.CDLL(path)
        for name, kinds in _FUNCTIONS.items():
            function = getattr(c, name)
            function.restype, function.argtypes = ctypes.c_int, [_KINDS[kind] for kind in kinds]
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: all are set above
        raise AttributeError(name)

    def text(self, code: int) -> str:
        """What an error code means, in the driver's words."""
        parts = []
        for function in (self.cuGetErrorString, self.cuGetErrorName):
            found = ctypes.c_char_p()
            function(code, ctypes.byref(found))
            parts.append((found.value or b"unknown").decode(errors="replace"))
        return f"{parts[0]} ({parts[1]}, {code})"

    def error(self, code: int, what: str, otherwise: type[RudnnError] = DeviceError) -> RudnnError:
        """The typed error of a code; `what` names the work, `otherwise` is for codes of no note."""
        kind = otherwise
        if code == _OUT_OF_MEMORY:
            kind = OutOfMemoryError
        elif code == _LAUNCH_TIMEOUT:
            kind = DeviceTimeoutError
        elif code in _LOST:
            kind = DeviceLostError
        return kind(f"{what}: {self.text(code)}")

    def check(self, code: int, what: str, otherwise: type[RudnnError] = DeviceError) -> None:
        """Raise the typed error of a code that is not 0."""
        if code:
            raise self.error(code, what, otherwise)


@lru_cache(maxsize=4)
def _open(path: str) -> Library:
    return Library(path)


def open_library() -> Library:
    """The driver. Raises OSError where there is none, AttributeError for one that is too old."""
    return _open(os.environ.get(LIBRARY) or "libcuda.so.1")


def fatal(code: int) -> bool:
    """Whether nothing more runs on the device in this process."""
    return code in _LOST or code == _LAUNCH_TIMEOUT
