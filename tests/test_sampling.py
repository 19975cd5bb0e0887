"""Pooling, interpolation and grid sampling at their edges, and which schedules they find."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rudnn.check import check, failures
from rudnn.dsl import In, Out, axes, axis, i64, max, maximum, min, op, sum
from rudnn.grid_sampling import grid_sample, grid_sample_backward
from rudnn.interpolation import interpolate, interpolate_backward
from rudnn.ops import grid_sampling, interpolation, pooling, pooling_adaptive
from rudnn.pooling import adaptive_avg_pool, adaptive_max_pool, avg_pool, max_pool
from rudnn.samples import specialise
from rudnn.schedules.cpu import rules
from rudnn.schedules.program import groups_of
from rudnn.schedules.rule import choose

NAN, INF = math.nan, math.inf
TAPS, SEPARABLE, GATHERS = "taps", "separable", "gathers"


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


# --- pooling ---


@pytest.mark.parametrize("size", [6, 7, 8, 20, 70])
def test_windows_that_overhang(size: int) -> None:
    """ceil_mode: the overhang has no part in a maximum and does not count in a mean."""
    x = normal(2, 3, size, size + 1)
    for padding in (0, 1):
        want, at = F.max_pool2d(x, 3, 2, padding, ceil_mode=True, return_indices=True)
        got, own = max_pool(x, 3, 2, padding, ceil_mode=True, return_indices=True)
        assert torch.equal(got, want) and torch.equal(own, at)
        for counted in (True, False):
            want = F.avg_pool2d(x, 3, 2, padding, ceil_mode=True, count_include_pad=counted)
            close(avg_pool(x, 3, 2, padding, ceil_mode=True, count_include_pad=counted), want)


def test_ties_go_to_the_first_and_nan_is_greatest() -> None:
    x = torch.zeros(1, 1, 4, 40)
    x[0, 0, 1, 5] = x[0, 0, 2, 4] = NAN
    x[0, 0, 0, 20:30] = -INF
    y, at = max_pool(x, 3, 1, 1, return_indices=True)
    want, first = F.max_pool2d(x, 3, 1, 1, return_indices=True)
    known = ~want.isnan()
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y[known], want[known])
    assert torch.equal(at[known], first[known])
    # Of two NaN the first; torch takes the last.
    assert at[0, 0, 1, 4] == 45 and at[0, 0, 2, 3] == 84 and at[0, 0, 3, 3] == 84
    assert torch.equal(max_pool(x, 3, 1, 1).isnan(), want.isnan())
    whole, place = adaptive_max_pool(x, (1, 1), return_indices=True)
    assert whole.isnan().all() and place.item() == 45


def test_windows_of_nothing_but_minus_infinity() -> None:
    x = torch.full((1, 2, 5, 9), -INF)
    y, at = max_pool(x, 3, 2, 1, return_indices=True)
    assert (y == -INF).all() and at[0, 0, 0].tolist() == [0, 1, 3, 5, 7]


@pytest.mark.parametrize("kernel, stride, padding, dilation", [
    ((1, 1), (1, 1), (0, 0), (1, 1)), ((2, 5), (3, 1), (1, 2), (1, 2)),
    ((3, 2), (1, 3), (1, 1), (3, 2)), ((5, 5), (2, 4), (2, 1), (1, 1)),
    ((3, 3), (1, 7), (0, 1), (1, 1)), ((7, 6), (2, 3), (3, 3), (1, 1)),
])  # fmt: skip
def test_windows(kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    """Strides, dilations and sizes that take every way through the rows: split, whole, unrolled."""
    for size in ((17, 19), (33, 67)):
        x = normal(2, *size)
        want, at = F.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)
        got, own = max_pool(x, kernel, stride, padding, dilation, return_indices=True)
        assert torch.equal(got, want) and torch.equal(own, at)
        if dilation == (1, 1):
            close(avg_pool(x, kernel, stride, padding), F.avg_pool2d(x, kernel, stride, padding))


@pytest.mark.parametrize("kernel, stride, padding", [(3, 2, 1), (2, 3, 0), (5, 1, 2), (4, 4, 2)])
def test_gradients_of_windows(kernel: int, stride: int, padding: int) -> None:
    for pool, peer in ((max_pool, F.max_pool2d), (avg_pool, F.avg_pool2d)):
        x = normal(2, 3, 21, 38)
        grads = []
        for call in (pool, peer):
            leaf = x.clone().requires_grad_()
            call(leaf, kernel, stride, padding).square().sum().backward()
            grads.append(leaf.grad)
        close(*grads)


@pytest.mark.parametrize("size", [(1, 1), (3, 7), (19, 40)])
def test_windows_that_share_out(size: tuple[int, int]) -> None:
    x = normal(2, 3, 19, 33)
    for pool, peer in ((adaptive_max_pool, F.adaptive_max_pool2d),
                       (adaptive_avg_pool, F.adaptive_avg_pool2d)):  # fmt: skip
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, want = pool(ours, size), peer(theirs, size)
        close(y, want)
        y.square().sum().backward()
        want.square().sum().backward()
        close(ours.grad, theirs.grad)


# --- interpolation ---

SMOOTH = ("bilinear", "bicubic", "lanczos3")


@pytest.mark.parametrize("mode", SMOOTH)
def test_one_aligned_place_takes_element_0(mode: str) -> None:
    x = normal(2, 3, 5, 7)
    close(interpolate(x, (1, 1), mode=mode, align_corners=True), x[:, :, :1, :1])


def test_one_aligned_place_gives_element_0_the_gradient() -> None:
    grad = torch.ones(2, 3, 1, 1)
    grad = interpolate_backward(grad, (5, 7), mode="bilinear", align_corners=True)
    want = torch.zeros(2, 3, 5, 7)
    want[:, :, 0, 0] = 1
    close(grad, want)


def test_the_aligned_gradient_of_a_single_row_or_column() -> None:
    """It once divided by size − 1 = 0, which ended the process."""
    for own, size in (((1, 5), (3, 2)), ((5, 1), (1, 4)), ((1, 1), (3, 1))):
        ours, theirs = normal(2, 2, *own).requires_grad_(), normal(2, 2, *own).requires_grad_()
        interpolate(ours, size, mode="bilinear", align_corners=True).sum().backward()
        F.interpolate(theirs, size, mode="bilinear", align_corners=True).sum().backward()
        close(ours.grad, theirs.grad, 1e-5)


def sinc_window(size: int, count: int) -> np.ndarray[Any, Any]:
    """[count, size]: sinc(z) · sinc(z/3) by NumPy, rows that sum to 1."""
    z = np.arange(size)[None, :] - ((np.arange(count)[:, None] + 0.5) * size / count - 0.5)
    weights = np.sinc(z) * np.sinc(z / 3) * (np.abs(z) < 3)
    return weights / weights.sum(axis=1, keepdims=True)


def test_lanczos() -> None:
    x = normal(2, 11, 17).numpy()
    for rows, columns in ((22, 34), (7, 40), (4, 5)):
        down, across = sinc_window(11, rows), sinc_window(17, columns)
        want = np.einsum("ir,prc,jc->pij", down, x.astype(np.float64), across)
        got = interpolate(x, (rows, columns), mode="lanczos3")
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_sizes(mode: str) -> None:
    """Many and few rows and columns, single ones too, and the gradient."""
    smooth = {"align_corners": False} if mode in SMOOTH else {}
    for own, size in (((9, 23), (18, 46)), ((40, 1), (3, 9)), ((5, 70), (70, 5)), ((1, 4), (1, 4))):
        ours, theirs = (normal(2, 2, *own).requires_grad_() for _ in range(2))
        y = interpolate(ours, size, mode=mode)
        want = F.interpolate(theirs, size, mode=mode, **smooth)
        close(y, want)
        y.square().sum().backward()
        want.square().sum().backward()
        close(ours.grad, theirs.grad, 1e-4)


def test_taps_of_weight_0_have_no_influence() -> None:
    """At the size it has, an image comes back as it is, NaN and infinities where they were."""
    x = normal(1, 2, 9, 20)
    x[0, 0, 4, 3], x[0, 1, 0, 0], x[0, 1, 8, 19] = NAN, INF, -INF
    for mode in SMOOTH:
        close(interpolate(x, (9, 20), mode=mode, align_corners=True), x)


# --- grid sampling ---

MODES = ("bilinear", "nearest", "bicubic")
PADDING = ("zeros", "border", "reflection")


def torch_sample(x: Any, grid: Any, mode: str, padding: str, align: bool) -> torch.Tensor:
    return F.grid_sample(x, grid, mode, padding, align_corners=align)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", PADDING)
def test_points_on_the_border(mode: str, padding: str) -> None:
    """Exactly on the first and last elements, on their outer edges, and just past both."""
    x = normal(1, 5, 4, 6)
    places: list[float] = []
    for edge in (1.0, 1 - 1 / 6, 1 - 1 / 4, 2.0, 3.0):
        places += [edge, -edge, edge + 1e-3, -edge - 1e-3]
    both = torch.tensor([[a, b] for a in places for b in (places[0], places[1], 0.1)])
    grid = both.reshape(1, 3, -1, 2)
    for align in (False, True):
        want = torch_sample(x.double(), grid.double(), mode, padding, align)
        got = grid_sample(x, grid, mode, padding, align)
        # Rounding may put a point on either side of where "nearest" jumps and "zeros" ends.
        same = (got - want).abs() <= 2e-5 * (1 + want.abs())
        assert same.float().mean() >= (0.9 if mode == "nearest" else 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_points_that_are_no_numbers(mode: str) -> None:
    """They spoil their own results alone, in either direction, and read nothing outside."""
    x, grid = normal(2, 6, 5, 7), normal(2, 4, 11, 2) / 2
    strange = (NAN, INF, -INF, 3e38, -3e38, 1e12)
    wild = grid.clone()
    for n, value in enumerate(strange):
        wild[n % 2, n % 4, n, n % 2] = value
    touched = (wild != grid).any(-1)
    for padding in PADDING:
        calm = grid_sample(x, grid, mode, padding)
        got = grid_sample(x, wild, mode, padding)
        rest = ~touched[:, None].expand_as(got)
        assert torch.equal(got[rest], calm[rest])
        if padding == "border":
            inside = (got >= x.min() - 4) & (got <= x.max() + 4)
            assert (inside | got.isnan())[~rest].all()
        dx, dgrid = grid_sample_backward(torch.ones_like(got), x, wild, mode, padding)
        _, want = grid_sample_backward(torch.ones_like(got), x, grid, mode, padding)
        assert dx.shape == x.shape
        close(dgrid[~touched], want[~touched], 1e-4)


def test_images_without_elements() -> None:
    """No channels: the gradient for the grid is 0, not what memory held."""
    grid, x = normal(2, 3, 9, 2), torch.empty(2, 0, 4, 5)
    dx, dgrid = grid_sample_backward(torch.empty(2, 0, 3, 9), x, grid)
    assert dx.shape == x.shape and (dgrid == 0).all()
    assert grid_sample(x, grid).shape == (2, 0, 3, 9)


def test_empty_batches() -> None:
    x = torch.empty(0, 3, 8, 8)
    made = [
        max_pool(x, 3, 2, 1), avg_pool(x, 3, 2, 1), adaptive_avg_pool(x, 4),
        adaptive_max_pool(x, 4), interpolate(x, 4, mode="bilinear"),
        grid_sample(x, torch.empty(0, 4, 4, 2)),
    ]  # fmt: skip
    assert [tuple(m.shape) for m in made] == [(0, 3, 4, 4)] * len(made)


# --- layouts ---


def strided(x: torch.Tensor) -> list[torch.Tensor]:
    """x with channels innermost, with every other column of a wider one, and all planes one."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), NAN)
    wide[..., ::2] = x
    return [x.movedim(1, -1).contiguous().movedim(-1, 1), wide[..., ::2], x[:1, :1].expand_as(x)]


def test_layouts() -> None:
    grid = normal(2, 5, 20, 2) / 2
    for x in strided(normal(2, 6, 13, 40)):
        plain = x.contiguous()
        for call in (
            lambda a: max_pool(a, 3, 2, 1), lambda a: avg_pool(a, 9, 5),
            lambda a: adaptive_avg_pool(a, 5), lambda a: interpolate(a, 21, mode="bicubic"),
            lambda a: grid_sample(a, grid),
        ):  # fmt: skip
            assert torch.equal(call(x), call(plain))


# --- the schedules ---


def chosen(declaration: Any, options: dict[str, Any] | None = None, **dims: int) -> list[str]:
    from rudnn.runtime.device import device

    graph = specialise(declaration, dims, options=options).graph
    caps = device("llvm").capability
    return [choose(rules(), g, caps).name for g in groups_of(graph)]


@pytest.mark.parametrize("declaration, rule", [
    (pooling.max_pool, TAPS), (pooling.max_pool_with_indices, TAPS), (pooling.avg_pool, TAPS),
    (pooling.max_pool_backward, TAPS), (pooling.max_pool_backward_from_input, TAPS),
    (pooling.avg_pool_backward, TAPS), (pooling_adaptive.adaptive_max_pool, SEPARABLE),
    (pooling_adaptive.adaptive_avg_pool, SEPARABLE),
    (pooling_adaptive.adaptive_avg_pool_backward, SEPARABLE),
    (interpolation.interpolate_op, SEPARABLE), (interpolation.interpolate_backward, SEPARABLE),
    (grid_sampling.grid_sample, GATHERS), (grid_sampling.grid_sample_backward, GATHERS),
], ids=lambda v: getattr(v, "name", v))  # fmt: skip
def test_rules(declaration: Any, rule: str) -> None:
    assert chosen(declaration)[-1] == rule


@op(out=Out("N", "J"), example={"N": 5, "W": 20, "J": 18})
def spread(x: Any = In("N", "W"), like: Any = In("N", "J")) -> Any:
    """The greatest of three neighbours less the least, times a number; no windows elsewhere."""
    n, j = axes("N", "J")
    k = axis("k", 3)
    near = x.at(n, j + k, fill=0.0)
    return (max(near, over=k) - min(near, over=k)) * like[n, j]


@op(out=Out("A", "B", "J"), example={"A": 3, "B": 4, "T": 9, "J": 21, "K": 6, "W": 30})
def picked(
    x: Any = In("A", "T", "W"), rows: Any = In("B", "K"), columns: Any = In("J", "K"),
) -> Any:  # fmt: skip
    """The greatest over rows and columns that data names, where it names any."""
    a, b, j = axes("A", "B", "J")
    u, v = axis("u", rows.shape[1]), axis("v", columns.shape[1])
    named = (rows[b, u] >= 0) & (columns[j, v] >= 0)
    value = x[a, maximum(i64(rows[b, u]), 0), maximum(i64(columns[j, v]), 0)]
    return max(value, over=(u, v), where=named)


@op(out=Out("S", "C", "I", "J"), example={"S": 2, "C": 5, "W": 12, "I": 3, "J": 19, "K": 3})
def mixed(
    x: Any = In("S", "C", "W"), at: Any = In("S", "I", "J", "K"), share: Any = In("S", "K", "J"),
) -> Any:  # fmt: skip
    """Elements that data names, mixed; the channels share the names. Outside is 2."""
    s, c, i, j = axes("S", "C", "I", "J")
    k = axis("k", 3)
    return sum(x.at(s, c, i64(at[s, i, j, k]), fill=2.0) * share[s, k, j], over=k)


def test_other_operators_of_these_patterns() -> None:
    assert chosen(spread) == [TAPS] and chosen(picked) == [SEPARABLE]
    assert chosen(mixed) == [GATHERS]
    assert not failures(check(spread))
    x, rows, columns = normal(3, 9, 30), normal(4, 6) * 5, normal(21, 6) * 15
    x[1, 2, 3] = NAN
    rows.clamp_(max=8)
    columns.clamp_(max=29)
    got = picked(x, rows, columns)
    u, v = rows.clamp(min=0).long(), columns.clamp(min=0).long()
    found = x[:, u[:, None, :, None], v[None, :, None, :]]
    named = (rows >= 0)[:, None, :, None] & (columns >= 0)[None, :, None, :]
    want = torch.where(named, found, -INF).flatten(-2).amax(-1)
    close(got, want)
    at, share = normal(2, 3, 19, 3) * 8, normal(2, 3, 19)
    y = mixed(normal(2, 5, 12), at, share)
    place = at.long()
    inside = (place >= 0) & (place < 12)
    read = torch.stack([normal(2, 5, 12)[s][:, place[s].clamp(0, 11)] for s in range(2)])
    read = torch.where(inside[:, None], read, torch.tensor(2.0))
    close(y, torch.einsum("scijk,skj->scij", read, share))


@op(out=Out("C", "I", "J"), example={"C": 5, "W": 12, "I": 3, "J": 19, "K": 2})
def named(x: Any = In("C", "W"), at: Any = In("I", "J", "K", dtype=i64)) -> Any:
    """The sums of elements that data names."""
    c, i, j = axes("C", "I", "J")
    k = axis("k", 2)
    return sum(x[c, at[i, j, k]], over=k)


def test_sums_over_a_tensor_without_elements_were_not_written() -> None:
    assert chosen(named) == [GATHERS]
    y = named(torch.empty(3, 0), torch.zeros(2, 9, 2, dtype=torch.int64),
              out=torch.full((3, 2, 9), NAN))  # fmt: skip
    assert (y == 0).all()
