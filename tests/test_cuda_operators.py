"""Operators on CUDA without a GPU: generated kernels run on the CPU, from the driver down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_emulator import Stub, emulated_cuda

from rudnn.check import check, failures
from rudnn.dsl.declare import Declaration
from rudnn.dsl.dtypes import DType
from rudnn.ops.registry import operators

OPERATORS = operators()
# Every rule of schedules/grid has one here.
EMULATED = (
    "add", "gelu_backward", "softmax_last_axis", "layer_norm_backward", "linear", "linear_packed",
    "batched_matmul", "attention", "embedding_backward", "linear_recurrence", "top_k",
    "segment_sum", "adaptive_max_pool",
)  # fmt: skip


def dtypes(declaration: Declaration) -> tuple[DType, ...]:
    """The types of the operator's own; one, where it has none."""
    own = any(i.dtype is None for i in declaration.inputs.values())
    return declaration.dtypes if own else declaration.dtypes[:1]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with emulated_cuda() as stub:
        yield stub


@pytest.mark.parametrize("name", EMULATED)
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
