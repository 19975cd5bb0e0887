"""The `Driver` of NVIDIA devices."""

from __future__ import annotations

from functools import lru_cache

from ....schedules.capability import Capability
from ...streams import Context, Library, StreamDriver
from . import libcuda
from .capability import record

_DLPACK_CUDA = 2


class CudaDriver(StreamDriver):
    """NVIDIA devices through the driver API."""

    dlpack = _DLPACK_CUDA

    def library(self) -> Library:
        return libcuda.open_library()

    def make(self, api: Library, index: int) -> Context:
        return libcuda.PrimaryContext(api, index)

    def capability(self, index: int) -> Capability:
        return record(self.arch(index))


@lru_cache(maxsize=1)
def driver() -> CudaDriver:
    """The driver of this process, whether or not a device is there."""
    return CudaDriver()
