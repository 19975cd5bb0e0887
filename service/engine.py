"""A service without its transport: requests in, stored answers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from ..dsl.errors import ServiceError
from ..runtime.tensor import device_named, tensor
from .batch import Array
from .kernels import kernel_named, kernel_names
from .metrics import Metrics
from .pipeline import Attend, Place, attend, attention_map, here
from .requests import Format, Rows
from .settings import Settings
from .store import Store

# Widest map of weights: what one can look at, and few enough scores to be no burden.
MAP_ROWS = 256


@dataclass(frozen=True)
class Job:
    """A request's rows and the kernel it wants."""

    rows: Rows
    kernel: str


@dataclass(frozen=True)
class Answer:
    """A stored representation: its id and its JSON text, a row if a row came, else rows."""

    id: int
    body: str


class Engine:
    """Weights, kernels and store of a service. Raises ServiceError where one of them is amiss."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.weights = settings.projections()
        self.format = Format(self.weights.dim, self.weights.largest_input, settings.max_rows)
        kernel_named(settings.kernel, self.weights.scale)  # refused before anything else is done
        self.kernels = (settings.kernel,) if settings.pinned else kernel_names()
        self._place = _place(settings.device)
        made = {name: kernel_named(name, self.weights.scale) for name in self.kernels}
        self._attend: dict[str, Attend] = {
            name: attend(self.weights, kernel, self._place) for name, kernel in made.items()
        }
        self._maps: dict[str, Callable[[Array], Array]] = {
            name: attention_map(self.weights, kernel, self._place) for name, kernel in made.items()
        }
        self.metrics = Metrics()
        self.store = Store(settings.store, settings.store_bytes)
        self._deliver = deliver(self.store)

    def warm(self) -> None:
        """Have kernels compiled before they are asked for.

        On the CPU there is one for any size, with a mask and without; other devices have several.
        """
        many = min(self.settings.max_rows, MAP_ROWS)
        batches = ((1,), (8,), (many,) * 8, (1, 2), (many, many - 1), (many, 1))
        for name in self.kernels:
            for lengths in batches:
                self._attend[name]([self._zeros(n) for n in lengths if n])
            for n in (2, 16, many):
                self._maps[name](self._zeros(n))

    def _zeros(self, rows: int) -> Array:
        return np.zeros((rows, self.weights.dim), np.float32)

    def process(self, jobs: Sequence[Job]) -> list[Answer]:
        """Attention for each job's rows: one call a kernel, one commit for all."""
        outputs: list[Array | None] = [None] * len(jobs)
        for kernel in dict.fromkeys(job.kernel for job in jobs):
            mine = [i for i, job in enumerate(jobs) if job.kernel == kernel]
            with self.metrics.call(kernel, [len(jobs[i].rows.rows) for i in mine]):
                made = self._attend[kernel]([jobs[i].rows.rows for i in mine])
            for i, output in zip(mine, made, strict=True):
                outputs[i] = output
        return self._deliver(list(zip(jobs, outputs, strict=True)))

    def map(self, rows: Array, kernel: str) -> Array:
        """The weights [n, n] of a request's rows [n, d]."""
        return self._maps[kernel](rows)

    def close(self) -> None:
        self.store.close()


def deliver(store: Store) -> Callable[[Sequence[tuple[Job, Any]]], list[Answer]]:
    """The last stage: (job, rows [n, E]) pairs → JSON, stored in one commit → answers."""

    def stage(made: Sequence[tuple[Job, Any]]) -> list[Answer]:
        texts = [to_json(y[0] if job.rows.flat else y) for job, y in made]
        records = [(job.kernel, text) for (job, _), text in zip(made, texts, strict=True)]
        return [Answer(i, t) for i, t in zip(store.add(records), texts, strict=True)]

    return stage


def to_json(array: Array) -> str:
    """f32 numbers in the fewest digits that give them back."""
    plain = np.ascontiguousarray(array)
    return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _place(device: str | None) -> Place:
    if device is None:
        return here
    found = device_named(device)
    return lambda array: tensor(array, device=found)


__all__ = ["MAP_ROWS", "Answer", "Engine", "Job", "ServiceError", "deliver", "to_json"]
