"""The attention service without HTTP: kernels, the pipeline, batches, weights."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from service_client import expected

from rudnn.errors import ServiceError
from rudnn.service import (
    Projections,
    attend,
    attention_map,
    kernel_named,
    kernel_names,
    register,
)
from rudnn.service.batch import Fill, pack
from rudnn.service.kernels import attention_weights, weighted_values
from rudnn.service.pipeline import compose

KERNELS = ("dense", "flash")


def requests(lengths: list[int], dim: int = 4, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.uniform(-1, 1, (n, dim)).astype(np.float32) for n in lengths]


def poisoned(value: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Rows past each one's length are NaN."""
    return np.where((np.arange(value.shape[1]) < np.array(lengths)[:, None])[..., None],
                    value, np.nan).astype(np.float32)  # fmt: skip


# --- the scoring stage ---


def test_both_kernels_are_known_by_name() -> None:
    assert set(KERNELS) <= set(kernel_names())
    with pytest.raises(ServiceError, match="needs a kernel among dense, flash, got 'sparse'"):
        kernel_named("sparse", 0.5)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (3, 5, 8, 8), (1, 33, 7, 5), (2, 64, 64, 32)])
def test_a_kernel_is_scaled_dot_product_attention(name: str, shape: tuple[int, ...]) -> None:
    batch, n, depth, width = shape
    q, k, v = (t[:, 0].numpy() for t in torch.randn(3, batch, 1, n, max(depth, width)))
    q, k, v = q[..., :depth], k[..., :depth], v[..., :width]  # views with odd strides
    ours = kernel_named(name, 0.3).score(q, k).aggregate(v)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(a).double() for a in (q, k, v)), scale=0.3)  # fmt: skip
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_a_masked_key_has_no_influence(name: str) -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 6, 4), dtype=np.float32) for _ in range(3))
    seen = np.arange(6) < np.array([[6], [2]])
    ours = kernel_named(name, 0.5).score(q, poisoned(k, [6, 2]), seen[:, None]).aggregate(v)
    short = kernel_named(name, 0.5).score(q[1:], k[1:, :2]).aggregate(v[1:, :2])
    np.testing.assert_allclose(ours[1:], short, rtol=0, atol=1e-6)


def test_dense_weights_are_row_stochastic_and_large_scores_do_not_overflow() -> None:
    q, k = (1000 * a for a in np.random.default_rng(0).standard_normal((2, 1, 9, 4), np.float32))
    weights = attention_weights(q, k, scale=1.0)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(
        weights, torch.softmax(torch.from_numpy(q @ k.transpose(0, 2, 1)), -1), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("declaration", [attention_weights, weighted_values])
def test_the_services_own_operators_pass_the_harness(declaration) -> None:
    from rudnn.check import check, failures

    assert not failures(check(declaration, "llvm", {"D": 5, "E": 3}, None, 0))


# --- the pipeline ---


def test_stages_compose_from_first_to_last() -> None:
    assert compose(lambda x: x + 1, lambda x: x * 10)(2) == 30
    assert compose()(7) == 7


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "lengths",
    [[1], [7], [1] * 20, [3, 3, 3], [1, 2, 5], [40, 1, 2, 1], [64, 1, 64], [2, 100]],
    ids=str,
)
def test_a_request_gets_the_same_alone_and_among_others(name: str, lengths: list[int]) -> None:
    weights = Projections.seeded(4, 0)
    run = attend(weights, kernel_named(name, weights.scale))
    sent = requests(lengths)
    for rows, ours in zip(sent, run(sent), strict=True):
        assert ours.shape == (len(rows), 4) and ours.dtype == np.float32
        np.testing.assert_allclose(ours, expected(rows.astype(float), weights), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengths", [[1, 2, 5], [40, 1, 2, 1]], ids=["padded", "packed"])
def test_the_largest_numbers_of_one_request_do_not_reach_another(
    name: str, lengths: list[int]
) -> None:
    weights = Projections.seeded(4, 0)
    run = attend(weights, kernel_named(name, weights.scale))
    sent = requests(lengths)
    quiet = run(sent)
    sent[0] = np.where(sent[0] > 0, weights.largest_input, -weights.largest_input)
    loud = run([rows.astype(np.float32) for rows in sent])
    assert all(np.isfinite(y).all() for y in loud)
    for before, after in zip(quiet[1:], loud[1:], strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)


def test_a_kernel_of_ones_own_takes_the_place_of_another() -> None:
    class Uniform:
        """Every row takes the mean of all."""

        def __init__(self, scale: float) -> None:
            pass

        def score(self, q, k, mask=None):
            return self

        def aggregate(self, v):
            return np.broadcast_to(v.mean(1, keepdims=True), v.shape)

    register("uniform")(Uniform)
    try:
        weights = Projections.seeded(4, 0)
        (rows,) = requests([5])
        (ours,) = attend(weights, kernel_named("uniform", weights.scale))([rows])
        np.testing.assert_allclose(ours, [(rows @ weights.value).mean(0)] * 5, atol=1e-6)
        uniform = attention_map(weights, kernel_named("uniform", weights.scale))(rows)
        np.testing.assert_allclose(uniform, np.full((5, 5), 1 / 5), atol=1e-6)
    finally:
        from rudnn.service import kernels

        del kernels._MAKERS["uniform"]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 50])
def test_any_kernel_shows_its_weights(name: str, n: int) -> None:
    weights = Projections.seeded(4, 3)
    (rows,) = requests([n])
    ours = attention_map(weights, kernel_named(name, weights.scale))(rows)
    q, k = rows @ weights.query, rows @ weights.key
    np.testing.assert_allclose(
        ours, torch.softmax(torch.from_numpy(q @ k.T / 2), -1), rtol=0, atol=1e-6
    )


# --- batches ---


def test_a_batch_is_laid_out_with_the_fewest_scores() -> None:
    assert pack(requests([3, 3])).mask is None
    padded = pack(requests([1, 2, 1, 2]))
    assert padded.x.shape == (4, 2, 4) and padded.mask is not None
    assert padded.mask.shape == (4, 1, 2)
    packed = pack(requests([30, 1, 1]))
    assert packed.x.shape == (1, 32, 4) and packed.mask is not None
    assert packed.mask.sum() == 900 + 1 + 1


def test_a_batch_does_not_grow_where_most_scores_would_be_padding() -> None:
    fill = Fill(4096)
    assert all(fill.add(1) for _ in range(500))
    assert not fill.add(512) and fill.total == 500
    rows = Fill(100)
    assert rows.add(1000) and not rows.add(1)  # the first always fits
    many = Fill(4096)
    assert [many.add(512) for _ in range(9)] == [True] * 8 + [False]


# --- weights ---


def test_weights_come_from_files(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    sizes = {"query": (6, 3), "key": (6, 3), "value": (6, 2)}
    tensors = {n: random.standard_normal(s).astype(np.float32) for n, s in sizes.items()}
    np.savez(tmp_path / "w.npz", **tensors)
    save_file(tensors, tmp_path / "w.safetensors")
    for name in ("w.npz", "w.safetensors"):
        weights = Projections.load(tmp_path / name)
        assert (weights.dim, weights.value_dim) == (6, 2)
        assert weights.scale == pytest.approx(1 / math.sqrt(6))
        np.testing.assert_array_equal(weights.key, tensors["key"])
        (rows,) = requests([4], dim=6)
        (ours,) = attend(weights, kernel_named("flash", weights.scale))([rows])
        np.testing.assert_allclose(ours, expected(rows.astype(float), weights), atol=2e-6)


def test_narrow_weights_are_widened(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    half = torch.randn(4, 4).bfloat16()
    save_file({n: half.clone() for n in ("query", "key", "value")}, tmp_path / "w.safetensors")
    weights = Projections.load(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(weights.value, half.float().numpy())
    narrow = np.ones((4, 4), ml_dtypes.bfloat16)
    assert Projections(narrow, narrow, narrow).query.dtype == np.float32


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"key": np.ones((4, 3))}, r"query and key of one shape, got \[4, 4\] and \[4, 3\]"),
        ({"value": np.ones((3, 4))}, "needs 4 rows, as query has"),
        ({"value": np.ones(4)}, "needs a floating-point matrix for value"),
        ({"query": np.ones((4, 4), int)}, "needs a floating-point matrix for query, got int64"),
        ({"query": np.full((4, 4), np.nan)}, "needs finite f32 weights in query"),
        ({"query": np.ones((4, 0))}, "needs widths from 1 to 512"),
        ({"value": None}, "needs tensors query, key, value in .*, got none named value"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict, told: str, tmp_path: Path) -> None:
    tensors = {n: np.ones((4, 4)) for n in ("query", "key", "value")} | change
    np.savez(tmp_path / "w.npz", **{n: a for n, a in tensors.items() if a is not None})
    with pytest.raises(ServiceError, match=told):
        Projections.load(tmp_path / "w.npz")


@pytest.mark.parametrize("name", ["none.npz", "w.txt", "broken.npz", "broken.safetensors"])
def test_files_that_hold_no_weights_are_one_clear_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"PK\3\4nonsense")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ServiceError, match="needs weights"):
        Projections.load(tmp_path / name)


@pytest.mark.parametrize("dim", [1, 4, 512])
def test_nothing_overflows_up_to_the_largest_input(dim: int) -> None:
    weights = Projections.seeded(dim, 1)
    top = np.float32(weights.largest_input)
    assert top > 1e15
    signs = np.sign(weights.key[:, 0])
    rows = np.stack([top * signs, -top * signs, np.zeros(dim)]).astype(np.float32)
    for name in KERNELS:
        (ours,) = attend(weights, kernel_named(name, weights.scale))([rows])
        assert np.isfinite(ours).all()
