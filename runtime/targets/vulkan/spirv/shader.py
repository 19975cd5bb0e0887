"""The shaders of a program, and the file they are stored in.

The file is a header `RUDNNSPV`, the length of a JSON text (uint32, little endian), that text (a
list of records, one a shader, each with the `nbytes` of its SPIR-V), and the SPIR-V of all shaders
in the same order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .....dsl.errors import LoadError

_MAGIC = b"RUDNNSPV"
_HEAD = struct.Struct("<8sI")


@dataclass(frozen=True)
class Shader:
    """One device function as a SPIR-V module with the entry point `main`.

    `words` is the module, little endian. Workgroups are `(local_size, 1, 1)`.

    Bindings 0, 1, … of set 0 are storage buffers, one for each pointer of the function, in order;
    `readonly` tells which are never written. Then the shader wants a block of numbers packed
    with `struct` as `layout`: for each buffer a uint32, the element (of the buffer's dtype) of
    the bound range at which the tensor begins, then the function's numbers. The block is the push
    constants; if `in_buffer`, it is one more storage buffer, at binding `len(readonly)`. Where
    the tensor's address and the bound range's are multiples of 16 bytes, so is the offset, which
    is what the vector moves of the kernel need.

    `subgroup`: threads exchange values, so a subgroup must be full and of the size that the kernel
    was made for.
    """

    name: str
    words: bytes
    local_size: int
    readonly: tuple[bool, ...]
    layout: str
    in_buffer: bool = False
    subgroup: bool = False

    @property
    def block_bytes(self) -> int:
        """Size of the block of numbers."""
        return struct.calcsize(self.layout)


def pack(shaders: Sequence[Shader]) -> bytes:
    """The shaders as one file."""
    records = []
    for shader in shaders:
        record = asdict(shader)
        record["nbytes"] = len(record.pop("words"))
        records.append(record)
    text = json.dumps(records, sort_keys=True).encode()
    return _HEAD.pack(_MAGIC, len(text)) + text + b"".join(s.words for s in shaders)


def unpack(data: bytes) -> tuple[Shader, ...]:
    """Inverse of `pack`. Raises LoadError for anything else."""
    try:
        magic, length = _HEAD.unpack_from(data)
        records = json.loads(data[_HEAD.size : _HEAD.size + length])
        start = _HEAD.size + length
        shaders = []
        for record in records:
            end = start + record.pop("nbytes")
            shaders.append(_shader(record, data[start:end], end <= len(data)))
            start = end
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"needs a file of SPIR-V shaders, got {error}") from error
    if magic != _MAGIC or start != len(data):
        raise LoadError(f"needs a file of SPIR-V shaders, got one of {len(data)} bytes")
    return tuple(shaders)


def _shader(record: dict[str, Any], words: bytes, complete: bool) -> Shader:
    if not complete:
        raise ValueError(f"{len(words)} bytes for {record['name']}")
    return Shader(words=words, **(record | {"readonly": tuple(record["readonly"])}))
