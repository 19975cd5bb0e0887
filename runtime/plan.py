"""The launch plan: what a kernel's argument array holds. Shared by cache, manifest and drivers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

ABI_VERSION = 1
SMALL_WORK = 32768  # a plan's `work` below which one thread is quicker than waking others


@dataclass(frozen=True)
class Slot:
    """One 64-bit argument.

    `kind` is "dim", "pointer", "stride", "scalar" or "workspace"; a stride counts `scale`
    elements of tensor `name` along `axis`; a scalar is an int64 or the bits of a float32.
    """

    kind: str
    name: str
    axis: int = 0
    dtype: str = "int64"
    scale: int = 1


@dataclass(frozen=True)
class Argument:
    """One parameter of a device function: the value of slot number `slot`.

    `kind` is "pointer" or a number's dtype. `offset`, an expression of the dims in Python, is
    added to a pointer, in bytes.
    """

    kind: str
    slot: int
    offset: str = ""


@dataclass(frozen=True)
class Launch:
    """One start of a device function `entry`.

    `grid` are the extents in x and y, expressions of the dims in Python, where 0 means that there
    is nothing to start; `block` is the number of threads of a block, `shared` the bytes of shared
    memory a block has.
    """

    entry: str
    arguments: tuple[Argument, ...]
    grid: tuple[str, str]
    block: int
    shared: int = 0

    @staticmethod
    def from_json(data: dict[str, Any]) -> Launch:
        """Inverse of `dataclasses.asdict`."""
        arguments = tuple(Argument(**a) for a in data["arguments"])
        x, y = data["grid"]
        return Launch(data["entry"], arguments, (x, y), data["block"], data["shared"])


@dataclass(frozen=True)
class LaunchPlan:
    """How to call a compiled operator.

    On the CPU `entry` is `int32_t entry(const int64_t *args)` with one element per slot, 0 on
    success. On a device with a grid the same arguments are dealt out to `launches`, in order.
    `workspace` (bytes) and `work` (elementary operations) are expressions of the dims, in Python;
    `kernels` says which rule and configuration made each kernel.
    """

    entry: str
    slots: tuple[Slot, ...]
    workspace: str
    work: str
    kernels: tuple[tuple[str, str, str], ...]
    launches: tuple[Launch, ...] = ()
    abi: int = ABI_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> LaunchPlan:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError on foreign data."""
        if data["abi"] != ABI_VERSION:
            raise ValueError(f"needs ABI {ABI_VERSION}, got {data['abi']}")
        return LaunchPlan(
            data["entry"],
            tuple(Slot(**s) for s in data["slots"]),
            data["workspace"],
            data["work"],
            tuple((str(a), str(b), str(c)) for a, b, c in data["kernels"]),
            tuple(Launch.from_json(item) for item in data["launches"]),
        )
