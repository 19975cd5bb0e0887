"""Every operator there is: our own, those of installed packages, and those of a file.

A package offers operators through the entry-point group `rudnn.ops`; an entry point names a
`Declaration` or a module that holds some.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ..dsl.declare import Declaration
from ..dsl.errors import OperatorError

GROUP = "rudnn.ops"
FAMILIES = (
    "normalization", "linear", "pointwise", "embedding", "attention", "attention_backward",
    "paged_attention", "recurrence", "selection", "segments", "pooling", "pooling_adaptive",
    "interpolation", "grid_sampling", "convolution", "ctc",
)  # fmt: skip


class UnknownOperatorError(OperatorError):
    """No operator of that name, or a file that holds none."""


@dataclass(frozen=True)
class Catalogue:
    """Operators by name, and what was wrong with the entry points that could not be used."""

    operators: dict[str, Declaration]
    problems: tuple[str, ...]


def operators() -> dict[str, Declaration]:
    """All operators by name, ours first."""
    return dict(catalogue().operators)


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """Our operators and those of installed packages; a broken package is a line in `problems`."""
    found: dict[str, Declaration] = {}
    for family in FAMILIES:
        found |= declared(importlib.import_module(f"..{family}", __name__))
    problems: list[str] = []
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
        try:
            offered = _offered(point.load())
        except Exception as error:  # someone else's package: whatever it raises
            problems.append(f"{point.name} = {point.value}: {type(error).__name__}: {error}")
            continue
        if not offered:
            problems.append(f"{point.name} = {point.value}: needs an operator, got none")
        for name, declaration in offered.items():
            if name in found:
                problems.append(f"{point.name} = {point.value}: {name} is taken")
            else:
                found[name] = declaration
    return Catalogue(found, tuple(problems))


def _offered(target: Any) -> dict[str, Declaration]:
    if isinstance(target, Declaration):
        return {target.name: target}
    return declared(target) if isinstance(target, ModuleType) else {}


def declared(module: ModuleType) -> dict[str, Declaration]:
    """The operators that a module itself declares, by operator name, private ones left out."""
    return {
        item.name: item
        for item in vars(module).values()
        if isinstance(item, Declaration)
        and item.module == module.__name__
        and not item.name.startswith("_")
    }


def resolve(name: str) -> Declaration:
    """`rms_norm`, or `path/FILE.py:swish_gate` → its declaration.

    Raises UnknownOperatorError, with near names where there are any.
    """
    path, colon, member = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _pick(declared(_load(Path(path))), member, f"an operator of {path}")
    if name.endswith(".py"):
        raise UnknownOperatorError(f"needs {name}:OPERATOR, got the file alone")
    return _pick(operators(), name, "an operator")


def _pick(known: Mapping[str, Declaration], name: str, what: str) -> Declaration:
    found = known.get(name)
    if found is None:
        raise UnknownOperatorError(f"needs {what}, got {name!r}{near(name, known)}")
    return found


def near(name: str, known: Iterable[str]) -> str:
    """`: did you mean a or b?`, or what there is where nothing is near."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    close += [n for n in names if name and name in n and n not in close][: 3 - len(close)]
    if close:
        return f": did you mean {' or '.join(close)}?"
    return f": there are {', '.join(sorted(names))}" if 0 < len(names) <= 8 else ""


def _load(path: Path) -> ModuleType:
    """The module of a file, run once a process. Raises UnknownOperatorError, one line."""
    if not path.is_file():
        raise UnknownOperatorError(f"needs a Python file, got {path}, which is none")
    name = f"rudnn_file_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownOperatorError(f"needs a Python file, got {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file raises
        del sys.modules[name]
        raise UnknownOperatorError(
            f"needs a file that runs, got {path}: {type(error).__name__}: {error}"
        ) from error
    return module
