"""A declaration called, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

import rudnn
from rudnn.dsl import bool_, f32
from rudnn.dsl.declare import Declaration, Spec
from rudnn.dsl.dtypes import i32
from rudnn.dsl.oracle import evaluate

Array = Any
DTYPES = {"float32": f32, "bool": bool_, "int32": i32}


def drawn(declaration: Declaration, sizes: dict[str, int]) -> dict[str, Array]:
    """Random f32 arrays, masks mostly true, by name."""
    random = np.random.default_rng(3)
    made: dict[str, Array] = {}
    for name, declared in declaration.inputs.items():
        shape = [sizes[d] for d in declared.dims]
        made[name] = (random.random(shape) < 0.6 if declared.dtype == bool_
                      else random.standard_normal(shape).astype(np.float32))  # fmt: skip
    return made


def compared(
    declaration: Declaration, arrays: dict[str, Array], sizes: dict[str, int],
    device: str | None = None, tolerance: float = 2e-6,
) -> list[Array]:  # fmt: skip
    """The results on the device, by default the arrays' own, which must be the oracle's."""
    given = [a if device is None else rudnn.tensor(a, device=device) for a in arrays.values()]
    result = declaration(*given)
    spec = Spec(
        tuple((n, DTYPES[str(a.dtype)]) for n, a in arrays.items()), (),
        tuple((d, sizes[d]) for d in sizes if d in declaration.static), (),
    )  # fmt: skip
    want = evaluate(declaration.trace(spec), arrays, sizes, precision="float64")
    results = [np.asarray(r) for r in (result if isinstance(result, tuple) else (result,))]
    for ours, theirs in zip(results, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=tolerance)
    return results


def check(declaration: Declaration, sizes: dict[str, int], **how: Any) -> None:
    """`compared` for random arrays of these sizes."""
    compared(declaration, drawn(declaration, sizes), sizes, **how)


def lowered(bound: Any) -> str:
    """The CPU's kernels of an operator before TVM writes them as LLVM IR."""
    from rudnn.runtime.compiler import Layouts, schedule
    from rudnn.runtime.targets.llvm import cpu
    from rudnn.runtime.targets.llvm.compile import lower

    program = schedule(bound.graph, Layouts(frozenset()), "llvm")
    module, _ = lower(program, "entry", cpu.tvm_target(""))
    return str(module.script())
