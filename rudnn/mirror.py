"""Host arrays seen from a device: the memory around a view goes along with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .dsl.dtypes import DType
from .runtime import dlpack
from .runtime.device import Device
from .runtime.tensor import Tensor

Array = np.ndarray[Any, Any]


class Mirror:
    """A host array and what a device knows it as.

    `there` is the array itself on the host, else a tensor with the same strides in a copy of the
    whole buffer that the array is a view of: what a kernel writes beside it shows.
    """

    def __init__(self, array: Array, dtype: DType, device: Device) -> None:
        self.array, self.device = array, device
        self.there: Any = array
        if device.driver.host:
            return
        self._root = _root(array)
        queue = device.default_queue
        self._memory = device.driver.allocate(self._root.nbytes, queue)
        if self._root.nbytes:
            device.driver.copy_in(self._memory.address, _bytes(self._root), queue)
        first = self._memory.address + _pointer(array) - _pointer(self._root)
        view = dlpack.view(first, array.shape, array.strides, dtype, self._memory)
        self.there = Tensor(view, dtype, queue)

    def refresh(self) -> Array:
        """The host array, with what the device's memory holds now."""
        if not self.device.driver.host and self._root.nbytes:
            queue = self.device.default_queue
            self.device.driver.copy_out(self._memory.address, _bytes(self._root), queue)
        return self.array


def _root(array: Array) -> Array:
    """The array that owns the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _pointer(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
