"""AMD devices: code objects by TVM's LLVM and an `ld.lld`, the HIP module API by ctypes."""

from .target import Rocm

__all__ = ["Rocm"]
