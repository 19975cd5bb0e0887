"""`serve`."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

from .arguments import BadArgument
from .output import waiting

_NEEDED = ("fastapi", "fastapi_offline", "orjson", "prometheus_client", "uvicorn")


def serve(host: str, port: int, **options: Any) -> int:
    """Serve until told to stop; `options` are those of `service.Settings`."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BadArgument(f"serve needs pip install 'rudnn[serve]', got no {', '.join(missing)}")
    from ..service.server import serve as run
    from ..service.settings import Settings

    settings = Settings(**options)

    with contextlib.ExitStack() as starting:
        starting.enter_context(waiting("compiling kernels"))

        def ready(address: str) -> None:
            starting.close()
            kept = f"in {settings.store}" if settings.store else "in memory"
            print(f"listening on {address}: kernel {settings.kernel}, representations {kept}",
                  flush=True)  # fmt: skip

        run(settings, host, port, ready)
    return 0
