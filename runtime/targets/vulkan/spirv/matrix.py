"""Cooperative matrices: fragments held by a subgroup, made by the functions of a matrix unit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .emitter import Emitter


def fragment_buffer(e: Emitter, buffer: Any) -> bool:
    return False


def matrix_call(e: Emitter, name: str, arguments: list[Any]) -> bool:
    return False
