"""Scheduled kernels to one object file with a plain C entry.

The stock pipeline ends in TVM's packed calling convention. Here all kernels of a program become
the body of one function `int32_t entry(const int64_t *args)` that unpacks its arguments itself,
so that what Python runs is what a C program links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....dsl.dtypes import DType
from ....dsl.errors import CompileError
from ....dsl.host import identifier, source
from ....dsl.lower import Lowering, storage
from ....schedules.program import Program
from ...arguments import argument_slots, work
from ...bindings import lay_by_bindings
from ...indices import name_divisions, truncate_divisions
from ...names import hide_values
from ...plan import LaunchPlan, Slot
from .guards import split_vector_guards

_DL_CPU = 1
# Names that TVM may write out in one: more take it seconds; cells cost attention 5 to 10 %.
_WRITTEN_OUT = 500


def lower(program: Program, entry: str, target: Any) -> tuple[Any, LaunchPlan]:
    """The program as an IRModule holding `entry`, and its launch plan."""
    import tvm

    bodies = []
    for kernel in program.kernels:
        module = _loop_passes(target, kernel.function)(tvm.IRModule({"main": kernel.function}))
        bodies.append(module["main"])
    slots = argument_slots(program)
    function, naturals = _entry(program, bodies, slots)
    function = truncate_divisions(function, (*program.dims.values(), *naturals))
    function = function.with_attr("global_symbol", entry)
    module = _final_passes()(tvm.IRModule({entry: function.with_attr("target", target)}))
    kernels = tuple((k.name, k.rule, repr(k.config)) for k in program.kernels)
    plan = LaunchPlan(
        entry, slots, source(program.workspace.total), source(work(program.graph)), kernels
    )
    return module, plan


def build(module: Any, target: Any) -> Any:
    """The module's machine code, a TVM runtime module (writes `.o`, shows LLVM IR)."""
    import tvm

    try:
        return tvm.get_global_func("target.build.llvm")(module, target)
    except Exception as error:  # TVM raises several kinds here
        raise CompileError(f"LLVM refused the kernel: {error}") from error


def _hidden(body: Any) -> Any:
    """`body` without names in expressions, and what writes their cells defined in LLVM IR."""
    from tvm import tirx
    from tvm.ir import StringImm

    body, keepers = hide_values(body, _WRITTEN_OUT, statements=False)
    text = "".join(
        f"define internal {kind} @{name}(ptr %cell, {kind} %value) alwaysinline {{\n"
        f"  store {kind} %value, ptr %cell\n  ret {kind} %value\n}}\n"
        for name, kind in keepers.items()
    )
    if not keepers:
        return body
    zero = tirx.IntImm("int32", 0)
    return tirx.AttrStmt(zero, "pragma_import_llvm", StringImm(text), body)


def _loop_passes(target: Any, function: Any) -> Any:
    """Blocks to loops: the CPU part of TVM's pipeline, 64-bit indices kept.

    Buffers shrink to what blocks use of them. Where a function has no blocks there is nothing to
    shrink, and to find that out takes longer than all other passes together.

    Without its LoopPartition, which splits a loop at any condition found in it: where that depends
    on a number known at launch, the parts it makes can start before the loop and write there.
    Without its elimination of common subexpressions, which may define one inside a let-expression
    and use it outside; LLVM has its own.
    """
    import tvm
    from tvm import s_tir, tirx

    s, t = s_tir.transform, tirx.transform
    blocks = isinstance(function.body, s_tir.SBlockRealize)
    return tvm.ir.transform.Sequential([
        t.BindTarget(target), s.CanonicalizeLoop(), s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(), s.ConvertBlocksToOpaque(),
        *((s.CompactBufferAllocation(),) if blocks else ()),
        s.LowerMatchBuffer(), _each(lay_by_bindings), s.StmtSimplify(), s.LowerOpaqueBlock(),
        t.FlattenBuffer(), split_vector_guards(), t.VectorizeLoop(True),
        t.StorageRewrite(),
        s.HoistIfThenElse(), t.UnrollLoop(), s.RenormalizeSplitPattern(), t.StmtSimplify(),
        t.RemoveNoOp(), s.RewriteUnsafeSelect(),
    ])  # fmt: skip


def _each(change: Callable[[Any], Any]) -> Any:
    """The module pass that changes each function."""
    import tvm

    @tvm.transform.module_pass(opt_level=0, name="Each")
    def run(module: Any, _: Any) -> Any:
        functions = {name: change(function) for name, function in module.functions_items()}
        return tvm.IRModule(functions, attrs=module.attrs)

    return run


def _final_passes() -> Any:
    import tvm
    from tvm import tirx

    t = tirx.transform
    return tvm.ir.transform.Sequential([t.LowerTVMBuiltin(), t.LowerIntrin()])


def _entry(program: Program, bodies: list[Any], slots: tuple[Slot, ...]) -> tuple[Any, list[Any]]:
    """One function: unpack the arguments, then the kernels' bodies in order.

    Returns it and its variables that are ≥ 0 besides dims.
    """
    from tvm import tirx
    from tvm.ir import PointerType, PrimType, StringImm
    from tvm.tirx.stmt import Return

    args = tirx.Var("args", PointerType(PrimType("int64")))
    array = tirx.decl_buffer(
        (tirx.IntImm("int64", max(1, len(slots))),), "int64", "args", data_alignment=8
    )
    statements: list[Any] = [tirx.DeclBuffer(array, data=args)]
    pointers: dict[str, Any] = {}
    workspace: Any = None
    for i, slot in enumerate(slots):
        value = array[tirx.IntImm("int64", i)]
        if slot.kind == "dim":
            statements.append(tirx.Bind(program.dims[slot.name], value))
        elif slot.kind == "stride":
            statements.append(tirx.Bind(program.stride_slots[slot.name, slot.axis][0], value))
        elif slot.kind == "scalar":
            scalar = program.scalars[slot.name]
            statements.append(tirx.Bind(scalar, _unpack(value, slot.dtype)))
        elif slot.kind == "workspace":
            workspace = value
        else:
            pointers[slot.name] = value
    lowering = Lowering(program.dims, program.scalars, {})
    for stage, offset in program.workspace.offsets:
        pointers[stage.name] = workspace + lowering.expr(offset, {})
    bound: dict[str, Any] = {}
    for kernel, lowered in zip(program.kernels, bodies, strict=True):
        for tensor, param in zip(kernel.tensors, lowered.params, strict=False):
            if tensor.name not in bound:
                pointer = tirx.Var(
                    f"{identifier(tensor.name)}_data", PointerType(_element(tensor.dtype))
                )
                statements.append(tirx.Bind(pointer, _as_pointer(pointers[tensor.name], pointer)))
                bound[tensor.name] = pointer
            statements.append(tirx.DeclBuffer(param, data=bound[tensor.name]))
    parts = [lowered.body for lowered in bodies]
    whole = parts[0] if len(parts) == 1 else tirx.SeqStmt(parts)  # of one there is no sequence
    named, whole, naturals = name_divisions(whole, program.dims.values())
    body: Any = tirx.SeqStmt([*statements, *named, _hidden(whole)])
    for key, number in (("device_id", 0), ("device_type", _DL_CPU)):
        body = tirx.AttrStmt(StringImm("default"), key, tirx.IntImm("int32", number), body)
    # Outside, or the release of scratch memory that ends the sequence would come after it.
    body = tirx.SeqStmt([body, Return(tirx.IntImm("int32", 0))])
    function = tirx.PrimFunc([args], body, ret_type=PrimType("int32"))
    return function.with_attr("tirx.noalias", True).with_attr("calling_conv", 0), naturals


def _element(dtype: DType) -> Any:
    from tvm.ir import PrimType

    return PrimType(storage(dtype))


def _as_pointer(value: Any, variable: Any) -> Any:
    import tvm

    return tvm.ir.Call(tvm.ir.Op.get("tirx.reinterpret"), [value], ret_ty=variable.ty)


def _unpack(value: Any, dtype: str) -> Any:
    from tvm import tirx

    if dtype == "float32":
        return tirx.reinterpret("float32", tirx.Cast("int32", value))
    return value if dtype == "int64" else tirx.Cast(dtype, value)
