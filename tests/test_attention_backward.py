"""Gradients of attention against the float64 oracle and torch; masks, bits, memory."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from attention_cases import CASES, DTYPES, NAMES, Array, Case, close, inputs, normal
from cuda_emulator import emulated_cuda
from spirv_kernels import needs_vulkan

import rudnn
from rudnn.attention import AttentionGradients, AttentionOptions, attention, attention_backward
from rudnn.dsl.declare import Spec
from rudnn.dsl.errors import AttentionError
from rudnn.dsl.host import evaluate as size_of
from rudnn.dsl.host import identifier
from rudnn.dsl.oracle import evaluate
from rudnn.ops.attention_backward import attention_backward_op, attention_bias_backward
from rudnn.references import reference
from rudnn.runtime.compiler import Layouts, schedule
from rudnn.runtime.device import device

# B, Hq, Hkv, Q, K: with tiles that are full, part of a vector, a single row, and nothing
DYNAMIC = [
    (2, 6, 3, 37, 133), (1, 1, 1, 1, 1), (1, 4, 4, 64, 128), (2, 4, 2, 1, 150), (1, 2, 1, 130, 20),
    (0, 2, 2, 5, 5), (2, 2, 2, 0, 5), (2, 4, 2, 5, 0),
]  # fmt: skip
TOLERANCE = {"f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}
_INPUTS = ("grad", "query", "key", "value", "y", "lse")

pytestmark = pytest.mark.usefixtures("poisoned")


def solved(
    arrays: list[Array], options: AttentionOptions
) -> tuple[list[Array], AttentionGradients]:
    """(grad, query, key, value, result, lse), and our gradients from them."""
    result, lse = attention(*arrays, options=options, return_lse=True)
    grad = normal(np.random.default_rng(5), *result.shape, dtype=result.dtype)
    known = [grad, *arrays[:3], result, lse]
    return known, attention_backward(*known, *arrays[3:], options=options)


def expected(
    known: list[Array], mask: Array, bias: Array, options: AttentionOptions
) -> list[Array]:
    """The float64 oracle's gradients of query, key, value and bias, from the same result."""
    sizes = dict(zip(("B", "Hq", "Q", "D"), known[1].shape, strict=True))
    sizes |= dict(zip(("Hkv", "K", "Dv"), known[3].shape[1:], strict=True))
    full = tuple(sizes[n] for n in ("B", "Hq", "Q", "K"))
    given = dict(zip(_INPUTS, known, strict=True))
    if mask is not None:
        given["mask"] = np.broadcast_to(mask, full)
    causal = options.causal_alignment if options.is_causal else "none"
    scale = sizes["D"] ** -0.5 if options.scale is None else options.scale
    numbers = {"scale": scale, "softcap": options.softcap or 0.0}

    def made(declaration: Any, inputs: dict[str, Array], dims: dict[str, int]) -> list[Array]:
        dtypes = tuple((n, NAMES[inputs[n].dtype]) for n in declaration.inputs if n in inputs)
        static = tuple((n, dims[n]) for n in ("D", "Dv"))
        settings = (("causal", causal), ("capped", options.softcap is not None))
        graph = declaration.trace(Spec(dtypes, (), static, settings))
        return list(evaluate(graph, inputs, dims | numbers, precision="float64"))

    if bias is None:
        return made(attention_backward_op, given, sizes)
    whole = given | {"attn_bias": np.broadcast_to(bias, full)}
    own = sizes | dict(zip(("Bb", "Hb", "Qb", "Kb"), bias.shape, strict=True))
    found = made(attention_backward_op, whole, sizes)
    return found + made(attention_bias_backward, given | {"attn_bias": bias}, own)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((n, "f32") for n in ("plain", "top_left", "mask", "bias", "all")),
        ("all", "f16"),
        ("all", "bf16"),
    ],
)
def test_options_dtypes_and_dynamic_sizes(name: str, dtype: str) -> None:
    case = CASES[name]
    for sizes in DYNAMIC:
        arrays = inputs(case, sizes, (33, 17), DTYPES[dtype])
        known, got = solved(arrays, case.options)
        for ours, theirs in zip(got, expected(known, *arrays[3:], case.options), strict=False):
            close(ours, theirs, TOLERANCE[dtype])
        assert got.attn_bias is None or got.attn_bias.shape == arrays[4].shape


@pytest.mark.parametrize("heads", [(1, 1), (130, 64)])
def test_head_sizes(heads: tuple[int, int]) -> None:
    arrays = inputs(CASES["padding"], (1, 2, 1, 70, 90), heads, np.float32)
    known, got = solved(arrays, AttentionOptions())
    for ours, theirs in zip(got, expected(known, *arrays[3:], AttentionOptions()), strict=False):
        close(ours, theirs, TOLERANCE["f32"])


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_autograd_agrees_with_torch_and_takes_the_gradient_of_lse(alignment: str) -> None:
    import torch

    case = Case("b1qk", "1h1k")
    arrays = inputs(case, (2, 4, 2, 37, 53), (33, 17), np.float32)
    arrays[3][0, 0, 3] = False  # a row that keeps nothing
    arrays[4] = arrays[4][0]  # of fewer dims than the scores
    options = AttentionOptions(0.2, 1.5, True, alignment)
    ours = [torch.from_numpy(a).requires_grad_(a.dtype != bool) for a in arrays]
    theirs = [t.detach().double().requires_grad_() for t in (*ours[:3], ours[4])]
    names = ("query", "key", "value", "attn_bias")
    settings = {"scale": 0.2, "softcap": 1.5, "capped": True, "causal": alignment,
                "return_lse": True, "mask": ours[3]}  # fmt: skip
    want = reference("attention")(dict(zip(names, theirs, strict=True)) | settings)  # type: ignore[misc]
    got = attention(*ours, options=options, return_lse=True)
    random = [torch.randn(t.shape, generator=torch.manual_seed(i)) for i, t in enumerate(got)]
    random[1] = torch.where(got.lse.isinf(), 0, random[1])

    def loss(result: Any, lse: Any) -> Any:
        finite = torch.where(lse.isinf(), 0, lse)
        return (result * random[0]).sum() + (finite * random[1]).sum()

    leaves = [*ours[:3], ours[4]]
    for a, b in zip(torch.autograd.grad(loss(*got), leaves),
                    torch.autograd.grad(loss(*want), theirs), strict=True):  # fmt: skip
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    alone = attention(*ours, options=options)
    assert isinstance(alone, torch.Tensor)
    alone.backward(random[0])
    assert ours[4].grad.shape == arrays[4].shape


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_keys_values_and_rows_have_no_influence(bad: float) -> None:
    arrays = inputs(Case(mask="bhqk"), (2, 2, 1, 70, 150), (16, 24), np.float32)
    arrays[3][..., 5:9] = False
    arrays[3][:, :, 11:13] = False
    known, want = solved(arrays, AttentionOptions())
    assert all(np.isfinite(g).all() for g in want[:3])
    for which in (2, 3):  # keys and values that nothing keeps
        known[which][:, :, 5:9] = bad
    for which in (0, 1, 4):  # rows that keep nothing
        known[which][:, :, 11:13] = bad
    got = attention_backward(*known, mask=arrays[3])
    for name, a, b in zip(got._fields, got[:3], want[:3], strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)
    assert not got.query[:, :, 11:13].any() and not got.key[:, :, 5:9].any()


def test_rows_whose_bias_is_minus_infinity_have_no_gradient() -> None:
    arrays = inputs(Case(bias="11qk"), (1, 2, 2, 20, 40), (8, 8), np.float32)
    arrays[4][:, :, 3:9] = -np.inf
    arrays[4][:, :, :, 7] = -np.inf
    known, got = solved(arrays, AttentionOptions())
    assert np.isneginf(known[5][:, :, 3:9]).all()
    for ours, theirs in zip(got, expected(known, *arrays[3:], AttentionOptions()), strict=True):
        close(ours, theirs, TOLERANCE["f32"])
    assert not got.query[:, :, 3:9].any() and not got.attn_bias[:, :, 3:9].any()


@pytest.mark.parametrize("pattern", ["bhqk", "111k", "b1q1", "1111"])
def test_a_bias_gets_its_gradient_in_its_own_shape(pattern: str) -> None:
    arrays = inputs(Case(bias=pattern), (2, 4, 2, 9, 13), (8, 8), np.float32)
    known, got = solved(arrays, AttentionOptions())
    assert got.attn_bias.shape == arrays[4].shape and got.attn_bias.dtype == np.float32
    close(got.attn_bias, expected(known, *arrays[3:], AttentionOptions())[3], TOLERANCE["f32"])


def emulated(
    known: list[Array], mask: Array, bias: Array, options: AttentionOptions
) -> list[Array]:
    """Gradients by kernels for CUDA that run on the CPU, matrix units too; memory is poisoned."""
    with emulated_cuda():
        device("cuda").driver.poison(True)
        there = [
            None if a is None else rudnn.tensor(a, device="cuda") for a in (*known, mask, bias)
        ]
        got = attention_backward(*there, options=options)
        return [g.numpy() for g in got[:3]]


@pytest.mark.parametrize(
    ("dtype", "name", "heads"), [("f16", "all", (33, 17)), ("bf16", "mask", (80, 128))]
)
def test_matrix_units_emulated(dtype: str, name: str, heads: tuple[int, int]) -> None:
    """Keys and rows that nothing keeps are NaN or infinite."""
    case = CASES[name]
    for sizes in ((2, 6, 3, 37, 133), (1, 2, 1, 70, 20), (2, 4, 2, 1, 5), (2, 4, 2, 5, 0)):
        arrays = inputs(case, sizes, heads, DTYPES[dtype])
        if name == "mask":
            arrays[3][..., 5:9] = False
            arrays[3][:, :, 11:13] = False
        known, _ = solved(arrays, case.options)
        want = expected(known, *arrays[3:], case.options)
        if name == "mask":
            for which, (first, last) in enumerate([(11, 13), (11, 13), (5, 9), (5, 9)]):
                known[which][:, :, first + 1 : last] = np.nan
                known[which][:, :, first : first + 1] = np.inf
        for ours, theirs in zip(emulated(known, *arrays[3:], case.options), want, strict=False):
            close(ours, theirs, TOLERANCE[dtype])


def test_what_is_not_finite_and_counts_adds_alike_by_matrix_units() -> None:
    """Such values leave shared memory for marks: the results' kinds are the oracle's."""
    arrays = inputs(Case(mask="bhqk"), (1, 3, 3, 70, 90), (120, 24), np.float16)
    known, _ = solved(arrays, AttentionOptions())
    grad, query, key = known[:3]
    grad[0, 0, 3, 5], grad[0, 0, 40, 5] = np.inf, -np.inf
    grad[0, 1, 50, 9], query[0, 1, 60, 119] = np.nan, np.inf
    key[0, 2, 77, 2] = -np.inf
    want = expected(known, *arrays[3:], AttentionOptions())
    for ours, theirs in zip(emulated(known, *arrays[3:], AttentionOptions()), want, strict=False):
        for kind in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(kind(ours), kind(theirs))
        assert np.isfinite(theirs).any() and not np.isfinite(theirs).all()
        close(*(np.nan_to_num(a, posinf=0, neginf=0) for a in (ours, theirs)), TOLERANCE["f16"])


@needs_vulkan
@pytest.mark.parametrize("pattern", ["bhqk", "111k"])
def test_a_bias_gets_its_gradient_on_a_grid(pattern: str) -> None:
    arrays = inputs(Case(bias=pattern), (2, 4, 2, 9, 13), (8, 8), np.float32)
    known, want = solved(arrays, AttentionOptions())
    there = [rudnn.tensor(a, device="vulkan") for a in (*known, arrays[4])]
    got = attention_backward(*there[:6], attn_bias=there[6])
    for ours, theirs in zip(got, want, strict=True):
        close(ours.numpy(), theirs, TOLERANCE["f32"])


def test_a_bias_of_another_shape_is_refused() -> None:
    q = np.zeros((1, 2, 4, 8), np.float32)
    lse = np.zeros((1, 2, 4), np.float32)
    with pytest.raises(AttentionError, match="attn_bias"):
        attention_backward(q, q, q, q, q, lse, attn_bias=np.zeros((1, 2, 3, 4), np.float32))
    with pytest.raises(AttentionError, match="needs causal_alignment among"):
        options = AttentionOptions(causal_alignment="left")
        attention_backward(q, q, q, q, q, lse, options=options)


def test_the_same_bits_again_and_for_heads_alone() -> None:
    """What one task adds up does not depend on the others."""
    arrays = inputs(Case(), (2, 4, 2, 150, 260), (33, 17), np.float32)
    known, first = solved(arrays, AttentionOptions())
    for _ in range(3):
        again = attention_backward(*known)
        assert all(digest(a) == digest(b) for a, b in zip(first[:3], again[:3], strict=True))
    alone = attention_backward(*(a[1:, 2:] if a.shape[1] == 4 else a[1:, 1:] for a in known))
    for a, b in zip(first[:3], alone[:3], strict=True):
        half = a.shape[1] // 2
        assert digest(a[1:, half:]) == digest(b)


def digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("target", ["llvm", "cuda:sm_90a"])
def test_memory_grows_with_rows_and_keys_not_with_their_product(target: str) -> None:
    from rudnn.samples import specialise

    sizes = {"B": 1, "Hq": 8, "Hkv": 8, "Q": 16384, "K": 16384, "D": 64, "Dv": 64}
    bound = specialise(attention_backward_op, sizes)
    program = schedule(bound.graph, Layouts(frozenset(), frozenset()), target)
    names = {identifier(n): v for n, v in bound.sizes.items()}
    assert size_of(program.workspace.total, names) < 64 * 2**20


def test_the_backward_is_part_of_the_face() -> None:
    assert rudnn.attention.attention_backward is attention_backward
