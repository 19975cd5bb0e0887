"""Contractions of forms that no operator of ours has, on grids, and what the rule can choose."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from cuda_emulator import emulated_cuda

from rudnn.check import check, failures
from rudnn.dsl import In, Out, axes, bf16, dim, f32, i64, maximum, op, require_indices
from rudnn.dsl import sum as total
from rudnn.dsl.declare import Declaration
from rudnn.dsl.dtypes import DType
from rudnn.runtime.device_code import lower
from rudnn.runtime.targets.cuda.capability import record
from rudnn.runtime.targets.cuda.source import tvm_target
from rudnn.runtime.targets.rocm.capability import record as amd
from rudnn.samples import specialise
from rudnn.schedules.capability import Capability
from rudnn.schedules.grid.contraction import Contraction
from rudnn.schedules.grid.contraction_config import ContractionConfig, rejection
from rudnn.schedules.group import Group
from rudnn.schedules.program import build, groups_of

SM_80 = record("sm_80")


@op(out=Out("N", "K", dtype=f32), static=("K", "N"), example={"rows": (5, 7), "N": 33, "K": 40})
def summed_over_rows(a: Any = In("*rows", "N"), b: Any = In("*rows", "K")) -> Any:
    """Several axes are summed over, in factors whose own axes are contiguous."""
    r, n, k = axes("*rows", "N", "K")
    return total(a[r, n] * b[r, k], over=r)


@op(out=Out("*rows", "N"), static=("K", "N"), example={"rows": (5, 7), "N": 33, "K": 40})
def products_as_factors(
    x: Any = In("*rows", "K"), scale: Any = In("K"), weight: Any = In("N", "K"),
    gain: Any = In("*rows"),
) -> Any:  # fmt: skip
    """Neither factor is a read."""
    r, n, k = axes("*rows", "N", "K")
    return total((x[r, k] * scale[k]) * (weight[n, k] * 2.0), over=k) * gain[r]


@op(out=Out("T", "N"), static=("N", "K"), example={"T": 37, "V": 5, "N": 33, "K": 40})
def gathered_rows(
    ids: Any = In("T", dtype=i64), table: Any = In("V", "K"), weight: Any = In("K", "N")
) -> Any:
    """A factor's rows are picked by data, which is contiguous along m itself."""
    require_indices(ids, dim("V"))
    t, n, k = axes("T", "N", "K")
    return total(table[ids[t], k] * weight[k, n], over=k)


@op(out=Out("M", "N", "B"), static=("N", "B"), example={"M": 33, "K": 20, "N": 17, "B": 4})
def batch_last(a: Any = In("M", "K", "B"), b: Any = In("K", "N", "B")) -> Any:
    """The result's last axis is in both factors."""
    m, n, k, i = axes("M", "N", "K", "B")
    return total(a[m, k, i] * b[k, n, i], over=k)


@op(out=Out("N", "M"), static=("N", "M"), example={"M": 33, "K": 20, "N": 40})
def both_transposed(a: Any = In("K", "M"), b: Any = In("N", "K"), bias: Any = In("M")) -> Any:
    """The first factor has the result's last axis; the epilogue reads along it."""
    m, n, k = axes("M", "N", "K")
    return maximum(total(a[k, m] * b[n, k], over=k) + bias[m], 0.0)


@op(out=Out("B", "M", "H", "N"), static=("H", "N"),
    example={"B": 2, "M": 19, "K": 20, "H": 3, "N": 16})  # fmt: skip
def heads_apart(a: Any = In("B", "M", "K"), b: Any = In("K", "H", "N")) -> Any:
    """Each factor has several axes of its own, which alternate in the result."""
    i, m, h, n, k = axes("B", "M", "H", "N", "K")
    return total(a[i, m, k] * b[k, h, n], over=k)


@op(out=Out("M", "N", dtype=i64), static=("N",), example={"M": 19, "K": 20, "N": 17})
def whole_numbers(a: Any = In("M", "K", dtype=i64), b: Any = In("K", "N", dtype=i64)) -> Any:
    m, n, k = axes("M", "N", "K")
    return total(a[m, k] * b[k, n], over=k)


FORMS = (
    summed_over_rows, products_as_factors, gathered_rows, batch_last, both_transposed, heads_apart,
    whole_numbers,
)  # fmt: skip


# Matrix units move factors as they are stored: here along other axes than a linear layer's.
BY_MATRIX_UNITS = (summed_over_rows, gathered_rows, batch_last, both_transposed)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_forms_by_plain_arithmetic(form: Declaration) -> None:
    rows = check(form, "vulkan", dtypes=(f32,))
    assert rows and failures(rows) == []


@pytest.mark.parametrize("form", BY_MATRIX_UNITS, ids=lambda f: f.name)
def test_forms_by_matrix_units(form: Declaration) -> None:
    with emulated_cuda():
        rows = check(form, "cuda", dtypes=(bf16,))
    assert rows and failures(rows) == []


class Fixed(Contraction):
    """The rule with a choice made for it."""

    def __init__(self, config: ContractionConfig) -> None:
        self.config = config

    def default(self, group: Group, caps: Capability) -> ContractionConfig:
        return self.config


SMALL = replace(SM_80, shared_bytes=32 * 1024, max_threads=256, subgroup=8, matrix=())


@pytest.mark.parametrize(
    ("caps", "dtype"), [(SM_80, bf16), (SMALL, f32), (amd("gfx942").capability, bf16)],
    ids=["sm_80", "small", "gfx942"],
)  # fmt: skip
def test_choices_fit_the_device(caps: Capability, dtype: DType) -> None:
    bound = specialise(batch_last, {"N": 64, "B": 64}, dtype)
    names = frozenset(t.name for t in (*bound.graph.inputs, *bound.graph.outputs))
    (group,) = groups_of(bound.graph)
    choices = list(Contraction().space(group, caps))
    assert len(choices) == len(set(choices)) > 8
    assert {bool(c.unit) for c in choices} == {False, bool(caps.matrix) and dtype is bf16}
    for choice in choices[::3]:
        program = build(bound.graph, (Fixed(choice),), caps, names, names)
        functions, _ = lower(program, "k", tvm_target("sm_80"))
        assert all(f.launch.shared <= caps.shared_bytes for f in functions), choice
        assert all(f.launch.block <= caps.max_threads for f in functions), choice


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({"tile": (256, 256), "share": (64, 32)}, "98304 bytes of shared memory, max 49152"),
        ({"share": (8, 8)}, r"whole fragments of \(16, 8, 16\)"),
        ({"share": (16, 8)}, "2048 threads a block, max 1024"),
        ({"tile": (128, 128), "share": (128, 128)}, "registers a thread, max 255"),
    ],
)
def test_what_does_not_fit_is_told(change: dict[str, Any], needs: str) -> None:
    unit = SM_80.matrix[0].intrinsic
    config = replace(ContractionConfig((128, 64), 32, (64, 32), unit), **change)
    found = rejection(config, SM_80)
    assert found is not None and re.search(needs, found.reason), found
