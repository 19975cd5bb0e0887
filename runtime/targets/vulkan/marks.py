"""Marks in a stream's work, with the device's clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from . import api

if TYPE_CHECKING:
    from .stream import Stream

_POOL = 256  # timestamps of one VkQueryPool
_LAST_STAGE = 0x2000  # VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT
_64_BITS_AND_WAIT = 1 | 2


class Clock:
    """Timestamps of one stream; a mark's is used again when the mark is gone."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.free: list[tuple[Any, int]] = []

    def slot(self) -> tuple[Any, int]:
        """A query pool and a number in it."""
        if not self.free:
            vk, stream = api.package(), self.stream
            info = vk.VkQueryPoolCreateInfo(queryType=vk.VK_QUERY_TYPE_TIMESTAMP, queryCount=_POOL)
            pool = vk.ffi.new("VkQueryPool *")
            result = stream.fn.vkCreateQueryPool(
                stream.gpu.handle, vk.ffi.addressof(info), vk.ffi.NULL, pool
            )
            stream.gpu.expect(result, "making timestamps")
            self.free = [(pool[0], i) for i in range(_POOL)]
        return self.free.pop()


class Mark:
    """A point in a stream's work.

    Where the device has no timestamps the host's clock stands in, read once the work before the
    mark is done.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._slot: tuple[Any, int] | None = None
        self._host = 0.0
        if stream.gpu.facts.timestamp_bits == 0:
            self._ticket = stream.ticket
            stream.wait(self._ticket)
            self._host = time.perf_counter()
            return
        with stream.lock:
            self._slot = stream.clock.slot()
            buffer = stream.begin()
            stream.fn.vkCmdResetQueryPool(buffer, *self._slot, 1)
            stream.fn.vkCmdWriteTimestamp(buffer, _LAST_STAGE, *self._slot)
            stream.barrier(buffer)
            self._ticket = stream.submit(buffer, "a mark")

    def __del__(self) -> None:
        if getattr(self, "_slot", None) is not None:
            self._stream.clock.free.append(self._slot)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        """Wait until the stream has come to this point."""
        self._stream.wait(self._ticket)

    def since(self, earlier: Mark) -> float:
        """Seconds of device time from an earlier mark of the same queue; waits for both."""
        self.synchronize()
        earlier.synchronize()
        if self._slot is None:
            return self._host - earlier._host
        facts = self._stream.gpu.facts
        half = 1 << facts.timestamp_bits - 1  # counts wrap; the marks may be the other way round
        ticks = (self._count() - earlier._count() + half) % (2 * half) - half
        return ticks * facts.timestamp_ns * 1e-9

    def _count(self) -> int:
        assert self._slot is not None
        found, stream = api.package().ffi.new("uint64_t *"), self._stream
        result = stream.fn.vkGetQueryPoolResults(
            stream.gpu.handle, *self._slot, 1, 8, found, 8, _64_BITS_AND_WAIT
        )
        stream.gpu.expect(result, "reading a timestamp")
        return int(found[0])
