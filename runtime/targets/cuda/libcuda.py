"""NVIDIA's driver API through ctypes: its library, its devices."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

from ...streams import Context, Library

LIBRARY = "RUDNN_CUDA_LIBRARY"  # another file than the driver's own
_SYMBOLS = {
    "init": "cuInit", "device_count": "cuDeviceGetCount", "device": "cuDeviceGet",
    "device_name": "cuDeviceGetName", "synchronize": "cuCtxSynchronize",
    "module_load": "cuModuleLoadData", "module_function": "cuModuleGetFunction",
    "module_unload": "cuModuleUnload", "stream_create": "cuStreamCreate",
    "stream_destroy": "cuStreamDestroy_v2", "stream_synchronize": "cuStreamSynchronize",
    "capture_begin": "cuStreamBeginCapture_v2", "capture_end": "cuStreamEndCapture",
    "launch": "cuLaunchKernel", "graph_instantiate": "cuGraphInstantiateWithFlags",
    "graph_launch": "cuGraphLaunch", "graph_destroy": "cuGraphDestroy",
    "graph_release": "cuGraphExecDestroy", "allocate_async": "cuMemAllocAsync",
    "free_async": "cuMemFreeAsync", "allocate": "cuMemAlloc_v2", "free": "cuMemFree_v2",
    "memory_info": "cuMemGetInfo_v2", "default_pool": "cuDeviceGetDefaultMemPool",
    "pool_set": "cuMemPoolSetAttribute", "copy_in": "cuMemcpyHtoDAsync_v2",
    "copy_out": "cuMemcpyDtoHAsync_v2", "copy": "cuMemcpyDtoDAsync_v2", "fill": "cuMemsetD8Async",
    "event_create": "cuEventCreate", "event_record": "cuEventRecord",
    "event_synchronize": "cuEventSynchronize", "event_elapsed": "cuEventElapsedTime",
    "event_destroy": "cuEventDestroy_v2",
}  # fmt: skip
_MORE = {
    "cuGetErrorName": "ip", "cuGetErrorString": "ip", "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi", "cuCtxPushCurrent_v2": "p", "cuCtxPopCurrent_v2": "p",
}  # fmt: skip
_MAJOR, _MINOR = 75, 76  # attributes of a device: its compute capability


class Driver(Library):
    """The driver. Raises OSError where there is none, AttributeError for one that is too old."""

    def __init__(self, path: str) -> None:
        super().__init__(path, _SYMBOLS, _MORE)

    def describe(self, code: int) -> str:
        parts = []
        for function in (self.cuGetErrorString, self.cuGetErrorName):
            found = ctypes.c_char_p()
            function(code, ctypes.byref(found))
            parts.append((found.value or b"unknown").decode(errors="replace"))
        return f"{parts[0]} ({parts[1]}, {code})"

    def attribute(self, device: ctypes.c_int, which: int) -> int:
        """A number that describes a device."""
        value = ctypes.c_int()
        code = self.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        self.check(code, f"asking cuda:{device.value} for its attributes")
        return value.value


class PrimaryContext(Context):
    """The primary context of a device, which frameworks in this process share."""

    kind = "cuda"
    api: Driver

    def open(self) -> str:
        handle = ctypes.c_void_p()
        code = self.api.cuDevicePrimaryCtxRetain(ctypes.byref(handle), self.device)
        self.api.check(code, f"making a context on {self}")
        self._handle = handle.value
        self._popped = ctypes.byref(ctypes.c_void_p())
        major, minor = (self.api.attribute(self.device, which) for which in (_MAJOR, _MINOR))
        return f"sm_{major}{minor}"

    def enter(self) -> int:
        return int(self.api.cuCtxPushCurrent_v2(self._handle))

    def leave(self) -> None:
        self.api.cuCtxPopCurrent_v2(self._popped)


@lru_cache(maxsize=4)
def _open(path: str) -> Driver:
    return Driver(path)


def open_library() -> Driver:
    """The driver of this process. Raises OSError or AttributeError."""
    return _open(os.environ.get(LIBRARY) or "libcuda.so.1")
