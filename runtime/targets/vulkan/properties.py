"""What a Vulkan device says of itself, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import api

_COMPUTE_QUEUE = 0x2
_COMPUTE_STAGE = 0x20
_SHUFFLES = 0x10 | 0x20  # subgroup shuffle, and shuffle relative
_SUBGROUP_SCOPE = 3
_ONLY_32_INDEPENDENT, _ALL_INDEPENDENT = 0, 1  # VkShaderFloatControlsIndependence
_API_1_3 = 1 << 22 | 3 << 12
_BFLOAT16 = 1000141000  # both the sType of its features and the component type
_COMPONENTS = {0: "float16", 1: "float32", _BFLOAT16: "bfloat16"}


@dataclass(frozen=True)
class _Group:
    """Features of one structure, asked for where `extension` is offered ("": always).

    `fields` are the features' names and, where another structure of the same layout stands in
    for one that the package does not know, its fields; `kind` is then the sType.
    """

    structure: str
    extension: str
    fields: dict[str, str]
    kind: int = 0

    def make(self, vk: Any, chain: Any, **values: int) -> Any:
        given = {"sType": self.kind} if self.kind else {}
        return getattr(vk, self.structure)(pNext=chain, **given, **values)


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_GROUPS = (
    _Group("VkPhysicalDeviceVulkan11Features", "", _same("storageBuffer16BitAccess")),
    _Group("VkPhysicalDeviceVulkan12Features", "", _same(
        "timelineSemaphore", "storageBuffer8BitAccess", "shaderFloat16", "shaderInt8",
        "shaderSubgroupExtendedTypes", "vulkanMemoryModel",
        "vulkanMemoryModelDeviceScope",
    )),
    _Group("VkPhysicalDeviceSubgroupSizeControlFeatures", "VK_EXT_subgroup_size_control", _same(
        "subgroupSizeControl", "computeFullSubgroups",
    )),
    _Group("VkPhysicalDeviceShaderAtomicFloatFeaturesEXT", "VK_EXT_shader_atomic_float", _same(
        "shaderBufferFloat32Atomics", "shaderBufferFloat32AtomicAdd",
    )),
    _Group("VkPhysicalDeviceCooperativeMatrixFeaturesKHR", "VK_KHR_cooperative_matrix", _same(
        "cooperativeMatrix",
    )),
    _Group("VkPhysicalDevice16BitStorageFeatures", "VK_KHR_shader_bfloat16", {
        "shaderBFloat16Type": "storageBuffer16BitAccess",
        "shaderBFloat16CooperativeMatrix": "storagePushConstant16",
    }, _BFLOAT16),
)  # fmt: skip
_CORE_FEATURES = ("robustBufferAccess", "shaderInt64", "shaderInt16")
_OPTIONAL_EXTENSIONS = ("VK_EXT_memory_budget", "VK_KHR_portability_subset")


@dataclass(frozen=True)
class MatrixShape:
    """One shape of cooperative matrices with f32 accumulators: C[m, n] += A[m, k]·B[k, n]."""

    m: int
    n: int
    k: int
    operands: str


@dataclass(frozen=True)
class Facts:
    """A device's properties.

    `family` is its queue family for kernels (-1: none), `timestamp_bits` what the family counts
    with, `timestamp_ns` one count. `features` are names of features that are there and that a
    kernel or the driver may use, `extensions` those of extensions. `subgroup` is 0 where its
    size cannot be required. `float_controls` are the float properties that are true. Sizes are
    bytes.
    """

    name: str
    kind: int
    vendor: int
    device: int
    driver: str
    driver_version: int
    api_version: int
    cache_uuid: str
    family: int
    timestamp_bits: int
    timestamp_ns: float
    extensions: frozenset[str]
    features: frozenset[str]
    float_controls: frozenset[str]
    subgroup: int
    shuffle: bool
    matrix: tuple[MatrixShape, ...]
    max_threads: int
    max_blocks: int
    shared_bytes: int
    push_bytes: int
    max_buffers: int
    offset_alignment: int
    max_range: int
    max_allocation: int
    processors: int


def inspect(handle: Any) -> Facts:
    """The facts of a VkPhysicalDevice."""
    vk = api.package()
    basic = vk.vkGetPhysicalDeviceProperties(handle)
    names = {e.extensionName for e in vk.vkEnumerateDeviceExtensionProperties(handle, None)}
    family, bits = _family(vk, handle)
    features = _features(vk, handle, basic.apiVersion, names)
    more = _Properties(vk, handle, names)
    subgroup = _subgroup(more, features)
    limits = basic.limits
    threads = min(limits.maxComputeWorkGroupInvocations, limits.maxComputeWorkGroupSize[0])
    if subgroup:
        threads = min(threads, subgroup * more.control.maxComputeWorkgroupSubgroups)
    return Facts(
        name=basic.deviceName, kind=basic.deviceType, vendor=basic.vendorID, device=basic.deviceID,
        driver=f"{more.text('driverName')} {more.text('driverInfo')}".strip(),
        driver_version=basic.driverVersion, api_version=basic.apiVersion,
        cache_uuid=bytes(basic.pipelineCacheUUID).hex(), family=family, timestamp_bits=bits,
        timestamp_ns=limits.timestampPeriod, extensions=frozenset(names), features=features,
        float_controls=more.float_controls(), subgroup=subgroup,
        shuffle=bool(subgroup) and more.subgroup.supportedOperations & _SHUFFLES == _SHUFFLES,
        matrix=tuple(_matrix(vk, handle, features)) if _matrix_ready(features, subgroup) else (),
        max_threads=threads, max_blocks=min(65535, *limits.maxComputeWorkGroupCount[0:2]),
        shared_bytes=limits.maxComputeSharedMemorySize, push_bytes=limits.maxPushConstantsSize,
        max_buffers=min(
            more.push.maxPushDescriptors, limits.maxPerStageDescriptorStorageBuffers,
            limits.maxDescriptorSetStorageBuffers,
        ),
        offset_alignment=limits.minStorageBufferOffsetAlignment,
        max_range=limits.maxStorageBufferRange,
        max_allocation=more.maintenance.maxMemoryAllocationSize, processors=more.processors(),
    )  # fmt: skip


def enabled(facts: Facts) -> tuple[Any, list[str]]:
    """The feature chain and the extensions that a VkDevice of these facts is made with."""
    vk = api.package()
    chain: Any = None
    extensions = ["VK_KHR_push_descriptor"]
    extensions += [e for e in _OPTIONAL_EXTENSIONS if e in facts.extensions]
    for group in _GROUPS:
        wanted = {field: 1 for name, field in group.fields.items() if name in facts.features}
        if not wanted:
            continue
        if group.extension in facts.extensions:
            extensions.append(group.extension)
        chain = group.make(vk, chain, **wanted)
    core = vk.VkPhysicalDeviceFeatures(**{n: 1 for n in _CORE_FEATURES if n in facts.features})
    return vk.VkPhysicalDeviceFeatures2(pNext=chain, features=core), extensions


def _family(vk: Any, handle: Any) -> tuple[int, int]:
    """Index and timestamp bits of the first queue family for kernels."""
    for i, family in enumerate(vk.vkGetPhysicalDeviceQueueFamilyProperties(handle)):
        if family.queueFlags & _COMPUTE_QUEUE:
            return i, family.timestampValidBits
    return -1, 0


def _features(vk: Any, handle: Any, version: int, names: set[str]) -> frozenset[str]:
    chain: Any = None
    asked: list[tuple[Any, dict[str, str]]] = []
    for group in _GROUPS:
        part_of_1_3 = group.extension == "VK_EXT_subgroup_size_control" and version >= _API_1_3
        if group.extension in names or part_of_1_3 or not group.extension:
            chain = group.make(vk, chain)
            asked.append((chain, group.fields))
    answer = vk.VkPhysicalDeviceFeatures2(pNext=chain)
    vk.vkGetPhysicalDeviceFeatures2(handle, answer)
    asked.append((answer.features, _same(*_CORE_FEATURES)))
    return frozenset(
        n for part, fields in asked for n, field in fields.items() if getattr(part, field)
    )


class _Properties:
    """The structures behind VkPhysicalDeviceProperties2."""

    def __init__(self, vk: Any, handle: Any, names: set[str]) -> None:
        self.vk = vk
        self.subgroup = vk.VkPhysicalDeviceSubgroupProperties()
        self.control = vk.VkPhysicalDeviceSubgroupSizeControlProperties(pNext=self.subgroup)
        self.push = vk.VkPhysicalDevicePushDescriptorPropertiesKHR(pNext=self.control)
        self.maintenance = vk.VkPhysicalDeviceMaintenance3Properties(pNext=self.push)
        self.driver = vk.VkPhysicalDeviceDriverProperties(pNext=self.maintenance)
        self.floats = vk.VkPhysicalDeviceFloatControlsProperties(pNext=self.driver)
        chain = self.floats
        self.sm = self.units = None
        if "VK_NV_shader_sm_builtins" in names:
            self.sm = chain = vk.VkPhysicalDeviceShaderSMBuiltinsPropertiesNV(pNext=chain)
        if "VK_AMD_shader_core_properties" in names:
            self.units = chain = vk.VkPhysicalDeviceShaderCorePropertiesAMD(pNext=chain)
        vk.vkGetPhysicalDeviceProperties2(handle, vk.VkPhysicalDeviceProperties2(pNext=chain))

    def text(self, field: str) -> str:
        found: str = self.vk.ffi.string(getattr(self.driver, field)).decode(errors="replace")
        return found

    def float_controls(self) -> frozenset[str]:
        """Those that may be set for one width and not for others."""
        floats, alike = self.floats, set()
        for kind, independent in (
            ("Denorm", floats.denormBehaviorIndependence),
            ("Rounding", floats.roundingModeIndependence),
        ):
            if independent != _ALL_INDEPENDENT:
                widths = ("16",) if independent == _ONLY_32_INDEPENDENT else ("16", "32")
                alike |= {n for n in dir(floats) if kind in n and n.endswith(widths)}
        fields = [n for n in dir(floats) if n.startswith("shader") and n not in alike]
        return frozenset(n for n in fields if getattr(floats, n))

    def processors(self) -> int:
        """Multiprocessors or compute units; 0 where the driver does not say."""
        if self.sm is not None:
            return int(self.sm.shaderSMCount)
        u = self.units
        if u is not None:
            arrays = u.shaderEngineCount * u.shaderArraysPerEngineCount
            return int(arrays * u.computeUnitsPerShaderArray)
        return 0


def _subgroup(more: _Properties, features: frozenset[str]) -> int:
    """The size of subgroups that kernels require: 32 where there is a choice, else the usual."""
    control = more.control
    required = control.requiredSubgroupSizeStages & _COMPUTE_STAGE
    if not required or not {"subgroupSizeControl", "computeFullSubgroups"} <= features:
        return 0
    if control.minSubgroupSize <= 32 <= control.maxSubgroupSize:
        return 32
    return int(more.subgroup.subgroupSize)


def _matrix_ready(features: frozenset[str], subgroup: int) -> bool:
    needs = {"cooperativeMatrix", "vulkanMemoryModel", "vulkanMemoryModelDeviceScope",
             "shaderFloat16", "storageBuffer16BitAccess"}  # fmt: skip
    return needs <= features and subgroup > 0


def _matrix(vk: Any, handle: Any, features: frozenset[str]) -> Iterator[MatrixShape]:
    from .instance import instance

    name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
    address = vk.lib.vkGetInstanceProcAddr(instance(), name.encode())
    ask = vk.ffi.cast(f"PFN_{name}", address)
    count = vk.ffi.new("uint32_t *")
    ask(handle, count, vk.ffi.NULL)
    found = vk.ffi.new("VkCooperativeMatrixPropertiesKHR[]", count[0])
    for item in found:
        item.sType = vk.VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR
    ask(handle, count, found)
    bf16 = {"shaderBFloat16Type", "shaderBFloat16CooperativeMatrix"} <= features
    wanted = ("float16", "bfloat16") if bf16 else ("float16",)
    for item in found:
        operands, result = _COMPONENTS.get(item.AType, ""), _COMPONENTS.get(item.ResultType)
        alike = item.AType == item.BType and item.CType == item.ResultType
        if item.scope == _SUBGROUP_SCOPE and alike and result == "float32" and operands in wanted:
            yield MatrixShape(item.MSize, item.NSize, item.KSize, operands)
