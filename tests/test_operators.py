"""Every operator through the harness: dtype × layout × size against the oracle, torch, autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from spirv_kernels import needs_vulkan, validated

from rudnn.check import Row, check, failures
from rudnn.ops.registry import operators
from rudnn.runtime.targets.vulkan import instance
from rudnn.runtime.targets.vulkan import target as vulkan

OPERATORS = operators()
# A linked backward goes through the harness along with its forward.
LINKED = {d.backward.name for d in OPERATORS.values() if d.backward is not None}
NAMES = sorted(set(OPERATORS) - LINKED)


@pytest.mark.parametrize("name", NAMES)
def test_operator(name: str) -> None:
    rows = complete(name, check(OPERATORS[name]))
    if OPERATORS[name].backward is not None:
        assert any(r.against == "autograd" and r.status == "pass" for r in rows)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every kernel passes spirv-val, every call the validation layer."""
    pack = vulkan.pack
    monkeypatch.setattr(vulkan, "pack", lambda shaders: pack([validated(s) for s in shaders]))
    before = len(instance.validation_messages())
    yield
    assert "\n".join(instance.validation_messages()[before:]) == ""


@needs_vulkan
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("silent")
def test_operator_on_vulkan(name: str) -> None:
    complete(name, check(OPERATORS[name], "vulkan"))


def complete(name: str, rows: list[Row]) -> list[Row]:
    """No row fails, and every dtype passes in every layout."""
    bad = failures(rows)
    assert not bad, "\n".join(f"{r.against} {r.dtype} {r.layout} {r.dims}: {r.detail}" for r in bad)
    passed = [r for r in rows if r.status == "pass" and r.op == name]
    kinds = Counter((r.dtype, r.layout, r.sizes) for r in passed)
    for dtype in (t.short for t in OPERATORS[name].dtypes):
        for layout in ("contiguous", "strided", "broadcast"):
            sizes = {s for d, lay, s in kinds if d == dtype and lay == layout}
            assert {"typical", "odd"} <= sizes, (dtype, layout, sizes)
    return rows
