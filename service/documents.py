"""What OpenAPI says of each route beyond its signature."""

from __future__ import annotations

from typing import Any

from .engine import MAP_ROWS, Engine

_NUMBER = {"type": "number"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "example": "needs 4 numbers in a row, got 3"}},
}
_RECORD = {
    "type": "object",
    "required": ["id", "created", "kernel", "output"],
    "properties": {
        "id": {"type": "integer"},
        "created": {"type": "number", "description": "Seconds since 1970."},
        "kernel": {"type": "string"},
        "output": {"type": "array", "items": {}, "description": "As it was answered."},
    },
}


def about(engine: Engine) -> str:
    """The service in a paragraph."""
    weights = engine.weights
    return (f"Exact scaled dot-product attention. A row has {weights.dim} numbers of magnitude up "
            f"to {weights.largest_input:.3g}, an answer's row {weights.value_dim}. Kernels: "
            f"{', '.join(engine.kernels)}.")  # fmt: skip


def limits(engine: Engine) -> dict[str, Any]:
    """What a client must know to send a request that is taken."""
    settings, weights = engine.settings, engine.weights
    return {
        "kernel": settings.kernel,
        "kernels": list(engine.kernels),
        "dim": weights.dim,
        "output_dim": weights.value_dim,
        "largest_input": weights.largest_input,
        "max_rows": settings.max_rows,
        "max_rows_of_weights": MAP_ROWS,
        "max_body": settings.max_body,
    }


def process(engine: Engine) -> dict[str, Any]:
    weights = engine.weights
    answer = {"oneOf": [_row(weights.value_dim), _rows(weights.value_dim)]}
    done = _answer("One row if one array of numbers came, else as many rows.", answer)
    done["headers"] = {"Representation-Id": {"description": "For /retrieve/{id}.",
                                             "schema": {"type": "integer"}}}  # fmt: skip
    return _route(done, 400, 413, 422, 503, 507) | _body(engine)


def weights(engine: Engine) -> dict[str, Any]:
    square = {"type": "array", "items": {"type": "array", "items": _NUMBER}}
    return _route(_answer("Each row sums to 1.", square), 400, 413, 422) | _body(engine)


def retrieve(engine: Engine) -> dict[str, Any]:
    page = {
        "type": "object",
        "required": ["representations", "next"],
        "properties": {
            "representations": {"type": "array", "items": _RECORD},
            "next": {"type": "string", "nullable": True, "description": "Where the rest is."},
        },
    }
    return _route(_answer("A page.", page), 422, 503)


def retrieve_one(engine: Engine) -> dict[str, Any]:
    return _route(_answer("The representation.", _RECORD), 404, 422, 503)


def health(engine: Engine) -> dict[str, Any]:
    example = {"status": "ok", "stored": 0} | limits(engine)
    return _route(_answer("It does.", {"type": "object", "example": example}), 503)


def metrics() -> dict[str, Any]:
    text = {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    return _route(text, 503)


_ERRORS = {
    400: "The body is not JSON.",
    404: "There is none with this id.",
    413: "The body is too long, or has too many rows.",
    422: "The request's contents do not fit.",
    503: "Too much is waiting, the service is stopping, or its store cannot be used.",
    507: "The store is full.",
}


def _route(done: dict[str, Any], *statuses: int) -> dict[str, Any]:
    errors = {s: _answer(_ERRORS[s], _ERROR) for s in statuses}
    return {"responses": {200: done, **errors}}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _row(width: int) -> dict[str, Any]:
    return {"type": "array", "items": _NUMBER, "minItems": width, "maxItems": width}


def _rows(width: int, most: int | None = None) -> dict[str, Any]:
    bound = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": _row(width), "minItems": 1} | bound


def _body(engine: Engine) -> dict[str, Any]:
    dim = engine.weights.dim
    numbers = [round((3 * i + 2) % 10 / 10, 1) for i in range(dim)]
    schema = {"oneOf": [_row(dim), _rows(dim, engine.settings.max_rows)], "example": numbers}
    content = {"application/json": {"schema": schema}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}
