"""A hand-written kernel and its launch plan, for tests of the Vulkan driver."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("RUDNN_VULKAN_VALIDATION", "1")  # before anything makes the instance

from rudnn.runtime.cache import DiskCache  # noqa: E402
from rudnn.runtime.device import Device, Queue  # noqa: E402
from rudnn.runtime.plan import Argument, Launch, LaunchPlan, Slot  # noqa: E402
from rudnn.runtime.targets.vulkan.driver import driver  # noqa: E402
from rudnn.runtime.targets.vulkan.memory import Memory  # noqa: E402
from rudnn.runtime.targets.vulkan.spirv import Shader, pack  # noqa: E402
from rudnn.runtime.targets.vulkan.tools import find  # noqa: E402

# y[i] = x[i] * s * s * … (`times` factors) for i < n, in f32. The numbers are push constants, or
# a third buffer: {storage}, {decorations}.
ASSEMBLY = """
OpCapability Shader
OpCapability Int64
OpMemoryModel Logical GLSL450
OpEntryPoint GLCompute %main "main" %thread %x %y %numbers
OpExecutionMode %main LocalSize 64 1 1
OpDecorate %thread BuiltIn GlobalInvocationId
OpDecorate %floats ArrayStride 4
OpDecorate %buffer Block
OpMemberDecorate %buffer 0 Offset 0
OpDecorate %x DescriptorSet 0
OpDecorate %x Binding 0
OpDecorate %x NonWritable
OpDecorate %y DescriptorSet 0
OpDecorate %y Binding 1
OpDecorate %block Block
OpMemberDecorate %block 0 Offset 0
OpMemberDecorate %block 1 Offset 4
OpMemberDecorate %block 2 Offset 8
OpMemberDecorate %block 3 Offset 16
OpMemberDecorate %block 4 Offset 24
{decorations}
%void = OpTypeVoid
%function = OpTypeFunction %void
%uint = OpTypeInt 32 0
%long = OpTypeInt 64 0
%float = OpTypeFloat 32
%bool = OpTypeBool
%uint3 = OpTypeVector %uint 3
%to_uint3 = OpTypePointer Input %uint3
%floats = OpTypeRuntimeArray %float
%buffer = OpTypeStruct %floats
%to_buffer = OpTypePointer StorageBuffer %buffer
%to_float = OpTypePointer StorageBuffer %float
%block = OpTypeStruct %uint %uint %long %long %float
%to_block = OpTypePointer {storage} %block
%to_number = OpTypePointer {storage} %uint
%to_long = OpTypePointer {storage} %long
%to_scale = OpTypePointer {storage} %float
%thread = OpVariable %to_uint3 Input
%x = OpVariable %to_buffer StorageBuffer
%y = OpVariable %to_buffer StorageBuffer
%numbers = OpVariable %to_block {storage}
%0 = OpConstant %uint 0
%1 = OpConstant %uint 1
%2 = OpConstant %uint 2
%3 = OpConstant %uint 3
%4 = OpConstant %uint 4
%main = OpFunction %void None %function
%entry = OpLabel
%id = OpLoad %uint3 %thread
%i = OpCompositeExtract %uint %id 0
%a0 = OpAccessChain %to_number %numbers %0
%x_start = OpLoad %uint %a0
%a1 = OpAccessChain %to_number %numbers %1
%y_start = OpLoad %uint %a1
%a2 = OpAccessChain %to_long %numbers %2
%n_long = OpLoad %long %a2
%n = OpUConvert %uint %n_long
%a3 = OpAccessChain %to_long %numbers %3
%times_long = OpLoad %long %a3
%times = OpUConvert %uint %times_long
%a4 = OpAccessChain %to_scale %numbers %4
%scale = OpLoad %float %a4
%inside = OpULessThan %bool %i %n
OpSelectionMerge %end None
OpBranchConditional %inside %then %end
%then = OpLabel
%xi = OpIAdd %uint %x_start %i
%from = OpAccessChain %to_float %x %0 %xi
%first = OpLoad %float %from
OpBranch %loop
%loop = OpLabel
%j = OpPhi %uint %0 %then %j_next %continue
%value = OpPhi %float %first %then %value_next %continue
%again = OpULessThan %bool %j %times
OpLoopMerge %after %continue None
OpBranchConditional %again %continue %after
%continue = OpLabel
%value_next = OpFMul %float %value %scale
%j_next = OpIAdd %uint %j %1
OpBranch %loop
%after = OpLabel
%yi = OpIAdd %uint %y_start %i
%to = OpAccessChain %to_float %y %0 %yi
OpStore %to %value
OpBranch %end
%end = OpLabel
OpReturn
OpFunctionEnd
"""
_IN_BUFFER = "\n".join(
    f"OpDecorate %numbers {what}" for what in ("DescriptorSet 0", "Binding 2", "NonWritable")
)
LAYOUT = "<IIqqf"
PLAN = LaunchPlan(
    "scale",
    (
        Slot("dim", "rows.0"), Slot("dim", "times"), Slot("pointer", "x", dtype="float32"),
        Slot("pointer", "y", dtype="float32"), Slot("scalar", "s", dtype="float32"),
    ),
    "0", "rows_0", (("scale", "by hand", ""),),
    (
        Launch(
            "scale_0",
            (
                Argument("pointer", 2), Argument("pointer", 3), Argument("int64", 0),
                Argument("int64", 1), Argument("float32", 4),
            ),
            ("(rows_0 + 63) // 64", "1"), 64,
        ),
    ),
)  # fmt: skip
# Some tenths of a second on a processor. No more turns: Mesa 22's llvmpipe ends all loops of a
# thread after 65535, without a word.
SLOW_COUNT, SLOW_TIMES = 64 * 100, 60_000


def assemble(in_buffer: bool = False) -> bytes:
    storage = "StorageBuffer" if in_buffer else "PushConstant"
    text = ASSEMBLY.format(storage=storage, decorations=_IN_BUFFER if in_buffer else "")
    command = [find("spirv-as"), "--target-env", "vulkan1.2", "-", "-o", "-"]
    return subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout


class Kernel:
    """`y = x * s ** times` on a queue."""

    def __init__(self, shader: Shader, folder: Path, queue: Queue | None = None) -> None:
        self.driver = driver()
        self.queue = queue or new_queue()
        binary = folder / "kernel.spvs"
        binary.write_bytes(pack([shader]))
        self.loaded = self.driver.load(binary, PLAN, DiskCache(folder / "cache"), 0)
        self.call = self.loaded.on(self.queue)

    def start(self, n: int, times: int, x: int, y: int, s: float) -> None:
        bits = int.from_bytes(struct.pack("<f", s), "little")
        assert self.call(struct.pack("<qqqqq", n, times, x, y, bits), 0) == 0

    def start_slow(self) -> tuple[Memory, Memory]:
        """Work for a while: 1 in the first memory to 1 in the second."""
        held = [self.driver.allocate(4 * SLOW_COUNT, self.queue) for _ in range(2)]
        ones = np.ones(SLOW_COUNT, np.float32)
        self.driver.copy_in(held[0].address, memoryview(ones), self.queue)
        self.start(SLOW_COUNT, SLOW_TIMES, held[0].address, held[1].address, 1.0)
        return held[0], held[1]

    def __call__(self, x: np.ndarray[Any, Any], s: float, times: int = 1) -> np.ndarray[Any, Any]:
        """From the host and back."""
        held = [self.driver.allocate(x.nbytes, self.queue) for _ in range(2)]
        self.driver.copy_in(held[0].address, memoryview(x), self.queue)
        self.start(x.size, times, held[0].address, held[1].address, s)
        return self.read(held[1].address, x.size)

    def read(self, address: int, count: int) -> np.ndarray[Any, Any]:
        y = np.zeros(count, np.float32)
        self.driver.copy_out(address, memoryview(y), self.queue)
        return y


def new_queue() -> Queue:
    return Queue(Device("vulkan", 0, driver().device_names()[0], driver()))


def numbers(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)
