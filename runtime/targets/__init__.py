"""The targets, one folder each. A new one is a folder and a line in `registered`."""

from __future__ import annotations

from functools import lru_cache

from ...dsl.errors import TargetError
from ..driver import Target


@lru_cache(maxsize=1)
def registered() -> dict[str, Target]:
    """Targets by name, the default first."""
    from .cuda import Cuda
    from .llvm import Llvm
    from .rocm import Rocm
    from .vulkan import Vulkan

    found: tuple[Target, ...] = (Llvm(), Vulkan(), Cuda(), Rocm())
    return {t.name: t for t in found}


def parse(name: str) -> tuple[Target, str]:
    """`llvm`, `llvm:x86-64-v3` → (target, arch). Raises TargetError on an unknown name."""
    kind, _, arch = name.partition(":")
    target = registered().get(kind)
    if target is None:
        raise TargetError(f"needs a target among {', '.join(registered())}, got {name}")
    return target, arch
