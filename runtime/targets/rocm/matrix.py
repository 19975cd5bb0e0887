"""The functions of a matrix unit as LLVM IR, and which lane holds which element.

An operand tile is 16x16 with k along the instruction's inner dimension. Lane `l` of a wavefront
holds row `l % 16` of A (column `l % 16` of B) at some run of k, which is the same for both, and
column `l % 16` of the accumulator at some rows (AMD's matrix instruction calculator):

============  ====================  ============================  =========================
family        elements of A and B   k                             rows of the accumulator
============  ====================  ============================  =========================
mfma          4 (64 lanes)          4 (l / 16) + i                4 (l / 16) + i, i < 4
wmma          16 (32 lanes)         i: both halves hold the same  2 i + l / 16, i < 8
wmma12        8 (32 lanes)          8 (l / 16) + i                8 (l / 16) + i, i < 8
============  ====================  ============================  =========================

A loads as B does: row-major A and B stored [n][k] by one function, their transposes by another.
Loads name the alignment of one element; where LLVM can prove more, it loads wider.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....schedules.capability import MatrixUnit

_LANE = """\
  %thread = call i32 @llvm.amdgcn.workitem.id.x()
  %row = and i32 %thread, 15
  %lane = and i32 %thread, {last_lane}
  %half = lshr i32 %lane, 4
"""
_FUNCTION = """
define linkonce_odr hidden void @{name}({parameters}) #0 {{
{body}  ret void
}}
"""


@dataclass(frozen=True)
class _Layout:
    """Element i has k = `k_half` (lane / 16) + i, or row = `row_half` (lane / 16) + `step` i."""

    last_lane: int
    k_half: int
    row_half: int
    step: int


_LAYOUTS = {
    "mfma": _Layout(63, 4, 4, 1),
    "wmma": _Layout(31, 0, 1, 2),
    "wmma12": _Layout(31, 8, 8, 1),
}
_INSTRUCTIONS = {
    ("mfma", "float16"): "mfma.f32.16x16x16f16",
    ("mfma", "bfloat16"): "mfma.f32.16x16x16bf16.1k",
    ("wmma", "float16"): "wmma.f32.16x16x16.f16.v8f32.v16f16",
    ("wmma", "bfloat16"): "wmma.f32.16x16x16.bf16.v8f32.v16i16",
    ("wmma12", "float16"): "wmma.f32.16x16x16.f16.v8f32.v8f16",
    ("wmma12", "bfloat16"): "wmma.f32.16x16x16.bf16.v8f32.v8i16",
}


def functions(unit: MatrixUnit, family: str) -> str:
    """LLVM IR of the unit's functions; to be inlined whole."""
    return _Writer(unit, family).text()


class _Writer:
    def __init__(self, unit: MatrixUnit, family: str) -> None:
        self.unit, self.layout = unit, _LAYOUTS[family]
        self.element = "half" if unit.operands == "float16" else "i16"
        self.operand = f"<{unit.a} x {self.element}>"
        self.accumulator = f"<{unit.c} x float>"
        self.intrinsic = f"@llvm.amdgcn.{_INSTRUCTIONS[family, unit.operands]}"
        self.flags = ", i32 0, i32 0, i32 0" if family == "mfma" else ""
        self.lane = _LANE.format(last_lane=self.layout.last_lane)

    def text(self) -> str:
        name = self.unit.intrinsic
        loads = "ptr addrspace(5) %fragment, ptr addrspace(3) %tile, i32 %stride"
        parts = [
            _FUNCTION.format(name=f"{name}_load_{which}", parameters=loads, body=body)
            for which, body in (
                ("a", self.load()),
                ("b", self.load()),
                ("a_t", self.load_transposed()),
                ("b_t", self.load_transposed()),
            )  # fmt: skip
        ]
        fragments = "ptr addrspace(5) %c, ptr addrspace(5) %a, ptr addrspace(5) %b"
        stores = "ptr addrspace(3) %tile, i32 %stride, ptr addrspace(5) %c"
        parts += [
            _FUNCTION.format(name=f"{name}_mma", parameters=fragments, body=self.multiply()),
            _FUNCTION.format(name=f"{name}_zero", parameters="ptr addrspace(5) %c",
                             body=self.put(self.accumulator, "zeroinitializer", "%c", 4)),
            _FUNCTION.format(name=f"{name}_store", parameters=stores, body=self.store()),
            self.declaration(),
        ]  # fmt: skip
        return "".join(parts)

    def declaration(self) -> str:
        flags = self.flags.replace(" 0", "")
        return (f"declare {self.accumulator} {self.intrinsic}"
                f"({self.operand}, {self.operand}, {self.accumulator}{flags})\n")  # fmt: skip

    def put(self, kind: str, value: str, pointer: str, align: int) -> str:
        return f"  store {kind} {value}, ptr addrspace(5) {pointer}, align {align}\n"

    def first_k(self) -> str:
        return f"{self.lane}  %k = mul i32 %half, {self.layout.k_half}\n"

    def load(self) -> str:
        """Elements side by side in memory: one vector load."""
        return (
            self.first_k()
            + (
                "  %start = mul i32 %row, %stride\n"
                "  %place = add i32 %start, %k\n"
                f"  %from = getelementptr {self.element}, ptr addrspace(3) %tile, i32 %place\n"
                f"  %value = load {self.operand}, ptr addrspace(3) %from, align 2\n"
            )
            + self.put(self.operand, "%value", "%fragment", 2)
        )

    def load_transposed(self) -> str:
        """Elements one stride apart."""
        lines, vector, kind = self.first_k(), "poison", self.element
        for i in range(self.unit.a):
            lines += (
                f"  %k{i} = add i32 %k, {i}\n"
                f"  %start{i} = mul i32 %k{i}, %stride\n"
                f"  %place{i} = add i32 %start{i}, %row\n"
                f"  %from{i} = getelementptr {kind}, ptr addrspace(3) %tile, i32 %place{i}\n"
                f"  %value{i} = load {kind}, ptr addrspace(3) %from{i}, align 2\n"
                f"  %v{i} = insertelement {self.operand} {vector}, {kind} %value{i}, i32 {i}\n"
            )
            vector = f"%v{i}"
        return lines + self.put(self.operand, vector, "%fragment", 2)

    def multiply(self) -> str:
        lines = "".join(
            f"  %v{n} = load {self.operand}, ptr addrspace(5) %{n}, align 2\n" for n in "ab"
        )
        operands = f"{self.operand} %va, {self.operand} %vb, {self.accumulator} %vc"
        return (
            lines
            + (
                f"  %vc = load {self.accumulator}, ptr addrspace(5) %c, align 4\n"
                f"  %sum = call {self.accumulator} {self.intrinsic}({operands}{self.flags})\n"
            )
            + self.put(self.accumulator, "%sum", "%c", 4)
        )

    def store(self) -> str:
        layout = self.layout
        lines = self.lane + (
            f"  %value = load {self.accumulator}, ptr addrspace(5) %c, align 4\n"
            f"  %first = mul i32 %half, {layout.row_half}\n"
        )
        for i in range(self.unit.c):
            lines += (
                f"  %r{i} = add i32 %first, {i * layout.step}\n"
                f"  %start{i} = mul i32 %r{i}, %stride\n"
                f"  %place{i} = add i32 %start{i}, %row\n"
                f"  %to{i} = getelementptr float, ptr addrspace(3) %tile, i32 %place{i}\n"
                f"  %v{i} = extractelement {self.accumulator} %value, i32 {i}\n"
                f"  store float %v{i}, ptr addrspace(3) %to{i}, align 4\n"
            )
        return lines
