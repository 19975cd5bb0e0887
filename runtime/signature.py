"""What an exported operator looks like from outside: tensors, dims and scalars by public name.

A pack of rank 1 goes by its own name (`rows`); the dims of a longer one are `rows_0`, `rows_1`, ….
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dsl.declare import Declaration, Spec
from ..dsl.dtypes import DType
from ..dsl.expr import DimRef, Expr, Size, Tensor
from ..dsl.graph import Graph
from ..dsl.host import identifier, source


@dataclass(frozen=True)
class DimInfo:
    """A dim. `slot` is its name in the launch plan; `size` None means dynamic."""

    name: str
    slot: str
    size: int | None
    example: int


@dataclass(frozen=True)
class TensorInfo:
    """An argument tensor; `shape` has dim names, sizes, or other expressions of dims in C.

    `unit` says that its last stride is compiled in as 1. `below` is the bound of an index tensor's
    values, an expression in C, or "" for any other tensor.
    """

    name: str
    role: str
    dtype: DType
    shape: tuple[str | int, ...]
    unit: bool
    below: str = ""


@dataclass(frozen=True)
class ScalarInfo:
    """A number given at each call; `default` None means it has none."""

    name: str
    dtype: DType
    default: int | float | None


@dataclass(frozen=True)
class Check:
    """A contract check at launch: `condition` in C over dims and scalars, and its message."""

    condition: str
    needs: str


@dataclass(frozen=True)
class Signature:
    """An exported operator. `name` is that of its C function and its files."""

    name: str
    operator: str
    doc: str
    target: str
    tensors: tuple[TensorInfo, ...]
    dims: tuple[DimInfo, ...]
    scalars: tuple[ScalarInfo, ...]
    options: tuple[tuple[str, Any], ...]
    checks: tuple[Check, ...]

    def dynamic(self) -> tuple[DimInfo, ...]:
        return tuple(d for d in self.dims if d.size is None)

    def c(self, node: Size) -> str:
        """An expression of dims and scalars in C, under public names."""
        return self.public(source(node, "c"))

    def public(self, text: str) -> str:
        """A source text over the launch plan's names, under public names."""
        return rename(text, {identifier(d.slot): d.name for d in self.dims})


def rename(text: str, names: Mapping[str, str]) -> str:
    """`text` with whole identifiers replaced."""
    return re.sub(r"[A-Za-z_]\w*", lambda m: names.get(m[0], m[0]), text)


def public_name(slot: str, ranks: Mapping[str, int]) -> str:
    """The public name of a dim of the launch plan: `rows.0` → `rows`, or `rows_0` if ambiguous."""
    pack, dot, _ = slot.partition(".")
    return pack if dot and ranks.get(pack) == 1 else identifier(slot)


def describe(
    declaration: Declaration, spec: Spec, graph: Graph, unit: frozenset[str],
    examples: Mapping[str, int], name: str, target: str,
) -> Signature:  # fmt: skip
    """The signature of one specialisation; `examples` gives each dim's example size, by slot."""
    ranks, static = dict(spec.ranks), dict(spec.static)
    names = {identifier(slot): public_name(slot, ranks) for slot in examples}

    def text(node: Expr | int) -> str:
        return rename(source(node, "c"), names)

    bounds = {t.name: text(below) for t, below in graph.index_checks}

    def tensor(t: Tensor, role: str) -> TensorInfo:
        shape = tuple(_extent(e, text, names) for e in t.shape)
        return TensorInfo(t.name, role, t.dtype, shape, t.name in unit, bounds.get(t.name, ""))

    tensors = [tensor(t, "input") for t in graph.inputs]
    tensors += [tensor(t, "output") for t in graph.outputs]
    dims = tuple(
        DimInfo(names[identifier(slot)], slot, static.get(slot), example)
        for slot, example in examples.items()
    )
    scalars = tuple(
        ScalarInfo(s.name, s.dtype, declaration.params[s.name].default) for s in graph.scalars
    )
    checks = tuple(
        Check(text(r.condition), r.needs)
        for r in graph.requirements
        if isinstance(r.condition, Expr)
    )
    return Signature(
        name, declaration.name, declaration.doc, target, tuple(tensors), dims, scalars,
        spec.options, checks,
    )  # fmt: skip


def _extent(value: Size, text: Any, names: Mapping[str, str]) -> str | int:
    if isinstance(value, DimRef):
        return names[identifier(value.name)]
    fixed = getattr(value, "value", value)
    return fixed if isinstance(fixed, int) else str(text(value))
