"""The rule for weighted sums: which nest computes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection
from ..weighted import rejection


class WeightedSums:
    """Row by row, plainly."""

    name = "weighted_sums"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return rejection(group)

    def default(self, group: Group, caps: Capability) -> Config:
        return Config()

    def space(self, group: Group, caps: Capability) -> Iterator[Config]:
        yield self.default(group, caps)

    def lower(self, emitter: Emitter, group: Group, caps: Capability, config: Config) -> Any:
        from .weighted_plain import plain

        return plain(emitter, group)
