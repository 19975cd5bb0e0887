"""What a service is started with."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..dsl.errors import ServiceError, require_host
from .projections import Projections

_need = partial(require_host, error=ServiceError)


@dataclass(frozen=True)
class Settings:
    """The options of `rudnn serve`; raises ServiceError for those that do not go together.

    Parameters
    ----------
    kernel : str
        Of requests that ask for none.
    pinned : bool
        Refuse requests that ask for another kernel.
    dim, seed : int
        Width and seed of the projection weights where there is no file.
    weights : str, optional
        A .npz or .safetensors file with `query`, `key`, `value`.
    store : str, optional
        A SQLite file; None keeps representations in memory.
    store_bytes : int
        The most that a store in memory takes.
    device : str, optional
        A device by name; None is the CPU.
    workers : int
        Processes; more than one need a store.
    window : float
        Seconds that a request waits for others to share its kernel call.
    batch_rows, queue_rows : int
        The most rows of one kernel call, and waiting for one.
    max_rows, max_body : int
        The most rows, and bytes, of one request.
    """

    kernel: str = "flash"
    pinned: bool = False
    dim: int = 4
    seed: int = 0
    weights: str | None = None
    store: str | None = None
    store_bytes: int = 1 << 30
    device: str | None = None
    workers: int = 1
    window: float = 0.001
    batch_rows: int = 4096
    queue_rows: int = 65536
    max_rows: int = 1024
    max_body: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("workers", "batch_rows", "queue_rows", "max_rows", "max_body", "store_bytes"):
            _need(getattr(self, name) >= 1, f"{name} of 1 or more", getattr(self, name))
        _need(0 <= self.window <= 60, "a window from 0 to 60 s", self.window)
        _need(self.max_rows <= self.queue_rows, "a queue that holds the largest request",
              f"queue_rows={self.queue_rows}, max_rows={self.max_rows}")  # fmt: skip
        _need(self.workers == 1 or self.store is not None, "--store PATH for workers to share",
              f"workers={self.workers} and a store in memory")  # fmt: skip

    def projections(self) -> Projections:
        """The weights meant. Raises ServiceError."""
        if self.weights is None:
            return Projections.seeded(self.dim, self.seed)
        return Projections.load(Path(self.weights))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))
