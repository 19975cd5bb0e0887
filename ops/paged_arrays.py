"""What paged attention asks of arrays: contiguous ones of one dtype, all in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dsl.dtypes import FLOATS, DType, f32, i32
from ..dsl.errors import DeviceError, PagedAttentionError, require_host
from ..runtime.arrays import Kind, kind_of
from ..runtime.bind import contiguous
from ..runtime.device import Device, Queue


def require(condition: bool, needs: str, got: object) -> None:
    """Raise PagedAttentionError unless `condition` holds."""
    require_host(condition, needs, got, PagedAttentionError)


class Place:
    """Where arrays live: how to make more there, without keeping the one that was looked at."""

    def __init__(self, like: Any, name: str) -> None:
        self.kind: Kind = kind_of(like, name)
        self.device: Device = self.kind.device(like)
        self.queue: Queue | None = self.kind.queue(like)
        self._natives = {t: self.kind.native(t, like) for t in (f32, i32)}

    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        return self.kind.empty(shape, self._natives[dtype])

    def put(self, array: Any) -> Any:
        """A copy of an i32 host array; on the host any kind of array goes with NumPy's."""
        if self.device.driver.host:
            return array
        made = self.empty(array.shape, i32)
        self.kind.assign(made, array)
        return made

    def require(self, what: str, array: Any, name: str) -> None:
        """Raise DeviceError unless `array` is here, and ordered on the same queue."""
        kind = kind_of(array, name)
        device, queue = kind.device(array), kind.queue(array)
        if device is not self.device:
            raise DeviceError(f"needs {name} on {self.device}, where the {what} is, got {device}")
        if None not in (queue, self.queue) and queue is not self.queue:
            raise DeviceError(f"needs {name} on the queue of the {what}, got another of {device}")


def require_array(
    name: str, array: Any, layout: str, sizes: Sequence[int | None], dtype: DType | None = None
) -> tuple[tuple[int, ...], DType]:
    """The shape and dtype of a contiguous array; None among the sizes is any.

    `layout` names the dims. Raises PagedAttentionError.
    """
    kind = kind_of(array, name)
    shape, strides = tuple(array.shape), kind.strides(array)
    known = ", ".join(str(s) if s is not None else n
                      for s, n in zip(sizes, layout.split(), strict=True))  # fmt: skip
    fits = len(shape) == len(sizes) and all(
        s in (None, n) for s, n in zip(sizes, shape, strict=True)
    )
    require(fits, f"{name} of shape [{', '.join(layout.split())}] = [{known}]", list(shape))
    for i, want in enumerate(contiguous(shape)):
        if strides is None or (shape[i] > 1 and 0 not in shape and strides[i] != want):
            got = "no whole elements" if strides is None else f"stride {strides[i]}"
            raise PagedAttentionError(
                f"needs {name} contiguous, stride {want} at dim {i}, got {got} there"
            )
    own = kind.dtype(kind.layout(array)[0])
    if dtype is not None:
        require(own == dtype, f"{name} of the query's dtype, {dtype}", own)
    require(own in FLOATS, f"{name} of dtype f32, f16 or bf16", own)
    assert own is not None
    return shape, own
