"""Exporting an operator for apps that have neither Python nor a compiler for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..dsl.arguments import In
from ..dsl.declare import Declaration, Spec
from ..dsl.dtypes import DType, f32
from . import compiler
from .plan import ABI_VERSION
from .signature import Signature, describe
from .targets import parse
from .tvm_import import PINS

if TYPE_CHECKING:
    import numpy as np

FORMAT = 1  # of manifest.json
DYNAMIC = "dynamic"


def export_operator(
    declaration: Declaration,
    *,
    target: str = "llvm",
    dims: Mapping[str, int | str] | None = None,
    dtype: DType | None = None,
    options: Mapping[str, Any] | None = None,
    folder: Path,
    ranks: Mapping[str, int] | None = None,
    present: Collection[str] = (),
    dtypes: Mapping[str, DType] | None = None,
    unit: Collection[str] | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Compile one specialisation into `folder`, with header, example host and manifest.

    Parameters
    ----------
    dims : sizes by name
        A number compiles the size in, "dynamic" leaves it to the call. Left out, a dim is dynamic
        where the operator allows it, else its example size. A pack of rank 1 goes by its name
        (`rows`), the dims of a longer one by `rows.0`, `rows.1`, ….
    dtype : DType
        The operator's own float type; f32 by default.
    options : compile-time choices by name
        Their defaults where left out; texts are matched against the choices' names.
    ranks : int by pack
        How many dims a pack such as `*rows` has; 1 by default.
    present : names
        Optional inputs the kernel is to have; the others are absent.
    dtypes : DType by input
        For inputs that accept several types, where it is not the first.
    unit : names
        Tensors whose last stride is 1, the others have any. By default all: views may be strided
        along every other dim.
    name : str
        Of the C function and the files; `rudnn_<operator>_<dtype>` by default. Two
        specialisations of one operator in one program need two names.

    Returns
    -------
    dict
        The manifest, as written to `manifest.json`.

    Raises
    ------
    RudnnError
        The operator's own, on a name or value that does not fit.
    """
    request = Request(declaration, dict(ranks or {}))
    spec = request.spec(dict(dims or {}), dtype, options or {}, present, dtypes or {})
    graph = declaration.trace(spec)
    tensors = frozenset(t.name for t in (*graph.inputs, *graph.outputs))
    stray = sorted(set(unit or ()) - tensors)
    if stray:
        request.fail(f"unit tensors among {', '.join(sorted(tensors))}", ", ".join(stray))
    unit = tensors if unit is None else frozenset(unit)
    name = name or f"rudnn_{declaration.name}_{_own_dtype(declaration, spec, graph.outputs).short}"
    if not (name.isascii() and name.isidentifier()):
        request.fail("a name that is a C identifier", name)
    kind, arch = parse(target)
    kind.capability(arch)
    signature = describe(declaration, spec, graph, unit, request.examples(spec), name, target)
    # Aligned or not is for the call to know: a kernel for others to call assumes neither.
    program = compiler.schedule(graph, compiler.Layouts(unit), target)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = kind.export(program, signature, arch, folder)
    made = manifest(signature, part, folder)
    text = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
    (folder / "manifest.json").write_text(text, "utf-8")
    return made


class Request:
    """What the caller asked of a declaration, checked against what it offers."""

    def __init__(self, declaration: Declaration, ranks: dict[str, int]) -> None:
        self.declaration = declaration
        shapes = [t.dims for t in declaration.inputs.values()]
        shapes += [t.dims for t in declaration.outputs]
        packs = dict.fromkeys(d[1:] for dims in shapes for d in dims if d.startswith("*"))
        for pack, rank in ranks.items():
            if pack not in packs:
                self.fail(f"ranks of {_listed(packs)}", pack)
            if not isinstance(rank, int) or rank < 0:
                self.fail(f"a rank ≥ 0 for {pack}", rank)
        self.ranks = {pack: ranks.get(pack, 1) for pack in packs}

    def fail(self, needs: str, got: Any) -> NoReturn:
        raise self.declaration.error(f"{self.declaration.name} needs {needs}, got {got}")

    def slots(self) -> dict[str, str]:
        """The dims as the launch plan calls them, by the name the caller uses."""
        names: dict[str, str] = {}
        for dim in (*self.declaration.dim_names(), *self.declaration.extents):
            pack = dim[1:]
            if not dim.startswith("*"):
                names[dim] = dim
            elif self.ranks[pack] == 1:
                names[pack] = f"{pack}.0"
            else:
                names |= {f"{pack}.{i}": f"{pack}.{i}" for i in range(self.ranks[pack])}
        return names

    def spec(
        self, dims: dict[str, int | str], dtype: DType | None, options: Mapping[str, Any],
        present: Collection[str], dtypes: Mapping[str, DType],
    ) -> Spec:  # fmt: skip
        inputs = self.present(present)
        return Spec(
            self.dtypes(inputs, dtype, dtypes), tuple(self.ranks.items()), self.static(dims),
            self.options(options),
        )  # fmt: skip

    def static(self, dims: dict[str, int | str]) -> tuple[tuple[str, int], ...]:
        slots, chosen = self.slots(), {}
        for name, value in dims.items():
            if name not in slots:
                self.fail(f"dims among {_listed(slots)}", name)
            if isinstance(value, str) and value.isdecimal():
                value = int(value)
            if value == DYNAMIC:
                if name in self.declaration.static:
                    self.fail(f"a size of {name}, which is static only", DYNAMIC)
            elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
                self.fail(f"{name} a size ≥ 0 or {DYNAMIC}", value)
            else:
                chosen[slots[name]] = value
        for name, slot in slots.items():
            if name in self.declaration.static and name not in dims:
                chosen[slot] = self.example(slot)
        return tuple((s, chosen[s]) for s in slots.values() if s in chosen)

    def example(self, slot: str) -> int:
        """The declaration's example size of one dim."""
        name, dot, position = slot.partition(".")
        value = self.declaration.example.get(name, self.declaration.extents.get(name))
        if dot and isinstance(value, (tuple, list)):
            # A pack of another rank than the example's: its last dims, then 1s before them.
            at = len(value) - self.ranks[name] + int(position)
            value = value[at] if at >= 0 else 1
        value = getattr(value, "default", value)
        if not isinstance(value, int):
            self.fail(f"a size of {name}", "none, and the declaration has no example of it")
        return value

    def examples(self, spec: Spec) -> dict[str, int]:
        """The size of each dim to show the operator with, by slot."""
        static = dict(spec.static)
        return {s: static[s] if s in static else self.example(s) for s in self.slots().values()}

    def present(self, wanted: Collection[str]) -> dict[str, In]:
        optional = [n for n, i in self.declaration.inputs.items() if i.optional]
        for name in wanted:
            if name not in optional:
                self.fail(f"optional inputs among {_listed(optional)}", name)
        return {n: i for n, i in self.declaration.inputs.items() if not i.optional or n in wanted}

    def dtypes(
        self, inputs: dict[str, In], dtype: DType | None, dtypes: Mapping[str, DType]
    ) -> tuple[tuple[str, DType], ...]:
        own = dtype or (f32 if f32 in self.declaration.dtypes else self.declaration.dtypes[0])
        if own not in self.declaration.dtypes:
            self.fail(f"a dtype among {_listed(self.declaration.dtypes)}", own)
        for name in dtypes:
            if name not in inputs:
                self.fail(f"inputs among {_listed(inputs)}", name)
        chosen = {}
        for name, declared in inputs.items():
            allowed = declared.accepts((own,))
            chosen[name] = dtypes.get(name, allowed[0])
            if chosen[name] not in allowed:
                self.fail(f"{name} of dtype {_listed(allowed)}", chosen[name])
        return tuple(chosen.items())

    def options(self, given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        known = self.declaration.options
        for name in given:
            if name not in known:
                self.fail(f"options among {_listed(known)}", name)
        return tuple((n, self.choice(n, given.get(n, o.default))) for n, o in known.items())

    def choice(self, name: str, value: Any) -> Any:
        choices = self.declaration.options[name].choices
        for choice in choices:
            if type(choice) is type(value) and choice == value:
                return choice
        for choice in choices:
            if isinstance(value, str) and str(choice).lower() == value.lower():
                return choice
        self.fail(f"{name} among {_listed(choices)}", repr(value))


def manifest(signature: Signature, part: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The manifest: the signature, the target's `part`, versions, and the files' digests.

    `part["files"]` names the files; every other key is taken as it is.
    """
    tensors = [
        {"name": t.name, "role": t.role, "dtype": t.dtype.name, "shape": list(t.shape),
         "unit_last_stride": t.unit, "values_below": t.below or None}
        for t in signature.tensors
    ]  # fmt: skip
    dims = [
        {"name": d.name, "slot": d.slot, "size": d.size if d.size is not None else DYNAMIC,
         "example": d.example}
        for d in signature.dims
    ]  # fmt: skip
    scalars = [
        {"name": s.name, "dtype": s.dtype.name, "default": s.default} for s in signature.scalars
    ]
    return {
        "format": FORMAT, "abi": ABI_VERSION, "name": signature.name,
        "operator": signature.operator, "target": signature.target, "doc": signature.doc,
        "tensors": tensors, "dims": dims, "scalars": scalars,
        "options": {n: _plain(v) for n, v in signature.options},
        "requirements": [{"c": c.condition, "needs": c.needs} for c in signature.checks],
        **{k: v for k, v in part.items() if k != "files"},
        "versions": versions(),
        "files": {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in part["files"]},
    }  # fmt: skip


def versions() -> dict[str, str]:
    """The versions of what made the artefact."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("rudnn", *PINS):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout on the path
            found[package] = "unknown"
    return found


def sample(count: int, seed: int, dtype: DType, below: int = 0) -> np.ndarray[Any, Any]:
    """The example host's `count` values for its tensor number `seed`, from 1.

    Splitmix64 of `(seed << 32) + i`; floats are the top 8 bits as multiples of 1/128 in −1 … 1,
    exact in every float type; integers are 0 … below − 1 (8 where there is no bound).
    """
    import numpy as np

    with np.errstate(over="ignore"):
        z = (np.uint64(seed << 32) + np.arange(count, dtype=np.uint64)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    if dtype.is_float:
        return (((z >> np.uint64(56)).astype(np.float32) - 128) / 128).astype(dtype.numpy)
    if dtype.kind == "bool":
        return (z >> np.uint64(63)).astype(np.bool_)
    return ((z >> np.uint64(33)) % np.uint64(below or 8)).astype(dtype.numpy)


def _own_dtype(declaration: Declaration, spec: Spec, outputs: Any) -> DType:
    """The type that names the variant: the operator's own, else the first result's."""
    for name, dtype in spec.dtypes:
        if declaration.inputs[name].dtype is None:
            return dtype
    return outputs[0].dtype


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _listed(items: Any) -> str:
    return ", ".join(str(i) for i in items) or "none"
