"""Starting kernels: a call's packed arguments to descriptors, push constants and dispatches."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....dsl.dtypes import BY_NAME
from ....dsl.errors import LaunchError, LoadError
from ....dsl.host import compiled, identifier
from ...cache import DiskCache
from ...plan import Launch, LaunchPlan
from . import api
from .pipelines import Pipeline
from .spirv.shader import unpack

if TYPE_CHECKING:
    from .gpu import Gpu
    from .memory import Allocation
    from .stream import Stream

_COMPUTE_POINT, _COMPUTE_STAGE, _STORAGE_BUFFER = 1, 0x20, 7
_SIZES_KEPT = 256  # sets of dims of one kernel
_LOW_32_BITS = 0xFFFFFFFF
_MOST_ELEMENTS = 2**31  # of a binding: SPIR-V takes an index of 32 bits as signed


@dataclass(frozen=True)
class _Pointer:
    """A buffer of a launch: slot `slot`, `offset` (of the dims, in bytes) into the workspace.

    `itemsize` is 0 for the workspace, which is bound where the buffer begins; a tensor is bound
    from the start of its memory, because a view may run backwards from its address.
    """

    slot: int
    offset: Callable[[Mapping[str, int]], int] | None
    itemsize: int


class Step:
    """One launch of a plan with its pipeline."""

    def __init__(self, launch: Launch, plan: LaunchPlan, pipeline: Pipeline) -> None:
        self.pipeline, self.grid = pipeline, tuple(compiled(e) for e in launch.grid)
        self.pointers = [
            _Pointer(
                a.slot, compiled(a.offset) if a.offset else None,
                0 if plan.slots[a.slot].kind == "workspace"
                else BY_NAME[plan.slots[a.slot].dtype].bytes,
            )
            for a in launch.arguments if a.kind == "pointer"
        ]  # fmt: skip
        numbers = [a for a in launch.arguments if a.kind != "pointer"]
        self.numbers = [(a.slot, a.kind.startswith("float")) for a in numbers]
        # the bits of a float32 lie in the slot, so they are packed as they are
        self.pack = struct.Struct(pipeline.shader.layout.replace("f", "I")).pack


class Loaded:
    """The kernels of a plan on one device."""

    def __init__(self, gpu: Gpu, binary: Path, plan: LaunchPlan, cache: DiskCache) -> None:
        try:
            shaders = unpack(binary.read_bytes())
        except OSError as error:
            raise LoadError(f"needs the file {binary}, got {error}") from error
        names = [launch.entry for launch in plan.launches]
        if [s.name for s in shaders] != names:
            raise LoadError(f"needs kernels {', '.join(names)}, got {len(shaders)} others")
        self.gpu, self.plan = gpu, plan
        built = [gpu.pipelines.build(shader, cache) for shader in shaders]
        gpu.pipelines.save_soon()
        weakref.finalize(self, gpu.pipelines.discard, built).atexit = False
        pairs = zip(plan.launches, built, strict=True)
        self.steps = [Step(launch, plan, pipeline) for launch, pipeline in pairs]
        self.dims = [identifier(s.name) for s in plan.slots if s.kind == "dim"]
        self.packed = struct.Struct(f"<{len(plan.slots)}q")
        self._sized: dict[tuple[int, ...], list[_Sized]] = {}
        self._calls: dict[Stream, Call] = {}

    def __str__(self) -> str:
        return self.plan.entry

    def on(self, queue: Any) -> Callable[[bytes, int], int]:
        """Start the kernels on a queue; the function returns when they are submitted."""
        stream = self.gpu.stream(queue)
        call = self._calls.get(stream)
        if call is None:
            call = self._calls[stream] = Call(self, stream)
        return call

    def sized(self, dims: tuple[int, ...]) -> list[_Sized]:
        """The launches for given dims, without those of empty grids."""
        found = self._sized.get(dims)
        if found is None:
            if len(self._sized) >= _SIZES_KEPT:
                self._sized.clear()
            names = dict(zip(self.dims, dims, strict=True))
            found = [s for s in (self._size(step, names) for step in self.steps) if s is not None]
            self._sized[dims] = found
        return found

    def _size(self, step: Step, names: dict[str, int]) -> _Sized | None:
        x, y = (int(extent(names)) for extent in step.grid)
        if x <= 0 or y <= 0:
            return None
        if max(x, y) > self.gpu.facts.max_blocks:
            raise LaunchError(
                f"{self} needs at most {self.gpu.facts.max_blocks} blocks an axis, got {x}, {y}"
            )
        offsets = [0 if p.offset is None else int(p.offset(names)) for p in step.pointers]
        return _Sized(step, x, y, offsets)


@dataclass(frozen=True)
class _Sized:
    """A step with a grid of x · y blocks and the byte offsets of its pointers."""

    step: Step
    x: int
    y: int
    offsets: list[int]


class Call:
    """A plan's kernels on one stream. The C data it writes to belongs to the stream's lock."""

    def __init__(self, loaded: Loaded, stream: Stream) -> None:
        self.loaded, self.stream = loaded, stream
        self.dims = len(loaded.dims)
        ffi = api.package().ffi
        counts = [len(s.pointers) + s.pipeline.shader.in_buffer for s in loaded.steps]
        most = max(counts, default=0)
        self._infos = ffi.new("VkDescriptorBufferInfo[]", most or 1)
        self._writes = ffi.new("VkWriteDescriptorSet[]", most or 1)
        kind = api.package().VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET
        for i in range(most):
            write = self._writes[i]
            write.sType, write.dstBinding, write.descriptorCount = kind, i, 1
            write.descriptorType, write.pBufferInfo = _STORAGE_BUFFER, self._infos + i
        self._from = ffi.from_buffer

    def __call__(self, packed: bytes, _threads: int) -> int:
        stream, loaded = self.stream, self.loaded
        stream.gpu.require()  # before any lock, which a fork may have left taken
        # without a value for the workspace where these dims need none
        values = loaded.packed.unpack(packed.ljust(loaded.packed.size, b"\0"))
        try:
            launches = loaded.sized(values[: self.dims])
            if not launches:
                return 0
            with stream.lock:
                self._start(launches, values)
        except struct.error as error:
            raise LaunchError(f"{loaded} got a number out of range: {error}") from error
        return 0

    def _start(self, launches: list[_Sized], values: tuple[int, ...]) -> None:
        stream, space = self.stream, self.stream.gpu.space
        with space.lock:
            held = [
                [space.find_argument(values[p.slot]) for p in sized.step.pointers]
                for sized in launches
            ]
        bound = [self._bound(s, a, values) for s, a in zip(launches, held, strict=True)]
        buffer = stream.begin()
        for sized, (places, block) in zip(launches, bound, strict=True):
            self._record(buffer, sized, places, block)
            stream.barrier(buffer)
        ticket = stream.submit(buffer, self.loaded)
        for allocations in held:
            for allocation in allocations:
                allocation.uses[stream] = ticket

    def _bound(
        self, sized: _Sized, held: list[Allocation], values: tuple[int, ...]
    ) -> tuple[list[tuple[Any, int, int]], bytes]:
        """Buffer, offset and range of each pointer, and the block of numbers."""
        places: list[tuple[Any, int, int]] = []
        starts: list[int] = []
        for pointer, offset, found in zip(sized.step.pointers, sized.offsets, held, strict=True):
            past = values[pointer.slot] - found.address + offset if found.nbytes else 0
            room = -(-found.nbytes // 4) * 4 or 4
            if pointer.itemsize:
                start, rest = divmod(past, pointer.itemsize)
                if rest:
                    raise LaunchError(
                        f"{self.loaded} needs an address of whole elements, got {past} bytes"
                    )
                if room > _MOST_ELEMENTS * pointer.itemsize:
                    raise LaunchError(
                        f"{self.loaded} needs tensors in memory of at most {_MOST_ELEMENTS} of "
                        f"their elements, got {room} bytes for elements of {pointer.itemsize}"
                    )
                places.append((found.block.buffer, found.offset, room))
                starts.append(start)
            else:
                past = past if past < room else 0  # a part without elements at the end
                places.append((found.block.buffer, found.offset + past, room - past))
                starts.append(0)
        numbers = [
            values[slot] & _LOW_32_BITS if bits else values[slot]
            for slot, bits in sized.step.numbers
        ]
        return places, sized.step.pack(*starts, *numbers)

    def _record(
        self, buffer: Any, sized: _Sized, places: list[tuple[Any, int, int]], block: bytes
    ) -> None:
        fn, pipeline = self.stream.fn, sized.step.pipeline
        fn.vkCmdBindPipeline(buffer, _COMPUTE_POINT, pipeline.handle)
        if pipeline.shader.in_buffer:
            places = [*places, self._stored(block)]
        infos = self._infos
        for i, (where, offset, room) in enumerate(places):
            info = infos[i]
            info.buffer, info.offset, info.range = where, offset, room
        if places:
            fn.vkCmdPushDescriptorSetKHR(
                buffer, _COMPUTE_POINT, pipeline.layout, 0, len(places), self._writes
            )
        if block and not pipeline.shader.in_buffer:
            fn.vkCmdPushConstants(
                buffer, pipeline.layout, _COMPUTE_STAGE, 0, len(block), self._from(block)
            )
        fn.vkCmdDispatch(buffer, sized.x, sized.y, 1)

    def _stored(self, block: bytes) -> tuple[Any, int, int]:
        """Numbers that are too many for push constants, in memory that this call uses."""
        stream = self.stream
        held = stream.gpu.space.allocate(len(block), tensor=False, staging=True)
        api.package().ffi.memmove(held.mapped, block, len(block))
        held.uses[stream] = stream.ticket + 1
        stream.gpu.space.drop(held)
        return held.block.buffer, held.offset, -(-len(block) // 4) * 4
