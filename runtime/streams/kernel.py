"""A loaded module and its launches: arguments packed for the device, repeated calls as graphs."""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...dsl.errors import LaunchError, LoadError
from ...dsl.host import compiled, identifier
from ..plan import Launch, LaunchPlan
from .context import Context, Stream
from .library import CAPTURE_RELAXED, PARAM_BUFFER, PARAM_SIZE

if TYPE_CHECKING:
    from ..device import Queue

# How a parameter is packed, and the bits of the 64-bit argument that it takes. Native alignment of
# `struct` is that of the device's compiler.
_FORMATS = {
    "pointer": ("Q", 64), "int64": ("Q", 64), "uint64": ("Q", 64), "int32": ("I", 32),
    "uint32": ("I", 32), "float32": ("I", 32), "int16": ("H", 16), "uint16": ("H", 16),
    "int8": ("B", 8), "uint8": ("B", 8), "bool": ("B", 8),
}  # fmt: skip
_REMEMBERED = 16  # calls with their own arguments whose launches are kept ready


class Packer:
    """Argument arrays of a plan to what its launches take, worked out once."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._unpack = struct.Struct(f"{len(plan.slots)}Q").unpack
        self._dims = [(i, identifier(s.name)) for i, s in enumerate(plan.slots) if s.kind == "dim"]
        # All expressions of the dims are one tuple, and evaluated together.
        texts: list[str] = []
        self._launches = [self._layout(launch, texts) for launch in plan.launches]
        self._expressions = compiled(f"({''.join(f'{text}, ' for text in texts)})")

    def _layout(self, launch: Launch, texts: list[str]) -> _Layout:
        place = len(texts)
        texts += launch.grid
        parts = []
        for argument in launch.arguments:
            if argument.kind not in _FORMATS:
                raise LoadError(f"needs parameters of {', '.join(_FORMATS)}, got {argument.kind}")
            mask = (1 << _FORMATS[argument.kind][1]) - 1
            parts.append((argument.slot, mask, len(texts) if argument.offset else None))
            texts += [argument.offset] if argument.offset else []
        pack = struct.Struct("@" + "".join(_FORMATS[a.kind][0] for a in launch.arguments)).pack
        return _Layout(launch, place, parts, pack)

    def __call__(self, packed: bytes) -> list[tuple[Launch, int, int, bytes]]:
        """The launches with something to do: grid in x and y, and the parameters' bytes."""
        values = self._unpack(packed)
        found = self._expressions({name: values[i] for i, name in self._dims})
        made = []
        for layout in self._launches:
            x, y = found[layout.place : layout.place + 2]
            if x > 0 and y > 0:
                parameters = layout.pack(*(
                    (values[slot] if at is None else values[slot] + found[at]) & mask
                    for slot, mask, at in layout.parts
                ))  # fmt: skip
                made.append((layout.launch, x, y, parameters))
        return made


@dataclass(frozen=True)
class _Layout:
    """Where one launch finds its grid among the expressions, and its parameters."""

    launch: Launch
    place: int
    parts: list[tuple[int, int, int | None]]
    pack: Callable[..., bytes]


class _Ready:
    """The launches of one call, as the driver takes them; a graph once they have come again."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], Any]]) -> None:
        self.calls = calls
        self.seen = 0
        self.graph: int | None = None


class Kernel:
    """The kernels of a plan on one device. Raises LoadError for an image that is not theirs."""

    def __init__(self, context: Context, image: bytes, plan: LaunchPlan) -> None:
        self.context, self.plan = context, plan
        self.packer = Packer(plan)
        self._ready: dict[bytes, _Ready] = {}
        self._lock = threading.RLock()
        api, module = context.api, ctypes.c_void_p()
        self.functions: dict[str, int] = {}
        with context:
            context.check(api.module_load(ctypes.byref(module), image),
                          f"loading {plan.entry}", LoadError)  # fmt: skip
            weakref.finalize(self, _unload, context, module.value).atexit = False
            for launch in plan.launches:
                function = ctypes.c_void_p()
                code = api.module_function(ctypes.byref(function), module, launch.entry.encode())
                context.check(code, f"finding {launch.entry}", LoadError)
                self.functions[launch.entry] = function.value or 0

    def on(self, queue: Queue) -> Callable[[bytes, int], int]:
        """A function of the packed arguments that submits the launches to a queue."""
        stream = self.context.stream(queue)

        def launch(packed: bytes, _threads: int) -> int:
            ready = self._ready.get(packed)
            if ready is None:
                ready = self._remember(packed)
            with self.context:
                if ready.graph is None and not self._repeats(ready):
                    self._submit(ready, stream)
                else:
                    code = self.context.api.graph_launch(ready.graph, stream.handle)
                    self._started([entry for entry, _, _ in ready.calls], code, stream)
            return 0

        return launch

    def _remember(self, packed: bytes) -> _Ready:
        calls = []
        for launch, x, y, parameters in self.packer(packed):
            buffer = ctypes.create_string_buffer(parameters, max(len(parameters), 1))
            size = ctypes.c_size_t(len(parameters))
            extra = (ctypes.c_void_p * 5)(
                PARAM_BUFFER, ctypes.addressof(buffer),
                PARAM_SIZE, ctypes.addressof(size), self.context.api.param_end,
            )  # fmt: skip
            shape = (self.functions[launch.entry], x, y, 1, launch.block, 1, 1, 0)
            calls.append((launch.entry, shape, (extra, buffer, size)))
        ready = _Ready(calls)
        with self._lock:
            while len(self._ready) >= _REMEMBERED:
                del self._ready[next(iter(self._ready))]
            self._ready[packed] = ready
        return ready

    def _submit(self, ready: _Ready, stream: Stream) -> None:
        launch = self.context.api.launch
        for entry, shape, (extra, _, _) in ready.calls:
            self._started([entry], launch(*shape, stream.handle, None, extra), stream)

    def _started(self, entries: list[str], code: int, stream: Stream) -> None:
        """Note what was started; an error may come from work before it."""
        if code:
            before = [name for name in stream.running if name not in entries]
            told = f" (before it ran {', '.join(before)})" if before else ""
            self.context.check(code, f"starting {', '.join(entries)}{told}", LaunchError)
        stream.running.update(dict.fromkeys(entries))

    def _repeats(self, ready: _Ready) -> bool:
        """Whether a call of several kernels has come again; then it is a graph from now on."""
        ready.seen += 1
        if ready.seen < 2 or len(ready.calls) < 2:
            return False
        with self._lock:
            if ready.graph is None:
                ready.graph = self._record(ready)
        return True

    def _record(self, ready: _Ready) -> int:
        """The launches as an executable graph, recorded on a stream of its own."""
        api, check, capture = self.context.api, self.context.check, self.context.capture
        what = f"recording {self.plan.entry}"
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        with self.context.capturing:
            mode = CAPTURE_RELAXED
            check(api.capture_begin(capture.handle, mode), what, LaunchError)
            try:
                self._submit(ready, capture)
            finally:
                code = api.capture_end(capture.handle, ctypes.byref(graph))
                capture.running.clear()
        check(code, what, LaunchError)
        code = api.graph_instantiate(ctypes.byref(executable), graph, 0)
        api.graph_destroy(graph)
        check(code, what, LaunchError)
        made = executable.value or 0
        weakref.finalize(
            ready, self.context.quietly, api.graph_release, made
        ).atexit = False  # fmt: skip
        return made


def _unload(context: Context, module: int | None) -> None:
    """Unload once nothing runs any more."""
    context.quietly(context.api.synchronize)
    context.quietly(context.api.module_unload, module)
