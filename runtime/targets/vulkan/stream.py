"""Ordered work on a device: what stands behind a rudnn queue.

Each stream has a timeline semaphore that counts its submissions; the number of one is its ticket.
Streams share the device's one VkQueue under a lock. Every command buffer ends with a barrier for
all that follows, so that work happens in the order of submission. Every call is submitted at once:
gathering up to 32 of them gained nothing on a software device, 40 us a launch either way.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ....dsl.errors import DeviceError, DeviceTimeoutError
from . import api
from .marks import Clock

if TYPE_CHECKING:
    from .gpu import Gpu
    from .memory import Allocation

_COMPUTE, _TRANSFER, _HOST = 0x800, 0x1000, 0x4000  # pipeline stages
_SHADER_READ, _SHADER_WRITE = 0x20, 0x40
_TRANSFER_READ, _TRANSFER_WRITE, _HOST_READ = 0x800, 0x1000, 0x2000
_SLICE_NS = 100_000_000  # of a wait, so that Ctrl-C is heard
_DEFAULT_TIMEOUT_S = 600.0
DEPTH = 128  # submissions that the host may be ahead of the device, and so the memory they hold
_ONE_TIME = 1  # VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT
_RESET_EACH = 2  # VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT


def timeout_s() -> float:
    """How long to wait for a device: RUDNN_VULKAN_TIMEOUT in seconds. Raises DeviceError."""
    text = os.environ.get("RUDNN_VULKAN_TIMEOUT", "")
    try:
        seconds = float(text) if text else _DEFAULT_TIMEOUT_S
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise DeviceError(f"RUDNN_VULKAN_TIMEOUT needs a number of seconds above 0, got {text!r}")
    return seconds


class Stream:
    """Records and submits; call `begin` to `submit` with `lock` held.

    `ticket` is that of the last submission, `done` the last known to be over.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.fn = gpu, gpu.fn
        self.lock = threading.RLock()
        self.ticket = self.done = 0
        self.arena: Allocation | None = None
        self.peak_arena = 0
        self.clock = Clock(self)
        self._flying: deque[tuple[int, Any, Any]] = deque()  # ticket, command buffer, what
        self._free: list[Any] = []
        vk = api.package()
        kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE)
        info = vk.VkSemaphoreCreateInfo(pNext=kind)
        self._semaphore = vk.ffi.new("VkSemaphore *")
        null, out = vk.ffi.NULL, vk.ffi.addressof
        result = self.fn.vkCreateSemaphore(gpu.handle, out(info), null, self._semaphore)
        gpu.expect(result, "making a semaphore")
        info = vk.VkCommandPoolCreateInfo(flags=_RESET_EACH, queueFamilyIndex=gpu.facts.family)
        pool = vk.ffi.new("VkCommandPool *")
        gpu.expect(
            self.fn.vkCreateCommandPool(gpu.handle, out(info), null, pool), "making a command pool"
        )
        self._pool = pool[0]
        self._structures(vk)

    def _structures(self, vk: Any) -> None:
        """C data that every submission uses again."""
        ffi = vk.ffi
        self._null = ffi.NULL
        self._begin = vk.VkCommandBufferBeginInfo(flags=_ONE_TIME)
        self._begin_at = ffi.addressof(self._begin)
        self._signal = ffi.new("uint64_t *")
        self._timeline = vk.VkTimelineSemaphoreSubmitInfo(
            signalSemaphoreValueCount=1, pSignalSemaphoreValues=self._signal
        )
        self._buffers = ffi.new("VkCommandBuffer[1]")
        self._submit = vk.VkSubmitInfo(
            pNext=self._timeline, commandBufferCount=1, pCommandBuffers=self._buffers,
            signalSemaphoreCount=1, pSignalSemaphores=self._semaphore,
        )  # fmt: skip
        self._submit_at = ffi.addressof(self._submit)
        self._count = ffi.new("uint64_t *")
        written = _SHADER_WRITE | _TRANSFER_WRITE
        seen = written | _SHADER_READ | _TRANSFER_READ | _HOST_READ
        self._after = vk.VkMemoryBarrier(srcAccessMask=written, dstAccessMask=seen)
        self._after_at = ffi.addressof(self._after)

    def begin(self) -> Any:
        """A command buffer to record into."""
        self.gpu.require()
        if not self._free:
            self.poll()
            if len(self._flying) >= DEPTH:
                self.wait(self._flying[0][0])
            while self._flying and self._flying[0][0] <= self.done:
                self._free.append(self._flying.popleft()[1])
            if not self._free:
                self._free += self._new_buffers()
        buffer = self._free.pop()
        result = self.fn.vkBeginCommandBuffer(buffer, self._begin_at)
        self.gpu.expect(result, "recording")
        return buffer

    def _new_buffers(self) -> list[Any]:
        vk, count = api.package(), 8
        info = vk.VkCommandBufferAllocateInfo(commandPool=self._pool, commandBufferCount=count)
        made = vk.ffi.new("VkCommandBuffer[]", count)
        result = self.fn.vkAllocateCommandBuffers(self.gpu.handle, vk.ffi.addressof(info), made)
        self.gpu.expect(result, "making command buffers")
        return list(made)

    def barrier(self, buffer: Any) -> None:
        """Everything before it is done, and its results are seen, before anything after it."""
        stages = _COMPUTE | _TRANSFER
        self.fn.vkCmdPipelineBarrier(
            buffer, stages, stages | _HOST, 0, 1, self._after_at, 0, self._null, 0, self._null
        )

    def submit(self, buffer: Any, what: Any) -> int:
        """Send a command buffer that ends with a barrier; `str(what)` names it. Its ticket."""
        self.gpu.expect(self.fn.vkEndCommandBuffer(buffer), f"recording {what}")
        self._signal[0] = ticket = self.ticket + 1
        self._buffers[0] = buffer
        self._flying.append((ticket, buffer, what))
        with self.gpu.queue_lock:
            result = self.fn.vkQueueSubmit(self.gpu.queue, 1, self._submit_at, self._null)
        if result:
            if result != api.DEVICE_LOST:  # which names it
                self._flying.pop()
            self.gpu.expect(result, f"starting {what}")
        self.ticket = ticket
        return ticket

    def workspace(self, nbytes: int) -> Allocation:
        """Scratch memory of at least `nbytes`, the same for all work of this stream."""
        with self.lock:
            held = self.arena
            if held is None or held.nbytes < nbytes:
                if held is not None:
                    self.arena = None
                    self.gpu.space.drop(held)
                self.arena = held = self.gpu.space.allocate(nbytes, tensor=False)
                self.peak_arena = max(self.peak_arena, nbytes)
            return held

    def poll(self) -> None:
        """Learn what is done; takes no lock."""
        result = self.fn.vkGetSemaphoreCounterValue(
            self.gpu.handle, self._semaphore[0], self._count
        )
        self.gpu.expect(result, "asking for progress")
        self.done = max(self.done, self._count[0])

    def unfinished(self) -> list[str]:
        """Names of what was submitted and is not known to be done."""
        return [str(what) for ticket, _, what in list(self._flying) if ticket > self.done]

    def wait(self, ticket: int | None = None) -> None:
        """Wait for a submission, the last one by default. Raises DeviceTimeoutError."""
        ticket = self.ticket if ticket is None else ticket
        self.gpu.require()
        if ticket <= self.done:
            return
        ffi = api.package().ffi
        value = ffi.new("uint64_t *", ticket)
        info = api.package().VkSemaphoreWaitInfo(
            semaphoreCount=1, pSemaphores=self._semaphore, pValues=value
        )
        limit = timeout_s()
        end = time.monotonic() + limit
        while True:
            left = int(max(0.0, end - time.monotonic()) * 1e9)
            result = self.fn.vkWaitSemaphores(
                self.gpu.handle, ffi.addressof(info), min(left, _SLICE_NS)
            )
            if result != api.TIMEOUT:
                break
            self.gpu.require()
            if left <= _SLICE_NS:
                self.poll()
                names = ", ".join(self.unfinished())
                raise DeviceTimeoutError(
                    f"{self.gpu} needs to finish within {limit:g} s, got no end of {names}"
                )
        self.gpu.expect(result, "waiting")
        self.done = max(self.done, ticket)
