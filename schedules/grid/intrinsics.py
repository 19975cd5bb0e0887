"""Calls of functions that every target gives: matrix units, asynchronous copies."""

from __future__ import annotations

from typing import Any

from .nest import GridNest

Tir = Any


def call(nest: GridNest, name: str, *arguments: Tir) -> None:
    """A statement that calls a function of the target."""
    from tvm import tirx

    nest.add(tirx.Evaluate(tirx.call_extern("void", name, *arguments)))


def address(element: Tir) -> Tir:
    """Where an element of a buffer lies."""
    from tvm import tirx

    return tirx.address_of(element)
