"""The `Driver` of NVIDIA devices."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....dsl.errors import DeviceError
from ....schedules.capability import Capability
from ...device import MemoryUsage
from ...locks import fork_safe_lock
from ...plan import LaunchPlan
from . import libcuda
from .capability import record
from .context import Block, Context, Stream
from .kernel import Kernel

if TYPE_CHECKING:
    from ...cache import DiskCache
    from ...device import Queue

_NAN_BYTE = 0xFF  # a float of any width made of these is NaN


class CudaDriver:
    """Devices by index; the driver is opened when first asked for one."""

    dlpack: int | None = 2  # kDLCUDA
    host = False

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        self._names: tuple[str, ...] | None = None
        self._lock = fork_safe_lock()
        self._poison = False
        self.problem = ""  # why there are no devices

    def device_names(self) -> Sequence[str]:
        if self._names is None:
            with self._lock:
                self._names = tuple(self._find())
        return self._names

    def _find(self) -> list[str]:
        """The names of all devices; where there are none, `problem` says why."""
        try:
            api = libcuda.open_library()
        except (OSError, AttributeError) as error:
            self.problem = f"no NVIDIA driver: {error}"
            return []
        count = ctypes.c_int()
        code = api.cuInit(0) or api.cuDeviceGetCount(ctypes.byref(count))
        if code or not count.value:
            self.problem = api.text(code) if code else "no device"
            return []
        names = []
        for index in range(count.value):
            text, device = ctypes.create_string_buffer(256), ctypes.c_int()
            api.check(api.cuDeviceGet(ctypes.byref(device), index), f"opening cuda:{index}")
            api.check(api.cuDeviceGetName(text, len(text), device), f"naming cuda:{index}")
            names.append(text.value.decode(errors="replace"))
        return names

    def arch(self, index: int) -> str:
        return self.context(index).arch

    def capability(self, index: int) -> Capability:
        return record(self.arch(index))

    def context(self, index: int) -> Context:
        """The device's context, made on first use. Raises DeviceError."""
        found = self._contexts.get(index)
        if found is None:
            names = self.device_names()
            if not 0 <= index < len(names):
                have = f"{len(names)} devices" if names else self.problem
                raise DeviceError(f"needs a device cuda:{index}, got {have}")
            with self._lock:
                found = self._contexts.get(index) or Context(libcuda.open_library(), index)
                self._contexts[index] = found
        return found

    def load(self, binary: Path, plan: LaunchPlan, cache: DiskCache, index: int) -> Kernel:
        return Kernel(self.context(index), binary.read_bytes(), plan)

    def last_error(self) -> str:
        return ""  # errors are raised

    def poison(self, on: bool) -> None:
        self._poison = on

    def allocate(self, nbytes: int, queue: Queue) -> Block:
        return Block(self._stream(queue), nbytes)

    def copy_in(self, address: int, data: memoryview, queue: Queue) -> None:
        stream, nbytes = self._stream(queue), data.nbytes
        if nbytes:
            call = stream.context.api.cuMemcpyHtoDAsync_v2
            with stream.context:
                code = call(address, _address(data), nbytes, stream.handle)
                stream.context.check(code, stream.work(f"copying {nbytes} bytes in"))
            self._wait(stream)  # until then the driver may still read `data`

    def copy_out(self, address: int, data: memoryview, queue: Queue) -> None:
        stream, nbytes = self._stream(queue), data.nbytes
        if nbytes:
            call = stream.context.api.cuMemcpyDtoHAsync_v2
            with stream.context:
                code = call(_address(data), address, nbytes, stream.handle)
                stream.context.check(code, stream.work(f"copying {nbytes} bytes out"))
        self._wait(stream)

    def copy(self, to: int, start: int, nbytes: int, queue: Queue) -> None:
        if nbytes:
            stream = self._stream(queue)
            call = stream.context.api.cuMemcpyDtoDAsync_v2
            with stream.context:
                code = call(to, start, nbytes, stream.handle)
                stream.context.check(code, stream.work(f"copying {nbytes} bytes"))

    def arena(self, queue: Queue, nbytes: int) -> int:
        stream = self._stream(queue)
        arenas = stream.context.arenas
        block = arenas.get(queue)
        if block is None or block.nbytes < nbytes:
            del block
            arenas.pop(queue, None)  # first, so that its memory can serve again
            block = arenas[queue] = Block(stream, nbytes, "arenas")
        if self._poison:
            call = stream.context.api.cuMemsetD8Async
            with stream.context:
                code = call(block.address, _NAN_BYTE, block.nbytes, stream.handle)
                stream.context.check(code, stream.work("filling the workspace"))
        return block.address

    def synchronize(self, queue: Queue) -> None:
        self._wait(self._stream(queue))

    def record(self, queue: Queue) -> Event:
        return Event(self._stream(queue))

    def memory_usage(self, index: int) -> MemoryUsage:
        usage = self.context(index).usage
        return MemoryUsage(usage.tensors, usage.arenas, usage.peak)

    def _stream(self, queue: Queue) -> Stream:
        return self.context(queue.device.index).stream(queue)

    def _wait(self, stream: Stream) -> None:
        with stream.context:
            code = stream.context.api.cuStreamSynchronize(stream.handle)
            stream.context.check(code, stream.work("waiting"))
        stream.running.clear()


class Event:
    """A point in a stream's work."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.context = stream, stream.context
        api, made = self.context.api, ctypes.c_void_p()
        with self.context:
            self.context.check(api.cuEventCreate(ctypes.byref(made), 0), "making an event")
            self.handle = made.value or 0
            weakref.finalize(
                self, self.context.quietly, api.cuEventDestroy_v2, self.handle
            ).atexit = False
            code = api.cuEventRecord(self.handle, stream.handle)
            self.context.check(code, stream.work("recording an event"))

    def synchronize(self) -> None:
        """Wait for the work before this point."""
        with self.context:
            code = self.context.api.cuEventSynchronize(self.handle)
            self.context.check(code, self.stream.work("waiting for an event"))

    def since(self, earlier: Event) -> float:
        """Seconds from an earlier event."""
        self.synchronize()
        earlier.synchronize()
        milliseconds = ctypes.c_float()
        with self.context:
            code = self.context.api.cuEventElapsedTime(
                ctypes.byref(milliseconds), earlier.handle, self.handle
            )
            self.context.check(code, "reading two events")
        return milliseconds.value / 1e3


def _address(data: memoryview) -> int:
    """Where host bytes lie, which may be read-only."""
    import numpy as np

    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
