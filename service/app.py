"""The service over HTTP: routes, their documentation, errors as JSON."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as HttpError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..dsl.errors import RudnnError
from . import documents
from .batcher import Batcher
from .engine import MAP_ROWS, Engine, Job, to_json
from .metrics import Metrics
from .requests import RequestError, Rows
from .settings import Settings
from .store import Stored, StoreFull

# Where a worker process finds its settings: a server's workers take no arguments.
SETTINGS = "RUDNN_SERVE_SETTINGS"

ID_HEADER = "Representation-Id"
PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'", "Cache-Control": "no-cache"}

# Past so many bytes a body is read in a thread, that others need not wait.
_LONG_BODY = 1 << 16
# A page of representations ends where it has so many bytes.
_PAGE_BYTES = 4 << 20
_LAST_ID = 2**63 - 1

KernelQuery = Annotated[
    str | None, Query(description="The attention kernel; default: the service's.")
]
After = Annotated[int, Query(ge=0, le=_LAST_ID, description="Only ids past this one.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="The most that are returned.")]
Id = Annotated[int, InPath(ge=1, le=_LAST_ID, description="What the header of /process said.")]


def from_environment() -> FastAPI:
    """The app of a worker process, which stops when its supervisor is gone."""
    return create_app(Engine(Settings.from_json(os.environ[SETTINGS])), parent_process())


def create_app(engine: Engine, supervisor: BaseProcess | None = None) -> FastAPI:
    """The ASGI app of an engine, which is warmed at its start and closed at its end."""
    settings = engine.settings

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(engine.warm)
        if supervisor is not None:
            _stop_with(supervisor)
        batcher = Batcher(engine.process, settings.window, settings.batch_rows,
                          settings.queue_rows, engine.metrics.waiting)  # fmt: skip
        app.state.batcher = batcher
        yield
        await batcher.close()
        engine.close()

    app = FastAPIOffline(
        title="rudnn attention service", version=__version__, redoc_url=None, lifespan=lifespan,
        description=documents.about(engine), static_url="/docs-static",
    )  # fmt: skip
    app.add_middleware(Counted, metrics=engine.metrics)
    _add_errors(app)
    _add_routes(app, engine)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    # An editable install has links in place of the files.
    app.mount("/page", StaticFiles(directory=PAGE, follow_symlink=True), name="page")
    return app


def _stop_with(supervisor: BaseProcess) -> None:
    """Have this process stop, as SIGTERM stops it, when another one ends."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(supervisor.sentinel)
        signal.raise_signal(signal.SIGTERM)

    loop.add_reader(supervisor.sentinel, stop)


def _add_routes(app: FastAPI, engine: Engine) -> None:
    settings, store = engine.settings, engine.store

    def kernel_of(wanted: str | None) -> str:
        if wanted is not None and wanted not in engine.kernels:
            raise RequestError(422, f"needs a kernel among {', '.join(engine.kernels)}, "
                                    f"got {wanted!r}")  # fmt: skip
        return wanted or settings.kernel

    async def rows_of(request: Request) -> Rows:
        body = await _body(request, settings.max_body)
        if len(body) > _LONG_BODY:
            return await run_in_threadpool(engine.format.parse, body)
        return engine.format.parse(body)

    @app.post("/process", **documents.process(engine))
    async def process(request: Request, kernel: KernelQuery = None) -> Response:
        """Scaled dot-product attention of the rows among themselves; the result is stored.

        A row is projected to query, key and value. One row alone attends to itself.
        """
        chosen = kernel_of(kernel)
        answer = await app.state.batcher.submit(Job(await rows_of(request), chosen))
        return _json(answer.body, {ID_HEADER: str(answer.id)})

    @app.post("/weights", **documents.weights(engine))
    async def weights(request: Request, kernel: KernelQuery = None) -> Response:
        """The attention weights of the rows, n × n: how much row i takes of row j."""
        chosen, rows = kernel_of(kernel), (await rows_of(request)).rows
        if len(rows) > MAP_ROWS:
            raise RequestError(413, f"needs at most {MAP_ROWS} rows for weights, got {len(rows)}")
        made = await run_in_threadpool(engine.map, rows, chosen)
        return _json(to_json(made))

    @app.get("/retrieve", **documents.retrieve(engine))
    async def retrieve(after: After = 0, limit: Limit = 100) -> Response:
        """The stored representations in the order of their ids, a page at a time."""
        found, more = await run_in_threadpool(store.page, after, limit, _PAGE_BYTES)
        following = f"/retrieve?after={found[-1].id}&limit={limit}" if more else None
        page = {"representations": [_record(r) for r in found], "next": following}
        return _json(orjson.dumps(page))

    @app.get("/retrieve/{id}", **documents.retrieve_one(engine))
    async def retrieve_one(id: Id) -> Response:
        """One stored representation."""
        found = await run_in_threadpool(store.get, id)
        if found is None:
            raise RequestError(404, f"needs the id of a stored representation, got {id}")
        return _json(orjson.dumps(_record(found)))

    @app.get("/health", **documents.health(engine))
    async def health() -> Response:
        """Whether the service works, and what it takes."""
        stored = await run_in_threadpool(store.count)
        return _json(orjson.dumps({"status": "ok", "stored": stored, **documents.limits(engine)}))

    @app.get("/metrics", **documents.metrics())
    async def metrics() -> Response:
        """Counters and histograms in Prometheus' text format."""
        stored = await run_in_threadpool(store.count)
        return Response(engine.metrics.text(stored), media_type=CONTENT_TYPE_LATEST)


def _record(stored: Stored) -> dict[str, Any]:
    return {"id": stored.id, "created": stored.created, "kernel": stored.kernel,
            "output": orjson.Fragment(stored.output)}  # fmt: skip


def _json(body: str | bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, headers=headers, media_type="application/json")


async def _body(request: Request, most: int) -> bytes:
    """A request's body. Raises RequestError where it is longer than `most` bytes."""
    said = request.headers.get("content-length", "0")
    parts, size = [], 0
    if int(said) <= most:  # a number: servers refuse others
        async for part in request.stream():
            size += len(part)
            if size > most:
                break
            parts.append(part)
        else:
            return b"".join(parts)
    raise RequestError(413, f"needs a body of at most {most} bytes, got {max(int(said), size)}"
                            f"{'' if int(said) > most else ' or more'}")  # fmt: skip


def _add_errors(app: FastAPI) -> None:
    """Every error is {"error": "needs …, got …"}."""

    def told(status: int, message: str) -> Response:
        headers = {}
        if status == 413:
            headers["Connection"] = "close"  # the rest of the body is not wanted
        if status == 503:
            headers["Retry-After"] = "1"
        return Response(orjson.dumps({"error": message}), status, headers, "application/json")

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return told(error.status, str(error))

    @app.exception_handler(StoreFull)
    async def full(request: Request, error: StoreFull) -> Response:
        return told(507, str(error))

    @app.exception_handler(RudnnError)
    async def failed(request: Request, error: RudnnError) -> Response:
        return told(503, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        (first, *_) = error.errors()
        name, needed = first["loc"][-1], first["msg"].removeprefix("Input ")
        return told(422, f"{name}: needs what {needed}, got {first['input']!r}")

    @app.exception_handler(HttpError)
    async def other(request: Request, error: HTTPException) -> Response:
        return told(error.status_code, f"{error.detail}: {request.method} {request.url.path}")

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return told(500, "the service failed at this request: its log tells more")

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return told(400, "the client has gone")


class Counted:
    """Middleware that counts requests by method, route and status, and times them."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = 500, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            # A path of the client's choice would be a series of its own.
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.request(scope["method"], route, status, time.perf_counter() - start)
