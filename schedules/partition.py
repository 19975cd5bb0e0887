"""Partition: which stages share a kernel.

Decided by patterns alone: a row reduction takes along the pointwise work over the same rows, a
contraction or a softmax_sum takes its pointwise consumer as an epilogue, weighted sums over the
same axes that do not need each other go together. What is left is a kernel of its own; tensors
between kernels live in the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..dsl import forms
from ..dsl.expr import Axis, Expr, Read, Stage
from ..dsl.graph import Graph, reads
from ..dsl.walk import walk
from ..dsl.weighted import WeightedSum
from .group import Group, contraction, innermost, is_map, reads_at
from .windows import windows


@dataclass
class _Cluster:
    kind: str
    rows: tuple[Axis, ...]
    stages: list[Stage] = field(default_factory=list)


def _kind(stage: Stage) -> str:
    node = stage.expr
    window_sum = windows(node)
    if contraction(node) is not None or (window_sum is not None and window_sum.is_static):
        return "contraction"
    if isinstance(node, forms.Reduce):
        columns = set(stage.axes) & innermost(node.body)
        return "columns" if columns and not set(node.over) & innermost(node.body) else "rows"
    if isinstance(node, (forms.SoftmaxSum, forms.LogSumExp)):
        return "softmax_sum"
    if isinstance(node, WeightedSum):
        return "weighted_sum"
    return "map" if is_map(stage) else type(node).__name__.lower()


def _joins_rows(cluster: _Cluster, stage: Stage, kind: str) -> bool:
    """Row work: a row reduction or pointwise stage over the same rows."""
    if kind not in ("rows", "map") or stage.axes[: len(cluster.rows)] != cluster.rows:
        return False
    if kind == "rows" and stage.axes != cluster.rows:
        return False
    return all(reads_at(stage.expr, s, s.axes) or _row_read(stage.expr, s, cluster.rows)
               for s in cluster.stages if s in reads(stage.expr))  # fmt: skip


def _row_read(node: Expr, stage: Stage, rows: tuple[Axis, ...]) -> bool:
    """Reads of `stage` stay within the row."""
    hits = [n for n in walk(node) if isinstance(n, Read) and n.tensor is stage]
    return all(
        len(h.index) >= len(rows) and all(i is r for i, r in zip(h.index, rows, strict=False))
        for h in hits
    )


def _joins_epilogue(graph: Graph, cluster: _Cluster, stage: Stage, kind: str) -> bool:
    """The one pointwise consumer of a contraction or softmax_sum, element for element.

    Not of a log-sum-exp: nests know the mean alone where the epilogue is.
    """
    if cluster.kind == "softmax_sum":
        own = [s for s in cluster.stages if _kind(s) != "contraction"]
    else:
        own = cluster.stages
    head = own[0]
    shared = head in graph.outputs or len(graph.consumers(head)) > 1
    if kind == "softmax_sum" and cluster.kind == "softmax_sum":
        return _same_rows(_source(head.expr), _source(stage.expr))
    return (
        kind == "map"
        and len(own) == 1 + (cluster.kind == "softmax_sum" and len(own) > 1)
        and head in reads(stage.expr)
        and set(stage.axes) == set(head.axes)
        and reads_at(stage.expr, head, head.axes)
        and not shared
        and not any(isinstance(s.expr, forms.LogSumExp) for s in own if s in reads(stage.expr))
    )


def _source(node: Expr) -> forms.SoftmaxSum:
    source = node.source if isinstance(node, forms.LogSumExp) else node
    assert isinstance(source, forms.SoftmaxSum)
    return source


def _same_rows(a: forms.SoftmaxSum, b: forms.SoftmaxSum) -> bool:
    return a.score is b.score and a.value is b.value and a.where is b.where


def _under_score(graph: Graph, stage: Stage) -> bool:
    """A contraction that only the scores of softmax_sums read, element for element."""
    readers = graph.consumers(stage)
    if contraction(stage.expr) is None or stage in graph.outputs or not readers:
        return False
    if any(not isinstance(r.expr, (forms.SoftmaxSum, forms.LogSumExp)) for r in readers):
        return False
    first = _source(readers[0].expr)
    others = [first.value, *([] if first.where is None else [first.where])]
    return (
        all(_same_rows(first, _source(r.expr)) for r in readers)
        and reads_at(first.score, stage, stage.axes)
        and all(stage not in reads(node) for node in others)
    )


def _under_weight(graph: Graph, stage: Stage) -> bool:
    """A sum that only the weights of weighted sums read, element for element: never stored."""
    readers = graph.consumers(stage)
    if not isinstance(stage.expr, forms.Reduce) or stage in graph.outputs or not readers:
        return False
    return all(
        isinstance(r.expr, WeightedSum)
        and stage in reads(r.expr.weight)
        and reads_at(r.expr.weight, stage, stage.axes)
        and stage not in reads(r.expr.value)
        and (r.expr.where is None or stage not in reads(r.expr.where))
        for r in readers
    )


def _joins_weighted(graph: Graph, cluster: _Cluster, stage: Stage) -> bool:
    """Another sum with weights over the same axes, or the pointwise stage after one of them."""
    sums = [s for s in cluster.stages if isinstance(s.expr, WeightedSum)]
    node = stage.expr
    if isinstance(node, WeightedSum):
        assert isinstance(sums[0].expr, WeightedSum)
        return set(node.weight_axes()) == set(sums[0].expr.weight_axes())
    return is_map(stage) and any(
        [t for t in reads(node) if t in cluster.stages] == [head]
        and set(stage.axes) == set(head.axes)
        and reads_at(node, head, head.axes)
        and head not in graph.outputs
        and len(graph.consumers(head)) == 1
        for head in sums
    )


def _joins_scan(cluster: _Cluster, stage: Stage) -> bool:
    """The emitted and the final result of one recurrence."""
    head = cluster.stages[0].expr
    node = stage.expr
    return (
        isinstance(head, forms.Scan) and isinstance(node, forms.Scan) and head.state is node.state
    )


def _joins_top_k(cluster: _Cluster, stage: Stage) -> bool:
    head, node = cluster.stages[0].expr, stage.expr
    return (
        isinstance(head, forms.TopK) and isinstance(node, forms.TopK) and head.score is node.score
    )


def _promotes(cluster: _Cluster, stage: Stage, kind: str) -> bool:
    """Whether a row reduction takes along the pointwise stage it is the first to read."""
    if cluster.kind != "map" or kind != "rows":
        return False
    source, rows = cluster.stages[0], stage.axes
    fits = source in reads(stage.expr) and source.axes[: len(rows)] == rows
    return fits and _row_read(stage.expr, source, rows)


def _joins(graph: Graph, cluster: _Cluster, stage: Stage, kind: str) -> bool:
    if _promotes(cluster, stage, kind):
        return True
    if cluster.kind == "rows":
        return _joins_rows(cluster, stage, kind)
    if cluster.kind in ("contraction", "softmax_sum"):
        return _joins_epilogue(graph, cluster, stage, kind)
    if cluster.kind == "weighted_sum":
        return _joins_weighted(graph, cluster, stage)
    if cluster.kind == "scan":
        return _joins_scan(cluster, stage)
    return cluster.kind == "topk" and _joins_top_k(cluster, stage)


def _blocked(clusters: list[_Cluster], index: int, together: Sequence[Stage]) -> bool:
    """Whether a stage and the sums under it need what a cluster after `index` computes.

    Or what its own does, for a weighted sum: those of one kernel are added up side by side.
    """
    late = [s for c in clusters[index + 1 :] for s in c.stages]
    if isinstance(together[0].expr, WeightedSum):
        late += [s for s in clusters[index].stages if not isinstance(s.expr, forms.Reduce)]
    return any(t in late for s in together for t in reads(s.expr))


def partition(graph: Graph) -> tuple[Group, ...]:
    """The graph's stages as groups, in an order in which they can run."""
    clusters: list[_Cluster] = []
    waiting: list[Stage] = []
    for stage in graph.stages:
        if _under_score(graph, stage) or _under_weight(graph, stage):
            waiting.append(stage)
            continue
        kind, read = _kind(stage), reads(stage.expr)
        under = [s for s in waiting if s in read]
        fits = (
            c
            for i, c in enumerate(clusters)
            if not _blocked(clusters, i, [stage, *under]) and _joins(graph, c, stage, kind)
        )
        home = next(fits, None)
        if home is None:
            home = _Cluster(kind, stage.axes if kind == "rows" else ())
            clusters.append(home)
        elif _promotes(home, stage, kind):
            home.kind, home.rows = "rows", stage.axes
        home.stages[:0] = [s for s in under if s not in home.stages]
        home.stages.append(stage)
    return tuple(_group(graph, c) for c in clusters)


def _group(graph: Graph, cluster: _Cluster) -> Group:
    inside = cluster.stages
    seen = [
        s for s in inside
        if s in graph.outputs or any(c not in inside for c in graph.consumers(s))
    ]  # fmt: skip
    name = f"{graph.name}_{inside[-1].name}"
    return Group(name, tuple(inside), tuple(seen), graph.constraint)
