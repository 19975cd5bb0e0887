"""AMD's HIP runtime through ctypes: its library, its devices."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import threading
from functools import lru_cache
from pathlib import Path

from ....dsl.errors import DeviceError
from ...streams import Context, Library

LIBRARY = "RUDNN_HIP_LIBRARY"  # another file than the runtime's own
_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")
_SYMBOLS = {
    "init": "hipInit", "device_count": "hipGetDeviceCount", "device": "hipDeviceGet",
    "device_name": "hipDeviceGetName", "synchronize": "hipDeviceSynchronize",
    "module_load": "hipModuleLoadData", "module_function": "hipModuleGetFunction",
    "module_unload": "hipModuleUnload", "stream_create": "hipStreamCreateWithFlags",
    "stream_destroy": "hipStreamDestroy", "stream_synchronize": "hipStreamSynchronize",
    "capture_begin": "hipStreamBeginCapture", "capture_end": "hipStreamEndCapture",
    "launch": "hipModuleLaunchKernel", "graph_instantiate": "hipGraphInstantiateWithFlags",
    "graph_launch": "hipGraphLaunch", "graph_destroy": "hipGraphDestroy",
    "graph_release": "hipGraphExecDestroy", "allocate_async": "hipMallocAsync",
    "free_async": "hipFreeAsync", "allocate": "hipMalloc", "free": "hipFree",
    "memory_info": "hipMemGetInfo", "default_pool": "hipDeviceGetDefaultMemPool",
    "pool_set": "hipMemPoolSetAttribute", "copy_in": "hipMemcpyHtoDAsync",
    "copy_out": "hipMemcpyDtoHAsync", "copy": "hipMemcpyDtoDAsync", "fill": "hipMemsetD8Async",
    "event_create": "hipEventCreateWithFlags", "event_record": "hipEventRecord",
    "event_synchronize": "hipEventSynchronize", "event_elapsed": "hipEventElapsedTime",
    "event_destroy": "hipEventDestroy",
}  # fmt: skip
_MORE = {"hipGetDevice": "p", "hipSetDevice": "i"}
_PROPERTIES = ("hipGetDevicePropertiesR0600", "hipGetDeviceProperties")
_PROPERTIES_BYTES = 16384  # more than any version of the structure has
_ARCH = re.compile(rb"gfx[0-9a-f]{3,4}(?![0-9a-z])")


class Hip(Library):
    """The HIP runtime. Raises OSError where there is none, AttributeError for one too old."""

    param_end = 3

    def __init__(self, path: str) -> None:
        super().__init__(path, _SYMBOLS, _MORE)
        c = ctypes.CDLL(path)
        c.hipGetErrorString.restype = c.hipGetErrorName.restype = ctypes.c_char_p
        self._words = (c.hipGetErrorString, c.hipGetErrorName)
        name = next((n for n in _PROPERTIES if hasattr(c, n)), _PROPERTIES[-1])
        self._properties = getattr(c, name)

    def describe(self, code: int) -> str:
        words, name = ((word(code) or b"unknown").decode(errors="replace") for word in self._words)
        return f"{words} ({name}, {code})"

    def arch(self, index: int) -> str:
        """The architecture of a device, "" where the runtime does not tell."""
        room = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        self.check(self._properties(room, index), f"asking rocm:{index} for its properties")
        # Where in the structure the name stands differs between versions.
        found = _ARCH.findall(room.raw)
        return found[-1].decode() if found else ""


class HipContext(Context):
    """One AMD device, current on a thread only while in use."""

    kind = "rocm"
    api: Hip

    def open(self) -> str:
        count = ctypes.c_int()
        self.api.check(self.api.device_count(ctypes.byref(count)), f"opening {self}")
        self._only = count.value == 1  # then it is every thread's current one
        self._former = threading.local()  # `devices`: current ones before each `enter`
        arch = self.api.arch(self.index)
        if not arch:
            raise DeviceError(f"needs {self} to tell its architecture, got none from HIP")
        return arch

    def enter(self) -> int:
        if self._only:
            return 0
        former = ctypes.c_int()
        code: int = self.api.hipGetDevice(ctypes.byref(former))
        code = code or self.api.hipSetDevice(self.index)
        if code == 0:
            self._former.devices = [*getattr(self._former, "devices", ()), former.value]
        return code

    def leave(self) -> None:
        if not self._only:
            self.api.hipSetDevice(self._former.devices.pop())


def open_library() -> Hip:
    """The HIP runtime of this process. Raises OSError or AttributeError."""
    return _open(os.environ.get(LIBRARY, ""))


@lru_cache(maxsize=4)
def _open(chosen: str) -> Hip:
    problems = []
    for path in (chosen,) if chosen else _candidates():
        try:
            return Hip(path)
        except OSError as error:
            problems.append(str(error))
    raise OSError(problems[0])


def _candidates() -> list[str]:
    """Where HIP may be: in this process, in torch (two copies in one process break), in ROCm."""
    torch = importlib.util.find_spec("torch")
    folders = [Path(place, "lib") for place in (torch and torch.submodule_search_locations) or ()]
    inside = [str(folder / name) for folder in folders for name in _NAMES]
    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "lib")
    found = [path for path in (*_loaded(), *inside) if os.path.exists(path)]
    return [*found, *_NAMES, *(str(rocm / name) for name in _NAMES)]


def _loaded() -> list[str]:
    """Files of HIP that this process has mapped."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return list(dict.fromkeys(re.findall(r"/\S*libamdhip64\.so\S*$", maps, re.M)))
