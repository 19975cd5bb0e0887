"""Stored representations: SQLite, in memory or in a file that several processes share."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..dsl.errors import ServiceError

_APPLICATION = 0x7275646E  # "rudn": marks a database as one of ours
_SCHEMA = """
CREATE TABLE representations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    created REAL NOT NULL,
    kernel TEXT NOT NULL,
    output TEXT NOT NULL
)
"""
_COLUMNS = "SELECT id, created, kernel, output FROM representations"
_BUSY_SECONDS = 30.0
_PAGE_BYTES = 4096

Run = Callable[..., sqlite3.Cursor]


class StoreFull(ServiceError):
    """No room is left in the store."""


@dataclass(frozen=True)
class Stored:
    """A representation: its id, when it came (seconds since 1970), its kernel, its JSON text."""

    id: int
    created: float
    kernel: str
    output: str


class Store:
    """Representations by id; ids grow in the order of commits, without gaps.

    What `add` returned for survives the process, and in a file also the machine. A store in
    memory is lost with the process and takes `most_bytes`. Methods may be called from any thread.
    """

    def __init__(self, path: str | None = None, most_bytes: int = 1 << 30) -> None:
        self._shared = path is not None
        with _told(path):
            self._writer = _connect(path or ":memory:")
            self._writing = threading.Lock()
            try:
                self._prepare(path)
            except BaseException:
                self._writer.close()
                raise
            if path is None:
                most = max(most_bytes // _PAGE_BYTES, 1)
                self._writer.execute(f"PRAGMA max_page_count={most}")
                self._reader, self._reading = self._writer, self._writing
            else:
                self._reader, self._reading = _connect(path), threading.Lock()

    def _prepare(self, path: str | None) -> None:
        with self._transaction() as run:
            (mark,) = run("PRAGMA application_id").fetchone()
            (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
            if mark == 0 and tables == 0:
                run(_SCHEMA)
                run(f"PRAGMA application_id={_APPLICATION}")
            elif mark != _APPLICATION:
                raise ServiceError(f"needs a store of rudnn or a new file, got {path}: "
                                   "a database of something else")  # fmt: skip
        if self._shared:
            # A commit is on the disk when it returns, whatever happens to process or machine.
            self._writer.execute("PRAGMA journal_mode=WAL")
            self._writer.execute("PRAGMA synchronous=FULL")

    @contextmanager
    def _transaction(self) -> Iterator[Run]:
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer.execute
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # a full disk has ended it already
                    self._writer.execute("ROLLBACK")
                raise

    def add(self, records: Sequence[tuple[str, str]]) -> list[int]:
        """Store (kernel, JSON text) pairs, all or none, and return their ids.

        Raises StoreFull, or ServiceError where the file cannot be written.
        """
        now = time.time()
        insert = "INSERT INTO representations (created, kernel, output) VALUES (?, ?, ?)"
        with _told("the store"), self._transaction() as run:
            made = [run(insert, (now, kernel, output)).lastrowid for kernel, output in records]
        return [i for i in made if i is not None]

    def get(self, id: int) -> Stored | None:
        """One representation."""
        with _told("the store"), self._reading:
            row = self._reader.execute(f"{_COLUMNS} WHERE id = ?", (id,)).fetchone()
        return None if row is None else Stored(*row)

    def page(self, after: int, limit: int, most_bytes: int) -> tuple[list[Stored], bool]:
        """Representations with ids past `after`, in order, and whether there are more.

        At most `limit`, and no more after `most_bytes` of text.
        """
        found: list[Stored] = []
        taken = 0
        with _told("the store"), self._reading:
            rows = self._reader.execute(f"{_COLUMNS} WHERE id > ? ORDER BY id LIMIT ?",
                                        (after, limit + 1))  # fmt: skip
            for row in rows:
                if len(found) == limit or taken >= most_bytes:
                    rows.close()
                    return found, True
                found.append(Stored(*row))
                taken += len(found[-1].output)
        return found, False

    def count(self) -> int:
        """How many there are: the last id, for nothing is ever removed."""
        with _told("the store"), self._reading:
            row = self._reader.execute("SELECT seq FROM sqlite_sequence").fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        """The last process to close a file leaves no journal beside it."""
        with self._reading:
            self._reader.close()
        if self._reader is not self._writer:
            with self._writing:
                self._writer.close()


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None,
                           check_same_thread=False)  # fmt: skip


@contextmanager
def _told(path: str | None) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        if "full" in text:
            raise StoreFull("needs room in the store, got none: the service stores no more "
                            "representations") from error  # fmt: skip
        raise ServiceError(f"needs a store that can be read and written, got {path}: "
                           f"{text}") from error  # fmt: skip
