"""The C header of an exported operator: a plain function over the kernel's argument array."""

from __future__ import annotations

from ..plan import LaunchPlan, Slot
from ..signature import Signature, TensorInfo, rename

C_TYPES = {
    "float32": "float", "float64": "double", "float16": "uint16_t", "bfloat16": "uint16_t",
    "bool": "uint8_t", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t",
    "int64": "int64_t", "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t",
    "uint64": "uint64_t",
}  # fmt: skip
_NOTES = {
    "float16": "IEEE half, as bits", "bfloat16": "bfloat16, as bits", "bool": "bool, 0 or 1",
}  # fmt: skip
# What C and C++ take for no name.
C_WORDS = frozenset({
    "alignas", "alignof", "and", "asm", "auto", "bool", "break", "case", "catch", "char", "class",
    "const", "constexpr", "continue", "decltype", "default", "delete", "do", "double",
    "dynamic_cast", "else", "enum", "explicit", "export", "extern", "false", "float", "for",
    "friend", "goto", "if", "inline", "int", "long", "mutable", "namespace", "new", "noexcept",
    "not", "nullptr", "operator", "or", "private", "protected", "public", "register", "restrict",
    "return", "short", "signed", "sizeof", "static", "struct", "switch", "template", "this",
    "throw", "true", "try", "typedef", "typeid", "typename", "typeof", "union", "unsigned",
    "using", "virtual", "void", "volatile", "wchar_t", "while", "xor",
})  # fmt: skip
# Names that the generated code uses itself.
_RESERVED = C_WORDS | {"main", "NULL", "NAN", "INFINITY", "workspace", "argc", "argv", "folder",
                       "i", "status", "used"}  # fmt: skip


class Names:
    """C identifiers for the signature's names, none twice and none a keyword."""

    def __init__(self, signature: Signature) -> None:
        self.known: dict[tuple[str, str], str] = {}
        taken = set(_RESERVED)
        kinds = (
            ("dim", signature.dims), ("tensor", signature.tensors), ("scalar", signature.scalars),
        )  # fmt: skip
        for kind, items in kinds:
            for item in items:
                name = item.name
                while name in taken:
                    name += "_"
                taken.add(name)
                self.known[kind, item.name] = name

    def dim(self, name: str) -> str:
        return self.known["dim", name]

    def tensor(self, name: str) -> str:
        return self.known["tensor", name]

    def scalar(self, name: str) -> str:
        return self.known["scalar", name]


class Header:
    """Writes the header of one operator.

    `workspace` (bytes) and `work` (elementary operations, below `small_work` for one thread) are
    expressions in C of the signature's dims.
    """

    def __init__(
        self, signature: Signature, plan: LaunchPlan, workspace: str, work: str, small_work: int
    ) -> None:
        self.signature, self.plan, self.small_work = signature, plan, small_work
        self.name = signature.name
        self.macro = signature.name.upper()
        self.c = Names(signature)
        self.strided = {s.name for s in plan.slots if s.kind == "stride"}
        self.workspace, self.work = self.expression(workspace), self.expression(work)

    @property
    def contract(self) -> str:
        """What a caller must keep to, in words."""
        return _CONTRACT

    def text(self) -> str:
        """The whole header."""
        parts = (
            self.comment(), self.opening(), self.workspace_function(), self.function(),
            "#ifdef __cplusplus\n}\n#endif\n#endif",
        )  # fmt: skip
        return "\n\n".join(parts) + "\n"

    # --- words ---

    def comment(self) -> str:
        """What the operator computes, and what each argument is."""
        s = self.signature
        lines = [f"{self.name}: the operator {s.operator}, compiled for {s.target}.", ""]
        lines += s.doc.splitlines()
        lines += ["", "Tensors:"]
        lines += [f"  {self.tensor_line(t)}" for t in s.tensors]
        lines += ["Dims: " + ", ".join(self.dim_words())] if s.dims else []
        lines += [self.scalar_line(x.name, x.default) for x in s.scalars]
        if s.options:
            lines += ["Options: " + ", ".join(f"{n}={v}" for n, v in s.options)]
        lines += [f"Requires: {check.needs}" for check in s.checks]
        lines += ["", *self.contract.splitlines()]
        body = "\n".join(f" * {line}".rstrip() for line in "\n".join(lines).split("\n"))
        return "/* " + body[3:].replace("*/", "* /") + "\n */"

    def tensor_line(self, tensor: TensorInfo) -> str:
        shape = ", ".join(str(e) for e in tensor.shape)
        notes = [_NOTES[tensor.dtype.name]] if tensor.dtype.name in _NOTES else []
        if tensor.below:
            notes.append(f"values in 0 ... {tensor.below} - 1")
        if len(tensor.shape) and not tensor.unit:
            notes.append("any strides")
        words = f"{self.c.tensor(tensor.name)}: {tensor.role}, {tensor.dtype.name} [{shape}]"
        return words + (f" ({'; '.join(notes)})" if notes else "")

    def dim_words(self) -> list[str]:
        return [
            f"{d.name} = {d.size}" if d.size is not None else f"{self.c.dim(d.name)} of any size"
            for d in self.signature.dims
        ]

    def scalar_line(self, name: str, default: int | float | None) -> str:
        usual = "" if default is None else f", usually {default!r}"
        return f"Scalar: {self.c.scalar(name)}{usual}"

    # --- code ---

    def constants(self) -> list[str]:
        return [
            f"#define {self.macro}_{d.name} {d.size} /* compiled in */"
            for d in self.signature.dims
            if d.size is not None
        ]

    def opening(self) -> str:
        return "\n".join([
            f"#ifndef {self.macro}_H_", f"#define {self.macro}_H_", "",
            '#include "rudnn_host.h"', "",
            f"#define {self.macro}_ABI_VERSION {self.plan.abi}",
            f"#if RUDNN_ABI_VERSION != {self.macro}_ABI_VERSION",
            '#error "this header needs the rudnn_runtime.h it was exported with"', "#endif",
            *self.constants(), "", "#ifdef __cplusplus", 'extern "C" {', "#endif", "",
            "/* The kernel itself; its argument array is described in manifest.json. */",
            f"extern int32_t {self.plan.entry}(const int64_t *args);",
        ])  # fmt: skip

    def dims(self) -> list[str]:
        return [self.c.dim(d.name) for d in self.signature.dynamic()]

    def workspace_function(self) -> str:
        parameters = [f"int64_t {d}" for d in self.dims()] or ["void"]
        return "\n".join([
            "/* Bytes of workspace that a call needs. */",
            *wrapped(f"static inline int64_t {self.name}_workspace_bytes(", parameters, ") {"),
            *(f"    (void){d};" for d in self.dims()),
            f"    return {self.workspace};", "}",
        ])  # fmt: skip

    def parameters(self) -> list[str]:
        """The C function's parameters, in order."""
        made = []
        for tensor in self.signature.tensors:
            constant = "const " if tensor.role == "input" else ""
            name = self.c.tensor(tensor.name)
            made.append(f"{constant}{C_TYPES[tensor.dtype.name]} *{name}")
            if tensor.name in self.strided:
                made.append(f"const int64_t *{name}_strides")
        made += [f"int64_t {d}" for d in self.dims()]
        for scalar in self.signature.scalars:
            kind = "float" if scalar.dtype.is_float else "int64_t"
            made.append(f"{kind} {self.c.scalar(scalar.name)}")
        return [*made, "void *workspace"]

    def function(self) -> str:
        opening = wrapped(f"static inline int32_t {self.name}(", self.parameters(), ") {")
        return "\n".join([*opening, *(f"    {line}" for line in self.body()), "}"])

    def body(self) -> list[str]:
        slots = self.plan.slots
        lines = [f"int64_t rudnn_args[{max(1, len(slots))}];", "int32_t rudnn_status;"]
        for tensor in self.signature.tensors:
            name, rank = self.c.tensor(tensor.name), max(1, len(tensor.shape))
            shape = ", ".join(self.extent(e) for e in tensor.shape) or "1"
            lines.append(f"const int64_t {name}_shape[{rank}] = {{{shape}}};")
            lines.append(f"int64_t {name}_step[{rank}];")
        lines += [f"if ({d} < 0) return RUDNN_NEGATIVE_DIM;" for d in self.dims()]
        lines += [
            f"if (!{self.expression(c.condition)}) return RUDNN_REQUIREMENT;"
            for c in self.signature.checks
        ]
        for tensor in self.signature.tensors:
            lines += self.check(tensor)
        outputs = [t for t in self.signature.tensors if t.role == "output"]
        empty = " && ".join(f"rudnn_count({self.shape(t)}) == 0" for t in outputs)
        lines.append(f"if ({empty}) return RUDNN_OK;")
        for tensor in self.signature.tensors:
            lines += self.check_values(tensor)
        lines += [
            f"rudnn_args[{i}] = {self.argument(slot)};"
            for i, slot in enumerate(slots)
            if slot.kind != "workspace"
        ]
        return [*lines, *self.start()]

    def start(self) -> list[str]:
        """Statements that run the kernel on `rudnn_args` and return its status."""
        slots = self.plan.slots
        place = next((i for i, s in enumerate(slots) if s.kind == "workspace"), -1)
        work = f"{self.work} < INT64_C({self.small_work}) ? 1 : 0"
        return [f"return rudnn_invoke({self.plan.entry}, rudnn_args, {place}, workspace,",
                f"                    {self.name}_workspace_bytes({', '.join(self.dims())}),",
                f"                    {work});"]  # fmt: skip

    def expression(self, text: str) -> str:
        """A C expression of the signature's names, over the C identifiers."""
        names = {d.name: self.c.dim(d.name) for d in self.signature.dims}
        return rename(text, names | {s.name: self.c.scalar(s.name) for s in self.signature.scalars})

    def extent(self, extent: str | int) -> str:
        return str(extent) if isinstance(extent, int) else self.expression(extent)

    def shape(self, tensor: TensorInfo) -> str:
        return f"{self.c.tensor(tensor.name)}_shape, {len(tensor.shape)}"

    def check(self, tensor: TensorInfo) -> list[str]:
        name = self.c.tensor(tensor.name)
        strides = f"{name}_strides" if tensor.name in self.strided else "NULL"
        written = int(tensor.role == "output")
        return [
            f"rudnn_status = rudnn_tensor({name}, {self.shape(tensor)}, {strides}, "
            f"{int(tensor.unit)}, {written}, {name}_step);",
            "if (rudnn_status) return rudnn_status;",
        ]

    def check_values(self, tensor: TensorInfo) -> list[str]:
        if not tensor.below:
            return []
        name, dtype = self.c.tensor(tensor.name), tensor.dtype
        return [
            f"rudnn_status = rudnn_indices({name}, {self.shape(tensor)}, {name}_step, "
            f"{dtype.bytes}, {int(dtype.kind == 'int')}, {self.expression(tensor.below)});",
            "if (rudnn_status) return rudnn_status;",
        ]

    def argument(self, slot: Slot) -> str:
        if slot.kind == "dim":
            return self.c.dim(next(d.name for d in self.signature.dims if d.slot == slot.name))
        if slot.kind == "pointer":
            return f"(int64_t)(intptr_t){self.c.tensor(slot.name)}"
        if slot.kind == "stride":
            return f"{self.c.tensor(slot.name)}_step[{slot.axis}]"
        name = self.c.scalar(slot.name)
        return f"rudnn_float_bits({name})" if slot.dtype == "float32" else name


def wrapped(start: str, items: list[str], end: str, width: int = 96) -> list[str]:
    """`start`, the comma-separated items, `end`: as lines broken between items."""
    lines, margin = [start], " " * len(start)
    for i, item in enumerate(items):
        text = item + (", " if i + 1 < len(items) else end)
        if len(lines[-1]) + len(text.rstrip()) > width and lines[-1].strip():
            lines.append(margin)
        lines[-1] += text
    return [line.rstrip() for line in lines]


_CONTRACT = """\
The function returns 0 (RUDNN_OK), a code of rudnn_embed.h (RUDNN_NULL_POINTER,
RUDNN_NEGATIVE_DIM, RUDNN_BAD_STRIDE, RUDNN_REQUIREMENT, RUDNN_BAD_INDEX, RUDNN_NO_MEMORY), or the
kernel's own status. On a code of rudnn_embed.h nothing has been written.

NAME_strides holds one stride a dim, in elements, negative or (inputs only) 0 as well; NULL means
row-major. The last stride must be 1 unless the tensor is marked "any strides". Memory needs no
alignment beyond its element's. Outputs must not overlap anything. `workspace` is memory for
NAME_workspace_bytes(...) bytes, or NULL: the runtime then lends it. Any thread may call, and any
number at once."""
