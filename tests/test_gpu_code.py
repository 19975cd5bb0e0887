"""Operators compiled for every GPU: no spills, no stack, matrix instructions, safe barriers."""

from __future__ import annotations

import pytest
import sass
from gpu_code import PRODUCTS, Compiled, compiled

from rudnn.dsl.declare import Declaration
from rudnn.dsl.dtypes import DType, bf16, f16, f32
from rudnn.ops.registry import operators
from rudnn.runtime.compiler import Layouts, build
from rudnn.runtime.targets import parse
from rudnn.runtime.targets.cuda import toolkit
from rudnn.runtime.targets.rocm import linker
from rudnn.samples import specialise

OPERATORS = operators()
CUDA = ("cuda:sm_80", "cuda:sm_90a", "cuda:sm_120")
ROCM = ("rocm:gfx90a", "rocm:gfx942", "rocm:gfx1100", "rocm:gfx1201")
MATRIX = ("HMMA", "HGMMA", "v_mfma", "v_wmma")
HEAD_SIZES = (32, 64, 80, 96, 128)
REGISTER_FILE = 65536  # registers of an NVIDIA multiprocessor
# To lanes of vector registers, never to memory: not none, but few. (Nine tensors with strides of
# their own, as the gradients of attention read, are more than the scalar registers of gfx9 hold.)
SCALAR_SPILLS = 64
SYSTEM_SHARED = 1024  # bytes that a block there has besides its own, from sm_90 on

needs_cuda = pytest.mark.skipif(
    toolkit.find_nvrtc() is None or sass.tool("cuobjdump") is None,
    reason=f"needs pip install 'rudnn[cuda]' and {sass.TOOLS}",
)
needs_rocm = pytest.mark.skipif(linker.find() is None, reason="needs pip install 'rudnn[rocm]'")
targets = [pytest.param(t, marks=needs_cuda) for t in CUDA]
targets += [pytest.param(t, marks=needs_rocm) for t in ROCM]


@pytest.mark.parametrize("target", targets)
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_machine_code(name: str, target: str) -> None:
    declaration = OPERATORS[name]
    for dtype in own_dtypes(declaration):
        made = compiled(declaration, dtype, target)
        check(made, target)
        if name in PRODUCTS and dtype != f32:
            assert sum(k.count(*MATRIX) for k in made.kernels) > 0, (dtype, made.rules)


@pytest.mark.parametrize("target", targets)
@pytest.mark.parametrize("head", HEAD_SIZES)
def test_attention_of_usual_head_sizes(head: int, target: str) -> None:
    declaration = OPERATORS["attention"]
    for dtype in declaration.dtypes:
        made = compiled(declaration, dtype, target, {"D": head, "Dv": head})
        check(made, target)
        if dtype != f32:
            assert sum(k.count(*MATRIX) for k in made.kernels) > 0, (dtype, made.rules)


@pytest.mark.parametrize("target", targets)
def test_gradients_of_attention_of_a_large_head_size(target: str) -> None:
    made = compiled(OPERATORS["attention_backward"], bf16, target, {"D": 128, "Dv": 128})
    check(made, target)
    assert sum(k.count(*MATRIX) > 0 for k in made.kernels) == 2, made.rules


@pytest.mark.parametrize("target", targets)
@pytest.mark.parametrize("strategy", ["FlashUnit", "Fallback"])
def test_attention_by_other_strategies(strategy: str, target: str) -> None:
    made = compiled(OPERATORS["attention"], f16, target, options={"strategy": strategy})
    check(made, target)
    assert (sum(k.count(*MATRIX) for k in made.kernels) > 0) == (strategy == "Fallback")
    assert (len(made.kernels) == 1) == (strategy == "FlashUnit")


@needs_cuda
@pytest.mark.parametrize("name", ["add", "rms_norm", "linear"])
def test_aligned_rows_move_by_16_bytes(name: str) -> None:
    bound = specialise(OPERATORS[name])
    names = frozenset(t.name for t in (*bound.graph.inputs, *bound.graph.outputs))
    artifact = build(bound.graph, Layouts(names, names), "cuda:sm_90a", name)
    text = sass.listing(artifact.files[artifact.binary])
    assert "LDG.E.128" in text and "STG.E.128" in text


def own_dtypes(declaration: Declaration) -> tuple[DType, ...]:
    """The types of the operator's own; one, where it has none."""
    own = any(i.dtype is None for i in declaration.inputs.values())
    return declaration.dtypes if own else declaration.dtypes[:1]


def check(made: Compiled, target: str) -> None:
    """Registers and shared memory within limits, nothing in local memory, barriers guarded."""
    kind, arch = parse(target)
    limits = kind.capability(arch)
    assert made.kernels and {k.name for k in made.kernels} == set(made.threads)
    for kernel in made.kernels:
        assert kernel.stack == 0 and kernel.spills == 0, kernel
        assert kernel.scalar_spills <= SCALAR_SPILLS, kernel
        assert kernel.shared <= limits.shared_bytes + SYSTEM_SHARED, kernel
        assert kernel.bare_barriers == 0, kernel
        assert 0 < kernel.registers <= (limits.registers or 512), kernel
        if kind.name == "cuda":
            assert kernel.registers * made.threads[kernel.name] <= REGISTER_FILE, kernel
