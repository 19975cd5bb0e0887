"""DLPack capsules, every element type included (NumPy's own leave bf16 out)."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from ..dsl.dtypes import BY_NAME, DType
from ..dsl.errors import DeviceError, OperatorError

CPU = 1
_CODES = {"int": 0, "uint": 1, "float": 2, "bool": 6}
_BFLOAT = 4


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [
    ("tensor", _Tensor),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
]

_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype = ctypes.py_object
_capsule_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_valid.restype = ctypes.c_int
_capsule_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_rename = ctypes.pythonapi.PyCapsule_SetName
_capsule_rename.argtypes = [ctypes.py_object, ctypes.c_char_p]

_FRESH, _USED = b"dltensor", b"used_dltensor"
# What exported capsules point into, by address, until their deleter runs.
_EXPORTED: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _release(managed: Any) -> None:
    _EXPORTED.pop(ctypes.addressof(managed.contents), None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    """A capsule nobody consumed frees what it holds."""
    item = ctypes.cast(capsule, ctypes.py_object)
    if _capsule_valid(item, _FRESH):
        _EXPORTED.pop(_capsule_pointer(item, _FRESH), None)


def export(array: np.ndarray[Any, Any], dtype: DType, place: tuple[int, int] = (CPU, 0)) -> Any:
    """A capsule over `array`, which stays alive until the consumer is done.

    `place` is the kind of device, as DLPack numbers them, and its index.

    Raises BufferError for a read-only array: this capsule has no way to say so.
    """
    if not array.flags.writeable:
        raise BufferError("needs a writeable array to export by DLPack, got a read-only one")
    rank = array.ndim
    shape = (ctypes.c_int64 * rank)(*array.shape)
    strides = (ctypes.c_int64 * rank)(*(s // array.itemsize for s in array.strides))
    code = _BFLOAT if dtype.name == "bfloat16" else _CODES[dtype.kind]
    managed = _Managed()
    managed.tensor = _Tensor(
        array.__array_interface__["data"][0], _Device(*place), rank,
        _DataType(code, dtype.bits, 1), shape, strides, 0,
    )  # fmt: skip
    managed.deleter = _release
    address = ctypes.addressof(managed)
    _EXPORTED[address] = (managed, shape, strides, array)
    return _capsule_new(address, _FRESH, ctypes.cast(_destroy, ctypes.c_void_p))


def _dtype(code: int, bits: int, lanes: int) -> DType:
    if lanes != 1:
        raise OperatorError(f"needs DLPack elements of one lane, got {lanes}")
    kinds = {v: k for k, v in _CODES.items()} | {_BFLOAT: "float"}
    for candidate in BY_NAME.values():
        same = candidate.kind == kinds.get(code) and candidate.bits == bits
        if same and (candidate.name == "bfloat16") == (code == _BFLOAT):
            return candidate
    raise OperatorError(f"needs a DLPack type known here, got code {code} with {bits} bits")


def consume(source: Any) -> tuple[np.ndarray[Any, Any], DType]:
    """A NumPy view of an object with `__dlpack__`, sharing its memory.

    Raises DeviceError for memory that the host cannot reach.
    """
    where = source.__dlpack_device__()
    if int(where[0]) != CPU:
        raise DeviceError(f"needs host memory, got DLPack device {tuple(map(int, where))}")
    capsule = source.__dlpack__()
    address = _capsule_pointer(capsule, _FRESH)
    managed = _Managed.from_address(address)
    tensor = managed.tensor
    # Before the capsule is ours: a refused one is still its maker's to free.
    dtype = _dtype(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    _capsule_rename(capsule, _USED)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    steps: tuple[int, ...] | None = None
    if tensor.strides:
        steps = tuple(tensor.strides[i] * dtype.bytes for i in range(tensor.ndim))
    array = view((tensor.data or 0) + tensor.byte_offset, shape, steps, dtype)
    owner = array if array.base is None else array.base
    weakref.finalize(owner, _finish, managed, address)
    return array, dtype


def _finish(managed: Any, address: int) -> None:
    if managed.deleter:
        managed.deleter(_Managed.from_address(address))


class _Memory:
    """Memory as NumPy understands it, and what keeps it alive."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__, self.owner = interface, owner


def owns_memory(base: Any) -> bool:
    """Whether the `base` of an array is memory that was made for it, not someone else's."""
    return isinstance(base, _Memory) and base.owner is not None


def view(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: DType,
    owner: Any = None,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """An array over memory that is not NumPy's; its `base` is an object that can be watched.

    `strides` count bytes. The elements are not touched, so the memory may be a device's.
    """
    if 0 in shape:
        return np.empty(shape, dtype.numpy)
    bits = np.dtype(f"u{dtype.bytes}")
    interface = {"data": (address, False), "shape": shape, "strides": strides,
                 "typestr": bits.str, "version": 3}  # fmt: skip
    return np.asarray(_Memory(interface, owner)).view(dtype.numpy)
