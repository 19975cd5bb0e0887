"""One device of this process: its streams, its memory, and what became of it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...dsl.errors import DeviceError, DeviceLostError, OutOfMemoryError, RudnnError
from ..locks import fork_safe_lock
from .library import NON_BLOCKING, NOT_SUPPORTED, POOL_KEEPS, Library, fatal

if TYPE_CHECKING:
    from ..device import Queue

_COUNTING = fork_safe_lock()
_POOL_KEEPS_BYTES = 1 << 30  # that freed memory may hold on to, for the next allocation


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
            code = api.stream_create(ctypes.byref(made), NON_BLOCKING)
            context.check(code, "making a stream")
        self.handle = made.value or 0
        weakref.finalize(self, context.quietly, api.stream_destroy, self.handle).atexit = False

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
    """Device `index` of a kind that `kind` names, as frameworks in this process share it.

    `with context:` makes it the current one of the thread; it raises DeviceError in a process
    forked after the driver was first used, and DeviceLostError once a kernel has broken it.
    """

    kind = ""

    def __init__(self, api: Library, index: int) -> None:
        self.api, self.index, self.pid = api, index, os.getpid()
        self.lost = ""
        device = ctypes.c_int()
        api.check(api.device(ctypes.byref(device), index), f"opening {self}")
        self.device = device
        self.arch = self.open()
        self.ordered = True  # until the driver says that allocations have no order
        pool, keep = ctypes.c_void_p(), ctypes.c_uint64(_POOL_KEEPS_BYTES)
        # By default a pool gives all freed memory back at each wait.
        if api.default_pool(ctypes.byref(pool), device) == 0:
            api.pool_set(pool, POOL_KEEPS, ctypes.byref(keep))
        self.streams: weakref.WeakKeyDictionary[Queue, Stream] = weakref.WeakKeyDictionary()
        self.arenas: weakref.WeakKeyDictionary[Queue, Block] = weakref.WeakKeyDictionary()
        self.usage = Usage()
        self.capture = Stream(self, None)  # where graphs are recorded, by one thread at a time
        self.capturing = threading.RLock()

    def open(self) -> str:
        """Get ready for `enter`; the architecture to compile for."""
        raise NotImplementedError

    def enter(self) -> int:
        """Make the device the thread's current one; an error code."""
        raise NotImplementedError

    def leave(self) -> None:
        """Undo the last `enter` of the thread."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def __enter__(self) -> Context:
        if self.pid != os.getpid():
            raise DeviceError(
                f"needs a process that was not forked after it used {self}, got a fork of process "
                f"{self.pid}: start processes with the multiprocessing method spawn"
            )
        if self.lost:
            raise DeviceLostError(self.lost)
        self.check(self.enter(), "entering a context")
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def check(self, code: int, what: str, otherwise: type[RudnnError] = DeviceError) -> None:
        """Raise the typed error of a code that is not 0, and remember what ends the context."""
        if code:
            error = self.api.error(code, f"{what} on {self}", otherwise)
            if fatal(code):
                self.lost = str(error)
            raise error

    def quietly(self, function: Any, *arguments: Any) -> None:
        """Give something back, if there still is a context to give it to."""
        if not self.lost and self.pid == os.getpid():
            with suppress(RudnnError), self:
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
        address, api, size = ctypes.c_uint64(), self.api, max(nbytes, 1)
        with self:
            code = NOT_SUPPORTED
            if self.ordered:
                code = api.allocate_async(ctypes.byref(address), size, stream.handle)
                self.ordered = code != NOT_SUPPORTED
            if code == NOT_SUPPORTED:
                code = api.allocate(ctypes.byref(address), size)
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
            self.quietly(self.api.free_async, address, stream.handle)
        else:
            self.quietly(self.api.free, address)  # waits for the device by itself

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all, of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self:
            code = self.api.memory_info(ctypes.byref(free), ctypes.byref(total))
            self.check(code, "asking for the memory")
        return free.value, total.value
