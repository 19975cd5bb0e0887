"""An opened device: what its queues, its memory and its kernels share."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from ....dsl.errors import DeviceError, DeviceLostError, OutOfMemoryError, RudnnError
from ...locks import fork_safe_lock
from . import api
from .instance import Physical, instance, physical_devices
from .memory import Space
from .pipelines import Pipelines
from .properties import enabled

if TYPE_CHECKING:
    from .stream import Stream


class Gpu:
    """A VkDevice with one VkQueue.

    `fault` is why nothing more runs on it: every later call raises an error of that type.
    """

    def __init__(self, index: int, physical: Physical) -> None:
        self.index, self.physical, self.facts = index, physical, physical.facts
        self.fault: RudnnError | None = None
        self.streams: list[Stream] = []
        self.idle: list[Stream] = []  # of rudnn queues that are gone
        self.queue_lock = threading.Lock()
        self.poison = False
        self.handle = _create(physical)
        self.fn = api.Functions(self.handle)
        queue = api.package().ffi.new("VkQueue *")
        self.fn.vkGetDeviceQueue(self.handle, self.facts.family, 0, queue)
        self.queue = queue[0]
        self.space = Space(self)
        self.pipelines = Pipelines(self)

    def __str__(self) -> str:
        return f"vulkan:{self.index} ({self.facts.name})"

    def require(self) -> None:
        """Raise if the device is lost, or belongs to the process that this one was forked from."""
        if self.fault is not None:
            raise type(self.fault)(*self.fault.args)

    def expect(self, result: int, doing: str) -> None:
        """Raise the typed error of a failed call."""
        if result >= api.SUCCESS:
            return
        if result == api.DEVICE_LOST:
            flying = [name for stream in self.streams for name in stream.unfinished()]
            kernels = ", ".join(flying) or "nothing"
            self.fault = DeviceLostError(f"{self} was lost {doing}; in flight: {kernels}")
            self.require()
        text = f"{self} failed {doing}: {api.result_name(result)}"
        if result in (api.OUT_OF_HOST_MEMORY, api.OUT_OF_DEVICE_MEMORY):
            raise OutOfMemoryError(text)
        raise DeviceError(text)

    def stream(self, queue: Any) -> Stream:
        """What stands behind a rudnn queue, made when first asked for."""
        self.require()
        found: Stream | None = queue.handle
        if found is None:
            with _LOCK:
                found = queue.handle
                if found is None:  # no other thread was quicker
                    found = queue.handle = self._new_stream()
                    weakref.finalize(queue, self.idle.append, found).atexit = False
        return found

    def _new_stream(self) -> Stream:
        from .stream import Stream

        if self.idle:
            return self.idle.pop()
        made = Stream(self)
        self.streams.append(made)
        return made


def _create(physical: Physical) -> Any:
    vk = api.package()
    chain, extensions = enabled(physical.facts)
    queue = vk.VkDeviceQueueCreateInfo(
        queueFamilyIndex=physical.facts.family, queueCount=1, pQueuePriorities=[1.0]
    )
    info = vk.VkDeviceCreateInfo(
        pNext=chain, queueCreateInfoCount=1, pQueueCreateInfos=[queue],
        enabledExtensionCount=len(extensions), ppEnabledExtensionNames=extensions,
    )  # fmt: skip
    try:
        return vk.vkCreateDevice(physical.handle, info, None)
    except (vk.VkError, vk.VkException) as error:
        kind = type(error).__name__
        raise DeviceError(f"{physical.facts.name} cannot be opened: {kind}") from error


_OPEN: dict[int, Gpu] = {}
_LOCK = fork_safe_lock()
_FORKED = DeviceError(
    "vulkan needs a process of its own, got one forked from a process that had used it: "
    "start it with the method spawn"
)
_inherited = False


def opened(index: int) -> Gpu:
    """Device number `index`, opened when first asked for. Raises DeviceError."""
    gpu = _OPEN.get(index)
    if gpu is None:
        with _LOCK:
            if _inherited:
                raise DeviceError(*_FORKED.args)
            gpu = _OPEN.get(index) or _open(index)
    return gpu


def _open(index: int) -> Gpu:
    found = physical_devices()
    if not 0 <= index < len(found):
        raise DeviceError(f"vulkan needs a device among {len(found)}, got number {index}")
    gpu = _OPEN[index] = Gpu(index, found[index])
    return gpu


def open_devices() -> tuple[Gpu, ...]:
    """The devices in use."""
    return tuple(_OPEN.values())


def _after_fork() -> None:
    """Drivers' threads and locks do not survive a fork: refuse, rather than wait for ever."""
    global _inherited
    _inherited = _inherited or instance.cache_info().currsize > 0
    for gpu in _OPEN.values():
        gpu.fault = _FORKED


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
