"""The `vulkan` package as the driver uses it: its library, raw functions, results as errors."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from ....dsl.errors import TargetError

PACKAGE_HINT = "pip install 'rudnn[vulkan]'"
LIBRARY_HINT = "apt install mesa-vulkan-drivers libvulkan1"

SUCCESS, TIMEOUT = 0, 2
OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY, DEVICE_LOST = -1, -2, -4

_RESULTS = {
    1: "VK_NOT_READY", 2: "VK_TIMEOUT", -1: "VK_ERROR_OUT_OF_HOST_MEMORY",
    -2: "VK_ERROR_OUT_OF_DEVICE_MEMORY", -3: "VK_ERROR_INITIALIZATION_FAILED",
    -4: "VK_ERROR_DEVICE_LOST", -5: "VK_ERROR_MEMORY_MAP_FAILED",
    -6: "VK_ERROR_LAYER_NOT_PRESENT", -7: "VK_ERROR_EXTENSION_NOT_PRESENT",
    -8: "VK_ERROR_FEATURE_NOT_PRESENT", -9: "VK_ERROR_INCOMPATIBLE_DRIVER",
    -10: "VK_ERROR_TOO_MANY_OBJECTS", -12: "VK_ERROR_FRAGMENTED_POOL",
    -13: "VK_ERROR_UNKNOWN", -1000012000: "VK_ERROR_INVALID_SHADER_NV",
}  # fmt: skip

# What is called for each device through its own pointers: 0.5 to 1 us a call, where the package's
# checked wrappers take 4 to 5.
_FUNCTIONS = (
    "vkAllocateCommandBuffers", "vkAllocateMemory", "vkBeginCommandBuffer", "vkBindBufferMemory",
    "vkCmdBindPipeline", "vkCmdCopyBuffer", "vkCmdDispatch", "vkCmdFillBuffer",
    "vkCmdPipelineBarrier", "vkCmdPushConstants", "vkCmdPushDescriptorSetKHR",
    "vkCmdResetQueryPool", "vkCmdWriteTimestamp", "vkCreateBuffer", "vkCreateCommandPool",
    "vkCreateComputePipelines", "vkCreateDescriptorSetLayout", "vkCreatePipelineCache",
    "vkCreatePipelineLayout", "vkCreateQueryPool", "vkCreateSemaphore", "vkCreateShaderModule",
    "vkDestroyBuffer", "vkDestroyDescriptorSetLayout", "vkDestroyPipeline",
    "vkDestroyPipelineLayout", "vkDestroyShaderModule", "vkEndCommandBuffer", "vkFreeMemory",
    "vkGetBufferMemoryRequirements", "vkGetDeviceQueue", "vkGetPipelineCacheData",
    "vkGetQueryPoolResults", "vkGetSemaphoreCounterValue", "vkMapMemory", "vkQueueSubmit",
    "vkWaitSemaphores",
)  # fmt: skip


@lru_cache(maxsize=1)
def package() -> Any:
    """The `vulkan` package. Raises TargetError, with the line that mends it."""
    try:
        return importlib.import_module("vulkan")
    except ImportError as error:
        raise TargetError(f"vulkan needs the package vulkan ({error}): {PACKAGE_HINT}") from error
    except OSError as error:
        raise TargetError(f"vulkan needs libvulkan.so.1: {LIBRARY_HINT}") from error


class Functions:
    """A device's functions by name, as raw pointers that take C data and return a VkResult."""

    def __init__(self, device: Any) -> None:
        vk = package()
        for name in _FUNCTIONS:
            address = vk.lib.vkGetDeviceProcAddr(device, name.encode())
            setattr(self, name, vk.ffi.cast(f"PFN_{name}", address))

    def __getattr__(self, name: str) -> Any:  # for type checkers: the functions are attributes
        raise AttributeError(name)


def result_name(result: int) -> str:
    """A VkResult for people to read."""
    return _RESULTS.get(result, f"VkResult {result}")
