"""A declaration called, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

import rudnn
from rudnn.dsl import bool_, f32
from rudnn.dsl.declare import Declaration, Spec
from rudnn.dsl.oracle import evaluate

DTYPES = {"float32": f32, "bool": bool_}


def check(
    declaration: Declaration, sizes: dict[str, int], static: Iterable[str],
    device: str | None = None, tolerance: float = 2e-6,
) -> None:  # fmt: skip
    """Random f32 arrays, masks mostly true; `static` are the dims that are compiled in."""
    rng = np.random.default_rng(3)
    arrays = {}
    for name, declared in declaration.inputs.items():
        shape = [sizes[d] for d in declared.dims]
        arrays[name] = (rng.random(shape) < 0.6 if declared.dtype == bool_
                        else rng.standard_normal(shape).astype(np.float32))  # fmt: skip
    given = [a if device is None else rudnn.tensor(a, device=device) for a in arrays.values()]
    got = declaration(*given)
    spec = Spec(
        tuple((n, DTYPES[str(a.dtype)]) for n, a in arrays.items()), (),
        tuple((d, sizes[d]) for d in static), (),
    )  # fmt: skip
    want = evaluate(declaration.trace(spec), arrays, sizes, precision="float64")
    results = got if isinstance(got, tuple) else (got,)
    for ours, theirs in zip(results, want, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-5, atol=tolerance)
