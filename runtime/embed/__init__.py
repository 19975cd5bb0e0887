"""Headers and example hosts in C for exported operators, of the host's processor and of devices."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
COMMON = (NATIVE / "rudnn_embed.h", NATIVE / "rudnn_example.h")


def copy_support(folder: Path, files: Iterable[Path]) -> list[str]:
    """Copy files that every export has, and a target's own; their names."""
    made = []
    for path in (*files, *COMMON):
        shutil.copyfile(path, folder / path.name)
        made.append(path.name)
    return made
