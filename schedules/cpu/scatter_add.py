"""Sums grouped by an index: each task owns columns of the result and adds the points in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dsl import forms
from ...dsl.expr import Axis
from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection
from ..scatter import column as column_of
from ..scatter import rejection
from .direct import CoreNest


@dataclass(frozen=True)
class ScatterAddConfig(Config):
    """`tile` columns of the result a task; `unroll` vectors at a time."""

    tile: int = 4096
    unroll: int = 4


class ScatterAdd:
    """`parallel rows, column tiles: result ← 0; for points in order: result[at] += value`.

    A column is summed by one task in the order of the points, so the bits do not depend on the
    number of threads. An index outside the result adds nowhere.
    """

    name = "scatter_add"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return rejection(group)

    def default(self, group: Group, caps: Capability) -> ScatterAddConfig:
        return ScatterAddConfig()

    def space(self, group: Group, caps: Capability) -> Iterator[ScatterAddConfig]:
        for tile in (4096, 1024, 256, 64):
            yield ScatterAddConfig(tile)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: ScatterAddConfig
    ) -> Any:
        from tvm import tirx

        (stage,) = group.stages
        node = stage.expr
        assert isinstance(node, forms.ScatterAdd)
        nest, at = CoreNest(emitter), emitter.lowering.expr
        out = nest.targets[id(stage)]
        column = column_of(stage.axes, node)
        kept = [a for a in stage.axes if a is not node.target and a is not column]
        extents = [emitter.size(a.extent) for a in kept]
        env: dict[Axis, Any] = {}
        width: Any = nest.number(1)
        start: Any = nest.number(0)
        if column is not None:
            columns = emitter.size(column.extent)
            ranges, tile = nest.columns(columns, nest.product(extents), config.tile, caps.cores)
            extents.append(ranges)

        def each(body: Any) -> None:
            if column is None:
                body(env)
            else:
                nest.lanes(width, caps.lanes(), config.unroll,
                           lambda j: body(env | {column: start + j}))  # fmt: skip

        def place(where: dict[Axis, Any]) -> list[Any]:
            return [where[a] for a in stage.axes]

        with nest.loop("task", nest.product(extents), "parallel") as task:
            index = nest.unflatten(task, extents)
            for axis, value in zip(kept, index, strict=False):
                env[axis] = nest.opaque(axis.name, value)
            if column is not None:
                start = nest.opaque("start", index[-1] * tile)
                width = nest.opaque("width", tirx.min(tile, columns - start))
            zero = tirx.const(0.0, "float32")
            with nest.loop("row", emitter.size(node.target.extent)) as row:
                env[node.target] = row
                each(lambda where: nest.store(out, place(where), zero))
            del env[node.target]

            def points(rest: tuple[Axis, ...]) -> None:
                if rest:
                    with nest.loop(rest[0].name, emitter.size(rest[0].extent)) as var:
                        env[rest[0]] = var
                        points(rest[1:])
                    return
                goal = nest.bind("goal", at(node.at, env))
                extent = emitter.size(node.target.extent)
                with nest.when(tirx.all(goal >= 0, goal < extent)):
                    env[node.target] = goal
                    each(lambda where: nest.store(
                        out, place(where), out[tuple(place(where))] + at(node.value, where)
                    ))  # fmt: skip

            points(node.over)
        return nest.finish()
