"""The body of a request: JSON to rows of f32, or an error that says what was needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from ..dsl.errors import ServiceError
from .batch import Array


class RequestError(ServiceError):
    """A request that cannot be answered; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Rows:
    """rows [n, d] f32; `flat` where they came as one array of d numbers."""

    rows: Array
    flat: bool


@dataclass(frozen=True)
class Format:
    """What a body must hold: rows of `dim` numbers, not past `largest` in magnitude."""

    dim: int
    largest: float
    max_rows: int

    def parse(self, body: bytes) -> Rows:
        """A body's rows. Raises RequestError."""
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(400, f"needs JSON, {self._wanted}, got {error}") from None
        if not isinstance(data, list) or not data:
            got = "an empty array" if data == [] else _kind(data)
            raise RequestError(422, f"needs {self._wanted}, got {got}")
        flat = not isinstance(data[0], list)
        rows = [data] if flat else data
        if len(rows) > self.max_rows:
            raise RequestError(413, f"needs at most {self.max_rows} rows, got {len(rows)}")
        for i, row in enumerate(rows):
            self._check(row, i)
        return Rows(self._numbers(rows), flat)

    @property
    def _wanted(self) -> str:
        return f"an array of {self.dim} numbers or an array of such rows"

    def _check(self, row: Any, i: int) -> None:
        if not isinstance(row, list):
            raise RequestError(422, f"needs an array as row {i}, got {_kind(row)}")
        if set(map(type, row)) - {float, int}:  # type(True) is bool
            j = next(j for j, x in enumerate(row) if type(x) not in (float, int))
            raise RequestError(422, f"needs numbers only, got {_kind(row[j])} in row {i}, "
                                    f"column {j}")  # fmt: skip
        if len(row) != self.dim:
            raise RequestError(422, f"needs {self.dim} numbers in a row, got {len(row)} in row {i}")

    def _numbers(self, rows: list[list[float]]) -> Array:
        wide = np.array(rows, np.float64)
        wrong = ~(np.abs(wide) <= self.largest)
        if wrong.any():
            i, j = (int(n) for n in np.argwhere(wrong)[0])
            raise RequestError(422, f"needs numbers of magnitude up to {self.largest:.3g}, "
                                    f"got {rows[i][j]} in row {i}, column {j}")  # fmt: skip
        return wide.astype(np.float32)


def _kind(value: Any) -> str:
    """A JSON value's kind, as one says it."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", dict: "an object", list: "an array"}
    return names.get(type(value), "a number")
