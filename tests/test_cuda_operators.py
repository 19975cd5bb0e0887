"""Every operator on CUDA without a GPU: compiled for three generations, and run emulated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_emulator import Stub, emulated_cuda
from sass import TOOLS, instructions, matrix, resources, tool

from rudnn.check import check, failures
from rudnn.dsl.declare import Declaration
from rudnn.dsl.dtypes import DType, f32
from rudnn.ops.registry import operators
from rudnn.runtime import compiler
from rudnn.runtime.export import Request
from rudnn.runtime.plan import LaunchPlan
from rudnn.runtime.targets.cuda import capability, toolkit
from rudnn.runtime.targets.cuda.compile import build

OPERATORS = operators()
ARCHES = ("sm_80", "sm_90a", "sm_120")
PRODUCTS = ("linear", "linear_backward", "batched_matmul", "batched_matmul_backward", "attention")
REGISTER_FILE = 65536  # registers of a multiprocessor
SYSTEM_SHARED = 1024  # bytes that a block has besides its own, from sm_90 on
compiles = pytest.mark.skipif(
    toolkit.find_nvrtc() is None or tool("nvdisasm") is None,
    reason=f"needs {toolkit.HINT}; {TOOLS}",
)


def compiled(
    declaration: Declaration, dtype: DType, arch: str, dims: dict[str, int | str] | None = None
) -> tuple[bytes, str, LaunchPlan]:
    """An operator's cubin, source and plan; every layout that a call may promise is promised."""
    spec = Request(declaration, {}).spec(dims or {}, dtype, {}, (), {})
    graph = declaration.trace(spec)
    names = frozenset(t.name for t in (*graph.inputs, *graph.outputs))
    program = compiler.schedule(graph, compiler.Layouts(names, names), f"cuda:{arch}")
    return build(program, declaration.name, arch)


def dtypes(declaration: Declaration) -> tuple[DType, ...]:
    """The types of the operator's own; one, where it has none."""
    own = any(i.dtype is None for i in declaration.inputs.values())
    return declaration.dtypes if own else declaration.dtypes[:1]


def fits(cubin: bytes, plan: LaunchPlan) -> None:
    """No stack frame, no spill, within what a block may have."""
    usage = resources(cubin)
    assert usage.keys() == {launch.entry for launch in plan.launches}
    for launch in plan.launches:
        needs = usage[launch.entry]
        assert (needs.stack, needs.local) == (0, 0), (launch.entry, needs)
        assert launch.block <= 1024 and needs.registers * launch.block <= REGISTER_FILE
        assert launch.shared <= needs.shared <= capability.SHARED_BYTES + SYSTEM_SHARED


CASES = [(name, dtype) for name, d in OPERATORS.items() for dtype in dtypes(d)]


@compiles
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=[f"{n}-{d.short}" for n, d in CASES])
def test_compiles(name: str, dtype: DType, arch: str) -> None:
    cubin, _, plan = compiled(OPERATORS[name], dtype, arch)
    fits(cubin, plan)
    if name in PRODUCTS and dtype != f32:
        assert any(matrix(code) for code in instructions(cubin).values())


@compiles
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", OPERATORS["attention"].dtypes, ids=lambda d: d.short)
def test_attention_compiles_for_the_usual_heads(dtype: DType, size: int) -> None:
    cubin, _, plan = compiled(OPERATORS["attention"], dtype, "sm_90a", {"D": size, "Dv": size})
    fits(cubin, plan)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with emulated_cuda() as stub:
        yield stub


@pytest.mark.parametrize("name", OPERATORS)
def test_runs_emulated(stub: Stub, name: str) -> None:
    declaration = OPERATORS[name]
    rows = check(declaration, "cuda", dtypes=dtypes(declaration)[-1:], backward=False)
    assert rows and failures(rows) == []
    assert stub.launches() and stub.depth() == 0


@pytest.mark.parametrize("name", ["softmax_last_axis", "linear"])
def test_threads_may_run_in_any_order(
    stub: Stub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A barrier that is missing shows in one order at least: here the last thread comes first."""
    monkeypatch.setenv("STUB_BACKWARDS", "1")
    declaration = OPERATORS[name]
    rows = check(declaration, "cuda", dtypes=dtypes(declaration)[-1:], backward=False)
    assert rows and failures(rows) == []
