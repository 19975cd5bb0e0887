"""Connectionist temporal classification: how unlikely the labels of a sequence are.

An alignment is a class for each frame; its labels are what is left when runs of one class become
one and blanks go. The loss is −log of the summed probability of all alignments of the target. They
are paths through 2U + 1 states, l = blank, y₁, blank, y₂, …, blank, that end in one of the last
two. With x the log-probabilities, α₋₁ = 0 at state 0 and −∞ elsewhere, in frame t < T

    α_t[s] = x_t[l_s] + log(e^α_t₋₁[s] + e^α_t₋₁[s−1] + (e^α_t₋₁[s−2] if l_s ≠ l_s₋₂))
    loss   = −log(e^α_T₋₁[2U] + e^α_T₋₁[2U−1])

and β the same from the end. A path is in state s at frame t with probability
e^(α_t[s] + β_t[s] − x_t[l_s] + loss); o_t[c] is the sum of those with l_s = c.

The gradient is e^x − o, as torch's: what log_softmax hands down for logits, and of the loss itself
only along changes that keep Σ e^x = 1. It differs from the plain derivative, −o, by a term that
log_softmax takes away. Where x is −∞ no path goes, and o is 0 (torch: NaN).
"""

from __future__ import annotations

import math
from typing import Any

from ..dsl import (
    In,
    Option,
    Out,
    Param,
    Shared,
    axes,
    axis,
    dim,
    exp,
    f32,
    i32,
    i64,
    log,
    max,
    maximum,
    op,
    require,
    require_indices,
    scan,
    scatter_add,
    sum,
    tensor,
    where,
)
from ..dsl.errors import CtcError

_NONE = -math.inf  # the logarithm of what cannot be


def _ordered(a: Any, b: Any) -> tuple[Any, Any]:
    """(the greater, the other); a NaN is one of them."""
    greater = a > b
    return where(greater, a, b), where(greater, b, a)


def _log_sum(a: Any, b: Any, c: Any) -> Any:
    """log(eᵃ + eᵇ + eᶜ), −∞ where all are −∞: e⁰ of the greatest need not be computed."""
    high, low = _ordered(a, b)
    high, middle = _ordered(high, c)
    base = where(high == _NONE, 0.0, high)
    return high + log(exp(low - base) + exp(middle - base) + 1.0)


class _Lattice:
    """The states of each sample and what is heard in them."""

    def __init__(self, given: Any) -> None:
        blank, targets = given.blank, given.targets
        require((blank >= 0) & (blank < dim("C")), "blank in 0 … C − 1", blank=blank, C=dim("C"))
        require_indices(targets, dim("C"))
        require_indices(given.input_lengths, dim("T") + 1)
        require_indices(given.target_lengths, dim("S") + 1)
        self.log_probs = given.log_probs
        self.n, self.s = n, s = axes("N"), axis("state", 2 * dim("S") + 1)
        self.frames, self.last = i64(given.input_lengths[n]), 2 * i64(given.target_lengths[n])
        spoken = (s % 2 == 1) & (s < self.last)
        of_target = targets.at(n, s // 2, fill=0)
        self.label = tensor("label", (n, s), where(spoken, i32(of_target), i32(blank)), i32)
        self.comes = self.differs("comes", -2)

    def differs(self, name: str, offset: int) -> Any:
        """Whether the state may be next to that at an offset of two: the one between left out."""
        n, s = self.n, self.s
        other = self.label.at(n, s + offset, fill=-1)
        return tensor(name, (n, s), self.label[n, s] != other)

    def heard(self, t: Any) -> Any:
        """x_t[l_s]"""
        return f32(self.log_probs[t, self.n, self.label[self.n, self.s]])

    def forward(self, t: Any) -> tuple[Any, Any]:
        """(α_t, α of a sample's last frame)"""
        n, s = self.n, self.s

        def step(before: Any) -> Any:
            skipping = where(self.comes[n, s], before.at(s - 2, fill=_NONE), _NONE)
            come = _log_sum(before[s], before.at(s - 1, fill=_NONE), skipping)
            return where(t < self.frames, self.heard(t) + come, before[s])

        return scan(t, (s,), init=where(s == 0, 0.0, _NONE), step=step)

    def loss(self, alpha: Any) -> Any:
        """The loss from α of the last frame."""
        n, i = self.n, axis("i", 2)
        end = tensor("end", (n, self.s), alpha)
        ends = end.at(n, self.last - i, fill=_NONE)
        top = max(ends, over=i)
        base = where(top == _NONE, 0.0, top)
        return tensor("cost", (n,), -(base + log(sum(exp(ends - base), over=i))))[n]

    def visits(self, alpha: Any, loss: Any) -> Any:
        """How probable each state is in the frames of log_probs, the last of them first."""
        n, s = self.n, self.s
        t = axes("T")
        frame, goes = dim("T") - 1 - t, self.differs("goes", 2)

        def step(after: Any) -> Any:
            skipping = where(goes[n, s], after.at(s + 2, fill=_NONE), _NONE)
            come = _log_sum(after[s], after.at(s + 1, fill=_NONE), skipping)
            return where(frame < self.frames, self.heard(frame) + come, after[s])

        def visit(beta: Any) -> Any:
            through = alpha[n, frame, s] + beta[s]
            return where(through == _NONE, 0.0, exp(through - self.heard(frame) + loss))

        start = where(s == self.last, 0.0, _NONE)
        return tensor("visits", (n, t, s), scan(t, (s,), init=start, step=step, emit=visit)[0])


_EXAMPLE = {"T": 10, "N": 4, "C": 7, "S": 5}
# What the loss is of; blank is a class.
_GIVEN = Shared(
    log_probs=In("T", "N", "C"), targets=In("N", "S", dtype=i32), input_lengths=In("N", dtype=i32),
    target_lengths=In("N", dtype=i32), blank=Param(0, dtype=i64),
    zero_infinity=Option(False, (False, True)),
)  # fmt: skip


@op(out=Out("N", dtype=f32, name="loss"), example=_EXAMPLE, error=CtcError)
def ctc_loss(given: Any = _GIVEN) -> Any:
    """The loss of each sample: inf where no alignment is possible, or 0 with zero_infinity.

    log_probs [T, N, C] f32, f16 or bf16; targets [N, S] in 0 … C − 1, input_lengths [N] in 0 … T
    and target_lengths [N] in 0 … S, i32; blank in 0 … C − 1 → [N] f32, as every log-sum-exp.
    What lies past a sample's lengths has no influence. Raises CtcError.
    """
    lattice = _Lattice(given)
    loss = lattice.loss(lattice.forward(axes("T"))[1])
    return where(loss == math.inf, 0.0, loss) if given.zero_infinity else loss


@op(out=Out("T", "N", "C", name="dlog_probs"), example=_EXAMPLE, error=CtcError)
def ctc_loss_backward(grad: Any = In("N", dtype=f32), given: Any = _GIVEN) -> Any:
    """grad · (e^x − o) in each sample's frames, 0 past them.

    NaN in the frames of a sample that has no alignment, or 0 with zero_infinity. Each class is
    summed in the order of the states. grad [N] f32, the others as `ctc_loss` takes them →
    [T, N, C] in log_probs' dtype: f32, f16 or bf16. Raises CtcError.
    """
    lattice = _Lattice(given)
    n, (t, c) = lattice.n, axes("T", "C")
    alphas, alpha = lattice.forward(t)
    loss = lattice.loss(alpha)
    visits = lattice.visits(tensor("alpha", (n, t, lattice.s), alphas), loss)
    label, s = lattice.label, lattice.s
    visited = scatter_add(visits[n, dim("T") - 1 - t, s], at={c: label[n, s]}, over=s)
    gradient = grad[n] * (exp(f32(given.log_probs[t, n, c])) - visited)
    hopeless = 0.0 if given.zero_infinity else math.nan
    return where(t < lattice.frames, where(loss == math.inf, hopeless, gradient), 0.0)


@op(out=Out(dtype=f32, name="total"), example={"N": 32}, dtypes=(f32,), error=CtcError)
def ctc_reduction(
    losses: Any = In("N", dtype=f32), target_lengths: Any = In("N", dtype=i32), *,
    mean: Any = Option(True, (True, False)),
) -> Any:  # fmt: skip
    """Σ losses, or with `mean` the mean of losses over target lengths, empty targets as of 1.

    losses [N] f32, target_lengths [N] i32 → [] f32. Raises CtcError.
    """
    n = axes("N")
    if not mean:
        return sum(losses[n], over=n)
    return sum(losses[n] / f32(maximum(i64(target_lengths[n]), 1)), over=n) / f32(dim("N"))


@op(out=Out("N", dtype=f32, name="dlosses"), example={"N": 32}, dtypes=(f32,), error=CtcError)
def ctc_reduction_backward(
    grad: Any = In(dtype=f32), target_lengths: Any = In("N", dtype=i32), *,
    mean: Any = Option(True, (True, False)),
) -> Any:  # fmt: skip
    """The gradient of `ctc_reduction` for its losses.

    grad [] f32, target_lengths [N] i32 → [N] f32. Raises CtcError.
    """
    n = axes("N")
    if not mean:
        return grad.at()
    return grad.at() / f32(maximum(i64(target_lengths[n]), 1)) / f32(dim("N"))


ctc_loss.differentiable(ctc_loss_backward, "log_probs")
ctc_reduction.differentiable(ctc_reduction_backward, "losses")
