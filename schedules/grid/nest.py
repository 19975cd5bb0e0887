"""Loop nests for grids: launches of blocks of threads, shared memory, exchange between threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...dsl.expr import Stage
from ..capability import Capability
from ..emit import Emitter, combine
from ..nest import Nest, static

Tir = Any
_ALL_LANES = 0xFFFFFFFF
_NARROW = ("int8", "int16", "uint8", "uint16", "bool")


def block_size(caps: Capability, wanted: int) -> int:
    """The greatest power of two up to `wanted` that a block may have threads."""
    return 1 << (min(wanted, caps.max_threads).bit_length() - 1)


class GridNest(Nest):
    """A nest of one or more launches, which run one after the other.

    Statements stand inside a `launch`; nothing but the workspace carries over to the next one.
    """

    def __init__(self, emitter: Emitter, caps: Capability) -> None:
        super().__init__(emitter)
        self.caps = caps
        self.threads = 1
        self.thread: Tir = self.number(0)

    def ceil_div(self, value: Tir, by: int) -> Tir:
        """⌈value / by⌉ of a value ≥ 0."""
        from tvm import tirx

        if by == 1:
            return value
        return self.simple(tirx.truncdiv(value + self.number(by - 1), self.number(by)))

    @contextmanager
    def launch(self, blocks: Tir, threads: int) -> Iterator[tuple[Tir, Tir]]:
        """A device function of `blocks` blocks of `threads`; yields the indices of both.

        A grid has up to `max_blocks` along one axis: more are folded over a second one.
        """
        from tvm import tirx

        limit = self.caps.max_blocks
        fits = (static(blocks) or limit + 1) <= limit
        names = ("blockIdx.x", "threadIdx.x") if fits else ("blockIdx.x", "blockIdx.y",
                                                            "threadIdx.x")  # fmt: skip
        axes = {n: tirx.Var(n.replace(".", "_"), "int32") for n in names}
        block = axes["blockIdx.x"].astype("int64")
        extents = {"threadIdx.x": self.number(threads), "blockIdx.x": blocks}
        if not fits:
            most = self.number(limit)
            block = block + axes["blockIdx.y"].astype("int64") * most
            extents["blockIdx.x"] = tirx.min(blocks, most)
            extents["blockIdx.y"] = tirx.truncdiv(blocks + most - self.number(1), most)
        self.blocks.append([])
        self.threads = threads
        block = self.bind("block", block)
        self.thread = self.bind("thread", axes["threadIdx.x"].astype("int64"))
        if fits:
            yield block, self.thread
        else:
            with self.when(block < blocks):
                yield block, self.thread
        body = self.close()
        for name, var in reversed(axes.items()):
            body = _bind_axis(name, var, extents[name].astype("int32"), body)
        self.add(body)

    def bind(self, name: str, value: Tir) -> Tir:
        """`value`, computed once here.

        TVM simplifies what a name stands for twice, and refuses to meet a Let in it again.
        """
        if _holds_let(value):
            value = self.lay_by(f"{name}_cell", value)
        return super().bind(name, value)

    def opaque(self, name: str, value: Tir) -> Tir:
        """`value`, computed once here: the short list of passes of a grid takes it as it is."""
        made = self.simple(value)
        return made if static(made) is not None else self.bind(name, made)

    def hidden(self, name: str, value: Tir) -> Tir:
        """`value`, computed once here, where TVM's passes do not look behind the name.

        For what comes of divisions by sizes known at launch: written out in every index, they
        take TVM seconds a kernel.
        """
        return super().opaque(name, value)

    def keep(self, stage: Stage, room: Tir | None = None) -> None:
        """Room for a stage in the workspace: what a launch sets, those after it read.

        `room` is that of another stage, which nothing reads any more.
        """
        made = self.workspace(stage.name, stage.shape, stage.dtype) if room is None else room
        self.targets[id(stage)] = self.sources[id(stage)] = made
        self.reader(stage, made)

    def private(self, name: str, shape: Sequence[Tir], dtype: str) -> Tir:
        """An array of the thread: registers, where every index is known when compiling."""
        return self._allocate(name, shape, dtype, "local")

    def shared(self, name: str, shape: Sequence[Tir], dtype: str) -> Tir:
        """An array of the block."""
        return self._allocate(name, shape, dtype, "shared")

    def _allocate(self, name: str, shape: Sequence[Tir], dtype: str, scope: str) -> Tir:
        from tvm import tirx

        extents = list(shape) or [self.number(1)]
        made = tirx.decl_buffer(extents, dtype, self.emitter.name(name), scope=scope,
                                data_alignment=16)  # fmt: skip
        self.add(tirx.AllocBuffer(made))
        return made

    def barrier(self) -> None:
        """Every thread of the block comes here, and sees what the others wrote before."""
        from tvm import tirx

        self.add(tirx.Evaluate(_call("int32", "tvm_storage_sync", "shared")))

    def shuffle_down(self, value: Tir, by: int) -> Tir:
        """The value of the lane `by` further on in the subgroup; any value past its end."""
        return self._shuffle("tvm_warp_shuffle_down", value, by)

    def shuffle(self, value: Tir, lane: Tir) -> Tir:
        """The value of a lane of the subgroup."""
        return self._shuffle("tvm_warp_shuffle", value, lane.astype("int32"))

    def _shuffle(self, name: str, value: Tir, which: Any) -> Tir:
        from tvm import tirx

        width = self.caps.subgroup
        mask = tirx.const(_ALL_LANES, "uint32")
        dtype = str(value.ty.dtype)
        if dtype in ("int64", "uint64"):  # registers have 32 bits
            low = self._shuffle(name, value.astype("uint32"), which).astype(dtype)
            half = tirx.const(32, dtype)
            high = self._shuffle(name, (value >> half).astype("uint32"), which).astype(dtype)
            return self.bind("shuffled", high << half | low)
        if dtype in _NARROW:
            return self._shuffle(name, value.astype("int32"), which).astype(dtype)
        return self.bind("shuffled", _call(dtype, name, mask, value, which, width, width))

    def reduce(self, op: str, value: Tir, width: int) -> Tir:
        """`value` combined over each run of `width` (a power of two) threads, known to all of them.

        The order of the operations depends on `width` and the subgroup alone. Every thread of the
        block comes here.
        """
        value = self.bind("part", value)
        if width == 1:
            return value
        if not self.caps.shuffle:
            return self._reduce_shared(op, value, width, width)
        lanes = min(width, self.caps.subgroup)
        value = self._fold_lanes(op, value, lanes)
        if width > lanes:
            return self._gather(op, value, width, lanes)
        lane = self.thread % self.number(self.caps.subgroup)
        return self.shuffle(value, lane - lane % self.number(lanes))

    def _fold_lanes(self, op: str, value: Tir, lanes: int) -> Tir:
        """In the first of each `lanes` threads, the fold of all of them."""
        step = lanes // 2
        while step:
            value = self.bind("part", combine(op, value, self.shuffle_down(value, step)))
            step //= 2
        return value

    def _gather(self, op: str, value: Tir, width: int, lanes: int) -> Tir:
        """The first of each subgroup has a part; all of `width` threads get their fold."""
        count = width // lanes
        cells = self.shared("parts", [self.number(self.threads // lanes)], str(value.ty.dtype))
        self.barrier()
        lane = self.bind("lane", self.thread % self.number(lanes))
        with self.when(lane.equal(self.number(0))):
            self.store(cells, [self.thread // self.number(lanes)], value)
        self.barrier()
        first = self.bind("first", self.thread // self.number(width) * self.number(count))
        some = min(count, lanes)
        mine = self.bind("mine", first + lane % self.number(some))
        total = cells[mine]
        for further in range(some, count, some):
            total = combine(op, total, cells[mine + self.number(further)])
        return self.shuffle(self._fold_lanes(op, self.bind("part", total), some), self.number(0))

    def _reduce_shared(self, op: str, value: Tir, width: int, step: int) -> Tir:
        """A tree in shared memory, for devices whose threads cannot exchange registers."""
        cells = self.shared("tree", [self.number(self.threads)], str(value.ty.dtype))
        self.barrier()
        self.store(cells, [self.thread], value)
        self.barrier()
        place = self.thread % self.number(width)
        while step > 1:
            step //= 2
            with self.when(place < self.number(step)):
                other = cells[self.thread + self.number(step)]
                self.store(cells, [self.thread], combine(op, cells[self.thread], other))
            self.barrier()
        return self.bind("whole", cells[self.thread - place])


def _holds_let(value: Tir) -> bool:
    import tvm_ffi
    from tvm import tirx

    found: list[Tir] = []
    tvm_ffi.structural_walk(value, (tirx.Let, found.append))
    return bool(found)


def _call(dtype: str, name: str, *arguments: Any) -> Tir:
    from tvm import tirx

    return tirx.call_intrin(dtype, f"tirx.{name}", *arguments)


def _bind_axis(name: str, var: Tir, extent: Tir, body: Tir) -> Tir:
    """`body` run by each index of a launch axis."""
    from tvm import tirx
    from tvm.ir import Range

    axis = tirx.IterVar(Range(tirx.const(0, "int32"), extent), var, tirx.IterVar.ThreadIndex, name)
    return tirx.AttrStmt(axis, "thread_extent", extent, body)
