"""The launch plan: what a kernel's argument array holds. Shared by cache, manifest and drivers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

ABI_VERSION = 1
SMALL_WORK = 32768  # a plan's `work` below which one thread is quicker than waking others


@dataclass(frozen=True)
class Slot:
    """One 64-bit argument.

    `kind` is "dim", "pointer", "stride", "scalar" or "workspace"; a stride counts elements of
    tensor `name` along `axis`; a scalar is an int64 or the bits of a float32.
    """

    kind: str
    name: str
    axis: int = 0
    dtype: str = "int64"


@dataclass(frozen=True)
class LaunchPlan:
    """How to call a compiled operator.

    `entry` is `int32_t entry(const int64_t *args)` with one element per slot, 0 on success.
    `workspace` (bytes) and `work` (elementary operations) are expressions of the dims, in Python;
    `kernels` says which rule and configuration made each kernel.
    """

    entry: str
    slots: tuple[Slot, ...]
    workspace: str
    work: str
    kernels: tuple[tuple[str, str, str], ...]
    abi: int = ABI_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> LaunchPlan:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError on foreign data."""
        slots = tuple(Slot(**s) for s in data["slots"])
        kernels = tuple((str(a), str(b), str(c)) for a, b, c in data["kernels"])
        if data["abi"] != ABI_VERSION:
            raise ValueError(f"needs ABI {ABI_VERSION}, got {data['abi']}")
        return LaunchPlan(
            data["entry"], slots, data["workspace"], data["work"], kernels, data["abi"]
        )
