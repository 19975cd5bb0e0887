"""The attention service without HTTP: stages, kernels, batches, weights, store, bodies."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from rudnn.errors import ServiceError
from rudnn.service import (
    Projections,
    Settings,
    attend,
    attention_map,
    kernel_named,
    kernel_names,
    register,
)
from rudnn.service.batch import Fill, pack
from rudnn.service.kernels import attention_weights, weighted_values
from rudnn.service.pipeline import compose

pytest.importorskip("orjson")
from service_client import expected  # noqa: E402

from rudnn.service.batcher import Batcher  # noqa: E402
from rudnn.service.engine import Answer, Engine, Job, to_json  # noqa: E402
from rudnn.service.requests import Format, RequestError, Rows  # noqa: E402
from rudnn.service.store import Store, StoreFull  # noqa: E402

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


# --- bodies ---

FORMAT = Format(dim=4, largest=1e18, max_rows=3)


@pytest.mark.parametrize(
    ("body", "shape", "flat"),
    [
        (b"[0.5,0.1,0.4,0.8]", (1, 4), True),
        (b"[[1,2,3,4]]", (1, 4), False),
        (b" [ [1,2,3,4],\n[5e-50,6,-0.0,1e18] ] ", (2, 4), False),
    ],
)
def test_a_body_is_a_row_or_rows(body: bytes, shape: tuple[int, int], flat: bool) -> None:
    made = FORMAT.parse(body)
    assert (made.rows.shape, made.flat) == (shape, flat) and made.rows.dtype == np.float32


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"", 400, "needs JSON, an array of 4 numbers or an array of such rows, got"),
        (b"[1,2,3,", 400, "needs JSON"),
        (b"[NaN,1,2,3]", 400, "needs JSON"),
        (b"[1,2,3,Infinity]", 400, "needs JSON"),
        (b"\xff\xfe[1]", 400, "needs JSON"),
        (b"[" * 100_000, 400, "needs JSON"),
        (b"3", 422, "got a number"),
        (b"null", 422, "got null"),
        (b'{"rows": []}', 422, "got an object"),
        (b"[]", 422, "got an empty array"),
        (b"[[]]", 422, "needs 4 numbers in a row, got 0 in row 0"),
        (b"[1,2,3]", 422, "needs 4 numbers in a row, got 3 in row 0"),
        (b"[[1,2,3,4],[1,2,3,4,5]]", 422, "got 5 in row 1"),
        (b"[1,2,true,4]", 422, "needs numbers only, got a boolean in row 0, column 2"),
        (b'[[1,2,3,4],[1,"2",3,4]]', 422, "got a string in row 1, column 1"),
        (b"[1,2,3,[4]]", 422, "got an array in row 0, column 3"),
        (b"[[1,2,3,4],5]", 422, "needs an array as row 1, got a number"),
        (b"[[[1,2,3,4]]]", 422, "got an array in row 0, column 0"),
        (b"[1,2,3,null]", 422, "got null in row 0, column 3"),
        (b"[1,2,-1e19,4]", 422, "needs numbers of magnitude up to 1e+18, got -1e+19 in row 0"),
        (b"[1,2,3,1e999]", None, ""),
        (b"[1,2,3," + b"9" * 400 + b"]", None, ""),
        (b"[[1,2,3,4],[1,2,3,4],[1,2,3,4],[1,2,3,4]]", 413, "needs at most 3 rows, got 4"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_other_bodies_are_refused(body: bytes, status: int | None, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        FORMAT.parse(body)
    assert caught.value.status in ((status,) if status else (400, 422))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_answers_give_back_the_same_f32() -> None:
    values = np.random.default_rng(0).standard_normal((50, 3), np.float32) * 1e-3
    text = to_json(values)
    np.testing.assert_array_equal(np.array(json.loads(text), np.float32), values)
    assert to_json(np.array([0.1, 16777216, -0.0], np.float32)) == "[0.1,16777216.0,-0.0]"


# --- the store ---


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path: Path):
    made = Store(None if request.param == "memory" else str(tmp_path / "s.db"))
    yield made
    made.close()


def test_what_is_stored_comes_back_by_id_and_in_pages(store: Store) -> None:
    assert store.count() == 0 and store.page(0, 10, 1000) == ([], False)
    assert store.add([("dense", "[1]"), ("flash", "[2]"), ("dense", "[3]")]) == [1, 2, 3]
    assert store.add([("dense", "[4]")]) == [4] and store.count() == 4
    found = store.get(2)
    assert found is not None and (found.kernel, found.output) == ("flash", "[2]")
    assert abs(found.created - time.time()) < 60
    assert store.get(5) is None
    page, more = store.page(1, 2, 1000)
    assert [r.id for r in page] == [2, 3] and more
    page, more = store.page(3, 2, 1000)
    assert [r.id for r in page] == [4] and not more
    page, more = store.page(0, 10, 4)  # a page ends once it has enough bytes
    assert [r.id for r in page] == [1, 2] and more


def test_writers_and_readers_in_many_threads_lose_nothing(store: Store) -> None:
    def write(i: int) -> list[int]:
        ids = store.add([("dense", f"[{i}, {j}]") for j in range(5)])
        assert store.get(ids[0]).output == f"[{i}, 0]"
        return ids

    with ThreadPoolExecutor(8) as pool:
        ids = [i for made in pool.map(write, range(40)) for i in made]
    assert sorted(ids) == list(range(1, 201)) and store.count() == 200


def test_a_full_store_keeps_what_it_has() -> None:
    store = Store(None, most_bytes=64 << 10)
    text, kept = "[" + "1," * 2000 + "1]", 0
    with pytest.raises(StoreFull, match="needs room in the store"):
        for _ in range(100):
            kept = store.add([("dense", text)])[0]
    with pytest.raises(StoreFull):
        store.add([("dense", text)] * 2)
    assert kept > 5 and store.count() == kept and store.get(kept).output == text
    store.close()


def test_a_file_is_kept_and_shared(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    one, other = Store(path), Store(path)
    assert (one.add([("dense", "[1]")]), other.add([("dense", "[2]")])) == ([1], [2])
    assert [r.id for r in one.page(0, 9, 1000)[0]] == [1, 2]
    one.close()
    other.close()
    assert [p.name for p in tmp_path.iterdir()] == ["s.db"]
    again = Store(path)
    assert again.count() == 2
    again.close()


def test_several_can_make_a_file_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(6)

    def make(i: int) -> list[int]:
        barrier.wait()
        store = Store(str(tmp_path / "s.db"))
        try:
            return store.add([("dense", f"[{i}]")])
        finally:
            store.close()

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(make, range(6))) == [[i] for i in range(1, 7)]


def test_a_store_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but text long enough to be told apart " * 10)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE mine (x)")
    other.commit()
    other.close()
    for name in ("text", "other.db", "no/such/folder.db"):
        before = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
        with pytest.raises(ServiceError, match="needs a store"):
            Store(str(tmp_path / name))
        assert before is None or (tmp_path / name).read_bytes() == before


# --- batches of concurrent requests ---


def job(n: int = 1, kernel: str = "dense") -> Job:
    return Job(Rows(np.zeros((n, 4), np.float32), n == 1), kernel)


def test_requests_that_come_together_share_a_call() -> None:
    calls: list[int] = []

    def work(jobs):
        calls.append(len(jobs))
        return [Answer(i, str(len(j.rows.rows))) for i, j in enumerate(jobs)]

    async def run() -> list[Answer]:
        batcher = Batcher(work, 0.02, 4096, 10_000)
        answers = await asyncio.gather(*(batcher.submit(job(n)) for n in (1, 2, 3)))
        await batcher.close()
        return answers

    assert [a.body for a in asyncio.run(run())] == ["1", "2", "3"]
    assert calls == [3]


def test_a_full_queue_refuses_and_a_stop_answers_what_it_took() -> None:
    release = threading.Event()

    def work(jobs):
        release.wait(10)
        return [Answer(1, "")] * len(jobs)

    async def run() -> None:
        batcher = Batcher(work, 0, 4096, 3)
        taken = [asyncio.create_task(batcher.submit(job(n))) for n in (2, 1, 2)]
        with pytest.raises(RequestError, match="needs at most 3 rows waiting, got 3 and 2") as full:
            await taken.pop()
        assert full.value.status == 503
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="stopping"):
            await batcher.submit(job())
        release.set()
        assert [type(a) for a in await asyncio.gather(*taken)] == [Answer, Answer]
        await closing

    asyncio.run(run())


def test_a_failure_is_told_to_its_batch_and_ends_nothing() -> None:
    def work(jobs):
        if jobs[0].kernel == "bad":
            raise ServiceError("needs luck, got none")
        return [Answer(1, "fine")] * len(jobs)

    async def run() -> None:
        batcher = Batcher(work, 0.001, 4096, 100)
        with pytest.raises(ServiceError, match="luck"):
            await batcher.submit(job(kernel="bad"))
        cancelled = asyncio.create_task(batcher.submit(job()))
        await asyncio.sleep(0)
        cancelled.cancel()  # its client has gone
        assert (await batcher.submit(job())).body == "fine"
        await batcher.close()

    asyncio.run(run())


# --- the engine ---


def test_an_engine_answers_mixed_kernels_in_order_and_stores_all() -> None:
    engine = Engine(Settings(kernel="dense"))
    engine.warm()
    sent = requests([1, 3, 1, 2])
    jobs = [Job(Rows(r, len(r) == 1), KERNELS[i % 2]) for i, r in enumerate(sent)]
    answers = engine.process(jobs)
    assert [a.id for a in answers] == [1, 2, 3, 4]
    for rows, answer, kernel in zip(sent, answers, KERNELS * 2, strict=True):
        got = np.array(json.loads(answer.body))
        assert got.ndim == (1 if len(rows) == 1 else 2)
        want = expected(rows.astype(float), engine.weights)
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=0, atol=1e-6)
        stored = engine.store.get(answer.id)
        assert stored is not None
        assert (stored.kernel, stored.output) == (kernel, answer.body)
    engine.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"workers": 2}, "needs --store PATH for workers to share, got workers=2"),
        ({"workers": 0}, "needs workers of 1 or more, got 0"),
        ({"window": -1.0}, "needs a window from 0 to 60 s"),
        ({"max_rows": 10, "queue_rows": 9}, "needs a queue that holds the largest request"),
        ({"kernel": "sparse"}, "needs a kernel among"),
        ({"dim": 0}, "needs a width from 1 to 512, got 0"),
    ],
)
def test_settings_that_do_not_work_are_refused(options: dict, told: str) -> None:
    with pytest.raises(ServiceError, match=told):
        Engine(Settings(**options))


def test_settings_travel_to_workers() -> None:
    settings = Settings(kernel="dense", store="s.db", workers=3, window=0.25)
    assert Settings.from_json(settings.to_json()) == settings
