"""The example host of an exported operator: a small C program that runs it once."""

from __future__ import annotations

from ..signature import Signature, TensorInfo
from .header import C_TYPES, Header, wrapped

_DTYPES = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "bool": "BOOL",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64",
}  # fmt: skip


FAILED = (
    "if (status) {",
    '    fprintf(stderr, "status %d: %s\\n", (int)status, rudnn_status_text(status));',
    "    return 1;", "}",
)  # fmt: skip


class Host:
    """Writes the example host of one operator; `build` is the line that builds it."""

    def __init__(self, signature: Signature, header: Header, build: str) -> None:
        self.signature, self.header, self.c, self.build = signature, header, header.c, build

    def text(self) -> str:
        """The whole program."""
        s = self.signature
        return "\n".join([
            self.comment(), "", f'#include "{s.name}.h"', '#include "rudnn_example.h"', "",
            "int main(int argc, char **argv) {",
            *(f"    {x}".rstrip() for x in (*self.variables(), *self.options(), *self.work())),
            "}", "",
        ])  # fmt: skip

    def comment(self) -> str:
        s = self.signature
        settings = [f"[{self.c.dim(d.name)}=N]" for d in s.dynamic()]
        settings += [f"[{self.c.scalar(x.name)}=X]" for x in s.scalars]
        settings += [f"[{self.c.tensor(t.name)}=@FILE]" for t in s.tensors if t.role == "input"]
        usage = " ".join([f"./{s.name}_host", *settings, "[--out FOLDER]"])
        return "\n".join([
            f"/* Runs {s.operator} once on example values, or on raw little-endian files.", " *",
            f" *   {self.build}", f" *   {usage}", " *",
            " * Prints the first elements of each result, its sum and a hash; --out FOLDER writes",
            " * it raw to FOLDER/NAME.bin.", " */",
        ])  # fmt: skip

    def inputs(self) -> list[TensorInfo]:
        return [t for t in self.signature.tensors if t.role == "input"]

    def outputs(self) -> list[TensorInfo]:
        return [t for t in self.signature.tensors if t.role == "output"]

    def variables(self) -> list[str]:
        lines = [f"int64_t {self.c.dim(d.name)} = {d.example};" for d in self.signature.dynamic()]
        for scalar in self.signature.scalars:
            kind = "float" if scalar.dtype.is_float else "int64_t"
            value = 1 if scalar.default is None else scalar.default
            lines.append(f"{kind} {self.c.scalar(scalar.name)} = {_literal(value)};")
        lines += [f"const char *{self.c.tensor(t.name)}_file = NULL;" for t in self.inputs()]
        lines += [f"void *{self.c.tensor(t.name)};" for t in self.signature.tensors]
        return [*lines, "const char *folder = NULL;", "int32_t status;", "int i;", ""]

    def options(self) -> list[str]:
        """The loop over the command line."""
        lines = [
            "for (i = 1; i < argc; ++i) {", "    int used = 0;",
            '    if (strcmp(argv[i], "--out") == 0 && i + 1 < argc) {',
            "        folder = argv[++i];", "        continue;", "    }",
        ]  # fmt: skip
        for d in self.header.dims():
            lines.append(f'    {d} = rudnn_size(argv[i], "{d}", {d}, &used);')
        for scalar in self.signature.scalars:
            x, kind = self.c.scalar(scalar.name), "float" if scalar.dtype.is_float else "int64_t"
            lines.append(f'    {x} = ({kind})rudnn_number(argv[i], "{x}", (double){x}, &used);')
        for tensor in self.inputs():
            name = self.c.tensor(tensor.name)
            lines.append(f'    {name}_file = rudnn_file(argv[i], "{name}", {name}_file, &used);')
        return [*lines, '    if (!used) rudnn_die("unknown argument", argv[i]);', "}", ""]

    def count(self, tensor: TensorInfo) -> str:
        factors = [f"({self.header.extent(e)})" if not str(e).isalnum() else self.header.extent(e)
                   for e in tensor.shape]  # fmt: skip
        return " * ".join(factors) or "1"

    def work(self) -> list[str]:
        """Make the arrays, call, print."""
        lines = []
        for seed, tensor in enumerate(self.inputs(), 1):
            name = self.c.tensor(tensor.name)
            below = self.header.expression(tensor.below) if tensor.below else "0"
            lines += [
                f'{name} = rudnn_input("{name}", {self.dtype(tensor)}, {self.count(tensor)}, '
                f"{seed}, {below}, {name}_file);"
            ]
        for tensor in self.outputs():
            name = self.c.tensor(tensor.name)
            lines.append(f"{name} = rudnn_array({self.dtype(tensor)}, {self.count(tensor)});")
        lines += [*self.call(), *FAILED]
        for tensor in self.outputs():
            name = self.c.tensor(tensor.name)
            lines.append(
                f'rudnn_output("{name}", {self.dtype(tensor)}, {name}, {self.count(tensor)}, '
                "folder);"
            )
        lines += [f"free({self.c.tensor(t.name)});" for t in self.signature.tensors]
        return [*lines, "return 0;"]

    def call(self) -> list[str]:
        """Contiguous arrays (strides NULL) and the runtime's workspace (NULL)."""
        arguments = []
        for tensor in self.signature.tensors:
            constant = "const " if tensor.role == "input" else ""
            name = self.c.tensor(tensor.name)
            arguments.append(f"({constant}{C_TYPES[tensor.dtype.name]} *){name}")
            if tensor.name in self.header.strided:
                arguments.append("NULL")
        arguments += self.header.dims()
        arguments += [self.c.scalar(s.name) for s in self.signature.scalars]
        return wrapped(f"status = {self.signature.name}(", [*arguments, "NULL"], ");", 92)

    def dtype(self, tensor: TensorInfo) -> str:
        return f"RUDNN_{_DTYPES[tensor.dtype.name]}"


def _literal(value: int | float) -> str:
    return f"{value!r}f" if isinstance(value, float) else repr(value)
