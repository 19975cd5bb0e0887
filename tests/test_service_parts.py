"""The attention service without HTTP: bodies, the store, concurrent requests, the engine."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rudnn.errors import ServiceError
from rudnn.service import Settings

pytest.importorskip("orjson")
from service_client import expected  # noqa: E402

from rudnn.service.batcher import Batcher  # noqa: E402
from rudnn.service.engine import Answer, Engine, Job, to_json  # noqa: E402
from rudnn.service.requests import Format, RequestError, Rows  # noqa: E402
from rudnn.service.store import Store, StoreFull  # noqa: E402

KERNELS = ("dense", "flash")


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
    sent = [np.full((n, 4), n / 8, np.float32) for n in (1, 3, 1, 2)]
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
