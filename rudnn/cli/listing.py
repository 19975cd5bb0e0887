"""`ops`, `doctor`, `cache`."""

from __future__ import annotations

import os
import platform
import textwrap
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .output import bytes_text, note, print_json, print_table

if TYPE_CHECKING:
    from ..dsl.declare import Declaration


def ops(as_json: bool) -> int:
    """Every operator there is."""
    from ..ops.registry import catalogue

    found = catalogue()
    for problem in found.problems:
        note(f"operator package: {problem}")
    records = [_operator(d) for d in found.operators.values()]
    if as_json:
        print_json(records)
        return 0
    rows = [
        (r["op"], ", ".join((*r["inputs"], *r["params"], *r["options"], *r["extents"])),
         " ".join(r["dtypes"]), r["backward"] or "", r["doc"].splitlines()[0] if r["doc"] else "")
        for r in records
    ]  # fmt: skip
    print_table(("operator", "arguments", "dtypes", "backward", ""), rows)
    return 0


def _operator(declaration: Declaration) -> dict[str, Any]:
    from ..runtime.targets import registered

    d = declaration
    own = any(i.dtype is None for i in d.inputs.values())
    return {
        "op": d.name,
        "module": d.module,
        "doc": d.doc,
        "inputs": {
            n: {
                "dims": list(i.dims),
                "dtypes": [t.short for t in i.accepts(d.dtypes)],
                "optional": i.optional,
            }
            for n, i in d.inputs.items()
        },
        "outputs": {
            o.name: {"dims": list(o.dims), "dtype": o.dtype.short if o.dtype else None}
            for o in d.outputs
        },
        "params": {n: p.default for n, p in d.params.items()},
        "options": {n: list(o.choices) for n, o in d.options.items()},
        "extents": list(d.extents),
        "static": sorted(d.static),
        "example": d.example,
        "dtypes": [t.short for t in d.dtypes] if own else [],
        "backward": d.backward.name if d.backward else None,
        "targets": list(registered()),
    }


def doctor(as_json: bool) -> int:
    """Exit code 1 if no target runs or a pinned package is another version."""
    from .. import __version__
    from ..runtime.compiler import disk_cache
    from ..runtime.targets import registered
    from ..runtime.tvm_import import PINS

    targets: list[dict[str, Any]] = [
        {"target": name, "compiles": s.can_compile, "runs": s.can_run, "detail": s.detail,
         "hint": s.hint, "devices": _devices(name) if s.can_run else []}
        for name, s in ((n, t.status()) for n, t in registered().items())
    ]  # fmt: skip
    packages = [
        {"package": n, "version": _found(n), "needs": PINS.get(n)}
        for n in (*PINS, "numpy", "ml-dtypes", "torch")
    ]
    threads = os.environ.get("RUDNN_NUM_THREADS", "")
    entries = disk_cache().list()
    record = {
        "rudnn": __version__, "python": platform.python_version(), "platform": platform.platform(),
        "threads": threads or None, "targets": targets, "packages": packages,
        "cache": {"folder": str(disk_cache().root), "kernels": len(entries),
                  "bytes": sum(e.nbytes for e in entries)},
    }  # fmt: skip
    wrong = [p for p in packages if p["needs"] and p["version"] != p["needs"]]
    good = not wrong and any(t["runs"] for t in targets)
    if as_json:
        print_json(record)
        return 0 if good else 1
    print(f"rudnn {__version__}, Python {record['python']}, {record['platform']}")
    rows = [(t["target"], _yes(t["compiles"]), _yes(t["runs"]), t["detail"], t["hint"])
            for t in targets]  # fmt: skip
    print_table(("target", "compiles", "runs", "", "to mend it"), rows)
    for device in (d for t in targets for d in t["devices"]):
        print(f"\n{device['device']}: {device['name']}, compiled for as {device['code']}")
        print(_wrapped(device["capability"]))
    print()
    print_table(("package", "version", ""), [_package(p) for p in packages])
    cache: Any = record["cache"]
    size = bytes_text(cache["bytes"])
    print(f"\ncache: {cache['folder']}, {cache['kernels']} kernels, {size}")
    return 0 if good else 1


def _devices(target: str) -> list[dict[str, Any]]:
    """The devices of a target, with what schedules may assume of each."""
    from ..runtime.device import devices_of

    return [
        {"device": str(d), "name": d.name, "code": d.code, "capability": asdict(d.capability)}
        for d in devices_of(target)
    ]


def _wrapped(capability: dict[str, Any]) -> str:
    """A capability record as indented lines; what a device does not have is left out."""
    units = [f"{'x'.join(map(str, u['shape']))} {u['operands']}" for u in capability["matrix"]]
    shown = capability | {"matrix": " ".join(units), "atomics": _atomics(capability["atomics"])}
    words = ", ".join(f"{k} {v}" for k, v in shown.items() if v)
    return textwrap.fill(words, 96, initial_indent="    ", subsequent_indent="    ")


def _atomics(pairs: Any) -> str:
    return " ".join(f"{op}({dtype})" for op, dtype in pairs)


def _found(package: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _package(record: dict[str, Any]) -> tuple[str, str, str]:
    name, have, needs = record["package"], record["version"], record["needs"]
    mend = f"needs {needs}: pip install {name}=={needs}" if needs and have != needs else ""
    return name, have or "none", mend


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def cache_list(as_json: bool) -> int:
    """The kernels on disk, oldest first."""
    from ..runtime.compiler import disk_cache

    cache = disk_cache()
    entries = cache.list()
    records = [
        {"key": e.key, "op": e.manifest.get("op"), "target": e.manifest.get("target"),
         "bytes": e.nbytes, "created": e.created, "folder": str(e.path)}
        for e in entries
    ]  # fmt: skip
    if as_json:
        print_json(records)
        return 0
    rows = [
        (e.key[:12], str(e.manifest.get("op", "")), str(e.manifest.get("target", "")),
         bytes_text(e.nbytes), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(e.created)))
        for e in entries
    ]  # fmt: skip
    print_table(("key", "operator", "target", "size", "made"), rows, "lllr")
    print(f"{cache.root}: {len(entries)} entries, {bytes_text(sum(e.nbytes for e in entries))}")
    return 0


def cache_clear() -> int:
    """Remove everything."""
    from ..runtime.compiler import disk_cache

    cache = disk_cache()
    count = cache.clear()
    print(f"{cache.root}: removed {count} {'entry' if count == 1 else 'entries'}")
    return 0
