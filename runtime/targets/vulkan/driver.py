"""The driver protocol on Vulkan devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ....dsl.errors import TargetError
from ...cache import DiskCache
from ...plan import LaunchPlan
from . import transfer
from .gpu import Gpu, open_devices, opened
from .instance import physical_devices
from .launch import Loaded
from .marks import Mark
from .memory import Memory
from .record import capability_of

if TYPE_CHECKING:
    from ....schedules.capability import Capability
    from ...device import MemoryUsage, Queue


class VulkanDriver:
    """Runs kernels on Vulkan devices; errors of a device name what it was running.

    After a fork, a child of a process that used Vulkan gets DeviceError from every call.
    """

    dlpack: int | None = None  # buffers here have no addresses that others know
    host = False

    def __init__(self) -> None:
        self._poison = False

    def device_names(self) -> Sequence[str]:
        """None where there is no driver; the chosen device comes first."""
        try:
            return tuple(d.facts.name for d in physical_devices())
        except TargetError:
            return ()

    def capability(self, index: int) -> Capability:
        return capability_of(physical_devices()[index].facts)

    def arch(self, index: int) -> str:
        return str(index) if index else ""

    def load(self, binary: Path, plan: LaunchPlan, cache: DiskCache, index: int) -> Loaded:
        gpu = opened(index)
        gpu.require()
        return Loaded(gpu, binary, plan, cache)

    def last_error(self) -> str:
        """Errors are raised, with their text."""
        return ""

    def poison(self, on: bool) -> None:
        self._poison = on

    def allocate(self, nbytes: int, queue: Queue) -> Memory:
        stream = self._gpu(queue).stream(queue)
        space = stream.gpu.space
        allocation = space.allocate(nbytes)
        memory = Memory(space, allocation)
        if self._poison:
            transfer.fill(stream, allocation, nbytes)
        return memory

    def copy_in(self, address: int, data: memoryview, queue: Queue) -> None:
        transfer.copy_in(self._gpu(queue).stream(queue), address, data)

    def copy_out(self, address: int, data: memoryview, queue: Queue) -> None:
        transfer.copy_out(self._gpu(queue).stream(queue), address, data)

    def copy(self, to: int, start: int, nbytes: int, queue: Queue) -> None:
        transfer.copy(self._gpu(queue).stream(queue), to, start, nbytes)

    def arena(self, queue: Queue, nbytes: int) -> int:
        stream = self._gpu(queue).stream(queue)
        held = stream.workspace(nbytes)
        if self._poison:
            transfer.fill(stream, held, nbytes)
        return held.address

    def synchronize(self, queue: Queue) -> None:
        gpu = self._gpu(queue)
        gpu.require()
        if queue.handle is not None:
            gpu.stream(queue).wait()

    def record(self, queue: Queue) -> Mark:
        return Mark(self._gpu(queue).stream(queue))

    def memory_usage(self, index: int) -> MemoryUsage:
        from ...device import MemoryUsage

        for gpu in open_devices():
            if gpu.index == index:
                arenas = [s.arena.nbytes for s in gpu.streams if s.arena is not None]
                peak = sum(s.peak_arena for s in gpu.streams)
                return MemoryUsage(gpu.space.tensor_bytes(), sum(arenas), peak)
        return MemoryUsage(0, 0, 0)

    def _gpu(self, queue: Queue) -> Gpu:
        return opened(queue.device.index)


@lru_cache(maxsize=1)
def driver() -> VulkanDriver:
    """The one driver of this process."""
    return VulkanDriver()
