"""Recurrences along an ordered axis, with f32 state whatever the storage."""

from __future__ import annotations

from typing import Any

from ..dsl import In, Out, axes, f32, op, scan


@op(
    out=(Out("*batch", "T", "C", name="states"), Out("*batch", "C", dtype=f32, name="final")),
    example={"batch": (4,), "T": 128, "C": 256},
)
def linear_recurrence(
    x: Any = In("*batch", "T", "C"),
    decay: Any = In("*batch", "T", "C"),
    initial: Any = In("*batch", "C", dtype=f32, optional=True),
) -> Any:
    """h_t = decay_t · h_{t−1} + x_t along T, from h_{−1} = initial (0 without).

    x, decay [..., T, C] f32, f16 or bf16, both the same, initial [..., C] f32 → every h_t as x,
    and the last in f32 [..., C]: run again from it, the sequence goes on. Raises OperatorError.
    """
    b, t, c = axes("*batch", "T", "C")
    start = 0.0 if initial is None else initial[b, c]
    return scan(t, (c,), init=start, step=lambda h: decay[b, t, c] * h[c] + x[b, t, c])
