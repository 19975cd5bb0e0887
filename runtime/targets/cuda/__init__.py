"""NVIDIA devices: CUDA C++ by TVM, machine code by NVRTC or nvcc, the driver API by ctypes."""

from .target import Cuda

__all__ = ["Cuda"]
