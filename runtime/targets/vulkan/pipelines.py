"""Shaders to pipelines, with the driver's pipeline cache kept on disk."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....dsl.errors import LoadError
from ...cache import DiskCache
from . import api
from .spirv.shader import Shader

if TYPE_CHECKING:
    from .gpu import Gpu

_COMPUTE_STAGE = 0x20
_STORAGE_BUFFER = 7
_PUSH_SET = 1  # VK_DESCRIPTOR_SET_LAYOUT_CREATE_PUSH_DESCRIPTOR_BIT_KHR
_FULL_SUBGROUPS = 2
_SPIRV_MAGIC = b"\x03\x02\x23\x07"
_SAVE_AFTER_S = 10.0  # a cache file is written at the end, and at most this often before


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A shader ready to be bound; `layout` says what it binds."""

    shader: Shader
    handle: Any
    layout: Any


class Pipelines:
    """Makes the pipelines of a device."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._lock = threading.RLock()
        self._layouts: dict[tuple[int, int], Any] = {}
        self._cache: Any = None
        self._file: Path | None = None
        self._saved_bytes = 0
        self._saved_at = 0.0

    def build(self, shader: Shader, cache: DiskCache) -> Pipeline:
        """Raises LoadError for a shader that the device does not take."""
        self._check(shader)
        vk, gpu = api.package(), self.gpu
        null, at = vk.ffi.NULL, vk.ffi.addressof
        info = vk.VkShaderModuleCreateInfo(codeSize=len(shader.words), pCode=shader.words)
        module = vk.ffi.new("VkShaderModule *")
        with self._lock:
            gpu.require()
            self._open(cache)
            layout = self._layout(len(shader.readonly) + shader.in_buffer, _pushed(shader))
            self._expect(gpu.fn.vkCreateShaderModule(gpu.handle, at(info), null, module), shader)
            stage = self._stage(vk, shader, module[0])
            pipeline = vk.VkComputePipelineCreateInfo(stage=stage, layout=layout)
            made = vk.ffi.new("VkPipeline *")
            result = gpu.fn.vkCreateComputePipelines(
                gpu.handle, self._cache, 1, at(pipeline), null, made
            )
            gpu.fn.vkDestroyShaderModule(gpu.handle, module[0], null)
            self._expect(result, shader)
        return Pipeline(shader, made[0], layout)

    def discard(self, made: list[Pipeline]) -> None:
        """Destroy pipelines that nothing uses."""
        if self.gpu.fault is None and not sys.is_finalizing():
            for pipeline in made:
                null = api.package().ffi.NULL
                self.gpu.fn.vkDestroyPipeline(self.gpu.handle, pipeline.handle, null)

    def _check(self, shader: Shader) -> None:
        facts = self.gpu.facts
        needs = {
            "SPIR-V": shader.words[:4] == _SPIRV_MAGIC and len(shader.words) % 4 == 0,
            f"at most {facts.max_buffers} buffers":
                len(shader.readonly) + shader.in_buffer <= facts.max_buffers,
            f"at most {facts.push_bytes} bytes of push constants":
                _pushed(shader) <= facts.push_bytes,
            f"at most {facts.max_threads} threads": shader.local_size <= facts.max_threads,
            "subgroups of a required size": not shader.subgroup or facts.subgroup > 0,
            f"threads in whole subgroups of {facts.subgroup}":
                not shader.subgroup or shader.local_size % facts.subgroup == 0,
        }  # fmt: skip
        for what, there in needs.items():
            if not there:
                raise LoadError(f"{self.gpu} needs {what}, got kernel {shader.name}")

    def _expect(self, result: int, shader: Shader) -> None:
        if result == api.DEVICE_LOST:
            self.gpu.expect(result, f"loading {shader.name}")
        if result < api.SUCCESS:
            name = api.result_name(result)
            raise LoadError(f"{self.gpu} refused kernel {shader.name}: {name}")

    def _stage(self, vk: Any, shader: Shader, module: Any) -> Any:
        size = None
        if shader.subgroup:
            size = vk.VkPipelineShaderStageRequiredSubgroupSizeCreateInfo(
                requiredSubgroupSize=self.gpu.facts.subgroup
            )
        return vk.VkPipelineShaderStageCreateInfo(
            pNext=size, flags=_FULL_SUBGROUPS if shader.subgroup else 0, stage=_COMPUTE_STAGE,
            module=module, pName="main",
        )  # fmt: skip

    def _layout(self, buffers: int, push: int) -> Any:
        """The VkPipelineLayout for so many buffers and bytes of push constants."""
        if (buffers, push) in self._layouts:
            return self._layouts[buffers, push]
        vk, gpu = api.package(), self.gpu
        null, at = vk.ffi.NULL, vk.ffi.addressof
        bindings = [
            vk.VkDescriptorSetLayoutBinding(
                binding=i, descriptorType=_STORAGE_BUFFER, descriptorCount=1,
                stageFlags=_COMPUTE_STAGE,
            )
            for i in range(buffers)
        ]  # fmt: skip
        info = vk.VkDescriptorSetLayoutCreateInfo(
            flags=_PUSH_SET, bindingCount=buffers, pBindings=bindings
        )
        sets = vk.ffi.new("VkDescriptorSetLayout *")
        result = gpu.fn.vkCreateDescriptorSetLayout(gpu.handle, at(info), null, sets)
        gpu.expect(result, "making a layout")
        ranges = [vk.VkPushConstantRange(stageFlags=_COMPUTE_STAGE, size=push)] if push else []
        info = vk.VkPipelineLayoutCreateInfo(
            setLayoutCount=1, pSetLayouts=sets, pushConstantRangeCount=len(ranges),
            pPushConstantRanges=ranges,
        )  # fmt: skip
        made = vk.ffi.new("VkPipelineLayout *")
        result = gpu.fn.vkCreatePipelineLayout(gpu.handle, at(info), null, made)
        gpu.expect(result, "making a layout")
        self._layouts[buffers, push] = made[0]
        return made[0]

    def _open(self, cache: DiskCache) -> None:
        """Make the VkPipelineCache, from the file of an earlier process if it is sound."""
        if self._cache is not None:
            return
        vk, gpu = api.package(), self.gpu
        self._file = cache_file(cache, gpu)
        data = _read(self._file)
        made = vk.ffi.new("VkPipelineCache *")
        content = vk.ffi.from_buffer(data) if data else vk.ffi.NULL
        info = vk.VkPipelineCacheCreateInfo(initialDataSize=len(data), pInitialData=content)
        result = gpu.fn.vkCreatePipelineCache(gpu.handle, vk.ffi.addressof(info), vk.ffi.NULL, made)
        gpu.expect(result, "making a pipeline cache")
        self._cache, self._saved_bytes = made[0], len(data)
        self._saved_at = time.monotonic()
        atexit.register(self.save)

    def save_soon(self) -> None:
        """Write the file unless that was done a moment ago."""
        if time.monotonic() - self._saved_at > _SAVE_AFTER_S:
            self.save()

    def save(self) -> None:
        """Write what the driver has compiled, if there is more than the file has."""
        if self._cache is None or self._file is None or self.gpu.fault is not None:
            return
        vk, gpu = api.package(), self.gpu
        self._saved_at = time.monotonic()
        with self._lock:
            size = vk.ffi.new("size_t *")
            get = gpu.fn.vkGetPipelineCacheData
            if get(gpu.handle, self._cache, size, vk.ffi.NULL) or size[0] <= self._saved_bytes:
                return
            data = vk.ffi.new("char[]", size[0])
            if get(gpu.handle, self._cache, size, data) == api.SUCCESS:
                self._saved_bytes = size[0]
                _write(self._file, vk.ffi.buffer(data, size[0])[:])


def _pushed(shader: Shader) -> int:
    return 0 if shader.in_buffer else shader.block_bytes


def cache_file(cache: DiskCache, gpu: Gpu) -> Path:
    """Where the pipelines of a device and driver are kept."""
    facts = gpu.facts
    name = f"{facts.cache_uuid}-{facts.vendor:x}-{facts.device:x}-{facts.driver_version:x}.bin"
    return cache.root / "vulkan" / name


def _read(path: Path) -> bytes:
    """The driver's data, or nothing if the file is not there or not whole."""
    try:
        digest, data = path.read_bytes()[:32], path.read_bytes()[32:]
    except OSError:
        return b""
    return data if hashlib.sha256(data).digest() == digest else b""


def _write(path: Path, data: bytes) -> None:
    """In one step; where nothing can be written, the next process compiles again."""
    temporary = path.with_name(f"{os.getpid()}-{uuid.uuid4().hex}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(hashlib.sha256(data).digest() + data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
