"""What AMDGPU assembly tells: registers, memory, instructions, and whether barriers are safe."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelFacts:
    """One kernel of an assembly text. Bytes; `instructions` counts mnemonics without suffixes.

    `spills` of vector registers go to memory, `scalar_spills` to lanes of vector registers.
    """

    name: str
    shared: int
    scratch: int
    vector_registers: int
    spills: int
    scalar_spills: int
    wave: int
    threads: int
    arguments: tuple[tuple[int, int], ...]
    instructions: Counter[str]
    bare_barriers: int


def kernels(assembly: str) -> dict[str, KernelFacts]:
    """The facts of every kernel in an assembly text, by name."""
    notes = assembly[assembly.index(".amdgpu_metadata") :]
    parts = re.split(r"^  - (?=\.)", notes, flags=re.M)[1:]
    found = [_facts(part, assembly) for part in parts]
    return {facts.name: facts for facts in found}


def _facts(note: str, assembly: str) -> KernelFacts:
    def number(key: str) -> int:
        match = re.search(rf"\.{key}: +(\d+)", note)
        return int(match[1]) if match else 0

    name = re.search(r"^    \.name: +(\S+)", note, re.M)
    assert name, note
    body = re.search(rf"^{name[1]}:\n(.*?)^\t\.section", assembly, re.M | re.S)
    assert body, name[1]
    lines = [line.strip() for line in body[1].splitlines() if line.startswith("\t")]
    arguments = re.findall(r"\.offset: +(\d+)\n +\.size: +(\d+)", note)
    return KernelFacts(
        name[1], number("group_segment_fixed_size"), number("private_segment_fixed_size"),
        number("vgpr_count"), number("vgpr_spill_count"), number("sgpr_spill_count"),
        number("wavefront_size"), number("max_flat_workgroup_size"),
        tuple((int(offset), int(size)) for offset, size in arguments),
        Counter(re.sub(r"_e(32|64)$|_dpp$|_sdwa$", "", line.split()[0]) for line in lines),
        _bare_barriers(lines),
    )  # fmt: skip


_BARRIER = ("s_barrier", "s_barrier_signal")
_SHARED_WRITE = re.compile(r"ds_(write|store|add|max|min|or|and|xor)")
_SHARED_WAIT = re.compile(
    r"s_waitcnt (?:.*lgkmcnt\(0\)|0$|null)|s_wait_(?:\w+_)?dscnt 0x0|s_wait_idle"
)


def _bare_barriers(lines: list[str]) -> int:
    """Barriers that a store to shared memory may still be under way at."""
    bare, pending = 0, False
    for line in lines:
        if _SHARED_WRITE.match(line):
            pending = True
        elif _SHARED_WAIT.match(line):
            pending = False
        elif line.split()[0] in _BARRIER and pending:
            bare += 1
    return bare
