"""The compile cache on disk: content-keyed entries, each a folder that never changes once there.

Layout under the root::

    ab/abcdef…/entry.json     line 1: SHA-256 of the rest; then JSON: key, manifest, sizes, hashes
    ab/abcdef…/kernel.so …    the files
    tmp/<pid>-<random>/       entries being written or removed

An entry is written in ``tmp`` and renamed into place, so it is there whole or not at all, whatever
moment a process dies at. A reader checks every byte against the hashes before it hands out a path:
loading a damaged library would crash the process. What fails the check is a miss and is removed.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_FORMAT = 1
_KEY = re.compile(r"[0-9a-f]{8,128}")
_ENTRY = "entry.json"
_SWEEP_AFTER_S = 60.0  # a put takes milliseconds; a younger folder may belong to a live process
_SWEEP_ALWAYS_S = 86400.0  # even if the process id is in use (again)


@dataclass(frozen=True)
class Entry:
    """One verified entry.

    Attributes
    ----------
    key : str
        Hex digits.
    path : Path
        The folder that holds the files.
    manifest : dict
        What ``put`` was given, through JSON.
    sizes : dict of str to int
        Bytes of each file.
    created : float
        Seconds since the epoch.
    """

    key: str
    path: Path
    manifest: dict[str, Any]
    sizes: dict[str, int]
    created: float

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(self.sizes.values())

    def file(self, name: str) -> Path:
        """Path of the file ``name``; KeyError if the entry has no such file."""
        if name not in self.sizes:
            raise KeyError(name)
        return self.path / name


def default_root() -> Path:
    """``RUDNN_CACHE_DIR``, else ``$XDG_CACHE_HOME/rudnn``, else ``~/.cache/rudnn``."""
    if root := os.environ.get("RUDNN_CACHE_DIR"):
        return Path(root)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification: a relative path is to be ignored
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))) / "rudnn"


class DiskCache:
    """Entries under ``root``, safe for any number of threads and processes.

    Nothing here raises for what is on the disk: unreadable is a miss, and where ``root`` cannot
    be written, new entries go to a folder of this process that is removed at its end.

    Parameters
    ----------
    root : path, optional
        Default: see ``default_root``. Made when first written to.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(os.path.abspath(root if root is not None else default_root()))
        self._swept = False

    def get(self, key: str) -> Entry | None:
        """The entry of ``key`` with every byte verified, or None.

        Raises ValueError if ``key`` is not 8 to 128 lower-case hex digits.
        """
        for root in self._roots():
            if entry := _verified(_folder(root, key), key):
                return entry
        return None

    def put(
        self, key: str, manifest: Mapping[str, Any], files: Mapping[str, bytes | os.PathLike[str]]
    ) -> Entry:
        """Store ``files`` (name to bytes, or a path to copy) and ``manifest`` (JSON) under ``key``.

        A sound entry that is already there is kept and returned: the first writer wins.
        Raises ValueError for a bad key or file name, TypeError for a manifest that is not JSON,
        OSError if a given path cannot be read or nothing at all can be written.
        """
        blobs = {name: _blob(name, source) for name, source in files.items()}
        record = _record(key, manifest, blobs)
        self._sweep()
        for _ in range(2):  # again, if a sweep or a clear came in between
            with contextlib.suppress(OSError):
                return _write(self.root, key, record, blobs)
        return _write(_process_root(), key, record, blobs)

    def remove(self, key: str) -> bool:
        """Remove the entry of ``key``; whether there was one."""
        return sum(_discard(root, _folder(root, key)) for root in self._roots()) > 0

    def list(self) -> tuple[Entry, ...]:
        """Every entry whose record is sound, oldest first. The files themselves are not read."""
        found = (_read_record(folder, folder.name) for r in self._roots() for folder in _folders(r))
        return tuple(sorted((e for e in found if e), key=lambda e: (e.created, e.key)))

    def clear(self) -> int:
        """Remove every entry, sound or not; how many. Libraries already loaded stay usable."""
        self._sweep(force=True)
        return sum(_discard(root, folder) for root in self._roots() for folder in _folders(root))

    def _roots(self) -> tuple[Path, ...]:
        fallback = _process_roots.get(os.getpid())
        return (self.root, fallback) if fallback else (self.root,)

    def _sweep(self, force: bool = False) -> None:
        """Remove what killed processes left in ``tmp``: once a process, or when asked."""
        if self._swept and not force:
            return
        self._swept = True
        with contextlib.suppress(OSError):
            for item in os.scandir(self.root / "tmp"):
                if _abandoned(item):
                    shutil.rmtree(item.path, ignore_errors=True)


def _folder(root: Path, key: str) -> Path:
    if not _KEY.fullmatch(key):
        raise ValueError(f"a cache key needs 8 to 128 lower-case hex digits, got {key!r}")
    return root / key[:2] / key


def _folders(root: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for group in sorted(os.listdir(root)):
            if len(group) == 2 and (root / group).is_dir():
                yield from (root / group / key for key in os.listdir(root / group))


def _blob(name: str, source: bytes | os.PathLike[str]) -> bytes:
    if name != os.path.basename(name) or name in ("", ".", "..", _ENTRY):
        raise ValueError(f"a cache file needs a plain name, got {name!r}")
    return source if isinstance(source, bytes) else Path(source).read_bytes()


def _record(key: str, manifest: Mapping[str, Any], blobs: Mapping[str, bytes]) -> bytes:
    hashes = {name: [len(b), hashlib.sha256(b).hexdigest()] for name, b in blobs.items()}
    content = {"format": _FORMAT, "key": key, "files": hashes, "manifest": dict(manifest)}
    text = json.dumps(content, indent=1).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _read_record(folder: Path, key: str, hashes: dict[str, str] | None = None) -> Entry | None:
    """The entry as its record tells, the files unread; fills ``hashes`` if given."""
    try:
        with open(folder / _ENTRY, "rb") as stream:
            created = os.fstat(stream.fileno()).st_mtime
            digest, _, text = stream.read().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        content = json.loads(text)
        if content["format"] != _FORMAT or content["key"] != key:
            return None
        sizes = {name: size for name, (size, _) in content["files"].items()}
        if hashes is not None:
            hashes.update((name, digest) for name, (_, digest) in content["files"].items())
        return Entry(key, folder, content["manifest"], sizes, created)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _verified(folder: Path, key: str) -> Entry | None:
    hashes: dict[str, str] = {}
    inode = _inode(folder)
    if inode is None:
        return None
    entry = _read_record(folder, key, hashes)
    try:
        for name in entry.sizes if entry else ():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != hashes[name]:
                entry = None
                break
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        entry = None
    except OSError:  # too many open files, say: a miss now, and perhaps sound
        return None
    if entry is None:
        _discard(folder.parent.parent, folder, inode)
    return entry


def _inode(path: Path) -> int | None:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


def _temporary(root: Path) -> Path:
    path = root / "tmp" / f"{os.getpid()}-{uuid.uuid4().hex}"
    os.makedirs(path.parent, exist_ok=True)
    return path


def _discard(root: Path, folder: Path, inode: int | None = None) -> bool:
    """Take ``folder`` away in one step, then delete it; whether it was there.

    With ``inode``, only if it is still the folder that was looked at: meanwhile another process
    may have replaced it by a sound one.
    """
    try:
        grave = _temporary(root)
        os.rename(folder, grave)
        if inode is not None and _inode(grave) != inode:
            os.rename(grave, folder)
            return False
    except OSError:
        return False
    if grave.is_dir() and not grave.is_symlink():
        shutil.rmtree(grave, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(grave)
    return True


def _write(root: Path, key: str, record: bytes, blobs: Mapping[str, bytes]) -> Entry:
    final, temporary = _folder(root, key), _temporary(root)
    os.mkdir(temporary)
    try:
        for name, content in (*blobs.items(), (_ENTRY, record)):
            (temporary / name).write_bytes(content)
        os.makedirs(final.parent, exist_ok=True)
        written = _read_record(temporary, key)
        for _ in range(8):
            if entry := _verified(final, key):  # removes an unsound one
                return entry
            with contextlib.suppress(OSError):  # another writer was first
                os.rename(temporary, final)
                if written:
                    return replace(written, path=final)
        raise OSError(f"cannot place cache entry {final}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _abandoned(item: os.DirEntry[str]) -> bool:
    """Whether the writer of a folder in ``tmp`` is gone (process ids may be another machine's)."""
    with contextlib.suppress(OSError):
        age = time.time() - item.stat(follow_symlinks=False).st_mtime
        pid = item.name.partition("-")[0]
        return age > _SWEEP_ALWAYS_S or (age > _SWEEP_AFTER_S and not _alive(pid))
    return False


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except OSError:
        pass
    return True


# by process id: a fork must neither share its parent's nor remove it
_process_roots: dict[int, Path] = {}


def _process_root() -> Path:
    pid = os.getpid()
    if pid not in _process_roots:
        root = Path(tempfile.mkdtemp(prefix="rudnn-"))
        _process_roots[pid] = root
        atexit.register(_remove_process_root, pid, root)
    return _process_roots[pid]


def _remove_process_root(pid: int, root: Path) -> None:
    if os.getpid() == pid:
        shutil.rmtree(root, ignore_errors=True)
