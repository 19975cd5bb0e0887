"""The kinds of array a call takes: NumPy arrays, torch tensors, `rudnn.Tensor`s."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from ..dsl.dtypes import BY_NAME, DType, dtype_of
from ..dsl.errors import DeviceError, OperatorError
from ..schedules.capability import WIDE_BYTES
from .device import Device, Queue, device, foreign_queue, host

Layout = tuple[Any, tuple[int, ...], tuple[int, ...]]


class Kind(Protocol):
    """How to look into one kind of array; strides count elements."""

    name: str

    def layout(self, x: Any) -> Layout:
        """(dtype object, shape, strides): hashable, what a call plan depends on."""

    def dtype(self, native: Any) -> DType | None:
        """The element type for a dtype object, None if there is no such type here."""

    def aligned(self, native: Any) -> bool:
        """Whether arrays of a dtype object are known to start at a multiple of 16 bytes."""

    def strides(self, x: Any) -> tuple[int, ...] | None:
        """Strides in elements; None where they are not whole (the array must be copied)."""

    def pointer(self, x: Any) -> int:
        """Address of the first element."""

    def native(self, dtype: DType, like: Any) -> Any:
        """The dtype object of an element type, for results beside the array `like`."""

    def empty(self, shape: Sequence[int], native: Any) -> Any:
        """A new contiguous array of a native dtype."""

    def similar(self, x: Any) -> Any:
        """A new array like `x`, strides included as far as they matter."""

    def contiguous(self, x: Any) -> Any:
        """A contiguous copy."""

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        """A view of the broadcast shape; strides of what was repeated are 0."""

    def assign(self, target: Any, source: Any) -> None:
        """Copy elements, of a like array or of a NumPy one."""

    def writeable(self, x: Any) -> bool:
        """Whether results may be stored in `x`."""

    def bounds(self, x: Any) -> tuple[int, int]:
        """First and past-the-last address that the elements of `x` span."""

    def device(self, x: Any) -> Device:
        """Where it lives."""

    def queue(self, x: Any) -> Queue | None:
        """The queue its work is ordered on; None for plain memory, which is always ready."""

    def wrote(self, x: Any) -> None:
        """Told after a kernel has stored results in `x`."""

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """A NumPy view (no copy)."""


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements between the first and the last that an array of these strides touches."""
    if 0 in shape:
        return 0
    return sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True)) + 1


class NumPyKind:
    """`numpy.ndarray`."""

    name = "numpy"

    def layout(self, x: Any) -> Layout:
        return x.dtype, x.shape, x.strides

    def dtype(self, native: Any) -> DType | None:
        return dtype_of(native.name) if native.isnative else None

    def aligned(self, native: Any) -> bool:
        return False  # the CPU moves vectors from any address

    def strides(self, x: Any) -> tuple[int, ...] | None:
        size = x.itemsize
        if any(s % size for s in x.strides):
            return None
        return tuple(s // size for s in x.strides)

    def pointer(self, x: Any) -> int:
        return x.__array_interface__["data"][0]

    def native(self, dtype: DType, like: Any) -> Any:
        return dtype.numpy

    def empty(self, shape: Sequence[int], native: Any) -> Any:
        return np.empty(shape, native)

    def similar(self, x: Any) -> Any:
        strides = self.strides(x) or ()
        base = np.empty(_span(x.shape, strides), x.dtype)
        # A negative stride counts back from the first element, which is then not the lowest.
        first = sum((n - 1) * -s for n, s in zip(x.shape, strides, strict=True) if s < 0 < n)
        return np.lib.stride_tricks.as_strided(base[first:], x.shape, x.strides)

    def contiguous(self, x: Any) -> Any:
        return np.array(x, order="C", copy=True, subok=False)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return np.broadcast_to(x, shape)

    def assign(self, target: Any, source: Any) -> None:
        target[...] = source

    def writeable(self, x: Any) -> bool:
        return bool(x.flags.writeable)

    def bounds(self, x: Any) -> tuple[int, int]:
        try:
            from numpy.lib.array_utils import byte_bounds
        except ImportError:  # NumPy 1
            from numpy import byte_bounds  # type: ignore[attr-defined,no-redef]
        return byte_bounds(x)

    def device(self, x: Any) -> Device:
        return host()

    def queue(self, x: Any) -> Queue | None:
        return None

    def wrote(self, x: Any) -> None:
        pass

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return x


class NumPyScalarKind(NumPyKind):
    """`numpy.float32(1)` and its like, which have no memory of their own: they are copied."""

    def layout(self, x: Any) -> Layout:
        return object(), x.shape, x.strides

    def strides(self, x: Any) -> tuple[int, ...] | None:
        return None


class TorchKind:
    """`torch.Tensor`, on the CPU or on a device that torch calls "cuda" (ROCm's too).

    Negative and conjugate views hold other numbers than their memory: they are copied. On a device
    the work goes to torch's current stream, and the dtype object is (dtype, device, stream, whether
    the tensor starts at a multiple of 16 bytes).
    """

    name = "torch"

    def layout(self, x: Any) -> Layout:
        if x.is_neg():
            return object(), x.shape, x.stride()
        try:
            strides = x.stride()
        except RuntimeError as error:
            raise OperatorError(f"needs a dense torch tensor, got layout {x.layout}") from error
        if x.is_cpu:
            return x.dtype, x.shape, strides
        where = _torch_device(x)
        stream = _torch_stream(x.device)
        aligned = self.pointer(x) % WIDE_BYTES == 0
        return (x.dtype, where, stream, aligned), x.shape, strides

    def dtype(self, native: Any) -> DType | None:
        own = native[0] if isinstance(native, tuple) else native
        return dtype_of(str(own).removeprefix("torch."))

    def aligned(self, native: Any) -> bool:
        return isinstance(native, tuple) and bool(native[3])

    def strides(self, x: Any) -> tuple[int, ...] | None:
        return None if x.is_neg() else x.stride()

    def pointer(self, x: Any) -> int:
        try:
            return x.data_ptr()
        except RuntimeError as error:
            raise OperatorError(
                f"needs a torch tensor with memory of its own, got {error}"
            ) from error

    def native(self, dtype: DType, like: Any) -> Any:
        own = _torch_dtype(dtype.name)
        return own if like.is_cpu else (own, like.device)

    def empty(self, shape: Sequence[int], native: Any) -> Any:
        if isinstance(native, tuple):
            return _torch_empty()(shape, dtype=native[0], device=native[1])
        return _torch_empty()(shape, dtype=native)

    def similar(self, x: Any) -> Any:
        return x.new_empty(_span(x.shape, x.stride())).as_strided(x.shape, x.stride())

    def contiguous(self, x: Any) -> Any:
        return x.resolve_neg().contiguous()

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return x.expand(shape)

    def assign(self, target: Any, source: Any) -> None:
        import torch

        target.copy_(torch.from_numpy(source) if isinstance(source, np.ndarray) else source)

    def writeable(self, x: Any) -> bool:
        return not x.requires_grad

    def bounds(self, x: Any) -> tuple[int, int]:
        start = x.data_ptr()
        if x.numel() == 0:
            return start, start
        return start, start + _span(x.shape, x.stride()) * x.element_size()

    def device(self, x: Any) -> Device:
        return host() if x.is_cpu else device(_torch_device(x))

    def queue(self, x: Any) -> Queue | None:
        return None if x.is_cpu else foreign_queue(self.device(x), _torch_stream(x.device))

    def wrote(self, x: Any) -> None:
        # A tensor that autograd has saved must be seen to have changed.
        import torch

        torch.autograd.graph.increment_version(x)

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        detached = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":
            import torch

            return detached.view(torch.uint16).numpy().view(BY_NAME["bf16"].numpy)
        return detached.numpy()


def _torch_device(x: Any) -> str:
    """The name here of the device a tensor is on. Raises DeviceError for a kind unknown here."""
    import torch

    if x.device.type != "cuda":
        raise DeviceError(f"needs tensors on the CPU, CUDA or ROCm, got one on {x.device}")
    kind = "rocm" if torch.version.hip else "cuda"
    return f"{kind}:{x.device.index or 0}"


def _torch_stream(where: Any) -> int:
    """torch's current stream on a device, as its driver knows it."""
    import torch

    return int(torch.cuda.current_stream(where).cuda_stream)


@lru_cache(maxsize=1)
def _torch_empty() -> Any:
    import torch

    return torch.empty


@lru_cache(maxsize=32)
def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


NUMPY = NumPyKind()
NUMPY_SCALAR = NumPyScalarKind()
TORCH = TorchKind()
_KINDS: dict[type, Kind] = {np.ndarray: NUMPY}


def register(cls: type, kind: Kind) -> None:
    """Take arrays of type `cls`."""
    _KINDS[cls] = kind


def kind_of(x: Any, name: str) -> Kind:
    """The kind of an array argument. Raises OperatorError for anything else."""
    found = _KINDS.get(type(x))
    if found is not None:
        return found
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _KINDS.setdefault(type(x), TORCH)
    if isinstance(x, np.generic):
        return NUMPY_SCALAR
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
        return NUMPY
    got = type(x).__name__
    raise OperatorError(f"needs a NumPy array, torch tensor or rudnn.Tensor for {name}, got {got}")
