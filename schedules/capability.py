"""What a device can do, as data. Schedules ask this record and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

WIDE_BYTES = 16  # the widest move of one thread of a grid


@dataclass(frozen=True)
class MatrixUnit:
    """A matrix instruction that a subgroup executes together: C += A·B, f32 accumulators.

    `shape` is (m, n, k). `a`, `b` and `c` are the elements of each matrix that one lane holds.
    Kernels call the target's functions `<intrinsic>_load_a`, `_load_a_t`, `_load_b`, `_load_b_t`,
    `_mma`, `_zero` and `_store`; which lane holds which element is known to the target alone.
    """

    shape: tuple[int, int, int]
    operands: str
    accumulator: str
    intrinsic: str
    a: int
    b: int
    c: int


@dataclass(frozen=True)
class Capability:
    """A device as schedules see it. Sizes are bytes; widths of vectors are bits.

    `model` is "cores" (few threads, wide vectors, caches) or "grid" (blocks of many threads,
    shared memory).

    Of cores: `vector_ldexp`: one instruction multiplies a vector by powers of two, denormal
    results included.

    Of grids: `subgroup` threads run in step (0: not known) and exchange registers if `shuffle`;
    a block has at most `max_threads` and a grid at most `max_blocks` along one axis;
    `registers` are those of one thread (0: not known). `async_copy`: global memory goes to shared
    memory without passing through registers.
    """

    model: str
    vector_bits: int = 128
    vector_registers: int = 16
    l1_bytes: int = 32 * 1024
    l2_bytes: int = 512 * 1024
    cores: int = 1
    shared_bytes: int = 1024 * 1024
    max_threads: int = 1
    max_blocks: int = 2**31 - 1
    subgroup: int = 0
    shuffle: bool = False
    registers: int = 0
    async_copy: bool = False
    matrix: tuple[MatrixUnit, ...] = ()
    atomics: tuple[tuple[str, str], ...] = ()
    vector_ldexp: bool = False

    @property
    def panel_width(self) -> int:
        """Columns of a panel in which contractions want a packed matrix; 0: as it is."""
        if self.model == "grid":
            return 0
        return (3 if self.vector_registers >= 32 else 2) * self.lanes()

    @property
    def folds_numbers(self) -> bool:
        """Whether an instruction takes a number in memory for all lanes of a vector.

        So do those with names for 32 registers; elsewhere a number is loaded to a register first.
        """
        return self.vector_registers >= 32

    def lanes(self, bits: int = 32) -> int:
        """Elements of a vector register."""
        return max(1, self.vector_bits // bits)
