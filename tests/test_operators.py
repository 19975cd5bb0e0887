"""Every operator through the harness: dtype × layout × size against the oracle, torch, autograd."""

from __future__ import annotations

from collections import Counter

import pytest

from rudnn.check import check, failures
from rudnn.ops.registry import operators

OPERATORS = operators()
# A linked backward goes through the harness along with its forward.
LINKED = {d.backward.name for d in OPERATORS.values() if d.backward is not None}


@pytest.mark.parametrize("name", sorted(set(OPERATORS) - LINKED))
def test_operator(name: str) -> None:
    declaration = OPERATORS[name]
    rows = check(declaration)
    bad = failures(rows)
    assert not bad, "\n".join(f"{r.against} {r.dtype} {r.layout} {r.dims}: {r.detail}" for r in bad)
    passed = [r for r in rows if r.status == "pass" and r.op == name]
    kinds = Counter((r.dtype, r.layout, r.sizes) for r in passed)
    for dtype in (t.short for t in declaration.dtypes):
        for layout in ("contiguous", "strided", "broadcast"):
            sizes = {s for d, lay, s in kinds if d == dtype and lay == layout}
            assert {"typical", "odd"} <= sizes, (dtype, layout, sizes)
    if declaration.backward is not None:
        assert any(r.against == "autograd" and r.status == "pass" for r in rows)
