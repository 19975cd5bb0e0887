"""How nests of sums over windows take apart rows, and read the image."""

from __future__ import annotations

from typing import Any

from ...dsl.dtypes import f32
from ...dsl.expr import Axis
from ...dsl.lower import convert
from ..group import known
from ..windows import Windows
from .tiling import Tiling, index


def row_env(nest: Tiling, found: Windows, group: Any, row: Any) -> dict[Axis, Any]:
    """The axes of a row of a group."""
    own = [index(known(a)) for a in found.rows]
    first, *rest = nest.unflatten(row, [index(found.run), *own])
    env = dict(zip(found.rows, rest, strict=True))
    if found.shared is not None:
        env[found.shared] = group * index(found.run) + first
    return env


def image_at(nest: Tiling, found: Windows, env: dict[Axis, Any], places: dict[int, Any]) -> Any:
    """The image's element, the windowed dims at `places`, as f32."""
    image, lowering = found.image, nest.emitter.lowering
    at = [places[p] if p in places else nest.value(i, env) for p, i in enumerate(image.index)]
    return convert(lowering.read(image.tensor, at), image.dtype, f32)
