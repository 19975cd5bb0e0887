"""Rules for devices of a few threads with wide vectors and caches."""

from __future__ import annotations

from ..rule import Rule


def rules() -> tuple[Rule, ...]:
    """The rules in the order they are tried."""
    from .columns import Columns
    from .contraction import Contraction
    from .fallback import Fallback
    from .gathers import GatheredSums
    from .pointwise import Pointwise
    from .rows import Rows
    from .scan import Scan
    from .scatter_add import ScatterAdd
    from .separable import SeparableFolds
    from .softmax_sum import SoftmaxSumRows
    from .tap_sums import TapSums
    from .taps import TapFolds
    from .top_k import TopK
    from .weighted_sum import WeightedSums
    from .windows import WindowSums

    return (
        SoftmaxSumRows(), TapSums(), WindowSums(), Contraction(), TapFolds(), SeparableFolds(),
        GatheredSums(), Rows(), Columns(), Pointwise(), Scan(), TopK(), ScatterAdd(),
        WeightedSums(), Fallback(),
    )  # fmt: skip
