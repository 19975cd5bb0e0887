"""CTC as called: torch.nn.functional's arguments; labels and lengths checked on the host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dsl.errors import CtcError, require_host
from ..runtime.arrays import kind_of
from ..runtime.tensor import Tensor, tensor
from . import ctc as declared

REDUCTIONS = ("none", "mean", "sum")

Array = np.ndarray[Any, Any]
Lengths = Any  # an array of integers, a sequence of them, or for one sample one


def _whole(name: str, given: Any) -> Array:
    """`given` as host integers. Raises CtcError."""
    if isinstance(given, (int, Sequence)):
        try:
            found = np.asarray(given)
        except ValueError:
            raise CtcError(f"needs {name} in rows of one length, got others") from None
        found = found.astype(np.int64) if not found.size else found
    else:
        found = kind_of(given, name).numpy(given)
    require_host(found.dtype.kind in "iu", f"{name} of integers", found.dtype.name, CtcError)
    return found


def _lengths(name: str, given: Lengths, count: int, most: int) -> Array:
    """[N] numbers in 0 … most."""
    found = _whole(name, given).reshape(-1)
    require_host(len(found) == count, f"{name} of {count} samples", len(found), CtcError)
    _require_within(name, found, 0, most)
    return found.astype(np.int32)


def _require_within(name: str, found: Array, low: int, high: int) -> None:
    if found.size:
        least, most = int(found.min()), int(found.max())
        require_host(low <= least and most <= high, f"{name} in {low} … {high}",
                     least if least < low else most, CtcError)  # fmt: skip


def _padded(targets: Array, lengths: Array) -> Array:
    """Labels [N, S], those past a sample's length 0."""
    if targets.ndim == 2:
        inside = np.arange(targets.shape[1]) < lengths[:, None]
        return np.where(inside, targets, 0)
    made = np.zeros((len(lengths), int(lengths.max(initial=0))), targets.dtype)
    made[np.arange(made.shape[1]) < lengths[:, None]] = targets
    return made


def _labels(
    targets: Any, target_lengths: Lengths, count: int, classes: int, blank: Any
) -> tuple[Array, Array]:
    """(labels [N, S], their numbers [N]), from padded or concatenated targets."""
    found = _whole("targets", targets)
    require_host(found.ndim in (1, 2), "targets of shape [N, S], or concatenated",
                 list(found.shape), CtcError)  # fmt: skip
    if found.ndim == 2:
        require_host(len(found) == count, f"targets of {count} samples", len(found), CtcError)
    most = found.shape[-1]
    lengths = _lengths("target_lengths", target_lengths, count, most)
    total = int(lengths.sum(dtype=np.int64))
    require_host(found.ndim == 2 or most == total, f"{total} concatenated targets", most, CtcError)
    labels = _padded(found, lengths)
    spoken = labels[np.arange(labels.shape[1]) < lengths[:, None]]
    _require_within("targets", spoken, 0, classes - 1)
    require_host(not (spoken == blank).any(), "targets without the blank", blank, CtcError)
    return labels.astype(np.int32), lengths


def _beside(log_probs: Any, array: Array) -> Any:
    """A host array as one of the kind of log_probs, where that is."""
    if isinstance(log_probs, Tensor):
        return tensor(array, queue=kind_of(log_probs, "log_probs").queue(log_probs))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(log_probs, torch.Tensor):
        return torch.from_numpy(array).to(log_probs.device)
    return array


@dataclass(frozen=True)
class _Call:
    """Checked arguments of a batch: those of the declarations by name, and how to reduce."""

    given: dict[str, Any]
    reduction: str
    batched: bool


def _call(
    log_probs: Any, targets: Any, input_lengths: Lengths, target_lengths: Lengths, blank: int,
    reduction: str, zero_infinity: bool,
) -> _Call:  # fmt: skip
    require_host(reduction in REDUCTIONS, f"reduction among {list(REDUCTIONS)}", repr(reduction),
                 CtcError)  # fmt: skip
    kind_of(log_probs, "log_probs")
    shape = tuple(log_probs.shape)
    require_host(len(shape) in (2, 3), "log_probs of shape [T, N, C] or [T, C]", list(shape),
                 CtcError)  # fmt: skip
    batched = len(shape) == 3
    steps, count, classes = shape if batched else (shape[0], 1, shape[1])
    frames = _lengths("input_lengths", input_lengths, count, steps)
    labels, lengths = _labels(targets, target_lengths, count, classes, blank)
    given = {
        "log_probs": log_probs if batched else log_probs[:, None],
        "targets": _beside(log_probs, labels),
        "input_lengths": _beside(log_probs, frames),
        "target_lengths": _beside(log_probs, lengths),
        "blank": blank,
        "zero_infinity": zero_infinity,
    }
    # One sample without a batch: its loss is the sum.
    return _Call(given, "sum" if reduction == "none" and not batched else reduction, batched)


def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
    *,
    out: Any = None,
) -> Any:
    """−log of the probability that the frames of a sample spell its target.

    Parameters
    ----------
    log_probs : array [T, N, C], or [T, C] without a batch; f32, f16 or bf16
        Logarithms of probabilities, as of log_softmax. Any strides.
    targets : integers [N, S], or those of all samples one after the other
        In 0 … C − 1 and not `blank`; in [N, S] what lies past a sample's length is not looked at.
    input_lengths, target_lengths : integers [N]
        How many frames and labels count, at most T and S. Frames past them have no influence.
    blank : int
        The class that stands for no label.
    reduction : "none", "mean" or "sum"
        "mean" divides each loss by its target's length (an empty one's by 1) before the mean.
    zero_infinity : bool
        A sample that has no alignment counts 0, its gradient 0, instead of inf and NaN.
    out : array of the result's shape, f32, optional

    Targets and lengths may be arrays of any kind, on any device, or sequences; they are read on the
    host, so those that are there already need no waiting.

    Returns
    -------
    [N] f32 with reduction "none", else [] f32. For torch tensors that require grad see
    `ctc_loss_backward`.

    Raises
    ------
    CtcError
        On shapes, dtypes, lengths or labels that do not fit.
    """
    call = _call(log_probs, targets, input_lengths, target_lengths, blank, reduction,
                 zero_infinity)  # fmt: skip
    if call.reduction == "none":
        return declared.ctc_loss(**call.given, out=out)
    losses = declared.ctc_loss(**call.given)
    mean = call.reduction == "mean"
    return declared.ctc_reduction(losses, call.given["target_lengths"], mean=mean, out=out)


def ctc_loss_backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The gradient of `ctc_loss` for log_probs, as torch has it.

    That is grad · (e^log_probs − the probability that a path is at this class in this frame): the
    derivative where Σ e^log_probs stays 1, and what log_softmax should be handed. Frames past a
    sample's length get 0; a sample without an alignment NaN, or 0 with `zero_infinity`.

    Parameters
    ----------
    grad : array of the loss's shape, f32
    log_probs, targets, … : as `ctc_loss`'s
    out : array of the shape and dtype of log_probs, optional

    Returns
    -------
    array of the shape and dtype of log_probs, the same bits on every run.

    Raises
    ------
    CtcError
        On shapes, dtypes, lengths or labels that do not fit.
    """
    call = _call(log_probs, targets, input_lengths, target_lengths, blank, reduction,
                 zero_infinity)  # fmt: skip
    shares = grad
    if call.reduction != "none":
        mean = call.reduction == "mean"
        shares = declared.ctc_reduction_backward(grad, call.given["target_lengths"], mean=mean)
    goal = out if out is None or call.batched else out[:, None]
    made = declared.ctc_loss_backward(shares, **call.given, out=goal)
    if out is not None:
        return out
    return made if call.batched else made[:, 0]
