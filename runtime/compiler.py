"""From a specialisation to a launchable kernel: memory cache, disk cache, compiler."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..dsl.errors import LoadError
from ..dsl.graph import Graph
from ..dsl.identity import describe
from .cache import DiskCache
from .driver import Artifact, Loaded
from .locks import fork_safe_lock
from .plan import LaunchPlan
from .targets import parse
from .tvm_import import PINS

if TYPE_CHECKING:
    from ..schedules.program import Program
    from .device import Device


@dataclass(frozen=True)
class Executable:
    """A kernel loaded on a device."""

    plan: LaunchPlan
    loaded: Loaded


@dataclass(frozen=True)
class Layouts:
    """What a kernel may assume of its tensors, by name.

    `unit`: the last stride is 1. `wide`: besides, all rows start at multiples of 16 bytes.
    """

    unit: frozenset[str]
    wide: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{' '.join(sorted(self.unit))} / {' '.join(sorted(self.wide))}"


_SOURCES = frozenset({".py", ".c", ".h", ".cuh", ".ll"})


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """A digest of everything that turns a graph into machine code: our own sources and the pins."""
    from .. import dsl, runtime, schedules

    digest = hashlib.sha256(repr(PINS).encode())
    for package in (dsl, schedules, runtime):
        folder = Path(package.__path__[0])
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _SOURCES):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


_LOCK = fork_safe_lock()
_DISK: DiskCache | None = None


def disk_cache() -> DiskCache:
    """The compile cache on disk."""
    global _DISK
    if _DISK is None:
        _DISK = DiskCache()
    return _DISK


def key_of(graph: Graph, layouts: Layouts, target: str) -> str:
    """The cache key of one kernel."""
    kind, arch = parse(target)
    identity = kind.identity(arch, disk_cache())
    parts = (fingerprint(), target, identity, describe(graph), str(layouts))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def executable(graph: Graph, layouts: Layouts, device: Device) -> Executable:
    """The kernel for a graph on a device.

    From memory, else from the disk cache if it is there and sound, else compiled and stored.
    Raises CompileError.
    """
    front = (id(graph), layouts, str(device))
    known = _BY_GRAPH.get(front)
    if known is not None and known[0] is graph:
        return known[1]
    key = key_of(graph, layouts, device.code)
    place = (key, device.index)
    ready = _LOADED.get(place)
    if ready is None:
        with _compiling(key):
            ready = (
                _LOADED.get(place) or _stored(key, device) or _compile(key, graph, layouts, device)
            )
            _LOADED[place] = ready
            _IN_PROGRESS.pop(key, None)
    _BY_GRAPH[front] = (graph, ready)
    return ready


def _compile(key: str, graph: Graph, layouts: Layouts, device: Device) -> Executable:
    """Build a kernel, store it and load it."""
    cache = disk_cache()
    artifact = build(graph, layouts, device.code, f"rudnn_{graph.name}_{key[:8]}")
    manifest = {
        "plan": artifact.plan.to_json(),
        "binary": artifact.binary,
        "op": graph.name,
        "target": device.code,
    }
    for attempt in range(2):
        entry = cache.put(key, manifest, artifact.files)
        try:
            return _load(entry.file(artifact.binary), artifact.plan, device)
        except LoadError:  # another process may clear the cache between the two steps
            cache.remove(key)
            if attempt:
                raise
    raise AssertionError


def _load(binary: Path, plan: LaunchPlan, device: Device) -> Executable:
    return Executable(plan, device.driver.load(binary, plan, disk_cache(), device.index))


def build(graph: Graph, layouts: Layouts, target: str, entry: str) -> Artifact:
    """Compile a graph, without any cache."""
    kind, arch = parse(target)
    return kind.compile(schedule(graph, layouts, target), entry, arch, disk_cache())


def schedule(graph: Graph, layouts: Layouts, target: str) -> Program:
    """The scheduled program of a graph."""
    from ..schedules.program import build as build_program
    from .tvm_import import load_tvm

    load_tvm()
    kind, arch = parse(target)
    caps = kind.capability(arch)
    return build_program(graph, kind.rules(), caps, layouts.unit, layouts.wide)


def _stored(key: str, device: Device) -> Executable | None:
    """The kernel from the disk cache; what is foreign or does not load is removed."""
    cache = disk_cache()
    entry = cache.get(key)
    if entry is None:
        return None
    try:
        plan = LaunchPlan.from_json(entry.manifest["plan"])
        binary = entry.file(entry.manifest["binary"])
    except (KeyError, TypeError, ValueError):
        cache.remove(key)
        return None
    try:
        return _load(binary, plan, device)
    except LoadError:
        cache.remove(key)
        return None


_LOADED: dict[tuple[str, int], Executable] = {}
_BY_GRAPH: dict[tuple[int, Layouts, str], tuple[Graph, Executable]] = {}
_IN_PROGRESS: dict[str, threading.Lock] = {}


def _compiling(key: str) -> threading.Lock:
    """One thread compiles a kernel, others wait for it; other processes may do it twice."""
    with _LOCK:
        return _IN_PROGRESS.setdefault(key, threading.Lock())


def _register_fork() -> None:
    import os

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_IN_PROGRESS.clear)


_register_fork()
