"""What a declaration takes: arguments that several share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rudnn  # noqa: F401  makes declarations callable
from rudnn.dsl import In, Option, Out, Param, Shared, axes, f32, op
from rudnn.dsl.declare import Declaration, Spec
from rudnn.dsl.errors import DeclarationError
from rudnn.dsl.identity import describe

GIVEN = Shared(x=In("N", "H"), factor=Param(2.0), negated=Option(False, (False, True)))
declared = op(out=Out("N", "H"), example={"N": 2, "H": 3}, name="scaled")


@declared
def together(bias: Any = In("H"), given: Any = GIVEN) -> Any:
    n, h = axes("N", "H")
    factor = -given.factor if given.negated else given.factor
    return given.x[n, h] * factor + bias[h]


@declared
def apart(
    bias: Any = In("H"), x: Any = In("N", "H"), factor: Any = Param(2.0),
    negated: Any = Option(False, (False, True)),
) -> Any:  # fmt: skip
    n, h = axes("N", "H")
    return x[n, h] * (-factor if negated else factor) + bias[h]


def _text(declaration: Declaration, negated: bool) -> str:
    return describe(declaration.trace(
        Spec((("bias", f32), ("x", f32)), options=(("negated", negated),))))  # fmt: skip


@pytest.mark.parametrize("negated", [False, True])
def test_shared_arguments_mean_what_they_do_one_by_one(negated: bool) -> None:
    assert together.order == apart.order == ("bias", "x", "factor", "negated")
    assert _text(together, negated) == _text(apart, negated)


def test_shared_arguments_are_passed_by_place_or_by_name() -> None:
    x, bias = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)
    for made in (together(bias, x, 3.0, True), together(bias, negated=True, x=x, factor=3.0)):
        np.testing.assert_array_equal(made, 1 - 3 * x)


def test_an_argument_that_stands_twice_is_refused() -> None:
    with pytest.raises(DeclarationError, match="a name of its own for each argument, got x twice"):

        @declared
        def twice(x: Any = In("H"), given: Any = GIVEN) -> Any:
            return given.x[axes("N", "H")]
