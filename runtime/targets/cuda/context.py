"""One device of this process: its context, streams, memory, and what became of it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....dsl.errors import DeviceError, DeviceLostError, OutOfMemoryError, RudnnError
from ...locks import fork_safe_lock
from . import libcuda
from .libcuda import Library

if TYPE_CHECKING:
    from ...device import Queue

_COUNTING = fork_safe_lock()
_POOL_KEEPS = 1 << 30  # bytes that freed memory may hold on to, for the next allocation


class Stream:
    """A queue's stream: our own, or one that a framework made and keeps (`handle`).

    `running` are the kernels submitted since it was last waited for, in order.
    """

    def __init__(self, context: Context, handle: int | None) -> None:
        self.context = context
        self.running: dict[str, None] = {}
        if handle is not None:
            self.handle = handle
            return
        made = ctypes.c_void_p()
        api = context.api
        with context:
            context.check(api.cuStreamCreate(ctypes.byref(made), libcuda.STREAM_NON_BLOCKING),
                          "making a stream")  # fmt: skip
        self.handle = made.value or 0
        weakref.finalize(self, context.quietly, api.cuStreamDestroy_v2, self.handle).atexit = False

    def work(self, what: str) -> str:
        """`what`, with the kernels that may be behind an error found in it."""
        return f"{what} after {', '.join(self.running)}" if self.running else what


@dataclass
class Usage:
    """Bytes of blocks alive, of either kind, and the most of the latter."""

    tensors: int = 0
    arenas: int = 0
    peak: int = 0


class Block:
    """Memory of a device in a stream's order; freed when the last reference goes."""

    def __init__(self, stream: Stream, nbytes: int, kind: str = "tensors") -> None:
        context = stream.context
        self.nbytes = nbytes
        self.address = context.allocate(nbytes, stream)
        context.count(kind, nbytes)
        release = weakref.finalize(self, context.free, self.address, stream, kind, nbytes)
        release.atexit = False


class Context:
    """The primary context of device `index`, which frameworks in this process share.

    `with context:` makes it the current one of the thread; it raises DeviceError in a process
    forked after CUDA was first used, and DeviceLostError once a kernel has broken the context.
    """

    def __init__(self, api: Library, index: int) -> None:
        self.api, self.index, self.pid = api, index, os.getpid()
        self.lost = ""
        device, handle, name = ctypes.c_int(), ctypes.c_void_p(), ctypes.create_string_buffer(256)
        api.check(api.cuDeviceGet(ctypes.byref(device), index), f"opening cuda:{index}")
        api.check(api.cuDeviceGetName(name, len(name), device), f"naming cuda:{index}")
        self._device = device
        self.name = name.value.decode(errors="replace")
        major = self._attribute(libcuda.ATTRIBUTE_MAJOR)
        self.arch = f"sm_{major}{self._attribute(libcuda.ATTRIBUTE_MINOR)}"
        api.check(api.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device),
                  f"making a context on cuda:{index}")  # fmt: skip
        self.handle = handle.value or 0
        self._popped = ctypes.byref(ctypes.c_void_p())
        self.ordered = bool(self._attribute(libcuda.ATTRIBUTE_POOLS))
        if self.ordered:
            self._keep_freed()
        self.streams: weakref.WeakKeyDictionary[Queue, Stream] = weakref.WeakKeyDictionary()
        self.arenas: weakref.WeakKeyDictionary[Queue, Block] = weakref.WeakKeyDictionary()
        self.usage = Usage()
        self.capture = Stream(self, None)  # where graphs are recorded, by one thread at a time
        self.capturing = threading.RLock()

    def __str__(self) -> str:
        return f"cuda:{self.index}"

    def __enter__(self) -> Context:
        if self.pid != os.getpid():
            raise DeviceError(
                f"needs a process that was not forked after it used {self}, got a fork of process "
                f"{self.pid}: start processes with the multiprocessing method spawn"
            )
        if self.lost:
            raise DeviceLostError(self.lost)
        self.api.check(self.api.cuCtxPushCurrent_v2(self.handle), f"entering {self}")
        return self

    def __exit__(self, *_: object) -> None:
        self.api.cuCtxPopCurrent_v2(self._popped)

    def check(self, code: int, what: str, otherwise: type[RudnnError] = DeviceError) -> None:
        """Raise the typed error of a code that is not 0, and remember what ends the context."""
        if code:
            error = self.api.error(code, f"{what} on {self}", otherwise)
            if libcuda.fatal(code):
                self.lost = str(error)
            raise error

    def quietly(self, function: Any, *arguments: Any) -> None:
        """Give something back, if there still is a context to give it to."""
        if not self.lost and self.pid == os.getpid():
            with self:
                function(*arguments)

    def stream(self, queue: Queue) -> Stream:
        """The stream of a queue: that of its handle, else one made now."""
        found = self.streams.get(queue)
        if found is None:
            found = self.streams.setdefault(queue, Stream(self, queue.handle))
            queue.handle = found.handle
        return found

    def allocate(self, nbytes: int, stream: Stream) -> int:
        """Address of new memory, aligned to 256 bytes. Raises OutOfMemoryError."""
        address, api = ctypes.c_uint64(), self.api
        size = max(nbytes, 1)
        with self:
            if self.ordered:
                code = api.cuMemAllocAsync(ctypes.byref(address), size, stream.handle)
            else:
                code = api.cuMemAlloc_v2(ctypes.byref(address), size)
            try:
                self.check(code, stream.work(f"allocating {nbytes} bytes"))
            except OutOfMemoryError as error:
                free, total = self.memory()
                raise OutOfMemoryError(f"{error}; {free} of {total} bytes are free") from None
        return address.value

    def count(self, kind: str, nbytes: int) -> None:
        """Note that blocks of a kind have grown."""
        with _COUNTING:
            setattr(self.usage, kind, getattr(self.usage, kind) + nbytes)
            self.usage.peak = max(self.usage.peak, self.usage.arenas)

    def free(self, address: int, stream: Stream, kind: str, nbytes: int) -> None:
        """Give memory back once the stream's work so far is done."""
        self.count(kind, -nbytes)
        if self.ordered:
            self.quietly(self.api.cuMemFreeAsync, address, stream.handle)
        else:
            self.quietly(self.api.cuMemFree_v2, address)  # waits for the device by itself

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all, of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self:
            self.check(self.api.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
                       "asking for the memory")  # fmt: skip
        return free.value, total.value

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.api.check(self.api.cuDeviceGetAttribute(ctypes.byref(value), which, self._device),
                       f"asking cuda:{self.index} for its attributes")  # fmt: skip
        return value.value

    def _keep_freed(self) -> None:
        """Let the pool keep some freed memory: by default it goes back at each wait."""
        pool, keep = ctypes.c_void_p(), ctypes.c_uint64(_POOL_KEEPS)
        if self.api.cuDeviceGetDefaultMemPool(ctypes.byref(pool), self._device) == 0:
            self.api.cuMemPoolSetAttribute(pool, libcuda.POOL_RELEASE_THRESHOLD, ctypes.byref(keep))
