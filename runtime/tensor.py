"""`rudnn.Tensor`: an array on a device, with the queue its work is ordered on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dsl.dtypes import DType, dtype_of
from ..dsl.errors import OperatorError
from . import dlpack
from .arrays import NUMPY, Layout, register
from .device import Device, Queue, current_queue, host
from .locks import fork_safe_lock

_LIVE = 0
_LOCK = fork_safe_lock()


class Tensor:
    """dtype, shape, strides (in elements), device and queue; host memory behind it.

    Made by `rudnn.tensor`, `rudnn.empty`, `rudnn.from_dlpack` and by operators given tensors.
    `numpy()` and DLPack share the memory.
    """

    __slots__ = ("_array", "dtype", "queue", "__weakref__")

    def __init__(self, array: np.ndarray[Any, Any], dtype: DType, queue: Queue) -> None:
        self._array, self.dtype, self.queue = array, dtype, queue
        _count(self, array.nbytes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(s // self._array.itemsize for s in self._array.strides)

    @property
    def ndim(self) -> int:
        return self._array.ndim

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    @property
    def device(self) -> Device:
        return self.queue.device

    def numpy(self) -> np.ndarray[Any, Any]:
        """The elements as a NumPy array, after waiting for the queue; bf16 is `ml_dtypes`'."""
        self.queue.synchronize()
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __getitem__(self, index: Any) -> Tensor:
        """A view, by basic indexing."""
        return Tensor(np.asarray(self._array[index]), self.dtype, self.queue)

    def transpose(self, *axes: int) -> Tensor:
        """A view with dims in another order."""
        return Tensor(self._array.transpose(*axes), self.dtype, self.queue)

    def __dlpack__(self, *, stream: Any = None, copy: bool | None = None, **_: Any) -> Any:
        """A DLPack capsule sharing the memory, or over a copy. Raises BufferError if read-only."""
        self.queue.synchronize()
        array = self._array.copy() if copy else self._array
        return dlpack.export(array, self.dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0)

    def __repr__(self) -> str:
        return f"rudnn.Tensor({list(self.shape)}, {self.dtype}, {self.device})"


def _count(tensor: Tensor, nbytes: int) -> None:
    global _LIVE
    if tensor._array.base is None:  # views hold no memory of their own
        with _LOCK:
            _LIVE += nbytes
        weakref.finalize(tensor, _uncount, nbytes)


def _uncount(nbytes: int) -> None:
    global _LIVE
    with _LOCK:
        _LIVE -= nbytes


def live_bytes() -> int:
    """Bytes held by live tensors."""
    return _LIVE


def tensor(data: Any, dtype: DType | str | None = None, queue: Queue | None = None) -> Tensor:
    """A tensor with a copy of `data` (anything NumPy takes; f64 becomes f32 unless named)."""
    array = np.array(data, copy=True, order="C")
    goal = _named(dtype) if dtype is not None else dtype_of(array.dtype.name)
    if goal is None:
        raise OperatorError(f"needs elements of a type known here, got {array.dtype}")
    if goal.name == "float64" and dtype is None:
        goal = _named("float32")
    return Tensor(array.astype(goal.numpy, copy=False), goal, queue or current_queue(host()))


def empty(
    shape: Sequence[int], dtype: DType | str = "float32", queue: Queue | None = None
) -> Tensor:
    """A tensor of undefined contents."""
    goal = _named(dtype)
    return Tensor(np.empty(tuple(shape), goal.numpy), goal, queue or current_queue(host()))


def from_dlpack(source: Any, queue: Queue | None = None) -> Tensor:
    """A tensor sharing memory with any object that has `__dlpack__`.

    Raises DeviceError for memory on a device that is not here.
    """
    array, dtype = dlpack.consume(source)
    return Tensor(array, dtype, queue or current_queue(host()))


def _named(dtype: DType | str) -> DType:
    found = dtype if isinstance(dtype, DType) else dtype_of(dtype)
    if found is None:
        raise OperatorError(f"needs a dtype such as f32, f16 or bf16, got {dtype!r}")
    return found


class _TensorKind:
    """`Tensor` as calls see it: NumPy's view of the memory, the tensor's own queue."""

    name = "rudnn"

    def layout(self, x: Any) -> Layout:
        return (x.dtype, x.queue), x._array.shape, x._array.strides

    def dtype(self, native: Any) -> DType | None:
        return native[0]

    def strides(self, x: Any) -> tuple[int, ...] | None:
        return NUMPY.strides(x._array)

    def pointer(self, x: Any) -> int:
        return NUMPY.pointer(x._array)

    def native(self, dtype: DType, like: Any) -> Any:
        return dtype, like.queue

    def empty(self, shape: Sequence[int], native: Any) -> Any:
        return empty(shape, *native)

    def wrote(self, x: Any) -> None:
        pass

    def similar(self, x: Any) -> Any:
        return Tensor(NUMPY.similar(x._array), x.dtype, x.queue)

    def contiguous(self, x: Any) -> Any:
        return Tensor(NUMPY.contiguous(x._array), x.dtype, x.queue)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return Tensor(NUMPY.expand(x._array, shape), x.dtype, x.queue)

    def assign(self, target: Any, source: Any) -> None:
        target._array[...] = np.asarray(source)

    def writeable(self, x: Any) -> bool:
        return NUMPY.writeable(x._array)

    def bounds(self, x: Any) -> tuple[int, int]:
        return NUMPY.bounds(x._array)

    def device(self, x: Any) -> Device:
        return x.device

    def queue(self, x: Any) -> Queue:
        return x.queue

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return x.numpy()


register(Tensor, _TensorKind())
