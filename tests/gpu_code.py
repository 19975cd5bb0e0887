"""Operators compiled for GPUs that are not here, and what their machine code tells."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import amdgpu
import sass

from rudnn.dsl.declare import Declaration
from rudnn.dsl.dtypes import DType, f32
from rudnn.runtime import compiler
from rudnn.runtime.targets import parse
from rudnn.samples import specialise

# Matrix products: in f16 and bf16 their kernels use matrix units.
PRODUCTS = ("linear", "linear_backward", "batched_matmul", "batched_matmul_backward", "attention",
            "attention_backward", "paged_attention")  # fmt: skip


@dataclass(frozen=True)
class KernelCode:
    """One kernel: what it needs, in bytes and registers, and its instructions by mnemonic.

    NVIDIA's instructions are there for products in f16 and bf16 only.
    """

    name: str
    registers: int
    stack: int
    spills: int
    scalar_spills: int
    shared: int
    bare_barriers: int
    instructions: Mapping[str, int]

    def count(self, *mnemonics: str) -> int:
        """Instructions that start with any of `mnemonics`."""
        return sum(n for i, n in self.instructions.items() if i.startswith(mnemonics))


@dataclass(frozen=True)
class Compiled:
    """The kernels of one operator, the rule and configuration that made each, threads a block."""

    kernels: tuple[KernelCode, ...]
    rules: tuple[tuple[str, str, str], ...]
    threads: Mapping[str, int]


def compiled(
    declaration: Declaration, dtype: DType, target: str,
    dims: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None,
) -> Compiled:  # fmt: skip
    """An operator at its example dims, contiguous and aligned.

    What was found out is kept in the compile cache, under the kernel's own key.
    """
    bound = specialise(declaration, dims, dtype, options)
    names = frozenset(t.name for t in (*bound.graph.inputs, *bound.graph.outputs))
    layouts = compiler.Layouts(names, names)
    own = compiler.key_of(bound.graph, layouts, target)
    key = hashlib.sha256(own.encode() + _reader()).hexdigest()
    cache = compiler.disk_cache()
    entry = cache.get(key)
    if entry is None:
        kind, _ = parse(target)
        product = declaration.name in PRODUCTS and dtype != f32
        found = _BUILDERS[kind.name](bound.graph, layouts, target, product)
        entry = cache.put(key, {}, {"facts.json": json.dumps(found).encode()})
    record = json.loads(entry.file("facts.json").read_bytes())
    kernels = tuple(KernelCode(**k) for k in record["kernels"])
    rules = tuple((a, b, c) for a, b, c in record["rules"])
    return Compiled(kernels, rules, record["threads"])


def _reader() -> bytes:
    """The sources of what reads machine code."""
    files = [*(Path(str(m.__file__)) for m in (amdgpu, sass)), Path(__file__)]
    return b"".join(path.read_bytes() for path in files)


def _cuda(graph: Any, layouts: compiler.Layouts, target: str, product: bool) -> dict[str, Any]:
    artifact = compiler.build(graph, layouts, target, f"rudnn_{graph.name}")
    cubin = artifact.files[artifact.binary]
    # To start the disassembler takes as long as to compile. Spills it need not look for: they are
    # on the stack.
    code = sass.instructions(cubin) if product else {}
    kernels = [
        KernelCode(n, u.registers, u.stack + u.local, 0, 0, u.shared, 0, code.get(n, {}))
        for n, u in sass.resources(cubin).items()
    ]
    return _record(kernels, artifact.plan)


def _rocm(graph: Any, layouts: compiler.Layouts, target: str, _: bool) -> dict[str, Any]:
    from rudnn.runtime.targets.rocm import compile as codegen

    program = compiler.schedule(graph, layouts, target)
    kind, arch = parse(target)
    code, plan = codegen.build(program, f"rudnn_{graph.name}", kind.arch(arch))
    code.link()
    kernels = [
        KernelCode(f.name, f.vector_registers, f.scratch, f.spills, f.scalar_spills, f.shared,
                   f.bare_barriers, f.instructions)
        for f in amdgpu.kernels(code.assembly()).values()
    ]  # fmt: skip
    return _record(kernels, plan)


def _record(kernels: list[KernelCode], plan: Any) -> dict[str, Any]:
    return {
        "kernels": [vars(k) | {"instructions": dict(Counter(k.instructions))} for k in kernels],
        "rules": plan.kernels,
        "threads": {launch.entry: launch.block for launch in plan.launches},
    }


_BUILDERS: dict[str, Callable[[Any, compiler.Layouts, str, bool], dict[str, Any]]] = {
    "cuda": _cuda, "rocm": _rocm,
}  # fmt: skip
