"""CTC at its edges, against torch where torch has them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from spirv_kernels import needs_vulkan

import rudnn
from rudnn.ctc import ctc_loss, ctc_loss_backward
from rudnn.errors import CtcError

T, N, C, S = 12, 5, 7, 4
REFERENCE = torch.nn.functional.ctc_loss


def log_probs(frames: int = T, classes: int = C, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(frames, N, classes, generator=made).log_softmax(-1)


# Of the samples: a usual one, none to say, repeats that just fit, repeats that do not, no frames.
TARGETS = torch.tensor([[1, 2, 3, 4], [6, 6, 6, 6], [2, 2, 3, 3], [5, 5, 5, 1], [1, 4, 1, 4]])
FRAMES = torch.tensor([12, 9, 6, 5, 0])
LENGTHS = torch.tensor([4, 0, 4, 4, 0])
ALIKE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}


def gradients(grad: Any, *arguments: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and torch's, by autograd; torch's in float64."""
    found = []
    for loss, kind in ((ctc_loss, torch.float32), (REFERENCE, torch.float64)):
        x = arguments[0].detach().to(kind).requires_grad_()
        loss(x, *arguments[1:], **settings).backward(grad.to(kind))
        found.append(x.grad.float())
    return found[0], found[1]


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_as_torch(reduction: str, zero_infinity: bool) -> None:
    """Empty targets, no frames and impossible alignments among others; the gradient's NaN too."""
    arguments = (log_probs(), TARGETS, FRAMES, LENGTHS)
    settings: dict[str, Any] = {"reduction": reduction, "zero_infinity": zero_infinity}
    want = REFERENCE(*arguments, **settings)
    got = ctc_loss(*arguments, **settings)
    torch.testing.assert_close(got, want, **ALIKE)
    assert got.dtype == torch.float32
    grad = torch.randn(want.shape)
    ours, theirs = gradients(grad, *arguments, **settings)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **ALIKE)
    plain = ctc_loss_backward(grad, *arguments, **settings)
    assert torch.equal(plain.nan_to_num(9), ours.nan_to_num(9))


def test_an_impossible_alignment_touches_no_other() -> None:
    loss = ctc_loss(log_probs(), TARGETS, FRAMES, LENGTHS, reduction="none")
    assert loss.isinf().tolist() == [False, False, False, True, False]
    assert loss[4] == 0  # no frames and nothing to say
    grad = ctc_loss_backward(torch.ones(N), log_probs(), TARGETS, FRAMES, LENGTHS, reduction="none")
    assert grad[:5, 3].isnan().all() and not grad[:, [0, 1, 2, 4]].isnan().any()
    for n, frames in enumerate(FRAMES):
        assert (grad[frames:, n] == 0).all()
    quiet = ctc_loss_backward(
        torch.ones(N), log_probs(), TARGETS, FRAMES, LENGTHS, reduction="none", zero_infinity=True
    )
    assert (quiet[:, 3] == 0).all()
    assert torch.equal(quiet[:, :3], grad[:, :3])


def test_the_gradient_of_logits() -> None:
    """Through log_softmax it is that of torch, and the derivative of the loss."""
    logits = torch.randn(T, N, C, dtype=torch.float64)
    arguments = (TARGETS[:3], FRAMES[:3], LENGTHS[:3])
    x = logits[:, :3].float().requires_grad_()
    ctc_loss(x.log_softmax(-1), *arguments, reduction="sum").backward()
    along = torch.randn_like(logits[:, :3])
    up, down = (
        REFERENCE((logits[:, :3] + s * along).log_softmax(-1), *arguments, reduction="sum")
        for s in (1e-6, -1e-6)
    )
    assert x.grad is not None
    slope = float((x.grad.double() * along).sum())
    assert slope == pytest.approx(float(up - down) / 2e-6, rel=1e-4)


def test_against_all_alignments() -> None:
    """The loss by its definition: the sum over every sequence of classes that spells the target."""
    x = log_probs(4, 3)[:, :1]
    for target in ([], [1], [1, 2], [2, 2], [1, 1, 1]):
        total = 0.0
        for path in itertools.product(range(3), repeat=4):
            spelt = [c for c, _ in itertools.groupby(path) if c]
            if spelt == target:
                total += float(torch.stack([x[t, 0, c] for t, c in enumerate(path)]).sum().exp())
        labels = torch.tensor([target], dtype=torch.int64)
        loss = ctc_loss(x, labels, [4], [len(target)], reduction="none")
        assert float(loss[0]) == pytest.approx(-np.log(total) if total else np.inf, rel=1e-5)


@pytest.mark.parametrize("blank", [0, 3, C - 1])
def test_any_class_may_be_the_blank(blank: int) -> None:
    labels = (TARGETS + blank) % C
    arguments = (log_probs(), labels, FRAMES, LENGTHS, blank, "none")
    torch.testing.assert_close(ctc_loss(*arguments), REFERENCE(*arguments), **ALIKE)


def test_concatenated_targets_and_kinds_of_arguments() -> None:
    x = log_probs()
    want = ctc_loss(x, TARGETS, FRAMES, LENGTHS, reduction="none")
    joined = torch.cat([t[:n] for t, n in zip(TARGETS, LENGTHS, strict=True)])
    for labels in (TARGETS, joined):
        for made in (
            (labels, FRAMES, LENGTHS),
            (labels.int(), FRAMES.int().numpy(), LENGTHS.tolist()),
            (labels.tolist(), tuple(FRAMES.tolist()), LENGTHS.numpy().astype(np.uint8)),
        ):
            assert torch.equal(ctc_loss(x, *made, reduction="none"), want)
    plain = ctc_loss(x.numpy(), TARGETS.numpy(), FRAMES.numpy(), LENGTHS.numpy(), reduction="none")
    assert isinstance(plain, np.ndarray) and np.array_equal(plain, want.numpy())


def test_without_a_batch() -> None:
    x = log_probs()[:, 0]
    for reduction in ("none", "mean", "sum"):
        want = REFERENCE(x, TARGETS[0], (12,), (4,), reduction=reduction)
        got = ctc_loss(x, TARGETS[0], 12, 4, reduction=reduction)
        torch.testing.assert_close(got, want)
        grad = ctc_loss_backward(torch.ones(()), x, TARGETS[0], (12,), (4,), reduction=reduction)
        assert grad.shape == x.shape


def test_padding_has_no_influence() -> None:
    """Neither NaN in frames past a sample's end nor labels past its target's."""
    x, labels = log_probs(), TARGETS.clone()
    settings: dict[str, Any] = {"reduction": "none", "zero_infinity": True}
    want = ctc_loss(x, labels, FRAMES, LENGTHS, **settings)
    slope = ctc_loss_backward(torch.ones(N), x, labels, FRAMES, LENGTHS, **settings)
    for n in range(N):
        x[FRAMES[n] :, n] = torch.nan
        labels[n, LENGTHS[n] :] = -5 if n % 2 else 10**6
    assert torch.equal(ctc_loss(x, labels, FRAMES, LENGTHS, **settings), want)
    got = ctc_loss_backward(torch.ones(N), x, labels, FRAMES, LENGTHS, **settings)
    assert torch.equal(got, slope)


def test_nan_in_a_frame_that_counts_reaches_its_loss_alone() -> None:
    x = log_probs()
    x[2, 0, 2] = torch.nan
    loss = ctc_loss(x, TARGETS, FRAMES, LENGTHS, reduction="none")
    assert loss.isnan().tolist() == [True, False, False, False, False]


def test_classes_that_cannot_be() -> None:
    """A log-probability of −∞: no path goes there, and the gradient there is no NaN."""
    x = log_probs()
    x[1, 0, 5], x[2, 0, 1], x[:, 1, 1:] = -torch.inf, -torch.inf, -torch.inf
    loss = ctc_loss(x, TARGETS, FRAMES, LENGTHS, reduction="none")
    torch.testing.assert_close(loss, REFERENCE(x, TARGETS, FRAMES, LENGTHS, reduction="none"))
    grad = ctc_loss_backward(torch.ones(N), x, TARGETS, FRAMES, LENGTHS, reduction="none")
    assert not grad[:, :3].isnan().any() and grad[1, 0, 5] == 0 and grad[2, 0, 1] == 0


def test_empty_sizes() -> None:
    x = log_probs()
    none = ctc_loss(x[:, :0], TARGETS[:0], [], [], reduction="none")
    assert none.shape == (0,)
    assert float(ctc_loss(x[:, :0], [], [], [], reduction="sum")) == 0
    assert ctc_loss(x[:, :0], [], [], []).isnan()
    assert ctc_loss_backward(none, x[:, :0], [], [], [], reduction="none").shape == (T, 0, C)
    silent = ctc_loss(x, TARGETS[:, :0], FRAMES, [0] * N, reduction="none")
    want = [-float(x[:n, i, 0].sum()) for i, n in enumerate(FRAMES)]
    assert silent.tolist() == pytest.approx(want, rel=1e-5)
    still = ctc_loss(x[:0], TARGETS, [0] * N, LENGTHS, reduction="none")
    assert still.tolist() == [np.inf, 0, np.inf, np.inf, 0]
    sole = ctc_loss(x[:, :, :1], TARGETS[:, :0], FRAMES, [0] * N, reduction="none")
    torch.testing.assert_close(sole, silent)


def test_any_layout() -> None:
    x = log_probs()
    want = ctc_loss(x, TARGETS, FRAMES, LENGTHS, reduction="none")
    slope = ctc_loss_backward(torch.ones(N), x, TARGETS, FRAMES, LENGTHS, reduction="none")
    turned = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(ctc_loss(turned, TARGETS, FRAMES, LENGTHS, reduction="none"), want)
    got = ctc_loss_backward(torch.ones(N), turned, TARGETS, FRAMES, LENGTHS, reduction="none")
    assert torch.equal(got.nan_to_num(9), slope.nan_to_num(9))


def test_many_frames_and_long_targets() -> None:
    """Vectors, the last of them within the one before, and more frames than calls may nest."""
    x = torch.randn(1500, 3, 20).log_softmax(-1)
    labels = torch.randint(1, 20, (3, 61))
    frames, lengths = [1500, 1499, 200], [61, 30, 3]
    want = REFERENCE(x.double(), labels, frames, lengths, reduction="none")
    got = ctc_loss(x, labels, frames, lengths, reduction="none")
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """f32 within: the loss is that of the rounded values, and f32."""
    x = log_probs().to(dtype)
    arguments = (TARGETS, FRAMES, LENGTHS)
    loss = ctc_loss(x, *arguments, reduction="none")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, REFERENCE(x.float(), *arguments, reduction="none"), **ALIKE)
    slope = ctc_loss_backward(torch.ones(N), x, *arguments, reduction="none")
    assert slope.dtype == dtype


def test_out() -> None:
    x = log_probs()
    losses, total, slope = torch.empty(N), torch.empty(()), torch.empty(T, C)
    assert ctc_loss(x, TARGETS, FRAMES, LENGTHS, reduction="none", out=losses) is losses
    assert ctc_loss(x, TARGETS, FRAMES, LENGTHS, reduction="sum", out=total) is total
    assert float(total) == float(losses.sum()) == np.inf
    one = (x[:, 0], TARGETS[0], 12, 4)
    assert ctc_loss_backward(torch.ones(()), *one, out=slope) is slope
    assert torch.equal(slope, ctc_loss_backward(torch.ones(()), *one))


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"targets": [[1, 7]]}, "targets in 0 … 6, got 7"),
    ({"targets": [[-1, 2]]}, "targets in 0 … 6, got -1"),
    ({"targets": [[0, 2]]}, "targets without the blank, got 0"),
    ({"targets": [[1.0, 2.0]]}, "targets of integers, got float64"),
    ({"targets": [[1, 2], [3]]}, "targets in rows of one length, got others"),
    ({"targets": [[1, 2], [1, 2]]}, "targets of 1 samples, got 2"),
    ({"targets": [1, 2, 3]}, "2 concatenated targets, got 3"),
    ({"targets": [[[1, 2]]]}, r"targets of shape \[N, S\], or concatenated, got \[1, 1, 2\]"),
    ({"input_lengths": [13]}, "input_lengths in 0 … 12, got 13"),
    ({"input_lengths": [-1]}, "input_lengths in 0 … 12, got -1"),
    ({"input_lengths": [5, 5]}, "input_lengths of 1 samples, got 2"),
    ({"target_lengths": [3]}, "target_lengths in 0 … 2, got 3"),
    ({"blank": 7}, "blank in 0 … C − 1, got blank=7, C=7"),
    ({"blank": -1}, "blank in 0 … C − 1, got blank=-1, C=7"),
    ({"reduction": "all"}, "reduction among"),
    ({"log_probs": torch.zeros(3)}, r"log_probs of shape \[T, N, C\] or \[T, C\], got \[3\]"),
    ({"log_probs": torch.zeros(12, 1, 7).double()}, "log_probs"),
)


@pytest.mark.parametrize("changed, message", REFUSED)
def test_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "log_probs": log_probs()[:, :1], "targets": [[1, 2]], "input_lengths": [12],
        "target_lengths": [2],
    }  # fmt: skip
    with pytest.raises(CtcError, match=message):
        ctc_loss(**(arguments | changed))


@needs_vulkan
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_on_vulkan(zero_infinity: bool) -> None:
    """The same edges; labels and lengths may stay on the host."""
    settings: dict[str, Any] = {"reduction": "none", "zero_infinity": zero_infinity}
    x = rudnn.tensor(log_probs().numpy(), device="vulkan")
    loss = ctc_loss(x, TARGETS, FRAMES, LENGTHS, **settings)
    want = ctc_loss(log_probs(), TARGETS, FRAMES, LENGTHS, **settings)
    np.testing.assert_allclose(loss.numpy(), want.numpy(), rtol=1e-5)
    grad = rudnn.tensor(np.ones(N, np.float32), device="vulkan")
    got = ctc_loss_backward(grad, x, TARGETS, FRAMES, LENGTHS, **settings)
    slope = ctc_loss_backward(torch.ones(N), log_probs(), TARGETS, FRAMES, LENGTHS, **settings)
    np.testing.assert_allclose(got.numpy(), slope.numpy(), rtol=1e-5, atol=1e-5)
