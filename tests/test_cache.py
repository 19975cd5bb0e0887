"""The disk cache: whole or absent, verified, safe under many processes and under SIGKILL."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rudnn.runtime.cache import DiskCache, default_root

KEY = hashlib.sha256(b"a kernel").hexdigest()
FILES = {"kernel.so": bytes(range(256)) * 200, "extra.txt": b""}
MANIFEST = {"entry": "rms_norm", "dims": {"H": 1024}, "text": "ümlaut"}


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache")


def start(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    prelude = (
        "import hashlib, os, sys, time\n"
        "from rudnn.runtime.cache import DiskCache\n"
        "cache = DiskCache(sys.argv[1])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def leftovers(cache: DiskCache) -> list[str]:
    folder = cache.root / "tmp"
    return os.listdir(folder) if folder.exists() else []


def test_round_trip(cache, tmp_path):
    assert cache.get(KEY) is None
    assert cache.list() == ()
    (tmp_path / "from.txt").write_bytes(b"by path")
    put = cache.put(KEY, MANIFEST, {**FILES, "path.txt": tmp_path / "from.txt"})
    for entry in (put, cache.get(KEY), DiskCache(cache.root).get(KEY), *cache.list()):
        assert entry.key == KEY and entry.manifest == MANIFEST
        assert entry.file("kernel.so").read_bytes() == FILES["kernel.so"]
        assert entry.file("path.txt").read_bytes() == b"by path"
        assert entry.nbytes == 256 * 200 + 7
        assert abs(entry.created - time.time()) < 60
    with pytest.raises(KeyError):
        put.file("other.so")
    assert leftovers(cache) == []


def test_first_writer_wins_until_removed(cache):
    cache.put(KEY, {"n": 1}, {"f": b"1"})
    assert cache.put(KEY, {"n": 2}, {"f": b"2"}).manifest == {"n": 1}
    assert cache.remove(KEY) and not cache.remove(KEY)
    assert cache.put(KEY, {"n": 2}, {"f": b"2"}).file("f").read_bytes() == b"2"


def test_clear(cache):
    keys = [hashlib.sha256(bytes([i])).hexdigest() for i in range(5)]
    for key in keys:
        cache.put(key, {}, FILES)
    assert {entry.key for entry in cache.list()} == set(keys)
    (cache.root / keys[0][:2] / keys[0] / "entry.json").write_bytes(b"unsound, but counted")
    assert cache.clear() == 5
    assert cache.list() == () and leftovers(cache) == []
    assert cache.clear() == 0


@pytest.mark.parametrize("key", ["", "short", "../../../etc", "A" * 64, "g" * 64, "0" * 200])
def test_bad_keys(cache, key):
    for call in (cache.get, cache.remove, lambda k: cache.put(k, {}, {})):
        with pytest.raises(ValueError, match="hex digits"):
            call(key)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "entry.json"])
def test_bad_file_names(cache, name):
    with pytest.raises(ValueError, match="plain name"):
        cache.put(KEY, {}, {name: b""})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


DAMAGE = {
    "truncated": truncate,
    "flipped bit": flip,
    "emptied": lambda path: path.write_bytes(b""),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
    "other json": lambda path: path.write_bytes(b'{"key": 1}'),
    "removed": Path.unlink,
    "folder": to_folder,
    "dangling link": dangle,
}


@pytest.mark.parametrize("name", ["entry.json", "kernel.so"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_a_quiet_miss_and_is_removed(cache, damage, name):
    damage(cache.put(KEY, MANIFEST, FILES).path / name)
    cache.list()
    assert cache.get(KEY) is None
    assert not (cache.root / KEY[:2] / KEY).exists()
    damage(cache.put(KEY, MANIFEST, FILES).path / name)
    entry = cache.put(KEY, MANIFEST, FILES)  # a put repairs without a get before it
    assert entry.file("kernel.so").read_bytes() == FILES["kernel.so"]
    assert leftovers(cache) == []


@pytest.mark.parametrize("what", ["file", "empty folder", "link", "foreign entry"])
def test_what_is_no_entry_of_ours_is_a_miss(cache, what):
    place = cache.root / KEY[:2] / KEY
    place.parent.mkdir(parents=True)
    if what == "file":
        place.write_bytes(b"not a folder")
    elif what == "empty folder":
        place.mkdir()
    elif what == "link":
        place.symlink_to("/nonexistent")
    else:  # a sound entry, under another key
        shutil.copytree(cache.put("ab" * 32, MANIFEST, FILES).path, place)
    assert cache.get(KEY) is None
    assert cache.put(KEY, MANIFEST, FILES) == cache.get(KEY)


@pytest.mark.parametrize("where", ["file", "under a file", "device"])
def test_unwritable_root_falls_back_to_this_process(tmp_path, where):
    (tmp_path / "file").write_bytes(b"")
    roots = {"file": "file", "under a file": "file/cache", "device": "/dev/null/cache"}
    cache = DiskCache(tmp_path / roots[where])
    assert cache.get(KEY) is None and cache.list() == () and cache.clear() == 0
    put = cache.put(KEY, MANIFEST, FILES)
    try:
        assert put.file("kernel.so").read_bytes() == FILES["kernel.so"]
        assert cache.get(KEY) == put and put in cache.list()
        assert (tmp_path / "file").read_bytes() == b""
    finally:
        assert cache.remove(KEY)


def test_fallback_ends_with_its_process():
    code = "print(cache.put('ab' * 32, {}, {'f': b'1'}).path.parent.parent)\n"
    code += "pid = os.fork()\nif pid: os.waitpid(pid, 0)\n"  # a fork must not remove it early
    code += "if pid: assert cache.get('ab' * 32)\n"
    process = start(code, "/dev/null/cache")
    folder = process.communicate(timeout=60)[0].split()[0]
    assert process.returncode == 0 and folder.startswith(os.path.sep)
    assert not os.path.exists(folder)


def test_default_root(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RUDNN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_root() == tmp_path / "home/.cache/rudnn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_root() == tmp_path / "home/.cache/rudnn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg/rudnn"
    monkeypatch.setenv("RUDNN_CACHE_DIR", str(tmp_path / "own"))
    assert default_root() == DiskCache().root == tmp_path / "own"


def test_threads_put_get_and_remove_one_key(cache):
    stop = threading.Event()

    def work(i: int) -> bool:
        good = True
        while not stop.is_set():
            if i == 0:
                cache.remove(KEY)
            elif i == 1:
                cache.list()
            elif entry := cache.get(KEY):
                good &= entry.manifest == MANIFEST
            else:
                cache.put(KEY, MANIFEST, FILES)
        return good

    with ThreadPoolExecutor(6) as pool:
        results = [pool.submit(work, i) for i in range(6)]
        time.sleep(1.0)
        stop.set()
        assert all(result.result(timeout=30) for result in results)
    assert cache.put(KEY, MANIFEST, FILES) == cache.get(KEY)


def test_two_processes_put_the_same_keys(cache):
    code = """
mine = int(sys.argv[2])
for i in range(300):
    key = hashlib.sha256(bytes([i % 256, i // 256])).hexdigest()
    entry = cache.put(key, {"i": i}, {"kernel.so": bytes([mine]) * 50000})
    data = entry.file("kernel.so").read_bytes()
    assert len(data) == 50000 and set(data) <= {1, 2} and len(set(data)) == 1
    assert cache.get(key) == entry
"""
    both = [start(code, cache.root, i) for i in (1, 2)]
    for process in both:
        process.communicate(timeout=120)
    assert [process.returncode for process in both] == [0, 0]
    assert len(cache.list()) == 300 and leftovers(cache) == []


def test_sigkill_at_any_moment(cache):
    code = """
print("ready", flush=True)
for i in range(10**9):
    key = hashlib.sha256(b"%d" % (i % 7)).hexdigest()
    cache.remove(key)
    cache.put(key, {"i": i}, {"kernel.so": b"%d" % (i % 7) * 50000, "b": b"x"})
"""
    for i in range(12):
        process = start(code, cache.root)
        assert process.stdout and process.stdout.readline() == "ready\n"
        time.sleep(0.001 + 0.0137 * i)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for k in range(7):
            entry = cache.get(hashlib.sha256(b"%d" % k).hexdigest())
            assert entry is None or entry.file("kernel.so").read_bytes() == b"%d" % k * 50000


def test_what_killed_processes_left_is_swept(cache):
    cache.put(KEY, MANIFEST, FILES)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    now, names = time.time(), {}
    for pid, age in ((process.pid, 120), (process.pid, 1), (os.getpid(), 120), (os.getpid(), 1e6)):
        folder = cache.root / "tmp" / f"{pid}-{age}"
        folder.mkdir()
        (folder / "kernel.so").write_bytes(b"half")
        os.utime(folder, (now - age, now - age))
        names[pid, age] = folder.name
    other = DiskCache(cache.root)
    other.put("ab" * 32, MANIFEST, FILES)
    kept = {names[process.pid, 1], names[os.getpid(), 120]}  # fresh, or of a live process
    assert set(leftovers(cache)) == kept


def test_a_hit_is_quick(cache):
    cache.put(KEY, MANIFEST, {"kernel.so": bytes(50000)})
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        cache.get(KEY)
        times.append(time.perf_counter() - begin)
    assert min(times) < 1e-3
