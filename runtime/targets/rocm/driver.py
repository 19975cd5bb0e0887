"""The `Driver` of AMD devices."""

from __future__ import annotations

from functools import lru_cache

from ....schedules.capability import Capability
from ...streams import Context, Library, StreamDriver
from . import hip
from .capability import record

_DLPACK_ROCM = 10


class HipDriver(StreamDriver):
    """AMD devices through HIP's module API."""

    dlpack = _DLPACK_ROCM

    def library(self) -> Library:
        return hip.open_library()

    def make(self, api: Library, index: int) -> Context:
        return hip.HipContext(api, index)

    def capability(self, index: int) -> Capability:
        return record(self.arch(index)).capability


@lru_cache(maxsize=1)
def driver() -> HipDriver:
    """The driver of this process, whether or not a device is there."""
    return HipDriver()
