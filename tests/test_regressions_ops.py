"""Bugs that were, in operators, the harness and the embedding: a test for each, by its symptom."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exports import WARNINGS, build_host, compile_c, execute
from native_kernels import needs_compiler

import rudnn
from rudnn.check import check
from rudnn.dsl import In, Out, axes, bf16, dim, f32, i64, op, require
from rudnn.dsl.errors import OperatorError, TargetError
from rudnn.dsl.expr import ScalarRef
from rudnn.dsl.host import evaluate, source
from rudnn.ops.registry import operators
from rudnn.runtime import embed
from rudnn.runtime.export import export_operator
from rudnn.runtime.targets import registered
from rudnn.runtime.targets.llvm import loader, toolchain

SWEEP = r"""
#include <stdio.h>
#include "rudnn_host.h"
int main(void) {
    int64_t a, b;
    for (a = -7; a <= 7; ++a)
        for (b = -3; b <= 3; ++b) {
            if (b) printf("%d %d\n", (int)INTEGERS, (int)REST);
        }
    return 0;
}
"""


@op(out=Out("N", "H"), example={"N": 4, "H": 5})
def apart(x: Any = In("N", "H")) -> Any:
    """x, if N − H is −1 or a number like it."""
    by = dim("N") - dim("H")
    require(by % 3 == 2, "N − H with 2 left of a division by 3", N=dim("N"), H=dim("H"))
    require(by // 2 < 0, "N below H", N=dim("N"), H=dim("H"))
    n, h = axes("N", "H")
    return x[n, h] + 0


@needs_compiler
def test_c_rounded_division_of_negative_numbers_to_zero_unlike_python(tmp_path: Path) -> None:
    a, b = (ScalarRef(n, i64) for n in "ab")
    nodes = {"INTEGERS": a // b, "REST": a % b}
    program = SWEEP
    for word, node in nodes.items():
        program = program.replace(word, source(node, "c"))
    (tmp_path / "sweep.c").write_text(program)
    runtime = toolchain.NATIVE / "rudnn_runtime.c"
    places = [f"-I{toolchain.NATIVE}", f"-I{embed.NATIVE}"]
    compile_c([*WARNINGS, *places, "-o", "sweep", "sweep.c", runtime, "-lm", "-lpthread"], tmp_path)
    got = [float(word) for word in execute([tmp_path / "sweep"]).split()]
    want = [
        float(evaluate(node, {"a": i, "b": j}))
        for i in range(-7, 8) for j in range(-3, 4) if j for node in nodes.values()
    ]  # fmt: skip
    assert got == want


@needs_compiler
def test_exported_requirement_over_a_negative_number_was_refused(tmp_path: Path) -> None:
    x = np.ones((4, 5), np.float32)
    assert np.array_equal(apart(x), x)
    made = export_operator(apart, folder=tmp_path)
    build_host(made, tmp_path)
    execute([tmp_path / f"{made['name']}_host", "N=4", "H=5"])


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_an_expression_with_inf_or_nan_raised_name_error(number: float) -> None:
    below = ScalarRef("x", f32) < number
    assert evaluate(below, {"x": 1.0}) == (number > 1.0)


def test_check_ran_on_the_host_and_wrote_another_target_on_its_rows() -> None:
    with pytest.raises(TargetError, match="device at hand, llvm, to check on, got llvm:x86-64-v3"):
        check(operators()["silu"], "llvm:x86-64-v3")


def test_packed_weight_of_a_tensor_subclass_with_gradients_was_refused() -> None:
    import torch

    class Weight(torch.Tensor):
        pass

    assert "torch" not in Weight.__module__
    plain, x = torch.randn(6, 8), torch.randn(3, 8)
    packed = rudnn.nn.PackedWeight(plain.as_subclass(Weight).requires_grad_())
    torch.testing.assert_close(rudnn.nn.linear(x, packed), x @ plain.T)


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_matmul_of_tensors_with_broadcast_leading_dims_gave_numpy(dtype: Any) -> None:
    random = np.random.default_rng(0)
    a, b = random.standard_normal((3, 1, 4, 8)), random.standard_normal((2, 8, 5))
    left, right = rudnn.tensor(a, dtype), rudnn.tensor(b, dtype)
    made = rudnn.nn.matmul(left, right)
    assert isinstance(made, rudnn.Tensor)
    assert made.shape == (3, 2, 4, 5) and made.dtype == dtype and made.queue is left.queue
    want = np.asarray(left, np.float32) @ np.asarray(right, np.float32)
    limit = 1e-5 if dtype is f32 else 2e-2
    np.testing.assert_allclose(made.numpy().astype(np.float32), want, rtol=limit, atol=limit)


def test_matmul_of_what_is_no_array_raised_attribute_error() -> None:
    good = np.ones((2, 2), np.float32)
    with pytest.raises(OperatorError, match="rudnn.Tensor for a, got list"):
        rudnn.nn.matmul([[1.0]], good)
    with pytest.raises(OperatorError, match="rudnn.Tensor for b, got NoneType"):
        rudnn.nn.matmul(good, None)


def test_doctor_said_that_kernels_are_linked_where_the_native_runtime_was_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "runtime", lambda: SimpleNamespace(native=False))
    for compiler in (("cc",), None):
        monkeypatch.setattr(toolchain, "find_compiler", lambda found=compiler: found)
        status = registered()["llvm"].status()
        assert "native runtime could not be built" in status.detail and status.hint
        assert "links with" not in status.detail
        assert ("no C compiler" in status.detail) == (compiler is None)


def test_operators_did_not_say_their_dtypes_and_errors() -> None:
    for name, declared in operators().items():
        if declared.module.startswith("rudnn.ops."):
            words = " ".join(declared.doc.split())
            assert f"Raises {declared.error.__name__}" in words, name
            assert all(t.short in words for t in declared.dtypes), name
            assert len(declared.doc.splitlines()[0]) <= 96, name
