"""Device memory: an address space of our own over blocks of VkDeviceMemory.

An address is an integer: the start of a block in our space plus the place in it. Kernels take a
buffer and an offset, which `Space.find` gives for an address. Memory is given back when nobody
refers to it and the queues that used it have come past their last use of it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import deque
from typing import TYPE_CHECKING, Any

from ....dsl.errors import DeviceError, OutOfMemoryError
from . import api

if TYPE_CHECKING:
    from .gpu import Gpu
    from .stream import Stream

_FIRST = 1 << 40  # no host address looks like it by chance
_GAP = 1 << 20  # between blocks, so that one past the end of a block is in none
ALIGNMENT = 256  # of every allocation: the most that a device may ask of a buffer's offset
_BLOCK = 32 << 20
_KEPT = 256 << 20  # bytes of empty blocks that are not given back to the driver

_DEVICE_LOCAL, _VISIBLE, _COHERENT, _CACHED = 1, 2, 4, 8
_USAGE = 0x1 | 0x2 | 0x20  # transfer source, transfer destination, storage
_UNIFIED_KINDS = (1, 4)  # integrated, processor


class Block:
    """One VkDeviceMemory with one VkBuffer over all of it; `holes` are free (offset, size)."""

    __slots__ = ("base", "buffer", "heap", "holes", "mapped", "memory", "size")

    def __init__(
        self, heap: Heap, size: int, base: int, memory: Any, buffer: Any, mapped: Any
    ) -> None:
        self.heap, self.size, self.base = heap, size, base
        self.memory, self.buffer, self.mapped = memory, buffer, mapped
        self.holes = [(0, size)]

    @property
    def empty(self) -> bool:
        return self.holes == [(0, self.size)]

    def take(self, size: int) -> int:
        """Offset of `size` bytes in the first hole that has them, or -1."""
        for i, (offset, room) in enumerate(self.holes):
            if room >= size:
                if room == size:
                    del self.holes[i]
                else:
                    self.holes[i] = (offset + size, room - size)
                return offset
        return -1

    def give(self, offset: int, size: int) -> None:
        """Undo `take`."""
        insort(self.holes, (offset, size))
        i = bisect_right(self.holes, (offset, size)) - 1
        if i + 1 < len(self.holes) and offset + size == self.holes[i + 1][0]:
            size += self.holes.pop(i + 1)[1]
            self.holes[i] = (offset, size)
        if i and sum(self.holes[i - 1]) == offset:
            before = self.holes[i - 1]
            self.holes[i - 1] = (before[0], before[1] + size)
            del self.holes[i]


class Allocation:
    """`nbytes` from `address`; `uses` are the last work of each stream that touches it."""

    __slots__ = ("address", "block", "nbytes", "offset", "size", "uses")

    def __init__(self, block: Block, offset: int, nbytes: int, size: int) -> None:
        self.block, self.offset, self.nbytes, self.size = block, offset, nbytes, size
        self.address = block.base + offset
        self.uses: dict[Stream, int] = {}

    @property
    def busy(self) -> bool:
        """Whether a queue has not come past its last use."""
        return any(stream.done < ticket for stream, ticket in self.uses.items())

    @property
    def mapped(self) -> Any:
        """The first byte as the host sees it, or None."""
        return None if self.block.mapped is None else self.block.mapped + self.offset


class Memory:
    """A tensor's memory, given back when this object goes."""

    __slots__ = ("_allocation", "_space", "address", "nbytes")

    def __init__(self, space: Space, allocation: Allocation) -> None:
        self.address, self.nbytes = allocation.address, allocation.nbytes
        self._space, self._allocation = space, allocation

    def __del__(self) -> None:
        # At any moment, in any thread: takes no lock. What is dropped is collected later.
        self._space.dropped.append((self._allocation, True))


class Heap:
    """Blocks of one kind of memory."""

    def __init__(self, gpu: Gpu, kind: int, index: int, mapped: bool) -> None:
        self.gpu, self.kind, self.index, self.mapped = gpu, kind, index, mapped
        self.blocks: list[Block] = []

    def take(self, size: int) -> tuple[Block, int] | None:
        """Room for `size` bytes in the blocks there are."""
        for block in self.blocks:
            offset = block.take(size)
            if offset >= 0:
                return block, offset
        return None

    def grow(self, size: int, base: int) -> Block | None:
        """A new block of `size` bytes, or None where the device has no more."""
        gpu = self.gpu
        if size > min(gpu.facts.max_allocation, self.available()):
            return None
        vk, fn = api.package(), gpu.fn
        buffer, needs = _buffer(gpu, size)
        memory = vk.ffi.new("VkDeviceMemory *")
        info = vk.VkMemoryAllocateInfo(allocationSize=needs.size, memoryTypeIndex=self.kind)
        result = fn.vkAllocateMemory(gpu.handle, vk.ffi.addressof(info), vk.ffi.NULL, memory)
        if result in (api.OUT_OF_HOST_MEMORY, api.OUT_OF_DEVICE_MEMORY):
            fn.vkDestroyBuffer(gpu.handle, buffer, vk.ffi.NULL)
            return None
        gpu.expect(result, f"allocating {size} bytes")
        gpu.expect(fn.vkBindBufferMemory(gpu.handle, buffer, memory[0], 0), "binding memory")
        mapped: Any = None
        if self.mapped:
            at = vk.ffi.new("void **")
            gpu.expect(fn.vkMapMemory(gpu.handle, memory[0], 0, size, 0, at), "mapping memory")
            mapped = vk.ffi.cast("char *", at[0])
        block = Block(self, size, base, memory[0], buffer, mapped)
        self.blocks.append(block)
        return block

    def available(self) -> int:
        """Bytes that may still be allocated: what the driver grants now, else the heap's size."""
        vk, facts = api.package(), self.gpu.facts
        budget = None
        if "VK_EXT_memory_budget" in facts.extensions:
            budget = vk.VkPhysicalDeviceMemoryBudgetPropertiesEXT()
        answer = vk.VkPhysicalDeviceMemoryProperties2(pNext=budget)
        vk.vkGetPhysicalDeviceMemoryProperties2(self.gpu.physical.handle, answer)
        if budget is not None:
            return int(budget.heapBudget[self.index] - budget.heapUsage[self.index])
        held = sum(block.size for block in self.blocks)
        return int(answer.memoryProperties.memoryHeaps[self.index].size) - held

    def trim(self, keep: int) -> None:
        """Give empty blocks back to the driver, but for `keep` bytes of them."""
        for block in [b for b in self.blocks if b.empty]:
            if block.size <= keep:
                keep -= block.size
                continue
            self.blocks.remove(block)
            null = api.package().ffi.NULL
            self.gpu.fn.vkDestroyBuffer(self.gpu.handle, block.buffer, null)
            self.gpu.fn.vkFreeMemory(self.gpu.handle, block.memory, null)


def _buffer(gpu: Gpu, size: int) -> tuple[Any, Any]:
    """A VkBuffer and its VkMemoryRequirements."""
    vk = api.package()
    info = vk.VkBufferCreateInfo(size=size, usage=_USAGE)
    buffer, needs = vk.ffi.new("VkBuffer *"), vk.ffi.new("VkMemoryRequirements *")
    result = gpu.fn.vkCreateBuffer(gpu.handle, vk.ffi.addressof(info), vk.ffi.NULL, buffer)
    gpu.expect(result, f"making a buffer of {size} bytes")
    gpu.fn.vkGetBufferMemoryRequirements(gpu.handle, buffer[0], needs)
    return buffer[0], needs


def _heaps(gpu: Gpu) -> tuple[Heap, Heap]:
    """Memory for tensors, and memory that the host sees; one heap where they are the same."""
    vk = api.package()
    buffer, needs = _buffer(gpu, ALIGNMENT)
    gpu.fn.vkDestroyBuffer(gpu.handle, buffer, vk.ffi.NULL)
    table = vk.vkGetPhysicalDeviceMemoryProperties(gpu.physical.handle)
    kinds = [
        (i, table.memoryTypes[i].propertyFlags, table.memoryTypes[i].heapIndex)
        for i in range(table.memoryTypeCount)
        if needs.memoryTypeBits >> i & 1
    ]

    def first(*wishes: int) -> tuple[int, int] | None:
        for wish in wishes:
            for i, flags, heap in kinds:
                if flags & wish == wish:
                    return i, heap
        return None

    host = _VISIBLE | _COHERENT
    both = first(_DEVICE_LOCAL | host | _CACHED)
    if unified(gpu) and both:
        one = Heap(gpu, *both, True)
        return one, one
    local, visible = first(_DEVICE_LOCAL, 0), first(host | _CACHED, host)
    if local is None or visible is None:
        raise DeviceError(f"{gpu} needs memory that the host can map, got none")
    return Heap(gpu, *local, False), Heap(gpu, *visible, True)


def unified(gpu: Gpu) -> bool:
    """Whether host and device share their memory, so that copies need no staging."""
    return gpu.facts.kind in _UNIFIED_KINDS


class Space:
    """The addresses of a device."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.lock = threading.RLock()
        self.heap, self.host_heap = _heaps(gpu)
        self.dropped: deque[tuple[Allocation, bool]] = deque()
        self._waiting: list[Allocation] = []
        self._next = _FIRST
        self._starts: list[int] = []  # of what is allocated, sorted
        self._by_start: dict[int, Allocation] = {}
        self._tensors = 0
        self._nothing: Allocation | None = None

    def allocate(self, nbytes: int, tensor: bool = True, staging: bool = False) -> Allocation:
        """`nbytes` of memory, at least ALIGNMENT. Raises OutOfMemoryError.

        `tensor`: counted as a tensor's. `staging`: memory that the host sees.
        """
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        if size > self.gpu.facts.max_range:
            raise OutOfMemoryError(
                f"{self.gpu} needs tensors of at most {self.gpu.facts.max_range} bytes, "
                f"got one of {nbytes}"
            )
        heap = self.host_heap if staging else self.heap
        with self.lock:
            self.collect()
            place = heap.take(size) or self._grow(heap, size, nbytes)
            made = Allocation(*place, nbytes, size)
            insort(self._starts, made.address)
            self._by_start[made.address] = made
            self._tensors += nbytes if tensor else 0
        return made

    def drop(self, allocation: Allocation) -> None:
        """Give back what `allocate(…, tensor=False)` made, once no queue uses it."""
        self.dropped.append((allocation, False))

    def find(self, address: int) -> Allocation:
        """The allocation that holds an address; call it with the lock held."""
        found = self._by_start.get(address)
        if found is None:
            i = bisect_right(self._starts, address) - 1
            found = self._by_start[self._starts[i]] if i >= 0 else None
            if found is None or address > found.address + found.nbytes:
                raise DeviceError(f"{self.gpu} has no tensor at address {address:#x}")
        return found

    def find_argument(self, address: int) -> Allocation:
        """As `find` for a kernel's argument; call it with the lock held.

        A tensor without elements has no memory here, and so an address of the host's, or 0. It is
        bound to a few bytes that nothing else uses.
        """
        found = self._by_start.get(address)
        if found is not None or _FIRST <= address < self._next:
            return found or self.find(address)
        if self._nothing is None:
            self._nothing = self.allocate(0, tensor=False)
        return self._nothing

    def tensor_bytes(self) -> int:
        """Bytes of live tensors, as last known where the device is lost."""
        if self.gpu.fault is not None:
            return self._tensors
        with self.lock:
            self.collect()
            return self._tensors

    def collect(self) -> None:
        """Free what was dropped and is no longer in use."""
        while self.dropped:
            allocation, tensor = self.dropped.popleft()
            self._tensors -= allocation.nbytes if tensor else 0
            self._waiting.append(allocation)
        if not self._waiting:
            return
        if any(a.busy for a in self._waiting):
            for stream in self.gpu.streams:
                stream.poll()
        busy = []
        for allocation in self._waiting:
            if allocation.busy:
                busy.append(allocation)
            else:
                self._free(allocation)
        self._waiting = busy

    def _free(self, allocation: Allocation) -> None:
        del self._by_start[allocation.address]
        del self._starts[bisect_right(self._starts, allocation.address) - 1]
        block = allocation.block
        block.give(allocation.offset, allocation.size)
        if block.empty:
            block.heap.trim(_KEPT)

    def _grow(self, heap: Heap, size: int, nbytes: int) -> tuple[Block, int]:
        """Room in a new block; when the device has no more, wait for what is being freed."""
        block = heap.grow(max(size, _BLOCK), self._next) or heap.grow(size, self._next)
        if block is None:
            for allocation in self._waiting:
                for stream, ticket in allocation.uses.items():
                    stream.wait(min(ticket, stream.ticket))  # one may be recording
            self.collect()
            if place := heap.take(size):
                return place
            for each in (self.heap, self.host_heap):
                each.trim(0)
            block = heap.grow(size, self._next)
        if block is None:
            held = sum(b.size for b in heap.blocks)
            raise OutOfMemoryError(
                f"{self.gpu} has no memory for {nbytes} bytes: {held} are in use, "
                f"{max(0, heap.available())} free"
            )
        self._next += -(-block.size // _GAP) * _GAP + _GAP
        return block, block.take(size)
