"""Scheduled kernels to device functions, for targets that launch grids of blocks.

Each launch of a program becomes one function whose parameters are pointers, then numbers. What
they are is told by the launch plan, whose argument slots are those of every target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..dsl.errors import CompileError
from ..dsl.expr import Tensor
from ..dsl.host import identifier, source
from ..dsl.lower import storage
from .arguments import argument_slots, work
from .bindings import lay_by_bindings
from .indices import truncate_divisions
from .plan import Argument, Launch, LaunchPlan, Slot

if TYPE_CHECKING:
    from ..schedules.program import Program

_DEVICE_KERNEL = 2  # TVM's calling convention of a function that a launch starts


@dataclass(frozen=True)
class DeviceFunction:
    """A TIR function for one launch: flat buffers, vectors spelt out, thread axes bound."""

    name: str
    function: Any
    launch: Launch


def lower(
    program: Program, entry: str, target: Any
) -> tuple[tuple[DeviceFunction, ...], LaunchPlan]:
    """The device functions of a program, in launch order, and its plan. Raises CompileError."""
    slots = argument_slots(program)
    functions: list[DeviceFunction] = []
    finder = _Arguments(program, slots)
    for kernel in program.kernels:
        body = kernel.function.body
        regions = body.seq if type(body).__name__ == "SeqStmt" else [body]
        for region in regions:
            name = f"{entry}_{len(functions)}"
            functions.append(_device_function(finder, kernel, region, name, target))
    kernels = tuple((k.name, k.rule, repr(k.config)) for k in program.kernels)
    plan = LaunchPlan(
        entry, slots, source(program.workspace.total), source(work(program.graph)), kernels,
        tuple(f.launch for f in functions),
    )  # fmt: skip
    return tuple(functions), plan


class _Arguments:
    """Where the parameters of device functions come from: slots, by tensor and by variable."""

    def __init__(self, program: Program, slots: tuple[Slot, ...]) -> None:
        self.program, self.slots = program, slots
        numbers: list[tuple[Any, int]] = []
        self.pointers: dict[str, int] = {}
        for place, slot in enumerate(slots):
            if slot.kind == "pointer":
                self.pointers[slot.name] = place
            elif slot.kind == "dim":
                numbers.append((program.dims[slot.name], place))
            elif slot.kind == "stride":
                numbers.append((program.stride_slots[slot.name, slot.axis][0], place))
            elif slot.kind == "scalar":
                numbers.append((program.scalars[slot.name], place))
            else:
                self.workspace = place
        self.numbers = numbers
        self.offsets = {s.name: source(o) for s, o in program.workspace.offsets}

    def pointer(self, tensor: Tensor) -> Argument:
        if tensor.name in self.offsets:
            return Argument("pointer", self.workspace, self.offsets[tensor.name])
        return Argument("pointer", self.pointers[tensor.name])

    def number(self, place: int) -> Argument:
        return Argument(self.slots[place].dtype, place)


def _device_function(
    finder: _Arguments, kernel: Any, region: Any, name: str, target: Any
) -> DeviceFunction:
    """One launch region as a function of its own, lowered as far as all targets agree."""
    from tvm import tirx
    from tvm.ir import PointerType, PrimType

    axes = _launch_axes(region)
    used = _variables(region)
    declared: list[Any] = []
    params: list[Any] = []
    arguments: list[Argument] = []
    for tensor, buffer in zip(kernel.tensors, kernel.function.params, strict=False):
        if _key(buffer) not in used:
            continue
        pointer = tirx.Var(
            f"{identifier(tensor.name)}_data", PointerType(PrimType(storage(tensor.dtype)))
        )
        params.append(pointer)
        declared.append(tirx.DeclBuffer(buffer, data=pointer))
        arguments.append(finder.pointer(tensor))
        used |= _variables(*buffer.ty.strides)
    for var, place in finder.numbers:
        if _key(var) in used:
            params.append(var)
            arguments.append(finder.number(place))
    function = tirx.PrimFunc(params, tirx.SeqStmt([*declared, region]))
    function = _lowered(function, finder.program.dims.values(), name, target)
    grid = (_text(axes["blockIdx.x"]), _text(axes["blockIdx.y"]) if "blockIdx.y" in axes else "1")
    block = axes["threadIdx.x"]
    if not hasattr(block, "value"):
        raise CompileError(f"needs a number of threads known when compiling, got {block}")
    launch = Launch(name, tuple(arguments), grid, int(block.value), _shared_bytes(function))
    return DeviceFunction(name, function, launch)


def _lowered(function: Any, dims: Any, name: str, target: Any) -> Any:
    """The passes that all targets share.

    Not among them is the elimination of common subexpressions: code generators find the alignment
    of an access in its index, and compilers for devices do that work themselves.
    """
    import tvm
    from tvm import tirx

    t = tirx.transform
    function = lay_by_bindings(truncate_divisions(function, dims))
    for key, value in (
        ("global_symbol", name), ("target", target), ("tirx.noalias", True),
        ("tirx.is_global_func", True), ("calling_conv", _DEVICE_KERNEL),
    ):  # fmt: skip
        function = function.with_attr(key, value)
    passes = tvm.ir.transform.Sequential([
        t.FlattenBuffer(), t.VectorizeLoop(True), t.UnrollLoop(), t.StmtSimplify(), t.RemoveNoOp(),
    ])  # fmt: skip
    with tvm.transform.PassContext(config={"tirx.UnrollLoop": {"explicit_unroll": True}}):
        return passes(tvm.IRModule({name: function}))[name]


def _launch_axes(region: Any) -> dict[str, Any]:
    """Extents of the launch axes around a region's body, by tag."""
    found: dict[str, Any] = {}
    while type(region).__name__ == "AttrStmt" and region.attr_key == "thread_extent":
        found[region.node.thread_tag] = region.value
        region = region.body
    if "threadIdx.x" not in found or "blockIdx.x" not in found:
        raise CompileError("needs statements inside a launch")
    return found


def _key(var: Any) -> int:
    return int(var.__chandle__())


def _variables(*nodes: Any) -> set[int]:
    """Handles of all variables in the nodes."""
    import tvm
    import tvm_ffi

    found: set[int] = set()

    for node in nodes:
        tvm_ffi.structural_walk(node, (tvm.ir.Var, lambda var: found.add(_key(var))))
    return found


def _shared_bytes(function: Any) -> int:
    """Bytes of shared memory that a function declares."""
    return sum(
        _elements(buffer.shape) * int(_bits(buffer)) // 8
        for buffer in _allocations(function.body)
        if buffer.scope() == "shared"
    )


def _allocations(body: Any) -> Iterator[Any]:
    import tvm_ffi
    from tvm import tirx

    found: list[Any] = []
    tvm_ffi.structural_walk(body, (tirx.AllocBuffer, lambda node: found.append(node.buffer)))
    return iter(found)


def _bits(buffer: Any) -> int:
    import tvm

    kind = tvm.DataType(str(buffer.dtype))
    return int(kind.bits * kind.lanes)


def _elements(shape: Any) -> int:
    total = 1
    for extent in shape:
        total *= int(extent.value)
    return total


_OPERATORS: Mapping[str, str] = {
    "Add": "({} + {})", "Sub": "({} - {})", "Mul": "({} * {})", "Div": "({} // {})",
    "FloorDiv": "({} // {})", "Mod": "({} % {})", "FloorMod": "({} % {})",
    "Min": "min({}, {})", "Max": "max({}, {})",
    "EQ": "({} == {})", "NE": "({} != {})", "LT": "({} < {})", "LE": "({} <= {})",
    "GT": "({} > {})", "GE": "({} >= {})", "And": "({} and {})", "Or": "({} or {})",
}  # fmt: skip


def _text(node: Any) -> str:
    """A launch extent, an expression of dims (none of them negative), in Python."""
    kind = type(node).__name__
    if kind == "Var":
        return str(node.name)
    if kind == "IntImm":
        return str(int(node.value))
    if kind == "Cast":
        return _text(node.value)
    if kind in _OPERATORS:
        return _OPERATORS[kind].format(_text(node.a), _text(node.b))
    if kind == "Select":
        parts = (node.true_value, node.condition, node.false_value)
        return "({} if {} else {})".format(*(_text(p) for p in parts))
    if kind == "Not":
        return f"(not {_text(node.a)})"
    if kind == "Call" and str(node.op.name).endswith("truncdiv"):
        return _OPERATORS["Div"].format(*(_text(a) for a in node.args))
    raise CompileError(f"needs a launch extent of dims, got {node}")
