"""A running `rudnn serve`, and clients for it that need nothing but Python."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ID = "representation-id"


@dataclass
class Reply:
    """An answer: its status, its headers by lower-case name, its body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def id(self) -> int:
        return int(self.headers[ID])


@dataclass
class Server:
    """A server's process and address."""

    process: subprocess.Popen[str]
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """One request on a connection of its own; a body that is not bytes goes as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            found = {k.lower(): v for k, v in answer.getheaders()}
            return Reply(answer.status, found, answer.read())
        finally:
            connection.close()

    def retrieve(self) -> dict[int, dict[str, Any]]:
        """All that is stored, by id."""
        found: dict[int, dict[str, Any]] = {}
        path = "/retrieve?limit=1000"
        while path:
            page = self.ask("GET", path).json
            found |= {r["id"]: r for r in page["representations"]}
            path = page["next"]
        return found

    def metric(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        lines = self.ask("GET", "/metrics").body.decode().splitlines()
        mine = [t for t in lines if t.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(t.rsplit(" ", 1)[1]) for t in mine)

    def stop(self) -> int:
        """Ask it to stop, and return its exit code."""
        self.process.terminate()
        return self.process.wait(60)


@contextmanager
def running(*options: object) -> Iterator[Server]:
    """A server at a free port of the loopback, killed at the end if it still runs."""
    command = [sys.executable, "-m", "rudnn.cli", "serve", "--port", "0", *map(str, options)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()  # ends where the process does
            if not line.startswith("listening on "):
                errors.seek(0)
                raise AssertionError(f"the server did not start: {line}{errors.read()}")
            address = line.split()[2].rstrip(":").removeprefix("http://")
            host, _, port = address.rpartition(":")
            yield Server(process, host.strip("[]"), int(port))
        finally:
            process.kill()
            process.wait(60)
            process.stdout.close()


@dataclass
class Load:
    """What clients sent and got: (rows, kernel, body) by id, and what went wrong."""

    answers: dict[int, tuple[np.ndarray, str, bytes]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    greatest_difference: float = 0.0

    def lost(self, stored: dict[int, dict[str, Any]]) -> list[int]:
        """Ids of answers that are not in the store as they were given."""
        return [i for i, (_, kernel, body) in self.answers.items()
                if i not in stored or stored[i]["kernel"] != kernel
                or stored[i]["output"] != json.loads(body)]  # fmt: skip


def load(server: Server, clients: int, seconds: float, found: Load | None = None) -> Load:
    """Have clients send rows, each one request after the other, to both kernels in turn.

    `found`, if given, is added to as answers come. A broken connection ends its client.
    """
    found = found or Load()

    async def all_of_them() -> None:
        stop = time.monotonic() + seconds
        await asyncio.gather(*(_client(server, found, i, stop) for i in range(clients)))

    asyncio.run(all_of_them())
    return found


async def _client(server: Server, found: Load, seed: int, stop: float) -> None:
    random = np.random.default_rng(seed)
    try:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        while time.monotonic() < stop:
            rows = random.uniform(-1, 1, (random.integers(1, 12), 4)).round(3)
            sent = rows[0] if len(rows) == 1 else rows
            outputs = []
            for kernel in ("dense", "flash"):
                start = time.perf_counter()
                reply = await _post(reader, writer, f"/process?kernel={kernel}", sent)
                found.seconds.append(time.perf_counter() - start)
                if reply.status != 200:
                    found.errors.append(f"{reply.status}: {reply.body.decode()}")
                    continue
                if reply.id in found.answers:
                    found.errors.append(f"id {reply.id} came twice")
                found.answers[reply.id] = (rows, kernel, reply.body)
                outputs.append(np.array(reply.json))
            if len(outputs) == 2:
                difference = float(np.abs(outputs[0] - outputs[1]).max())
                found.greatest_difference = max(found.greatest_difference, difference)
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        found.errors.append(repr(error))


async def _post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, rows: np.ndarray
) -> Reply:
    body = json.dumps(rows.tolist()).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
                 .encode() + body)  # fmt: skip
    await writer.drain()
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {k.lower(): v for k, _, v in (t.partition(": ") for t in lines if t)}
    data = await reader.readexactly(int(headers["content-length"]))
    return Reply(int(status.split()[1]), headers, data)


def expected(rows: np.ndarray, projections: Any) -> np.ndarray:
    """Exact attention of rows [n, d] in f64, the seed's formula with a softmax that cannot
    overflow."""
    q, k, v = (rows @ w.astype(np.float64)
               for w in (projections.query, projections.key, projections.value))  # fmt: skip
    scores = q @ k.T / np.sqrt(rows.shape[1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def main() -> None:
    """python tests/service_client.py [CLIENTS [SECONDS [OPTION…]]]: a soak on this machine."""
    clients, seconds = int((sys.argv[1:] or ["200"])[0]), float((sys.argv[2:] or ["20"])[0])
    with running(*sys.argv[3:]) as server:
        found = load(server, clients, seconds)
        lost = found.lost(server.retrieve())
        calls = server.metric("rudnn_call_requests_count")
    times = np.array(found.seconds) * 1000
    print(f"{len(found.answers)} answers, {len(found.errors)} errors, {len(lost)} lost; dense and "
          f"flash differ by {found.greatest_difference:.1e}; {len(times) / seconds:.0f} a second, "
          f"{len(times) / max(calls, 1):.0f} a kernel call; {np.median(times):.0f} ms, 99 % within "
          f"{np.percentile(times, 99):.0f} ms")  # fmt: skip
    print(*found.errors[:5], sep="\n", end="")


if __name__ == "__main__":
    main()
