"""New keys and values into paged caches, which are copied first where others look at them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..runtime.arrays import kind_of
from ..runtime.dlpack import owns_memory
from ..runtime.tensor import Tensor
from . import paged_attention as declared

Array = np.ndarray[Any, Any]


def write(cache: Any, new: Any, slots: Array, copied: bool) -> Any:
    """The cache [pages, P, H, D], or a copy, with row i of new [n, H, D] at slots[i].

    A slot is page · P + place; no two are the same.
    """
    shape = tuple(cache.shape)
    flat = cache.reshape(shape[0] * shape[1], *shape[2:])
    if copied:
        flat = declared.paged_copy(flat)
    for first, end, slot in _runs(slots):
        declared.paged_copy(new[first:end], out=flat[slot : slot + end - first])
    return flat.reshape(*shape) if copied else cache


def _runs(slots: Array) -> Iterator[tuple[int, int, int]]:
    """(first, end, slot) of rows that go to slots in a row: a copy each."""
    starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1)
    for first, end in zip(starts, [*starts[1:], len(slots)], strict=True):
        yield int(first), int(end), int(slots[first])


class _Probe:
    def count(self, array: Any) -> int:
        return sys.getrefcount(array)


def _measured() -> int:
    array = object()
    return _Probe().count(array)


# What `sys.getrefcount` tells a method of an argument that one variable of its caller holds.
ALONE = _measured()


def _held() -> int:
    array = object()
    return sys.getrefcount(array)


# The same in the function whose variable it is: from Python 3.14 on the argument is not counted.
_HELD = _held()


def is_shared(array: Any, references: int) -> bool:
    """Whether anything but one variable of a caller's looks at an array's memory.

    `references` are those that the method has counted which was called with the array.
    """
    if references > ALONE or not kind_of(array, "a cache").writeable(array):
        return True
    if isinstance(array, np.ndarray):
        return _seen_by_others(array)
    if isinstance(array, Tensor):
        in_use = sys.getrefcount(array._array) > 2  # the tensor's own, and the argument
        return in_use or _seen_by_others(array._array)
    import torch

    if not array.untyped_storage().resizable():  # memory that torch has from elsewhere
        return True
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return True
    fresh = torch.empty(1).untyped_storage()
    return bool(count(array.untyped_storage()._cdata) > count(fresh._cdata) + 1)  # its tensor


def _seen_by_others(array: Array) -> bool:
    """Whether a view has its memory with others, or from something that NumPy does not know."""
    if array.base is None:
        return False
    root = array.base
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.ndarray) or not (root.base is None or owns_memory(root.base)):
        return True
    return sys.getrefcount(root) > _HELD + 1  # the view's
