"""What a device can do, as data. Schedules ask this record and nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixUnit:
    """A matrix instruction: shape (m, n, k), operand and accumulator types, intrinsic id."""

    shape: tuple[int, int, int]
    operands: str
    accumulator: str
    intrinsic: str


@dataclass(frozen=True)
class Capability:
    """A device as schedules see it.

    `model` is "cores" (few threads, wide vectors, caches) or "grid" (blocks of many threads,
    shared memory). Sizes are bytes; widths of vectors are bits. `vector_ldexp`: one instruction
    multiplies a vector by powers of two, denormal results included.
    """

    model: str
    vector_bits: int = 128
    vector_registers: int = 16
    l1_bytes: int = 32 * 1024
    l2_bytes: int = 512 * 1024
    cores: int = 1
    shared_bytes: int = 1024 * 1024
    max_threads: int = 1
    subgroup_widths: tuple[int, ...] = (1,)
    registers: int = 0
    matrix: tuple[MatrixUnit, ...] = ()
    atomics: tuple[tuple[str, str], ...] = ()
    storage_16bit: bool = True
    vector_ldexp: bool = False

    @property
    def panel_width(self) -> int:
        """Columns of a panel in which contractions want a packed matrix."""
        return (3 if self.vector_registers >= 32 else 2) * self.lanes()

    def lanes(self, bits: int = 32) -> int:
        """Elements of a vector register."""
        return max(1, self.vector_bits // bits)
