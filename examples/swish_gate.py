"""An operator the package does not have, from one declaration: swish_gate, with its backward.

python examples/swish_gate.py
rudnn check examples/swish_gate.py:swish_gate
rudnn compile examples/swish_gate.py:swish_gate --target llvm --dtype f32 -o build/swish_gate
"""

from __future__ import annotations

from typing import Any

import numpy as np

import rudnn  # noqa: F401  (makes operators callable)
from rudnn.dsl import In, Out, axes, op, sigmoid

EXAMPLE = {"rows": (64,), "H": 1024}


@op(out=Out("*rows", "H"), example=EXAMPLE)
def swish_gate(x: Any = In("*rows", "H"), gate: Any = In("*rows", "H")) -> Any:
    """x · gate · σ(gate)."""
    r, h = axes("*rows", "H")
    return x[r, h] * (gate[r, h] * sigmoid(gate[r, h]))


@op(out=(Out("*rows", "H", name="dx"), Out("*rows", "H", name="dgate")), example=EXAMPLE)
def swish_gate_backward(
    grad: Any = In("*rows", "H"), x: Any = In("*rows", "H"), gate: Any = In("*rows", "H")
) -> Any:
    """The gradients of `swish_gate` with respect to x and gate."""
    r, h = axes("*rows", "H")
    s = sigmoid(gate[r, h])
    swish = gate[r, h] * s
    return grad[r, h] * swish, grad[r, h] * x[r, h] * (s + swish * (1 - s))


swish_gate.differentiable(swish_gate_backward, "x", "gate")


def main() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((5, 7, 33), dtype=np.float32)
    gate = random.standard_normal((5, 7, 33), dtype=np.float32)
    result = swish_gate(x, gate)
    expected = x * gate / (1 + np.exp(-gate))
    assert np.allclose(result, expected, rtol=1e-5, atol=1e-6)
    print(f"swish_gate: greatest difference from NumPy {np.abs(result - expected).max():.1e}")


if __name__ == "__main__":
    main()
