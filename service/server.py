"""The processes of a service: one, or a supervisor with its workers."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from ..dsl.errors import LaunchError, ServiceError
from .app import SETTINGS, create_app
from .engine import Engine
from .metrics import FOLDER
from .settings import Settings

_OPTIONS: dict[str, Any] = {
    "backlog": 2048,
    "log_level": "warning",
    "access_log": False,
    # How long a stop waits for clients that are slow to take their answers.
    "timeout_graceful_shutdown": 30,
}


def serve(settings: Settings, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; what was accepted until then is answered.

    `ready` is told the address once requests are answered there. Port 0 is any that is free.
    Raises ServiceError for settings that do not work and an address that cannot be had.
    """
    engine = Engine(settings)
    listening = _listen(host, port)
    bound = listening.getsockname()[1]
    address = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
    with listening:
        engine.warm()
        if settings.workers == 1:
            ready(address)
            server = uvicorn.Server(uvicorn.Config(create_app(engine), **_OPTIONS))
            server.run(sockets=[listening])
            if not server.started:
                raise LaunchError("needs a server that starts, got the error above")
            return
    engine.close()  # each worker opens its own
    threading.Thread(target=_await, args=(host, bound, lambda: ready(address)), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="rudnn-metrics-") as folder:
        os.environ |= {SETTINGS: settings.to_json(), FOLDER: folder}
        uvicorn.run(f"{__package__}.app:from_environment", factory=True, host=host, port=bound,
                    workers=settings.workers, **_OPTIONS)  # fmt: skip


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_OPTIONS["backlog"])
    except OSError as error:
        raise ServiceError(f"needs an address that can be had, got {host}:{port}: "
                           f"{error.strerror or error}") from error  # fmt: skip


def _await(host: str, port: int, then: Callable[[], None]) -> None:
    """Call `then` when a worker takes connections, which its supervisor does not tell."""
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            then()
            return
