"""Records of AMD architectures (`gfx90a`, `gfx1100`, …)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....dsl.errors import TargetError
from ....schedules.capability import Capability, MatrixUnit

_KIB, _MIB = 1024, 1024 * 1024


@dataclass(frozen=True)
class Arch:
    """What code generation knows of an architecture beyond what schedules do.

    `family` names the layout of matrix fragments: "mfma", "wmma" (gfx11), "wmma12", or "" without
    a matrix unit.
    """

    name: str
    capability: Capability
    family: str = ""

    @property
    def wave(self) -> int:
        """Threads of a wavefront."""
        return self.capability.subgroup


def _units(family: str, *operands: str) -> tuple[MatrixUnit, ...]:
    """16x16x16 units; see `matrix` for which lane holds what."""
    a, c = {"mfma": (4, 4), "wmma": (16, 8), "wmma12": (8, 8)}[family]
    short = {"float16": "f16", "bfloat16": "bf16"}
    return tuple(
        MatrixUnit((16, 16, 16), o, "float32", f"rudnn_{family}_{short[o]}", a=a, b=a, c=c)
        for o in operands
    )


# A launch packet counts threads, not blocks, in 32 bits.
_GCN = Capability(
    model="grid", vector_bits=128, l1_bytes=16 * _KIB, l2_bytes=4 * _MIB, cores=60,
    shared_bytes=64 * _KIB, max_threads=1024, max_blocks=2**22 - 1, subgroup=64, shuffle=True,
    registers=256, atomics=(("add", "float32"),),
)  # fmt: skip
_RDNA = replace(_GCN, subgroup=32, l1_bytes=32 * _KIB, cores=40)
_BOTH = ("float16", "bfloat16")


def _arch(name: str, base: Capability, cores: int, l2: int, family: str = "",
          operands: tuple[str, ...] = _BOTH) -> Arch:  # fmt: skip
    matrix = _units(family, *operands) if family else ()
    return Arch(name, replace(base, cores=cores, l2_bytes=l2 * _MIB, matrix=matrix), family)


# `cores` (compute units) and caches are those of the usual card: code must not differ between two
# cards of one architecture, or the compile cache would need to know the card.
_RECORDS = {
    arch.name: arch
    for arch in (
        _arch("gfx900", _GCN, 64, 4), _arch("gfx906", _GCN, 60, 4),
        _arch("gfx908", _GCN, 120, 8, "mfma", ("float16",)),  # its bf16 unit has another shape
        _arch("gfx90a", _GCN, 104, 8, "mfma"),
        _arch("gfx942", replace(_GCN, l1_bytes=32 * _KIB), 304, 4, "mfma"),
        _arch("gfx950", replace(_GCN, l1_bytes=32 * _KIB), 256, 4, "mfma"),
        _arch("gfx1010", _RDNA, 40, 4), _arch("gfx1030", _RDNA, 80, 4),
        _arch("gfx1031", _RDNA, 40, 3), _arch("gfx1032", _RDNA, 32, 2),
        _arch("gfx1034", _RDNA, 16, 1), _arch("gfx1035", _RDNA, 12, 2),
        _arch("gfx1036", _RDNA, 2, 1),
        _arch("gfx1100", _RDNA, 96, 6, "wmma"), _arch("gfx1101", _RDNA, 60, 4, "wmma"),
        _arch("gfx1102", _RDNA, 32, 2, "wmma"), _arch("gfx1103", _RDNA, 12, 2, "wmma"),
        _arch("gfx1150", _RDNA, 16, 2, "wmma"), _arch("gfx1151", _RDNA, 40, 2, "wmma"),
        _arch("gfx1200", _RDNA, 32, 4, "wmma12"), _arch("gfx1201", _RDNA, 64, 8, "wmma12"),
    )
}  # fmt: skip


def record(arch: str) -> Arch:
    """The record of a named architecture, features such as `:xnack-` left aside.

    Raises TargetError.
    """
    found = _RECORDS.get(arch.partition(":")[0])
    if found is None:
        known = ", ".join(_RECORDS)
        raise TargetError(f"needs rocm:ARCH with ARCH among {known}, got {arch!r}")
    return found
