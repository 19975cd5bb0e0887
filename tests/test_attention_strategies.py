"""Strategies of attention on grids: which kernels they choose, what these compute, what is refused.

Vulkan runs on the software device; CUDA kernels, matrix units too, run emulated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_cases import CASES, DTYPES, Array, Case, close, expected, inputs, poison
from cuda_emulator import emulated_cuda
from spirv_kernels import needs_vulkan, validated

import rudnn
from rudnn.dsl import In, Out, axes, f32, op, softmax_sum, sum
from rudnn.dsl.dtypes import DType, bf16, f16
from rudnn.dsl.errors import AttentionError
from rudnn.dsl.oracle import evaluate
from rudnn.ops.attention import (
    AttentionOptions,
    Fallback,
    FlashAccelerated,
    FlashUnit,
    Strategy,
    attention,
    attention_op,
)
from rudnn.ops.attention_backward import attention_backward_op
from rudnn.runtime import compiler
from rudnn.runtime.device import device
from rudnn.runtime.targets.cuda import capability as cuda
from rudnn.runtime.targets.vulkan.compile import build as build_shaders
from rudnn.runtime.targets.vulkan.record import PORTABLE
from rudnn.runtime.targets.vulkan.spirv import BASELINE, matrix_unit
from rudnn.runtime.tvm_import import load_tvm
from rudnn.samples import specialise
from rudnn.schedules.grid import rules
from rudnn.schedules.grid.softmax_tiled import TiledSoftmaxSum
from rudnn.schedules.grid.weighted_tiles import TiledConfig
from rudnn.schedules.program import build, groups_of, prepared
from rudnn.schedules.rule import choose

# What a matrix unit adds: weights in the values' type.
TOLERANCE = {"f32": 1e-5, "f16": 3e-3, "bf16": 2e-2}
SIZES = ((2, 4, 2, 37, 70), (1, 2, 2, 70, 20), (1, 2, 1, 3, 0))


def attend(target: str, arrays: list[Array], options: AttentionOptions, strategy: Strategy | None,
           wanted: tuple[Array, Array]) -> tuple[Array, Array]:  # fmt: skip
    """The result and log-sum-exp of a call into poisoned memory."""

    def there(a: Array | None) -> Any:
        return None if a is None else rudnn.tensor(a, device=target)

    outs = tuple(there(poison(a.shape, d)) for a, d in
                 zip(wanted, (arrays[0].dtype, np.float32), strict=True))  # fmt: skip
    attention(*map(there, arrays), options=options, strategy=strategy, return_lse=True, out=outs)
    return outs[0].numpy(), outs[1].numpy()


def agrees(target: str, case: Case, heads: tuple[int, int], dtype: str,
           strategy: Strategy | None) -> None:  # fmt: skip
    """Against the float64 oracle; keys that no row keeps are NaN or infinite."""
    device(target).driver.poison(True)
    for sizes in SIZES:
        arrays = inputs(case, sizes, heads, DTYPES[dtype])
        if case.mask is not None and sizes[4]:
            arrays[3][..., 5:8] = False
        wanted = expected(arrays, case.options)
        if case.mask is not None and sizes[4]:
            arrays[1][:, :, 5] = arrays[2][:, :, 6] = np.nan
            arrays[2][:, :, 7] = np.inf
        got = attend(target, arrays, case.options, strategy, wanted)
        close(got[0], wanted[0], TOLERANCE[dtype])
        close(got[1], wanted[1], 1e-5 if dtype == "f32" else 1e-3)
    device(target).driver.poison(False)


@needs_vulkan
@pytest.mark.parametrize(
    ("name", "heads"), [("all", (33, 17)), ("mask", (7, 3)), ("plain", (100, 130))]
)
def test_tiles_on_vulkan(name: str, heads: tuple[int, int]) -> None:
    agrees("vulkan", CASES[name], heads, "f32", FlashUnit())


@pytest.mark.parametrize(
    ("dtype", "name", "heads"), [("f16", "all", (33, 17)), ("bf16", "mask", (64, 96))]
)
def test_matrix_units_emulated(dtype: str, name: str, heads: tuple[int, int]) -> None:
    with emulated_cuda():
        agrees("cuda", CASES[name], heads, dtype, FlashAccelerated())


def test_a_nan_that_counts_reaches_its_rows_by_matrix_units() -> None:
    """A block of values that are not all finite takes another path: it must decay and add alike."""
    arrays = inputs(Case(mask="b11k"), (1, 1, 1, 20, 150), (16, 16), np.float16)
    arrays[3][:] = True
    wanted = expected(arrays, AttentionOptions())
    arrays[2][0, 0, 100, 3] = np.nan
    arrays[2][0, 0, 7] = np.inf
    arrays[3][..., 7] = False
    with emulated_cuda():
        got, lse = attend("cuda", arrays, AttentionOptions(), FlashAccelerated(), wanted)
    assert np.isnan(got[..., 3]).all() and np.isfinite(np.delete(got, 3, 3)).all()
    assert np.isfinite(lse).all()


@op(out=Out("N", "E"), static=("D", "C", "E"), example={"N": 70, "M": 90, "D": 20, "C": 5, "E": 9})
def two_products(
    q: Any = In("N", "D"), k: Any = In("M", "D"), v: Any = In("M", "E"),
    p: Any = In("N", "C"), g: Any = In("M", "C"),
) -> Any:  # fmt: skip
    """Two contractions under a score, something after the sum."""
    n, m, d, c, e = axes("N", "M", "D", "C", "E")
    score = sum(q[n, d] * k[m, d], over=d) + sum(p[n, c] * g[m, c], over=c)
    return 2 * softmax_sum(score, v[m, e], over=m, where=n >= m) + 1


@op(out=Out("N", "E"), static=("E",), example={"N": 70, "M": 90, "E": 9})
def given_scores(x: Any = In("N", "M"), v: Any = In("M", "E")) -> Any:
    """Scores that are no contraction: no barrier of theirs is between two blocks of keys."""
    n, m, e = axes("N", "M", "E")
    return softmax_sum(x[n, m], v[m, e], over=m)


@needs_vulkan
@pytest.mark.parametrize("form", [two_products, given_scores], ids=lambda f: f.name)
def test_other_forms_by_tiles(form: Any) -> None:
    assert chosen(form, PORTABLE, f32)[0] == "softmax_sum_tiled"
    rng = np.random.default_rng(5)
    arrays = {n: rng.standard_normal([form.example[d] for d in i.dims]).astype(np.float32)
              for n, i in form.inputs.items()}  # fmt: skip
    graph = specialise(form).graph
    (want,) = evaluate(graph, arrays, dict(form.example), precision="float64")
    got = form(*(rudnn.tensor(a, device="vulkan") for a in arrays.values()))
    close(got.numpy(), want, TOLERANCE["f32"])


def chosen(declaration: Any, caps: Any, dtype: DType, **settings: Any) -> tuple[str, str]:
    """The rule that a grid chooses for softmax_sum, and the matrix unit."""
    dims = {n: s for n, s in settings.items() if n in ("D", "Dv")}
    options = {n: s for n, s in settings.items() if n not in dims}
    graph = prepared(specialise(declaration, dims, dtype, options).graph, caps)
    (group,) = groups_of(graph)
    rule = choose(rules(), group, caps)
    return rule.name, getattr(rule.default(group, caps), "unit", "")


def test_strategies_choose_kernels() -> None:
    """By default tiles where they fit, by matrix units where there are any for the dtype."""
    caps = cuda.record("sm_80")
    unit = next(u.intrinsic for u in caps.matrix if u.operands == "float16")
    tiled, whole = "softmax_sum_tiled", "softmax_sum"
    assert chosen(attention_op, caps, f16) == (tiled, unit)
    assert chosen(attention_op, caps, f32) == (tiled, "")
    assert chosen(attention_op, caps, f16, D=512, Dv=512)[0] == whole
    assert chosen(attention_op, caps, f16, strategy="FlashAccelerated") == (tiled, unit)
    assert chosen(attention_op, caps, f16, strategy="FlashUnit") == (tiled, "")
    assert chosen(attention_op, caps, f16, strategy="Fallback")[0] == whole
    with pytest.raises(AttentionError, match="FlashAccelerated needs a matrix unit for float32 "
                       "operands, got float16, bfloat16"):  # fmt: skip
        chosen(attention_op, caps, f32, strategy="FlashAccelerated")
    with pytest.raises(AttentionError, match="FlashUnit needs memory and registers for tiles of "
                       "head size 4096, got"):  # fmt: skip
        chosen(attention_op, caps, f16, D=4096, Dv=4096, strategy="FlashUnit")


def test_strategies_choose_units_of_the_gradients() -> None:
    """By matrix units where there are any for the dtype and the head fits, unless told."""
    caps = cuda.record("sm_80")
    unit = next(u.intrinsic for u in caps.matrix if u.operands == "float16")

    def units(dtype: DType, strategy: str = "auto", head: int = 64) -> list[str]:
        dims, options = {"D": head, "Dv": head}, {"strategy": strategy}
        graph = prepared(specialise(attention_backward_op, dims, dtype, options).graph, caps)
        chosen = [choose(rules(), g, caps).default(g, caps) for g in groups_of(graph)]
        return [c.unit for c in chosen if isinstance(c, TiledConfig)]

    for strategy in ("auto", "FlashAccelerated", "Fallback"):
        assert units(f16, strategy) == units(f16, strategy, 256) == [unit]
    assert units(f16, "FlashUnit") == units(f32) == units(f32, "Fallback") == [""]
    with pytest.raises(AttentionError, match="FlashAccelerated needs a matrix unit for float32 "
                       "operands, got float16, bfloat16"):  # fmt: skip
        units(f32, "FlashAccelerated")
    with pytest.raises(AttentionError, match="FlashAccelerated needs sums of factors of products"):
        units(f16, "FlashAccelerated", 512)


def test_a_thread_has_no_more_keys_than_its_marks_of_masked_ones_have_bits() -> None:
    caps = replace(cuda.record("sm_80"), subgroup=1, shuffle=False, registers=4096, matrix=())
    (group,) = groups_of(prepared(specialise(attention_op, None, f32).graph, caps))
    configs = list(TiledSoftmaxSum().space(group, caps))
    assert configs and all(c.keys // c.across <= 32 for c in configs)


def test_a_strategy_is_part_of_the_key() -> None:
    graphs = [specialise(attention_op, None, f32, {"strategy": s}).graph for s in
              ("auto", "FlashUnit", "Fallback")]  # fmt: skip
    layouts = compiler.Layouts(frozenset())
    assert len({compiler.key_of(g, layouts, "llvm") for g in graphs}) == 3


@needs_vulkan
def test_a_device_without_matrix_units_refuses_them() -> None:
    q = rudnn.tensor(np.zeros((1, 1, 2, 4), np.float32), device="vulkan")
    with pytest.raises(AttentionError, match="FlashAccelerated needs a matrix unit for float32"):
        attention(q, q, q, strategy=FlashAccelerated())
    attention(q, q, q, strategy=Fallback())


@needs_vulkan
@pytest.mark.parametrize("form", [attention_op, attention_backward_op], ids=lambda f: f.name)
@pytest.mark.parametrize(("dtype", "subgroup"), [(f16, 32), (bf16, 64)], ids=str)
def test_cooperative_matrices_are_valid(dtype: DType, subgroup: int, form: Any) -> None:
    unit = matrix_unit((16, 16, 16), dtype.name, subgroup)
    caps = replace(PORTABLE, shared_bytes=48 * 1024, max_threads=1024, subgroup=subgroup,
                   shuffle=True, matrix=(unit,))  # fmt: skip
    graph = specialise(form, None, dtype, {"strategy": "FlashAccelerated"}).graph
    names = frozenset(t.name for t in (*graph.inputs, *graph.outputs))
    load_tvm()
    program = build(graph, rules(), caps, names, names)
    features = replace(BASELINE, matrix=(unit,), shuffle=True, shuffle_relative=True)
    shaders, _ = build_shaders(program, "entry", caps, features)
    assert [validated(s, "vulkan1.3") for s in shaders]
