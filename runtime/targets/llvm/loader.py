"""From a compiled module to a function that ctypes can call; with or without a C compiler.

With a compiler a kernel is a shared library, ``kernel.so``. Its object code reaches the thread pool
and scratch memory through pointer variables of its own, which `load` sets to the functions of
librudnn_runtime.

Without one it is LLVM IR as text, ``kernel.ll``, which TVM's just-in-time compiler loads. To that
text `load` appends a table of addresses (the entry, the same pointer variables) and a function that
returns it; from there on both kinds are alike: a plain C function, called without TVM and without
the GIL. The cost is an ``import tvm`` in each process (1 to 4 s) and some 30 ms a kernel to load;
the call is as quick.

Where librudnn_runtime is neither in the cache nor can be built, the class `_PythonRuntime` serves
in its place: threads of Python that run the same tasks, at about 50 us a parallel loop.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....dsl.errors import CompileError, LoadError
from ...cache import DiskCache
from ...locks import fork_safe_lock
from . import toolchain

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Kernel = Callable[[bytes], int]  # packed int64 arguments -> status, 0 is success

_LAUNCH = "__TVMBackendParallelLaunch"
_ALLOC = "__TVMBackendAllocWorkspace"
_FREE = "__TVMBackendFreeWorkspace"
_HOOKS = {  # a kernel's pointer variable: the library's function
    _LAUNCH: "rudnn_parallel_launch",
    "__TVMBackendParallelBarrier": "rudnn_parallel_barrier",
    _ALLOC: "rudnn_workspace_alloc",
    _FREE: "rudnn_workspace_free",
    "rudnn_error_hook": "rudnn_set_error",
}
_lock = fork_safe_lock()
_runtime: Runtime | None = None


class Runtime:
    """The process's native runtime: thread count, scratch memory, error text.

    Attributes
    ----------
    hooks : dict of str to int
        A kernel's pointer variable: the address it is to hold.
    native : bool
        Whether librudnn_runtime is behind it.
    """

    native = True

    def __init__(self, library: Path) -> None:
        self._c = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self._c.rudnn_last_error.restype = ctypes.c_char_p
        self.hooks = {name: _address(self._c[function]) for name, function in _HOOKS.items()}

    def num_threads(self) -> int:
        """Threads of a parallel loop: ``RUDNN_NUM_THREADS``, else the cores we may run on."""
        return int(self._c.rudnn_num_threads())

    def set_num_threads(self, n: int) -> None:
        """Set that number, for all threads of the process; 0 restores the default."""
        self._c.rudnn_set_num_threads(n)

    def thread_limit(self, n: int) -> int:
        """Cap the loops of the calling thread at ``n`` threads, 0 for no cap; the former cap."""
        return int(self._c.rudnn_thread_limit(n))

    def caller(self, kernel: Kernel) -> Callable[[bytes, int], int]:
        """`kernel` as a function of its arguments and a cap on threads (0: none)."""
        call = self._c.rudnn_call
        entry = ctypes.c_void_p(_address(kernel))

        def launch(args: bytes, threads: int, _kernel: Kernel = kernel) -> int:
            return call(entry, args, threads)

        return launch

    def poison(self, on: bool) -> None:
        """Fill each scratch block that a kernel allocates with NaN first."""
        self._c.rudnn_workspace_poison(int(on))

    def memory(self) -> dict[str, int]:
        """Bytes of scratch memory: ``live`` in kernels, ``reserved`` with caches, its ``peak``."""
        out = (ctypes.c_int64 * 3)()
        self._c.rudnn_workspace_stats(out)
        return dict(zip(("live", "reserved", "peak"), out, strict=True))

    def last_error(self) -> str:
        """What the last failing kernel called from this thread said, or ""."""
        return (self._c.rudnn_last_error() or b"").decode(errors="replace")


def runtime(cache: DiskCache | None = None) -> Runtime:
    """The runtime of this process, made on the first call (``cache``: where it is, or goes)."""
    global _runtime
    if _runtime is None:
        with _lock:
            if _runtime is None:
                try:
                    entry = toolchain.build_runtime(cache or DiskCache())
                    _runtime = Runtime(entry.file(toolchain.RUNTIME_LIBRARY))
                except (CompileError, OSError):
                    _runtime = _PythonRuntime()
    return _runtime


def artefact_name(cache: DiskCache) -> str:
    """What `build` will write here: ``kernel.so``, or ``kernel.ll`` where no linker works."""
    native = toolchain.find_compiler() is not None and runtime(cache).native
    return "kernel.so" if native else "kernel.ll"


def build(module: Any, folder: Path, cache: DiskCache) -> Path:
    """Write what `load` takes, named as `artefact_name` says, into ``folder``.

    Parameters
    ----------
    module : tvm.runtime.Module
        Of ``target.build.llvm``.

    Raises
    ------
    CompileError
        If linking fails.
    """
    out = folder / artefact_name(cache)
    if out.suffix == ".ll":
        out.write_text(module.inspect_source("ll"))
        return out
    compiled, kernel = (folder / f"{uuid.uuid4().hex}.o" for _ in range(2))
    try:
        module.write_to_file(str(compiled), "o")
        _copy_kernel_object(cache, kernel)
        return toolchain.link([compiled, kernel], out)
    finally:
        for path in (compiled, kernel):
            path.unlink(missing_ok=True)


def _copy_kernel_object(cache: DiskCache, to: Path) -> None:
    """The runtime's part of a kernel, which another process that clears the cache cannot take."""
    try:
        shutil.copyfile(toolchain.build_runtime(cache).file(toolchain.KERNEL_OBJECT), to)
    except FileNotFoundError:
        shutil.copyfile(toolchain.build_runtime(cache).file(toolchain.KERNEL_OBJECT), to)


def load(path: Path, entry: str, cache: DiskCache | None = None) -> Kernel:
    """The C function ``int32_t entry(const int64_t *)`` of a ``.so`` or ``.ll`` file.

    The result takes bytes, may be called from any thread, and keeps its code alive. Verify the
    file first: a damaged library can crash the process. Raises LoadError.
    """
    services = runtime(cache)
    try:
        if path.suffix == ".ll":
            return _load_text(path, entry, services.hooks, services.native)
        return _load_library(path, entry, services.hooks)
    except (OSError, AttributeError, RuntimeError) as error:
        raise LoadError(f"cannot load kernel {entry} from {path}: {error}") from error


def _load_library(path: Path, entry: str, hooks: dict[str, int]) -> Kernel:
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    for name, address in hooks.items():
        try:
            ctypes.c_void_p.in_dll(library, name).value = address
        except ValueError:  # this kernel does without
            continue
    function = library[entry]
    function.restype, function.argtypes = ctypes.c_int32, [ctypes.c_char_p]
    return function


def _load_text(path: Path, entry: str, hooks: dict[str, int], native: bool) -> Kernel:
    from ...tvm_import import load_tvm

    load_tvm()
    import tvm

    text = path.read_text()
    if not re.search(rf"^define .*@{entry}\(", text, re.MULTILINE):
        raise AttributeError(f"no function {entry}")
    # TVM's allocator may stay where the alternative is a callback into Python
    ours = hooks if native else {_LAUNCH: hooks[_LAUNCH]}
    names = [entry, *(name for name in ours if re.search(rf"^@{name} =", text, re.MULTILINE))]
    pointers = ", ".join(f"ptr @{name}" for name in names)
    with tempfile.TemporaryDirectory(prefix="rudnn-") as folder:
        whole = Path(folder, "kernel.ll")
        whole.write_text(text + _TABLE.format(count=len(names), pointers=pointers))
        module = tvm.get_global_func("ffi.Module.load_from_file.ll")(str(whole), "ll")
    # looking a function up compiles the module and points the variables at TVM's runtime: undo that
    table = (ctypes.c_void_p * len(names)).from_address(module["rudnn_table"]())
    for name, variable in zip(names[1:], table[1:], strict=True):
        ctypes.c_void_p.from_address(variable or 0).value = hooks[name]
    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p)(table[0] or 0)
    function.module = module  # type: ignore[attr-defined]
    return function


# A TVM FFI function of no arguments; it returns the table's address as an integer (type index 1).
_TABLE = """
@rudnn_addresses = private constant [{count} x ptr] [{pointers}]
define dllexport i32 @__tvm_ffi_rudnn_table(ptr %self, ptr %args, i32 %count, ptr %result) {{
  store i32 1, ptr %result
  %value = getelementptr i8, ptr %result, i64 8
  store i64 ptrtoint (ptr @rudnn_addresses to i64), ptr %value
  ret i32 0
}}
"""


def _wait(running: list[Future[None]]) -> None:
    from concurrent.futures import wait

    wait(running)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _Env(ctypes.Structure):
    _fields_ = [("sync_handle", ctypes.c_void_p), ("num_task", ctypes.c_int32)]


_TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Env), ctypes.c_void_p)
_LAUNCH_T = ctypes.CFUNCTYPE(ctypes.c_int, _TASK, ctypes.c_void_p, ctypes.c_int)
_ALLOC_T = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int
)
_FREE_T = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)


class _PythonRuntime(Runtime):
    """The same services by Python threads and the C library's allocator."""

    native = False

    def __init__(self) -> None:
        self._threads = self._default()
        self._poison = False
        self._local = threading.local()
        self._pools: dict[tuple[int, int], ThreadPoolExecutor] = {}  # by process id and size
        self._libc = ctypes.CDLL(None)
        self._libc.free.argtypes = [ctypes.c_void_p]
        self._keep = (_LAUNCH_T(self._launch), _ALLOC_T(self._alloc), _FREE_T(self._free))
        self.hooks = {
            name: _address(f) for name, f in zip((_LAUNCH, _ALLOC, _FREE), self._keep, strict=True)
        }

    @staticmethod
    def _default() -> int:
        text = os.environ.get("RUDNN_NUM_THREADS", "")
        if text.isdecimal() and int(text) > 0:
            return int(text)
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count() or 1

    def num_threads(self) -> int:
        return self._threads

    def set_num_threads(self, n: int) -> None:
        self._threads = n if n > 0 else self._default()

    def thread_limit(self, n: int) -> int:
        former = getattr(self._local, "limit", 0)
        self._local.limit = max(n, 0)
        return former

    def caller(self, kernel: Kernel) -> Callable[[bytes, int], int]:
        def launch(args: bytes, threads: int) -> int:
            former = self.thread_limit(threads)
            try:
                return kernel(args)
            finally:
                self.thread_limit(former)

        return launch

    def poison(self, on: bool) -> None:
        self._poison = on

    def memory(self) -> dict[str, int]:
        return {"live": 0, "reserved": 0, "peak": 0}  # not counted: the C library has it

    def last_error(self) -> str:
        return ""

    def _launch(self, task: Any, cdata: int | None, num_task: int) -> int:
        limit = getattr(self._local, "limit", 0)
        threads = min(self._threads, limit) if limit else self._threads
        if getattr(self._local, "inside", False):
            threads = 1
        count = num_task if num_task > 0 else (1 if threads == 1 else 4 * threads)
        ids, failures = deque(range(count)), list[int]()

        def work() -> None:
            env, former = _Env(None, count), getattr(self._local, "inside", False)
            self._local.inside = True
            try:
                while ids and not failures:
                    if rc := task(ids.popleft(), env, cdata):
                        failures.append(rc)
            except IndexError:  # another thread took the last one
                pass
            except BaseException:  # an interrupt; ctypes would swallow it and leave tasks undone
                failures.append(-1)
            self._local.inside = former

        helpers: list[Future[None]] = []
        try:
            pool = self._pool(threads - 1) if threads > 1 else None
            helpers = [pool.submit(work) for _ in range(threads - 1)] if pool else []
        except RuntimeError:  # no new threads, or the interpreter is ending
            pass
        work()
        running = [helper for helper in helpers if not helper.cancel()]
        while not all(helper.done() for helper in running):  # they use this thread's stack
            try:
                _wait(running)
            except BaseException:
                failures.append(-1)
        return failures[0] if failures else 0

    def _pool(self, size: int) -> ThreadPoolExecutor:
        key = (os.getpid(), size)
        with _lock:
            if key not in self._pools:
                # Not above: it cannot be imported while the interpreter ends, and few need it.
                from concurrent.futures import ThreadPoolExecutor

                self._pools[key] = ThreadPoolExecutor(size, thread_name_prefix="rudnn")
            return self._pools[key]

    def _alloc(self, _device: int, _id: int, nbytes: int, _code: int, _bits: int) -> int | None:
        pointer = ctypes.c_void_p()
        if self._libc.posix_memalign(ctypes.byref(pointer), 64, ctypes.c_size_t(max(nbytes, 64))):
            return None
        if self._poison and pointer.value:
            ctypes.memset(pointer.value, 0xFF, nbytes)
        return pointer.value

    def _free(self, _device: int, _id: int, pointer: int | None) -> int:
        self._libc.free(pointer)
        return 0
