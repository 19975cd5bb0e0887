"""The attention service over HTTP: `rudnn serve` as a process, asked as its users would."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rudnn.cli import main
from rudnn.service import Projections

pytest.importorskip("fastapi_offline")
pytest.importorskip("prometheus_client")
from service_client import Load, Server, expected, load, running  # noqa: E402

ROW = [0.5, 0.1, 0.4, 0.8]
WEIGHTS = Projections.seeded(4, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--max-rows", 300, "--max-body", 100_000) as made:
        yield made


# --- what the seed describes ---


def test_a_row_is_answered_and_its_representation_retrieved(server: Server) -> None:
    reply = server.ask("POST", "/process", ROW)
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    np.testing.assert_allclose(reply.json, expected(np.array([ROW]), WEIGHTS)[0], atol=1e-6)
    one = server.ask("GET", f"/retrieve/{reply.id}").json
    assert one["output"] == reply.json and one["kernel"] == "flash"
    assert abs(one["created"] - time.time()) < 60
    assert server.retrieve()[reply.id] == one


def test_curl_needs_no_content_type(server: Server) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what `curl -d` says
    assert server.ask("POST", "/process", ROW, **form).status == 200


@pytest.mark.parametrize("kernel", ["dense", "flash"])
def test_rows_attend_to_each_other_by_any_kernel(server: Server, kernel: str) -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, (200, 4)).round(3)
    reply = server.ask("POST", f"/process?kernel={kernel}", rows.tolist())
    np.testing.assert_allclose(reply.json, expected(rows, WEIGHTS), rtol=0, atol=1e-6)
    assert server.ask("GET", f"/retrieve/{reply.id}").json["kernel"] == kernel


@pytest.mark.parametrize("kernel", ["dense", "flash"])
def test_weights_sum_to_one(server: Server, kernel: str) -> None:
    rows = np.random.default_rng(1).uniform(-1, 1, (20, 4))
    before = server.ask("GET", "/health").json["stored"]
    weights = np.array(server.ask("POST", f"/weights?kernel={kernel}", rows.tolist()).json)
    assert weights.shape == (20, 20) and (weights > 0).all()
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(
        weights @ (rows @ WEIGHTS.value), expected(rows, WEIGHTS), rtol=0, atol=1e-6
    )
    assert server.ask("GET", "/health").json["stored"] == before


def test_retrieve_goes_by_pages(server: Server) -> None:
    ids = [server.ask("POST", "/process", ROW).id for _ in range(5)]
    page = server.ask("GET", f"/retrieve?after={ids[0]}&limit=3").json
    assert [r["id"] for r in page["representations"]] == ids[1:4]
    rest = server.ask("GET", page["next"]).json
    assert [r["id"] for r in rest["representations"]] == ids[4:] and rest["next"] is None


# --- what else is there ---


def test_health_says_what_is_taken(server: Server) -> None:
    health = server.ask("GET", "/health").json
    assert health["status"] == "ok" and health["kernels"] == ["dense", "flash"]
    assert (health["dim"], health["output_dim"], health["max_rows"]) == (4, 4, 300)
    edge = health["largest_input"] * 0.999
    assert server.ask("POST", "/process", [edge, -edge, edge, edge]).status == 200
    assert server.ask("POST", "/process", [2 * edge, 0, 0, 0]).status == 422


def test_metrics_count_by_route(server: Server) -> None:
    before = server.metric("rudnn_rows_total")
    server.ask("POST", "/process", [ROW] * 7)
    server.ask("GET", "/retrieve/1")
    server.ask("GET", "/no/such/path/of/a/guess")
    assert server.metric("rudnn_rows_total") == before + 7
    text = server.ask("GET", "/metrics").body.decode()
    assert 'rudnn_requests_total{method="POST",route="/process",status="200"}' in text
    assert 'route="/retrieve/{id}"' in text and 'route="other",status="404"' in text
    assert "/no/such" not in text
    assert server.metric("rudnn_stored_representations") == len(server.retrieve())


def test_documentation_needs_no_other_host(server: Server) -> None:
    page = server.ask("GET", "/docs").body.decode()
    assert "swagger" in page and "https://" not in page and "//cdn" not in page
    for asset in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert f"/docs-static/{asset}" in page
        assert server.ask("GET", f"/docs-static/{asset}").status == 200
    document = server.ask("GET", "/openapi.json").json
    paths = {"/process", "/weights", "/retrieve", "/retrieve/{id}", "/health", "/metrics"}
    assert set(document["paths"]) == paths
    process = document["paths"]["/process"]["post"]
    assert set(process["responses"]) >= {"200", "400", "413", "422", "503"}
    example = process["requestBody"]["content"]["application/json"]["schema"]["example"]
    assert server.ask("POST", "/process", example).status == 200


# --- bad requests ---


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "told"),
    [
        ("POST", "/process", b"nonsense", 400, "needs JSON, an array of 4 numbers"),
        ("POST", "/process", b"", 400, "needs JSON"),
        ("POST", "/process", [1, 2, 3], 422, "needs 4 numbers in a row, got 3 in row 0"),
        ("POST", "/process", b"[1,2,3,1e39]", 422, "needs numbers of magnitude up to"),
        ("POST", "/process", [ROW] * 301, 413, "needs at most 300 rows, got 301"),
        ("POST", "/process", b" " * 100_001, 413, "needs a body of at most 100000 bytes"),
        ("POST", "/process?kernel=sparse", ROW, 422, "needs a kernel among dense, flash, got"),
        ("POST", "/weights", [ROW] * 257, 413, "needs at most 256 rows for weights, got 257"),
        ("GET", "/retrieve/999999", None, 404, "needs the id of a stored representation"),
        ("GET", "/retrieve/x", None, 422, "id: needs what should be a valid integer"),
        ("GET", f"/retrieve/{2**63}", None, 422, "id: needs what should be less than or equal"),
        ("GET", "/retrieve?limit=0", None, 422, "limit: needs"),
        ("GET", "/retrieve?after=-1", None, 422, "after: needs"),
        ("GET", "/process", None, 405, "Method Not Allowed: GET /process"),
        ("GET", "/nowhere", None, 404, "Not Found: GET /nowhere"),
    ],
)  # fmt: skip
def test_bad_requests_are_told_why(
    server: Server, method: str, path: str, body: object, status: int, told: str
) -> None:
    reply = server.ask(method, path, body)
    assert reply.status == status and told in reply.json["error"]
    assert set(reply.json) == {"error"}
    assert server.ask("GET", "/health").status == 200


def raw(server: Server, sent: bytes) -> bytes:
    """What comes back for bytes, until the server closes or says nothing for a second."""
    with socket.create_connection((server.host, server.port), timeout=1) as connection:
        connection.sendall(sent)
        got = b""
        try:
            while part := connection.recv(65536):
                got += part
        except (TimeoutError, ConnectionError):
            pass
        return got


def test_a_body_of_unsaid_length_is_bounded_too(server: Server) -> None:
    head = b"POST /process HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    got = raw(server, head + chunk * 8)
    assert got.startswith(b"HTTP/1.1 413") and b"needs a body of at most 100000 bytes" in got


def test_clients_that_break_off_do_no_harm(server: Server) -> None:
    head = b"POST /process HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n"
    for sent in (head + b"[1,2", b"POST /pro", b"\x16\x03\x01 not HTTP\r\n\r\n"):
        with socket.create_connection((server.host, server.port)) as connection:
            connection.sendall(sent)
    assert server.ask("POST", "/process", ROW).status == 200


# --- concurrency ---


def check_load(server: Server, clients: int, seconds: float) -> None:
    before = server.metric("rudnn_call_requests_count")
    found = load(server, clients, seconds)
    assert not found.errors and len(found.answers) >= 2 * clients
    assert not found.lost(server.retrieve())
    assert found.greatest_difference <= 1e-6
    assert server.metric("rudnn_call_requests_count") - before < len(found.answers) / 4
    for rows, _, body in list(found.answers.values())[:500]:
        want = expected(rows, WEIGHTS)
        got = np.array(json.loads(body)).reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_200_clients_at_once_lose_nothing_and_share_calls(server: Server) -> None:
    check_load(server, 200, 4)


def test_workers_share_a_store(tmp_path: Path) -> None:
    with running("--store", tmp_path / "s.db", "--workers", 2) as server:
        check_load(server, 50, 3)
        # Metrics are those of all workers, whichever is asked.
        stored = server.metric("rudnn_stored_representations")
        assert stored == len(server.retrieve())
        sums = {server.metric("rudnn_call_requests_sum") for _ in range(10)}
        assert sums == {stored}
        assert server.stop() in (0, -signal.SIGTERM)
    assert [p.name for p in tmp_path.iterdir()] == ["s.db"]


def test_a_worker_that_dies_is_replaced_and_forgotten(tmp_path: Path) -> None:
    with running("--store", tmp_path / "s.db", "--workers", 2, "--window-ms", 500) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        workers = [int(pid) for pid in children.read_text().split()
                   if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]  # fmt: skip
        assert len(workers) == 2
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(server.ask, "POST", "/process", [ROW] * 3) for _ in range(8)]
            time.sleep(0.2)
            os.kill(workers[0], signal.SIGKILL)
            answered = [a.result() for a in asked if a.exception() is None]
        stored = server.retrieve()
        assert all(r.status == 200 and r.id in stored for r in answered)
        assert server.ask("POST", "/process", ROW).status == 200
        assert server.metric("rudnn_waiting_rows") == 0


def test_workers_end_with_their_supervisor(tmp_path: Path) -> None:
    with running("--store", tmp_path / "s.db", "--workers", 2) as server:
        id = server.ask("POST", "/process", ROW).id
        server.process.kill()
        server.process.wait(60)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                server.ask("GET", "/health")
            except OSError:
                break
            time.sleep(0.1)
        else:
            raise AssertionError("workers go on without their supervisor")
    with running("--store", tmp_path / "s.db") as again:
        assert id in again.retrieve()


# --- ends ---


@pytest.mark.parametrize("answers", [1, 300])
def test_all_that_was_answered_survives_a_kill(tmp_path: Path, answers: int) -> None:
    found = Load()

    def kill() -> None:
        while len(found.answers) < answers and len(found.errors) < 40:
            time.sleep(0.001)
        server.process.kill()

    with running("--store", tmp_path / "s.db") as server:
        killer = threading.Thread(target=kill)
        killer.start()
        load(server, 40, 60, found)  # each client ends with its connection
        killer.join()
    assert len(found.answers) >= answers and len(found.errors) == 40
    with running("--store", tmp_path / "s.db") as again:
        assert not found.lost(again.retrieve())
        assert again.ask("POST", "/process", ROW).id > max(found.answers)


def test_a_stop_answers_what_was_accepted(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    with running("--store", store, "--window-ms", 4000) as server, ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(server.ask, "POST", "/process", [ROW] * 2) for _ in range(20)]
        deadline = time.monotonic() + 4
        while server.metric("rudnn_waiting_rows") < 40 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.stop() in (0, -signal.SIGTERM)
        replies = [a.result() for a in asked]
    assert {r.status for r in replies} == {200}
    with running("--store", store) as again:
        stored = again.retrieve()
    assert {r.id for r in replies} == set(stored)


def test_more_than_may_wait_is_refused_and_told_to_come_again() -> None:
    with running("--window-ms", 4000, "--queue-rows", 10, "--max-rows", 10) as server:
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(server.ask, "POST", "/process", [ROW] * 2) for _ in range(12)]
            replies = [a.result() for a in asked]
        refused = [r for r in replies if r.status == 503]
        assert len(refused) == 7 and all(r.headers["retry-after"] == "1" for r in refused)
        assert "needs at most 10 rows waiting" in refused[0].json["error"]
        assert [r.status for r in replies].count(200) == 5


def test_a_full_store_is_told(tmp_path: Path) -> None:
    import resource

    with running("--store", tmp_path / "s.db") as server:
        size = os.path.getsize(tmp_path / "s.db") + 200_000
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, size))
        replies = [server.ask("POST", "/process", [ROW] * 1000) for _ in range(12)]
        assert replies[0].status == 200 and replies[-1].status in (503, 507)
        assert "needs" in replies[-1].json["error"]
        kept = {r.id for r in replies if r.status == 200}
        assert set(server.retrieve()) == kept


# --- settings ---


def test_a_pinned_kernel_and_weights_of_ones_own(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sizes = {"query": (3, 8), "key": (3, 8), "value": (3, 2)}
    tensors = {n: random.standard_normal(s).astype(np.float32) for n, s in sizes.items()}
    np.savez(tmp_path / "w.npz", **tensors)
    with running("--weights", tmp_path / "w.npz", "--kernel", "dense", "--pinned") as server:
        rows = random.uniform(-1, 1, (5, 3))
        reply = server.ask("POST", "/process", rows.tolist())
        want = expected(rows, Projections(**tensors))
        np.testing.assert_allclose(reply.json, want, rtol=0, atol=2e-6)
        assert server.ask("GET", "/health").json["kernels"] == ["dense"]
        assert server.ask("POST", "/process?kernel=dense", rows.tolist()).status == 200
        refused = server.ask("POST", "/process?kernel=flash", rows.tolist())
        assert refused.status == 422 and "needs a kernel among dense" in refused.json["error"]


KERNELS_OF_A_PACKAGE = """
import numpy as np

class Mean:
    def __init__(self, scale):
        pass
    def score(self, q, k, mask=None):
        return self
    def aggregate(self, v):
        return np.broadcast_to(np.asarray(v).mean(1, keepdims=True), v.shape)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """A package that offers kernels, found by this process and those it starts."""
    folder = tmp_path / "package"
    metadata = folder / "kernels_of_a_package-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "kernels_of_a_package.py").write_text(KERNELS_OF_A_PACKAGE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels_of_a_package\n")
    (metadata / "entry_points.txt").write_text(
        "[rudnn.kernels]\nmean = kernels_of_a_package:Mean\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(folder))
    return metadata


def test_a_package_offers_a_kernel(package: Path) -> None:
    with running("--kernel", "mean") as server:
        assert server.ask("GET", "/health").json["kernels"] == ["dense", "flash", "mean"]
        rows = np.random.default_rng(0).uniform(-1, 1, (3, 4))
        mean = (rows @ WEIGHTS.value).mean(0)
        answer = server.ask("POST", "/process", rows.tolist())
        np.testing.assert_allclose(answer.json, [mean] * 3, atol=1e-6)
        weights = server.ask("POST", "/weights?kernel=mean", rows.tolist())
        np.testing.assert_allclose(weights.json, np.full((3, 3), 1 / 3), atol=1e-6)
        exact = server.ask("POST", "/process?kernel=dense", rows.tolist())
        np.testing.assert_allclose(exact.json, expected(rows, WEIGHTS), rtol=0, atol=1e-6)


def test_a_packages_kernel_that_is_missing_is_one_line(package: Path, capsys) -> None:
    (package / "entry_points.txt").write_text("[rudnn.kernels]\nlost = nowhere:Lost\n")
    assert main(["serve", "--kernel", "lost"]) == 2
    error = capsys.readouterr().err
    assert "needs a kernel that can be loaded, got lost = nowhere:Lost" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--kernel sparse", "needs a kernel among dense, flash, got 'sparse'"),
        ("--workers 2", "needs --store PATH for workers to share"),
        ("--weights nothing.npz", "needs weights that can be read, got nothing.npz"),
        ("--store /no/such/folder/s.db", "needs a store that can be read and written"),
        ("--device warp:0", "warp"),
        ("--port 99999", "65535"),
        ("--dim 0", "needs a width from 1 to 512, got 0"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(capsys, line: str, told: str) -> None:
    assert main(["serve", *line.split()]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_an_address_in_use_is_told(server: Server, capsys) -> None:
    assert main(["serve", "--port", str(server.port)]) == 2
    assert "Address already in use" in capsys.readouterr().err
