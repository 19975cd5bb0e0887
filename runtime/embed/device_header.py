"""The C header of an operator compiled for a device: a plain function that starts its kernels."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ..plan import Argument, Launch, LaunchPlan
from ..signature import Signature, TensorInfo
from .header import Header, wrapped


class DeviceHeader(Header):
    """Writes the header of one operator for a device.

    `support` is the target's header: `rudnn_cuda.h` and its like, which implement the functions
    that native/rudnn_device.h lists. `functions` are the initialisers in C of the operator's
    `rudnn_function`s, one for each launch of the plan.
    """

    def __init__(
        self, signature: Signature, plan: LaunchPlan, workspace: str, support: str,
        functions: Sequence[str],
    ) -> None:  # fmt: skip
        super().__init__(signature, plan, workspace, "0", 0)
        self.support, self.functions = support, functions

    @property
    def contract(self) -> str:
        return _CONTRACT

    def text(self) -> str:
        parts = (
            self.comment(), self.opening(), self.table(), self.workspace_function(),
            self.function(), "#ifdef __cplusplus\n}\n#endif\n#endif",
        )  # fmt: skip
        return "\n\n".join(parts) + "\n"

    def opening(self) -> str:
        return "\n".join([
            f"#ifndef {self.macro}_H_", f"#define {self.macro}_H_", "",
            f'#include "{self.support}"', "", *self.constants(), "",
            "#ifdef __cplusplus", 'extern "C" {', "#endif",
        ])  # fmt: skip

    def table(self) -> str:
        """The kernels, and the function that loads them."""
        rows = ",\n".join(f"    {{{text}}}" for text in self.functions)
        count = len(self.functions)
        return "\n".join([
            f"static const rudnn_function {self.name}_functions[{count}] = {{", rows, "};", "",
            "/* Load the kernels from the folder they were exported to. */",
            f"static inline int32_t {self.name}_load(rudnn_device *device, const char *folder,",
            f"{' ' * len(f'static inline int32_t {self.name}_load(')}rudnn_module **module) {{",
            f"    return rudnn_load(device, folder, {self.name}_functions, {count}, module);", "}",
        ])  # fmt: skip

    def parameters(self) -> list[str]:
        return ["rudnn_device *device", "rudnn_module *module", *super().parameters()]

    def check_values(self, tensor: TensorInfo) -> list[str]:
        return []  # on the device; its kernels stay within bounds whatever the values

    def start(self) -> list[str]:
        slots = self.plan.slots
        place = next((i for i, s in enumerate(slots) if s.kind == "workspace"), -1)
        lines = []
        if place >= 0:
            size = f"{self.name}_workspace_bytes({', '.join(self.dims())})"
            lines = [
                f"if (!workspace && {size} > 0) {{",
                f"    workspace = rudnn_scratch(device, {size});",
                "    if (!workspace) return RUDNN_NO_MEMORY;", "}",
                f"rudnn_args[{place}] = (int64_t)(intptr_t)workspace;",
            ]  # fmt: skip
        else:
            lines.append("(void)workspace;")
        for i, launch in enumerate(self.plan.launches):
            lines += self.launch(i, launch)
        return [*lines, "return RUDNN_OK;"]

    def launch(self, number: int, launch: Launch) -> list[str]:
        """One kernel of the plan."""
        x, y = (self.dim_expression(g) for g in launch.grid)
        arguments = [self.parameter(a) for a in launch.arguments]
        return [
            "{",
            *(f"    {line}" for line in wrapped(
                "const rudnn_argument rudnn_list[] = {", arguments, "};", 88)),
            *(f"    {line}" for line in wrapped(
                "rudnn_status = rudnn_launch(",
                ["device", "module", str(number), x, y, str(launch.block), "rudnn_list",
                 str(len(launch.arguments))], ");", 88)),
            "    if (rudnn_status) return rudnn_status;", "}",
        ]  # fmt: skip

    def parameter(self, argument: Argument) -> str:
        """One argument of a kernel, `{kind, bits}`."""
        value = f"rudnn_args[{argument.slot}]"
        if argument.kind == "pointer" and argument.offset:
            value += f" + {self.dim_expression(argument.offset)}"
        return f"{{{_KINDS[argument.kind]}, {value}}}"

    def dim_expression(self, text: str) -> str:
        """An expression of the plan's dims, in C."""
        return self.expression(self.signature.public(c_source(text)))


_KINDS = {
    "pointer": "RUDNN_POINTER", "int64": "RUDNN_INT64", "int32": "RUDNN_INT32",
    "float32": "RUDNN_FLOAT32",
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "({} + {})", ast.Sub: "({} - {})", ast.Mult: "({} * {})",
    ast.FloorDiv: "RUDNN_FLOORDIV({}, {})", ast.Mod: "RUDNN_FLOORMOD({}, {})",
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def c_source(text: str) -> str:
    """A launch plan's expression of dims, which is Python's, in C."""
    return _c(ast.parse(text, mode="eval").body)


def _c(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return f"INT64_C({node.value})"
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)].format(_c(node.left), _c(node.right))
    if isinstance(node, ast.Compare):
        return f"({_c(node.left)} {_COMPARISONS[type(node.ops[0])]} {_c(node.comparators[0])})"
    if isinstance(node, ast.BoolOp):
        word = " && " if isinstance(node.op, ast.And) else " || "
        return f"({word.join(_c(v) for v in node.values)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"(!{_c(node.operand)})"
    if isinstance(node, ast.IfExp):
        return f"({_c(node.test)} ? {_c(node.body)} : {_c(node.orelse)})"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return f"RUDNN_{node.func.id.upper()}({', '.join(_c(a) for a in node.args)})"
    raise AssertionError(ast.dump(node))


_CONTRACT = """\
The function returns 0 (RUDNN_OK), a code of rudnn_embed.h (RUDNN_NULL_POINTER,
RUDNN_NEGATIVE_DIM, RUDNN_BAD_STRIDE, RUDNN_REQUIREMENT, RUDNN_NO_MEMORY), or the driver's own
status, for which rudnn_last_error() has a text. On a code of rudnn_embed.h nothing has been
started. Work is started in the order of calls; rudnn_wait() waits for it.

Pointers are the device's, from rudnn_alloc or as its header says. NAME_strides holds one stride a
dim, in elements, negative or (inputs only) 0 as well; NULL means row-major. The last stride must
be 1 unless the tensor is marked "any strides". Memory needs no alignment beyond its element's.
Outputs must not overlap anything. `workspace` is device memory for NAME_workspace_bytes(...)
bytes, or NULL: the device then lends it, for calls one after the other."""
