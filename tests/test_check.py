"""The harness finds what is wrong: in a kernel's result, a backward, a contract, a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from processes import printed

import rudnn.check as harness
from rudnn.check import Mismatch, check, difference, failures
from rudnn.dsl import In, Option, Out, Param, axes, exp, f32, op, require, sigmoid
from rudnn.dsl.declare import runner, set_runner
from rudnn.dsl.errors import TargetError
from rudnn.ops.registry import resolve
from rudnn.references import register
from rudnn.samples import LAYOUTS, Case, cases, place

EXAMPLE = {"rows": (4,), "H": 24}


def double(name: str) -> Any:
    """An operator x ↦ 2x of its own name."""

    @op(out=Out("*rows", "H"), example=EXAMPLE, dtypes=(f32,), name=name)
    def declared(x: Any = In("*rows", "H")) -> Any:
        r, h = axes("*rows", "H")
        return 2 * x[r, h]

    return declared


@pytest.fixture
def tampered() -> Any:
    """Put something between the harness and the kernels."""
    original = runner()

    def set_to(change: Callable[[Any, dict[str, Any], Any], None]) -> None:
        def run(declaration: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
            made = original(declaration, args, kwargs, out)
            change(made, kwargs, out)
            return made

        set_runner(run)

    yield set_to
    set_runner(original)


def details(rows: list[harness.Row]) -> str:
    return "\n".join(r.detail for r in failures(rows))


def test_a_right_operator_passes_in_every_layout_and_size() -> None:
    rows = check(double("right"))
    assert not failures(rows)
    assert {r.layout for r in rows} == set(LAYOUTS)
    assert {r.sizes for r in rows} == {"typical", "odd", "one", "no rows", "empty"}


def test_one_wrong_element_is_found(tampered) -> None:
    def change(made: Any, kwargs: Any, out: Any) -> None:
        if made.size:
            made[(-1,) * made.ndim] += 1e-3

    tampered(change)
    rows = check(double("wrong_element"))
    assert {r.sizes for r in failures(rows)} == {"typical", "odd", "one", "no rows"}
    assert "out: 1 of 96 elements differ, first at [3, 23]" in details(rows)


def test_an_element_that_is_never_written_is_found(tampered) -> None:
    def change(made: Any, kwargs: Any, out: Any) -> None:
        if made.size:
            made[(0,) * made.ndim] = np.nan

    tampered(change)
    assert "got nan" in details(check(double("unwritten")))


def test_a_write_past_the_result_is_found(tampered) -> None:
    def change(made: Any, kwargs: Any, out: Any) -> None:
        if out is not None and made.size and made.flags.c_contiguous:
            np.lib.stride_tricks.as_strided(made.reshape(-1), (made.size + 1,), (4,))[-1] = 0

    tampered(change)
    assert "memory around the result was written" in details(check(double("past_the_end")))


def test_a_changed_input_is_found(tampered) -> None:
    def change(made: Any, kwargs: Any, out: Any) -> None:
        x = kwargs["x"]
        if x.size and x.flags.writeable:
            x[...] = 0

    tampered(change)
    assert "input x was changed" in details(check(double("changes_input")))


def test_a_kernel_that_raises_is_a_row_not_a_crash(tampered) -> None:
    def change(made: Any, kwargs: Any, out: Any) -> None:
        raise IndexError("a bug")

    tampered(change)
    assert "IndexError: a bug" in details(check(double("raises")))


def test_a_declaration_that_torch_does_not_confirm_is_found() -> None:
    register("misread")(lambda a: 3 * a["x"])
    wrong = failures(check(double("misread")))
    assert wrong and {r.against for r in wrong} == {"torch"}


def gated(name: str, slope: Callable[[Any], Any]) -> Any:
    """silu with a backward whose slope of the sigmoid is `slope` of it."""
    forward_name = name

    @op(out=Out("*rows", "H"), example=EXAMPLE, dtypes=(f32,), name=forward_name)
    def forward(x: Any = In("*rows", "H")) -> Any:
        r, h = axes("*rows", "H")
        return x[r, h] * sigmoid(x[r, h])

    @op(out=Out("*rows", "H"), example=EXAMPLE, dtypes=(f32,), name=f"{name}_backward")
    def backward(grad: Any = In("*rows", "H"), x: Any = In("*rows", "H")) -> Any:
        r, h = axes("*rows", "H")
        s = sigmoid(x[r, h])
        return grad[r, h] * (s + x[r, h] * slope(s))

    forward.differentiable(backward, "x")
    return forward


def test_a_right_backward_passes() -> None:
    rows = check(gated("gated_right", lambda s: s * (1 - s)))
    assert not failures(rows)
    assert {"oracle", "numeric", "autograd"} <= {r.against for r in rows}


def test_a_wrong_backward_is_found_though_its_kernel_is_right() -> None:
    wrong = failures(check(gated("gated_wrong", lambda s: s * s)))
    assert {r.against for r in wrong} == {"numeric"}
    assert "gradient of x" in wrong[0].detail


def test_a_contract_that_refuses_the_example_is_found() -> None:
    @op(out=Out("*rows", "H"), example=EXAMPLE, dtypes=(f32,))
    def refuses(x: Any = In("*rows", "H"), *, limit: Any = Param(-1.0)) -> Any:
        require(limit > 0, "limit > 0", limit=limit)
        r, h = axes("*rows", "H")
        return x[r, h] * limit

    wrong = failures(check(refuses))
    assert wrong and {r.sizes for r in wrong} == {"typical"}
    assert "limit > 0" in wrong[0].detail


def test_an_option_gets_a_number_it_takes() -> None:
    @op(out=Out("*rows", "H"), example=EXAMPLE, dtypes=(f32,))
    def capped(
        x: Any = In("*rows", "H"), *, cap: Any = Param(0.0), on: Any = Option(False, (False, True))
    ) -> Any:
        r, h = axes("*rows", "H")
        if on:
            require(cap > 0, "cap > 0", cap=cap)
            return exp(-(x[r, h] ** 2)) * cap
        return 1 * x[r, h]

    rows = check(capped)
    assert not failures(rows)
    assert [r.status for r in rows if "on=True" in r.dims] == ["pass"]


def test_dims_can_be_pinned() -> None:
    rows = check(double("pinned"), dims={"H": 5})
    assert not failures(rows)
    assert all("H=5" in r.dims for r in rows)


def test_every_kind_of_size_is_among_the_cases() -> None:
    found = list(cases(resolve("rms_norm")))
    assert [c.label for c in found] == ["typical", "odd", "one", "no rows", "empty"]
    odd = found[1].dims
    assert all(s % 2 for s in (*odd["rows"], odd["H"]))
    assert isinstance(found[0], Case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("turn", [0, 1])
def test_placed_arrays_know_when_their_surroundings_change(layout: str, turn: int) -> None:
    good = place((3, 4), f32, layout, turn)
    good.view[...] = 1
    assert good.untouched()
    bad = place((3, 4), f32, layout, turn)
    bad.base.reshape(-1)[0] = 1
    assert not bad.untouched()


def test_sizes_are_the_same_on_every_run() -> None:
    """A set decided which of two equal dims was halved."""
    code = """
        from rudnn.ops.registry import operators
        from rudnn.samples import cases
        print([c.describe() for c in cases(operators()["attention"])])
    """
    assert len({printed(code, PYTHONHASHSEED=seed) for seed in "123"}) == 1


def test_infinities_must_agree() -> None:
    have = np.array([np.inf, 1.0], np.float32)
    assert difference("out", have, np.array([np.inf, 1.0]), f32) == 0.0
    with pytest.raises(Mismatch, match="got inf, want -inf"):
        difference("out", have, np.array([-np.inf, 1.0]), f32)


def test_a_target_that_cannot_run_here_is_refused() -> None:
    with pytest.raises(TargetError, match="needs the device at hand"):
        check(double("elsewhere"), "llvm:x86-64-v2")
