"""`compile`, `run`, `check`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import arguments
from .arguments import BadArgument
from .output import print_json, print_table, progress, waiting

Texts = Sequence[str] | None


def export(
    operator: str, folder: Path, target: str, dims: Texts, dtype: str | None, options: Texts,
    present: Texts, name: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Compile one specialisation into `folder`."""
    from ..ops.registry import resolve
    from ..runtime.export import export_operator

    declaration = resolve(operator)
    sizes, ranks = arguments.export_dims(dims, declaration)
    chosen = arguments.options(options, declaration)
    own = arguments.dtype_of(dtype, declaration)
    with waiting(f"compiling {declaration.name}"):
        manifest = export_operator(
            declaration, target=target, dims=sizes, dtype=own, options=chosen, folder=folder,
            ranks=ranks, present=present or (), name=name,
        )  # fmt: skip
    if as_json:
        print_json(manifest)
        return 0
    made = (*manifest["files"], "manifest.json")
    print_table(("file", "bytes"), [(str(folder / f), str((folder / f).stat().st_size))
                                    for f in made], "lr")  # fmt: skip
    if manifest.get("build"):
        print(f"\nto build and run the example host:\n  cd {folder} && {manifest['build']}")
    return 0


def run(operator: str, inputs: Sequence[str], params: Texts, outputs: Sequence[Path]) -> int:
    """Run an operator on files."""
    import numpy as np

    from ..ops.registry import resolve
    from ..runtime.call import caller

    declaration = resolve(operator)
    values: dict[str, Any] = dict(arguments.arrays(inputs, declaration))
    values |= arguments.settings(params, declaration)
    called = caller(declaration)
    try:
        ordered = called.values((), values)
    except TypeError as error:
        raise BadArgument(str(error)) from None
    with waiting(f"running {declaration.name}"):
        made = called.launch(ordered)
    results = {declaration.outputs[0].name: made}
    if isinstance(made, tuple):
        results = {o.name: a for o, a in zip(declaration.outputs, made, strict=True)
                   if a is not None}  # fmt: skip
    paths = arguments.result_paths(outputs, list(results)) if outputs else []
    for i, (label, array) in enumerate(results.items()):
        line = f"{label}: {array.dtype}{list(array.shape)}"
        if paths:
            with open(paths[i], "wb") as stream:  # np.save would add a suffix to the name
                np.save(stream, array, allow_pickle=False)
            line += f" → {paths[i]}"
        else:
            line += f"\n{array}"
        print(line)
    return 0


def check(operator: str, target: str, dims: Texts, dtypes: Texts, seed: int, as_json: bool) -> int:
    """Run the harness; 1 if a comparison fails."""
    from ..ops.registry import resolve

    declaration = resolve(operator)
    sizes = arguments.fixed_dims(dims, declaration)
    chosen = [t for t in (arguments.dtype_of(d, declaration) for d in dtypes or ()) if t]
    if seed < 0:
        raise BadArgument(f"--seed needs a number ≥ 0, got {seed}")
    from ..check import check as harness
    from ..check import failures, has_torch

    with progress(f"checking {declaration.name}") as report:
        rows = harness(declaration, target, sizes, chosen or None, seed, report=report)
    wrong = failures(rows)
    if as_json:
        print_json([r.to_json() for r in rows])
        return 1 if wrong else 0
    groups: dict[tuple[str, ...], list[Any]] = {}
    for row in rows:
        groups.setdefault((row.op, row.against, row.dtype), []).append(row)
    print_table(
        ("operator", "against", "dtype", "passed", "failed", "refused", "greatest error"),
        [(*key, *_counts(members)) for key, members in groups.items()], "lllrrrr",
    )  # fmt: skip
    if not has_torch():
        print("torch is not installed: compared with the oracle only")
    for row in wrong[:20]:
        print(f"FAIL {row.op} against {row.against}: {row.dtype} {row.layout} {row.sizes} "
              f"({row.dims}): {row.detail}", file=sys.stderr)  # fmt: skip
    if wrong:
        more = f", {len(wrong) - 20} not shown" if len(wrong) > 20 else ""
        print(f"rudnn: {len(wrong)} of {len(rows)} comparisons failed{more}", file=sys.stderr)
    return 1 if wrong else 0


def _counts(rows: Sequence[Any]) -> tuple[str, str, str, str]:
    counts = Counter(r.status for r in rows)
    errors = [r.error for r in rows if r.status == "pass"]
    worst = f"{max(errors):.1e}" if errors else ""
    return str(counts["pass"]), str(counts["fail"]), str(counts["refused"]), worst
