"""What every target with launches writes for an app: header, example host, launches in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schedules.program import Program
from ..plan import Launch, LaunchPlan
from ..signature import Signature
from . import NATIVE, copy_support
from .device_header import DeviceHeader, c_source
from .device_host import DeviceHost


@dataclass(frozen=True)
class Parts:
    """A target's share of an exported folder.

    `support` is its implementation of rudnn_device.h; `functions` initialise one `rudnn_function`
    for each launch, in C; `files` are those it has written to the folder; `libraries` end the line
    that builds the host; `manifest` is what it adds to the manifest.
    """

    support: Path
    functions: Sequence[str]
    files: Sequence[str]
    libraries: str
    manifest: dict[str, Any]


def export_device(
    program: Program, signature: Signature, plan: LaunchPlan, parts: Parts, folder: Path
) -> dict[str, Any]:
    """Write the header, the host and what they include; the manifest's target part."""
    name = signature.name
    header = DeviceHeader(
        signature, plan, signature.c(program.workspace.total), parts.support.name, parts.functions
    )
    build = f"cc -O2 -o {name}_host {name}_host.c {parts.libraries}"
    (folder / f"{name}.h").write_text(header.text(), "utf-8")
    (folder / f"{name}_host.c").write_text(DeviceHost(signature, header, build).text(), "utf-8")
    support = copy_support(folder, (parts.support, NATIVE / "rudnn_device.h"))
    return {
        "function": name, "header": f"{name}.h", "build": build,
        "plan": plan.to_json(),
        "launches": [_launch(signature, launch) for launch in plan.launches],
        "workspace_bytes": {"python": signature.public(plan.workspace), "c": header.workspace},
        **parts.manifest,
        "files": [*parts.files, f"{name}.h", f"{name}_host.c", *support],
    }  # fmt: skip


def _launch(signature: Signature, launch: Launch) -> dict[str, Any]:
    """One launch, its extents as expressions of the public dims."""
    return {
        "entry": launch.entry,
        "grid": [
            {"python": signature.public(g), "c": signature.public(c_source(g))}
            for g in launch.grid
        ],
        "block": launch.block,
        "shared_bytes": launch.shared,
    }  # fmt: skip
