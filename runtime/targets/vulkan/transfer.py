"""Copies between host and device, and within a device, in a stream's order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....dsl.errors import DeviceError
from . import api

if TYPE_CHECKING:
    from .memory import Allocation
    from .stream import Stream

_CHUNK = 16 << 20  # bytes that pass through one staging buffer


def copy_in(stream: Stream, address: int, data: memoryview) -> None:
    """Host bytes to the device; where the host sees the device's idle memory, at once."""
    nbytes, ffi = data.nbytes, api.package().ffi
    if nbytes == 0:
        return
    with stream.lock:
        to = _whole(stream, address, nbytes)
        if to.mapped is not None and not _in_use(to):
            ffi.memmove(to.mapped + (address - to.address), data, nbytes)
            return
        flat = data.cast("B") if data.c_contiguous else memoryview(bytes(data))
        for start in range(0, nbytes, _CHUNK):
            part = flat[start : start + _CHUNK]
            staging = stream.gpu.space.allocate(part.nbytes, tensor=False, staging=True)
            ffi.memmove(staging.mapped, part, part.nbytes)
            _copy(stream, to, address + start - to.address, staging, 0, part.nbytes)
            stream.gpu.space.drop(staging)


def copy_out(stream: Stream, address: int, data: memoryview) -> None:
    """Device bytes to the host, after all work of the stream so far."""
    nbytes, ffi = data.nbytes, api.package().ffi
    if nbytes == 0:
        stream.wait()
        return
    start = _whole(stream, address, nbytes)
    if start.mapped is not None:
        stream.wait()
        ffi.memmove(data, start.mapped + (address - start.address), nbytes)
        return
    flat = data.cast("B")
    for done in range(0, nbytes, _CHUNK):
        part = flat[done : done + _CHUNK]
        staging = stream.gpu.space.allocate(part.nbytes, tensor=False, staging=True)
        try:
            with stream.lock:
                ticket = _copy(
                    stream, staging, 0, start, address + done - start.address, part.nbytes
                )
            stream.wait(ticket)
            ffi.memmove(part, staging.mapped, part.nbytes)
        finally:
            stream.gpu.space.drop(staging)


def copy(stream: Stream, to: int, start: int, nbytes: int) -> None:
    """Between two places of the device that do not overlap."""
    if nbytes == 0:
        return
    with stream.lock:
        target, source = _whole(stream, to, nbytes), _whole(stream, start, nbytes)
        _copy(stream, target, to - target.address, source, start - source.address, nbytes)


def fill(stream: Stream, allocation: Allocation, nbytes: int) -> None:
    """0xFF, which is NaN in every float type, in the first bytes of an allocation."""
    size = -(-nbytes // 4) * 4
    if size == 0:
        return
    with stream.lock:
        buffer = stream.begin()
        where = allocation.block.buffer
        stream.fn.vkCmdFillBuffer(buffer, where, allocation.offset, size, 0xFFFFFFFF)
        stream.barrier(buffer)
        allocation.uses[stream] = stream.submit(buffer, "a fill")


def _whole(stream: Stream, address: int, nbytes: int) -> Allocation:
    """The allocation that holds all of the bytes."""
    space = stream.gpu.space
    with space.lock:
        found = space.find(address)
    if address + nbytes > found.address + found.nbytes:
        raise DeviceError(
            f"{stream.gpu} needs a copy within {found.nbytes} bytes, got {nbytes} bytes "
            f"from byte {address - found.address} on"
        )
    return found


def _in_use(allocation: Allocation) -> bool:
    if allocation.busy:
        for stream in list(allocation.uses):
            stream.poll()
    return allocation.busy


def _copy(
    stream: Stream, to: Allocation, at: int, source: Allocation, start: int, nbytes: int
) -> int:
    region = api.package().VkBufferCopy(
        srcOffset=source.offset + start, dstOffset=to.offset + at, size=nbytes
    )
    where = api.package().ffi.addressof(region)
    buffer = stream.begin()
    stream.fn.vkCmdCopyBuffer(buffer, source.block.buffer, to.block.buffer, 1, where)
    stream.barrier(buffer)
    ticket = stream.submit(buffer, "a copy")
    to.uses[stream] = source.uses[stream] = ticket
    return ticket
