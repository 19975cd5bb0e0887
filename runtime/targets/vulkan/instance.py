"""The Vulkan instance of this process, its messages, and the devices it finds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ....dsl.errors import DeviceError, TargetError
from ....schedules.workspace import ALIGNMENT as WORKSPACE_ALIGNMENT
from . import api
from .properties import Facts, inspect

_API_1_2, _API_1_3 = 1 << 22 | 2 << 12, 1 << 22 | 3 << 12
_LAYER = "VK_LAYER_KHRONOS_validation"
_PORTABILITY = "VK_KHR_portability_enumeration"
_DEBUG = "VK_EXT_debug_utils"
_WARNING_AND_ERROR = 0x100 | 0x1000
_VALIDATION_AND_PERFORMANCE = 0x2 | 0x4
_SOFTWARE = 4  # VK_PHYSICAL_DEVICE_TYPE_CPU

_MESSAGES: list[str] = []


@dataclass(frozen=True, eq=False)
class Physical:
    """A device that can run kernels; `facts` are what its properties say."""

    handle: Any
    facts: Facts

    @property
    def software(self) -> bool:
        return self.facts.kind == _SOFTWARE


def validation_messages() -> tuple[str, ...]:
    """Warnings and errors of the validation layer so far (RUDNN_VULKAN_VALIDATION=1)."""
    return tuple(_MESSAGES)


@lru_cache(maxsize=1)
def instance() -> Any:
    """The VkInstance of this process. Raises TargetError where no driver is installed."""
    vk = api.package()
    validate = os.environ.get("RUDNN_VULKAN_VALIDATION", "") not in ("", "0")
    have = {e.extensionName for e in vk.vkEnumerateInstanceExtensionProperties(None)}
    layers = [_LAYER] if validate else []
    if validate and _LAYER not in {x.layerName for x in vk.vkEnumerateInstanceLayerProperties()}:
        raise TargetError(
            f"RUDNN_VULKAN_VALIDATION needs {_LAYER}: apt install vulkan-validationlayers"
        )
    extensions = [e for e in (_PORTABILITY,) if e in have] + [_DEBUG] * validate
    application = vk.VkApplicationInfo(
        pApplicationName="rudnn", pEngineName="rudnn", apiVersion=_API_1_3
    )
    info = vk.VkInstanceCreateInfo(
        pApplicationInfo=application, flags=int(_PORTABILITY in extensions),
        enabledLayerCount=len(layers), ppEnabledLayerNames=layers,
        enabledExtensionCount=len(extensions), ppEnabledExtensionNames=extensions,
    )  # fmt: skip
    try:
        made = vk.vkCreateInstance(info, None)
    except (vk.VkError, vk.VkException) as error:
        kind = type(error).__name__
        raise TargetError(f"vulkan needs a driver ({kind}): {api.LIBRARY_HINT}") from error
    if validate:
        _listen(vk, made)
    return made


def _listen(vk: Any, handle: Any) -> None:
    """Collect what the validation layer says."""

    @vk.ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT")
    def heard(_severity: int, _kind: int, data: Any, _user: Any) -> int:
        _MESSAGES.append(vk.ffi.string(data.pMessage).decode(errors="replace"))
        return 0

    info = vk.ffi.new("VkDebugUtilsMessengerCreateInfoEXT *")
    info.sType = vk.VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT
    info.messageSeverity = _WARNING_AND_ERROR
    info.messageType = _VALIDATION_AND_PERFORMANCE
    info.pfnUserCallback = heard
    name = b"vkCreateDebugUtilsMessengerEXT"
    create = vk.ffi.cast(
        "PFN_vkCreateDebugUtilsMessengerEXT", vk.lib.vkGetInstanceProcAddr(handle, name)
    )
    messenger = vk.ffi.new("VkDebugUtilsMessengerEXT *")
    create(handle, info, vk.ffi.NULL, messenger)
    _KEPT.append(heard)


_KEPT: list[Any] = []  # a callback lives as long as the instance


@lru_cache(maxsize=1)
def physical_devices() -> tuple[Physical, ...]:
    """The devices that can run kernels, the chosen one first, the others as Vulkan lists them.

    Chosen is what RUDNN_VULKAN_DEVICE says, a number in Vulkan's order or a part of the name, else
    the first that is not a processor. Raises TargetError where there is no driver, DeviceError for
    a choice that fits none.
    """
    found = [d for d, lacks in surveyed() if not lacks]
    wanted = os.environ.get("RUDNN_VULKAN_DEVICE", "")
    if not found and not wanted:
        return ()
    chosen = _chosen(found, wanted)
    return (chosen, *(d for d in found if d is not chosen))


def _chosen(found: list[Physical], wanted: str) -> Physical:
    if not wanted:
        return next((d for d in found if not d.software), found[0])
    if wanted.isdecimal() and int(wanted) < len(found):
        fits = [found[int(wanted)]]
    else:
        fits = [d for d in found if wanted.lower() in d.facts.name.lower()]
    if not fits:
        have = ", ".join(f"{i} {d.facts.name}" for i, d in enumerate(found)) or "none"
        raise DeviceError(f"RUDNN_VULKAN_DEVICE needs one of the devices {have}, got {wanted}")
    return fits[0]


@lru_cache(maxsize=1)
def surveyed() -> tuple[tuple[Physical, str], ...]:
    """Every device Vulkan lists, and what it lacks for our kernels ("" if nothing)."""
    vk = api.package()
    devices = [Physical(h, inspect(h)) for h in vk.vkEnumeratePhysicalDevices(instance())]
    return tuple((d, _lacks(d.facts)) for d in devices)


def _lacks(facts: Facts) -> str:
    needs = {
        "Vulkan 1.2": facts.api_version >= _API_1_2,
        "a compute queue": facts.family >= 0,
        "VK_KHR_push_descriptor": "VK_KHR_push_descriptor" in facts.extensions,
        "timelineSemaphore": "timelineSemaphore" in facts.features,
        "robustBufferAccess": "robustBufferAccess" in facts.features,
        "shaderInt64": "shaderInt64" in facts.features,
        # what parts of the workspace are aligned to
        "storage buffers at offsets of 64 bytes": facts.offset_alignment <= WORKSPACE_ALIGNMENT,
    }
    return ", ".join(name for name, there in needs.items() if not there)
