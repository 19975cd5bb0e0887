"""`show`: an operator as mathematics, TIR, generated source, or the graph of its kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import arguments
from .output import bytes_text, print_code, waiting

if TYPE_CHECKING:
    from ..dsl.expr import Tensor
    from ..runtime.bind import Bound
    from ..runtime.driver import Target


def show(
    operator: str, view: str, dims: Sequence[str] | None, dtype: str | None,
    options: Sequence[str] | None, target: str,
) -> int:  # fmt: skip
    """Print one view of an operator at its example dims, optional inputs present."""
    from ..ops.registry import resolve
    from ..runtime.targets import parse
    from ..samples import specialise

    declaration = resolve(operator)
    kind, arch = parse(target)
    bound = specialise(
        declaration, arguments.fixed_dims(dims, declaration),
        arguments.dtype_of(dtype, declaration), arguments.options(options, declaration),
    )  # fmt: skip
    if view == "math":
        from ..dsl.render import math_text

        if declaration.doc:
            print(declaration.doc + "\n")
        print(math_text(bound.graph))
    elif view == "graph":
        print(graph_text(bound, kind, arch))
    else:
        _code(view, bound, kind, arch, target)
    return 0


def _code(view: str, bound: Bound, kind: Target, arch: str, target: str) -> None:
    from ..runtime.compiler import Layouts, schedule

    with waiting(f"compiling {bound.graph.name}"):
        program = schedule(bound.graph, Layouts(bound.unit), target)
        if view == "source":
            text, language = kind.source(program, f"rudnn_{bound.graph.name}", arch)
        else:
            parts = [f"# {k.name}: rule {k.rule}, {k.config}\n{k.function.script()}"
                     for k in program.kernels]  # fmt: skip
            text, language = "\n\n".join(parts), "python"
    print_code(text, language)


def graph_text(bound: Bound, kind: Target, arch: str) -> str:
    """The kernels in launch order, each with the tensors it reads and writes."""
    from ..schedules.program import groups_of, prepared
    from ..schedules.rule import choose
    from ..schedules.workspace import dataflow

    rules, caps = kind.rules(), kind.capability(arch)
    graph = prepared(bound.graph, caps)
    groups = groups_of(graph)
    dag = dataflow(groups)
    tensors: dict[str, Tensor] = {t.name: t for t in (*graph.inputs, *graph.stages)}
    arguments_ = {t.name for t in graph.inputs}
    results = {t.name for t in graph.outputs}

    def line(name: str) -> str:
        where = "input" if name in arguments_ else "result" if name in results else "workspace"
        return f"{_tensor(tensors[name], bound)}  ({where})"

    lines: list[str] = []
    for i, group in enumerate(groups):
        rule = choose(rules, group, caps).name
        stages = ", ".join(s.name for s in group.stages)
        lines.append(f"kernel {i}: {group.name}  [{rule}]  computes {stages}")
        lines += [f"  ← {line(n)}" for _, n in dag.predecessors(("kernel", i))]
        lines += [f"  → {line(n)}" for _, n in dag.successors(("kernel", i))]
    return "\n".join(lines)


def _tensor(tensor: Tensor, bound: Bound) -> str:
    """`sum: f32[64, 1024], 256.0 KiB` at the example dims."""
    from ..dsl.host import evaluate, identifier

    sizes: dict[str, Any] = {identifier(n): v for n, v in bound.sizes.items()}
    shape = [int(evaluate(e, sizes)) for e in tensor.shape]
    nbytes = math.prod(shape) * tensor.dtype.bytes
    return f"{tensor.name}: {tensor.dtype}{shape}, {bytes_text(nbytes)}"
