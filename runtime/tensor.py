"""`rudnn.Tensor`: an array on a device, with the queue its work is ordered on."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..dsl.dtypes import DType, dtype_of
from ..dsl.errors import DeviceError, OperatorError, require_host
from ..schedules.capability import WIDE_BYTES
from . import dlpack
from .arrays import NUMPY, Layout, register
from .device import Device, Queue, current_queue, device, host
from .locks import fork_safe_lock

_LIVE = 0
_LOCK = fork_safe_lock()


class Tensor:
    """dtype, shape, strides (in elements), device and queue; memory of that device behind it.

    Made by `rudnn.tensor`, `rudnn.empty`, `rudnn.from_dlpack`, `to`, and by operators given
    tensors. On the host `numpy()` and DLPack share the memory; on a device `numpy()` copies.
    """

    # An array over the device's addresses. On any device but the host it is only looked at for
    # its layout: to read an element would be a fault.
    __slots__ = ("_array", "dtype", "queue", "__weakref__")

    def __init__(self, array: np.ndarray[Any, Any], dtype: DType, queue: Queue) -> None:
        self._array, self.dtype, self.queue = array, dtype, queue
        if queue.device.driver.host:
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
        """The elements as a NumPy array, after waiting for the queue; bf16 is `ml_dtypes`'.

        On the host it shares the memory, from a device it is a copy.
        """
        self.queue.synchronize()
        return self._array if self.device.driver.host else _Span(self).read().copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def to(self, where: Device | Queue | str) -> Tensor:
        """A copy on another device or queue; the tensor itself if it is there already."""
        queue = _queue(where)
        if queue is self.queue:
            return self
        return _placed(self.numpy(), self.dtype, queue)

    def __getitem__(self, index: Any) -> Tensor:
        """A view, by basic indexing. Raises OperatorError for an index that would copy."""
        items = index if isinstance(index, tuple) else (index,)
        basic = (int, np.integer, slice, type(None), type(Ellipsis))
        for item in items:
            if isinstance(item, bool) or not isinstance(item, basic):
                raise OperatorError(f"needs integers and slices as an index, got {item!r}")
        whole = items if Ellipsis in items else (*items, Ellipsis)  # else one element is read
        return Tensor(self._array[whole], self.dtype, self.queue)

    def reshape(self, *shape: int) -> Tensor:
        """A view of another shape. Raises OperatorError where only a copy could have it."""
        view = self._array.view()
        try:
            view.shape = shape  # unlike reshape, never a copy
        except (AttributeError, ValueError) as error:
            have = f"{list(self.shape)} with strides {self.strides}"
            raise OperatorError(f"needs a shape that a view can have, got {list(shape)} "
                                f"of {have}") from error  # fmt: skip
        return Tensor(view, self.dtype, self.queue)

    def transpose(self, *axes: int) -> Tensor:
        """A view with dims in another order."""
        return Tensor(self._array.transpose(*axes), self.dtype, self.queue)

    def __dlpack__(self, *, stream: Any = None, copy: bool | None = None, **_: Any) -> Any:
        """A DLPack capsule sharing the memory, or over a copy.

        Raises BufferError if read-only, or if DLPack does not know the kind of device.
        """
        place = self.__dlpack_device__()
        self.queue.synchronize()
        source = _placed(self.numpy(), self.dtype, self.queue) if copy else self
        return dlpack.export(source._array, self.dtype, place)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind = self.device.driver.dlpack
        if kind is None:
            raise BufferError(f"needs a device that DLPack knows, got {self.device}: use numpy()")
        return (kind, self.device.index)

    def __repr__(self) -> str:
        return f"rudnn.Tensor({list(self.shape)}, {self.dtype}, {self.device})"


class _Span:
    """The device memory between a tensor's first and last element, and a copy of it here."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.low, high = NUMPY.bounds(tensor._array) if tensor._array.size else (0, 0)
        self.bytes = np.empty(high - self.low, np.uint8)

    def view(self) -> np.ndarray[Any, Any]:
        """The tensor's elements in the copy."""
        array = self.tensor._array
        if not array.size:
            return np.empty(array.shape, array.dtype)
        offset = NUMPY.pointer(array) - self.low
        return np.ndarray(array.shape, array.dtype, self.bytes.data, offset, array.strides)

    def read(self) -> np.ndarray[Any, Any]:
        queue = self.tensor.queue
        if self.bytes.size:
            queue.device.driver.copy_out(self.low, self.bytes.data, queue)
        return self.view()

    def write(self, source: np.ndarray[Any, Any]) -> None:
        """Set the tensor's elements; what lies between them stays."""
        if self.bytes.size > self.tensor.nbytes:
            self.read()
        self.view()[...] = source
        if self.bytes.size:
            queue = self.tensor.queue
            queue.device.driver.copy_in(self.low, self.bytes.data, queue)


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
    """Bytes of host memory held by live tensors."""
    return _LIVE


def _queue(where: Device | Queue | str | None) -> Queue:
    """The queue meant: a device's current one, the host's for None."""
    if isinstance(where, Queue):
        return where
    return current_queue(host() if where is None else device_named(where))


def device_named(where: Device | str) -> Device:
    """A device, itself or by name."""
    return device(where) if isinstance(where, str) else where


def _blank(shape: tuple[int, ...], dtype: DType, queue: Queue) -> Tensor:
    """A tensor of undefined contents."""
    driver = queue.device.driver
    if driver.host:
        return Tensor(np.empty(shape, dtype.numpy), dtype, queue)
    memory = driver.allocate(math.prod(shape) * dtype.bytes, queue)
    return Tensor(dlpack.view(memory.address, shape, None, dtype, memory), dtype, queue)


def _placed(array: np.ndarray[Any, Any], dtype: DType, queue: Queue) -> Tensor:
    """A tensor with a copy of a host array's elements."""
    made = _blank(array.shape, dtype, queue)
    _assign(made, array)
    return made


def _assign(target: Tensor, source: np.ndarray[Any, Any]) -> None:
    if target.device.driver.host:
        target._array[...] = source
    else:
        _Span(target).write(source)


def tensor(
    data: Any, dtype: DType | str | None = None, queue: Queue | None = None,
    device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """A tensor with a copy of `data` (anything NumPy takes; f64 becomes f32 unless named).

    It is on `queue`, else on the current queue of `device`, else on the host's. Raises
    OutOfMemoryError, DeviceError where there is no such device or the queue is another's, or
    OperatorError for data that is no array.
    """
    try:
        array = np.array(data, copy=True, order="C")
    except ValueError as error:  # rows of different lengths
        raise OperatorError(f"needs what NumPy can make an array of: {error}") from None
    goal = _named(dtype) if dtype is not None else dtype_of(array.dtype.name)
    if goal is None:
        raise OperatorError(f"needs elements of a type known here, got {array.dtype}")
    if goal.name == "float64" and dtype is None:
        goal = _named("float32")
    array = array.astype(goal.numpy, copy=False)
    where = _placement(queue, device)
    if where.device.driver.host:
        return Tensor(array, goal, where)
    return _placed(array, goal, where)


def empty(
    shape: int | Sequence[int], dtype: DType | str = "float32", queue: Queue | None = None,
    device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """A tensor of undefined contents; where it is, see `tensor`.

    Raises OperatorError for sizes that are no integers ≥ 0, and what `tensor` raises.
    """
    return _blank(_sizes(shape), _named(dtype), _placement(queue, device))


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    try:
        sizes = tuple(operator.index(n) for n in given)
    except TypeError:
        sizes = (-1,)
    require_host(all(n >= 0 for n in sizes), "a shape of integers ≥ 0", shape, OperatorError)
    return sizes


def _placement(queue: Queue | None, device: Device | str | None) -> Queue:
    """The queue meant by both arguments."""
    if queue is None:
        return _queue(device)
    where = queue.device if device is None else device_named(device)
    require_host(where == queue.device, f"a queue of {where.name}",
                 f"one of {queue.device.name}", DeviceError)  # fmt: skip
    return queue


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
    """`Tensor` as calls see it: NumPy's view of the memory, the tensor's own queue.

    The dtype object is (dtype, reference to the queue, whether it starts at a multiple of 16
    bytes), the last only where that matters.
    """

    name = "rudnn"

    def layout(self, x: Any) -> Layout:
        aligned = not x.device.driver.host and self.pointer(x) % WIDE_BYTES == 0
        return (x.dtype, x.queue.reference, aligned), x._array.shape, x._array.strides

    def dtype(self, native: Any) -> DType | None:
        return native[0]

    def aligned(self, native: Any) -> bool:
        return bool(native[2])

    def strides(self, x: Any) -> tuple[int, ...] | None:
        return NUMPY.strides(x._array)

    def pointer(self, x: Any) -> int:
        return NUMPY.pointer(x._array)

    def native(self, dtype: DType, like: Any) -> Any:
        return dtype, like.queue.reference

    def empty(self, shape: Sequence[int], native: Any) -> Any:
        dtype, queue = native
        return _blank(tuple(shape), dtype, queue())

    def wrote(self, x: Any) -> None:
        pass

    def similar(self, x: Any) -> Any:
        driver = x.device.driver
        if driver.host or not x._array.size:
            return Tensor(NUMPY.similar(x._array), x.dtype, x.queue)
        low, high = NUMPY.bounds(x._array)
        memory = driver.allocate(high - low + WIDE_BYTES, x.queue)
        first = memory.address + low % WIDE_BYTES + NUMPY.pointer(x._array) - low
        array = dlpack.view(first, x.shape, x._array.strides, x.dtype, memory)
        return Tensor(array, x.dtype, x.queue)

    def contiguous(self, x: Any) -> Any:
        return _placed(x.numpy(), x.dtype, x.queue)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return Tensor(NUMPY.expand(x._array, shape), x.dtype, x.queue)

    def assign(self, target: Any, source: Any) -> None:
        _assign(target, np.asarray(source))

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
