"""SPIR-V kernels on the compute queues of Vulkan devices."""

from .target import Vulkan

__all__ = ["Vulkan"]
