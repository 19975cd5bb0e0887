"""A driver's functions through ctypes under neutral names, its error codes as typed errors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from ...dsl.errors import (
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    OutOfMemoryError,
    RudnnError,
)

NON_BLOCKING = 1  # of a stream: it does not wait for the default one
CAPTURE_RELAXED = 2
POOL_KEEPS = 4  # the attribute of a memory pool
PARAM_BUFFER, PARAM_SIZE = 1, 2  # tags of a launch's `extra`

_KINDS = {
    "u": ctypes.c_uint, "i": ctypes.c_int, "p": ctypes.c_void_p, "d": ctypes.c_uint64,
    "z": ctypes.c_size_t, "b": ctypes.c_ubyte, "s": ctypes.c_char_p, "f": ctypes.c_float,
}  # fmt: skip
# Parameters by kind: d is an address on the device, p a handle or a pointer to a result.
_FUNCTIONS = {
    "init": "u", "device_count": "p", "device": "pi", "device_name": "pii", "synchronize": "",
    "module_load": "pp", "module_function": "pps", "module_unload": "p",
    "stream_create": "pu", "stream_destroy": "p", "stream_synchronize": "p",
    "capture_begin": "pi", "capture_end": "pp", "launch": "puuuuuuuppp",
    "graph_instantiate": "ppd", "graph_launch": "pp", "graph_destroy": "p", "graph_release": "p",
    "allocate_async": "pzp", "free_async": "dp", "allocate": "pz", "free": "d",
    "memory_info": "pp", "default_pool": "pi", "pool_set": "pip",
    "copy_in": "dpzp", "copy_out": "pdzp", "copy": "ddzp", "fill": "dbzp",
    "event_create": "pu", "event_record": "pp", "event_synchronize": "p",
    "event_elapsed": "ppp", "event_destroy": "p",
}  # fmt: skip

# Both makers number these alike.
_OUT_OF_MEMORY, _LAUNCH_TIMEOUT, NOT_SUPPORTED = 2, 702, 801
# After one of these every call fails: a device that is gone, memory or links that failed,
# exceptions in a kernel, a context that someone destroyed.
_LOST = frozenset({46, 214, 220, 226, 700, 709, 710, 714, 715, 716, 717, 718, 719, 999})


class Library:
    """The driver's functions as attributes; each returns an error code, 0 for success.

    `symbols` are the names in the library of the functions in `_FUNCTIONS`, `extra` the parameters
    of further ones, by their names there. Raises OSError where there is no library, AttributeError
    for one that is too old.
    """

    param_end = 0  # the tag that ends a launch's `extra`

    def __init__(self, path: str, symbols: Mapping[str, str], extra: Mapping[str, str]) -> None:
        self.path = path
        c = ctypes.CDLL(path)
        for name, kinds in (*_FUNCTIONS.items(), *extra.items()):
            function = getattr(c, symbols.get(name, name))
            function.restype, function.argtypes = ctypes.c_int, [_KINDS[kind] for kind in kinds]
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: all are set above
        raise AttributeError(name)

    def describe(self, code: int) -> str:
        """What an error code means, in the driver's words."""
        raise NotImplementedError

    def error(self, code: int, what: str, otherwise: type[RudnnError] = DeviceError) -> RudnnError:
        """The typed error of a code; `what` names the work, `otherwise` is for codes of no note."""
        kind = otherwise
        if code == _OUT_OF_MEMORY:
            kind = OutOfMemoryError
        elif code == _LAUNCH_TIMEOUT:
            kind = DeviceTimeoutError
        elif code in _LOST:
            kind = DeviceLostError
        return kind(f"{what}: {self.describe(code)}")

    def check(self, code: int, what: str, otherwise: type[RudnnError] = DeviceError) -> None:
        """Raise the typed error of a code that is not 0."""
        if code:
            raise self.error(code, what, otherwise)


def fatal(code: int) -> bool:
    """Whether nothing more runs on the device in this process."""
    return code in _LOST or code == _LAUNCH_TIMEOUT
