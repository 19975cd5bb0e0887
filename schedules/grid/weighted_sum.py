"""The rule for weighted sums: which launches compute them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..capability import Capability
from ..emit import Emitter
from ..group import Group
from ..rule import Config, Rejection
from ..weighted import rejection
from .nest import GridNest, block_size


@dataclass(frozen=True)
class WeightedSumConfig(Config):
    """`threads` of a block."""

    threads: int = 128


class WeightedSums:
    """A launch for each sum: blocks compute weights and add what they weigh."""

    name = "weighted_sums"

    def match(self, group: Group, caps: Capability) -> Rejection | None:
        return rejection(group)

    def default(self, group: Group, caps: Capability) -> WeightedSumConfig:
        return WeightedSumConfig(block_size(caps, 128))

    def space(self, group: Group, caps: Capability) -> Iterator[WeightedSumConfig]:
        yield self.default(group, caps)

    def lower(
        self, emitter: Emitter, group: Group, caps: Capability, config: WeightedSumConfig
    ) -> Any:
        from .weighted_plain import plain

        nest = GridNest(emitter, caps)
        plain(nest, group, config.threads)
        return nest.finish()
