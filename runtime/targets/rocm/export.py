"""What an app needs to run an operator on AMD devices: a code object, its source, C to start it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ....schedules.program import Program
from ...embed.device import Parts, export_device
from ...signature import Signature
from ...streams import NATIVE as STREAMS
from .capability import Arch
from .compile import build

NATIVE = Path(__file__).parent / "native"
_SHARED = "rudnn_streams.h"
_LIBRARIES = "-ldl -lm"


def export(program: Program, signature: Signature, arch: Arch, folder: Path) -> dict[str, Any]:
    """Write everything into `folder`; the manifest's target part. Raises CompileError."""
    name = signature.name
    code, plan = build(program, name, arch)
    (folder / f"{name}.hsaco").write_bytes(code.link())
    (folder / f"{name}.ll").write_text(code.ir, "utf-8")
    (folder / f"{name}.s").write_text(code.assembly(), "utf-8")
    shutil.copyfile(STREAMS / _SHARED, folder / _SHARED)
    functions = [f'"{name}.hsaco", "{launch.entry}"' for launch in plan.launches]
    files = [f"{name}.hsaco", f"{name}.ll", f"{name}.s", _SHARED]
    parts = Parts(
        NATIVE / "rudnn_hip.h", functions, files, _LIBRARIES,
        {"binary": f"{name}.hsaco", "source": f"{name}.ll", "assembly": f"{name}.s",
         "arch": arch.name, "wavefront": arch.wave},
    )  # fmt: skip
    return export_device(program, signature, plan, parts, folder)
