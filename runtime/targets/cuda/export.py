"""What an app needs to run an operator on NVIDIA devices: a cubin, its source, C that starts it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ....schedules.program import Program
from ...embed.device import Parts, export_device
from ...signature import Signature
from ...streams import NATIVE as STREAMS
from . import toolkit
from .compile import build

NATIVE = Path(__file__).parent / "native"
_SHARED = "rudnn_streams.h"
_LIBRARIES = "-ldl -lm"


def export(program: Program, signature: Signature, arch: str, folder: Path) -> dict[str, Any]:
    """Write everything into `folder`; the manifest's target part. Raises CompileError."""
    name = signature.name
    cubin, source, plan = build(program, name, arch)
    (folder / f"{name}.cubin").write_bytes(cubin)
    (folder / f"{name}.cu").write_text(source, "utf-8")
    shutil.copyfile(STREAMS / _SHARED, folder / _SHARED)
    functions = [f'"{name}.cubin", "{launch.entry}"' for launch in plan.launches]
    parts = Parts(
        NATIVE / "rudnn_cuda.h", functions, [f"{name}.cubin", f"{name}.cu", _SHARED], _LIBRARIES,
        {"binary": f"{name}.cubin", "source": f"{name}.cu", "arch": arch,
         "compiler": toolkit.identity(toolkit.compiler_name())},
    )  # fmt: skip
    return export_device(program, signature, plan, parts, folder)
