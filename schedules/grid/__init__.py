"""Rules for devices that run grids of blocks of many threads with shared memory."""

from __future__ import annotations

from ..rule import Rule


def rules() -> tuple[Rule, ...]:
    """The rules in the order they are tried."""
    from .columns import Columns
    from .contraction import Contraction
    from .fallback import Fallback
    from .pointwise import Pointwise
    from .rows import Rows
    from .scan import Scan
    from .scatter_add import ScatterAdd
    from .softmax_sum import SoftmaxSum
    from .softmax_tiled import TiledSoftmaxSum
    from .top_k import TopK
    from .weighted_sum import WeightedSums

    return (
        TiledSoftmaxSum(), SoftmaxSum(), Contraction(), Pointwise(), Columns(), Rows(), Scan(),
        TopK(), ScatterAdd(), WeightedSums(), Fallback(),
    )  # fmt: skip
