"""The journal: small states that are durable before anybody is told of them.

A save waits for its blocks, and for all saves before it. What must not wait so long, a turn's
tokens and messages, is an entry here until a reference says the same or more. It is SQLite: one
commit, synchronised, for all entries that come at one time. What they say, and how a state and the
entries behind it become a history again, is in ``kvcellar.agents.records.durable``.

Entries of a name have ascending serial numbers of the caller's, which a later history of that name
never has again. A reference whose metadata says ``serial`` supersedes all entries up to that.

Beside them are documents: texts of the caller's by an id, which nothing supersedes; where there are
too many, or too large ones, the oldest go.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcellar.errors import StoreError
from kvcellar.home import open_own
from kvcellar.store.disk.catalogue import BUSY_TIMEOUT_S, is_damage, is_not_writable
from kvcellar.store.disk.folder import Folder
from kvcellar.store.values.reports import EventKind, EventLog

SCHEMA_VERSION = 2

_SCHEMA = (
    "CREATE TABLE entries (name TEXT NOT NULL, serial INTEGER NOT NULL, payload BLOB NOT NULL, "
    "PRIMARY KEY (name, serial))",
    "CREATE TABLE documents (n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, "
    "size_bytes INTEGER NOT NULL, payload BLOB NOT NULL)",
    "CREATE INDEX documents_by_size ON documents (n, size_bytes)",
)
MOST_DOCUMENTS = 10_000
MOST_DOCUMENT_BYTES = 256 << 20

_CHECKPOINT_BYTES = 4 << 20
"""Bytes of the write-ahead log from which on it is copied into the database."""

_Entry = tuple[str, int, bytes]


class Journal:
    """One process's way to the journal. For any thread; several processes may have it open.

    There is no file before the first entry.

    Attributes:
        is_failing: true from an entry that could not be written to the next one that could.
    """

    def __init__(self, folder: Folder, events: EventLog) -> None:
        """Open nothing yet."""
        self._folder = folder
        self._path = folder.journal
        self._events = events
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._use = threading.Lock()
        """Held by whoever uses the connection."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[_Entry, Future[None]]] = []
        self._superseded: dict[str, int] = {}
        self._is_closed = False
        self.is_failing = False

    def close(self) -> None:
        """Close the connection; from then on nothing is taken."""
        with self._use:
            self._is_closed = True
            if self._db is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._drop_superseded(self._db)
                self._let_go()

    # Writing -----------------------------------------------------------------------------------

    def put(self, name: str, serial: int, payload: bytes) -> None:
        """Make an entry durable; one of the same name and serial gives way.

        Raises:
            StoreError: it cannot be written; nothing was changed.
        """
        mine: Future[None] = Future()
        with self._lock:
            self._waiting.append(((name, serial, payload), mine))
        with self._use:  # whoever comes first writes for all that wait
            with self._lock:
                batch, self._waiting = self._waiting, []
            if batch:
                try:
                    self._write([entry for entry, _ in batch])
                    self.is_failing = False
                except BaseException as error:  # an interrupt, too: others wait for this write
                    self.is_failing = True
                    told = error if isinstance(error, Exception) else _interrupted()
                    for _, future in batch:
                        future.set_exception(error if future is mine else told)
                    if told is not error and not mine.done():
                        raise
                else:
                    for _, future in batch:
                        future.set_result(None)
        mine.result()

    def put_document(self, document_id: str, payload: bytes) -> None:
        """Make a document durable, in place of one of that id; the oldest may go for it.

        Raises:
            StoreError: it cannot be written; nothing was changed.
        """
        with self._use, self._said(), self._changing() as db:
            db.execute(
                "INSERT OR REPLACE INTO documents (id, size_bytes, payload) VALUES (?, ?, ?)",
                (document_id, len(payload), payload),
            )
            n, size = db.execute("SELECT COUNT(*), SUM(size_bytes) FROM documents").fetchone()
            if n > MOST_DOCUMENTS or size > MOST_DOCUMENT_BYTES:
                self._drop_oldest(db, n - MOST_DOCUMENTS, size - MOST_DOCUMENT_BYTES)

    @staticmethod
    def _drop_oldest(db: sqlite3.Connection, n_excess: int, n_bytes: int) -> None:
        for number, size in db.execute("SELECT n, size_bytes FROM documents ORDER BY n").fetchall():
            if n_excess <= 0 and n_bytes <= 0:
                break
            db.execute("DELETE FROM documents WHERE n = ?", (number,))
            n_excess, n_bytes = n_excess - 1, n_bytes - size

    def drop_document(self, document_id: str) -> bool:
        """Let go of a document, durably; false where there is none."""
        if not self._path.exists():
            return False
        with self._use, self._said(), self._changing() as db:
            return db.execute("DELETE FROM documents WHERE id = ?", (document_id,)).rowcount > 0

    def supersede(self, name: str, serial: int) -> None:
        """Let go of a name's entries up to a serial number, with the next write."""
        with self._lock:
            self._superseded[name] = max(serial, self._superseded.get(name, 0))

    def forget(self, name: str) -> None:
        """Let go of all entries of a name, durably; on a full disk in the room of the reserve.

        Raises:
            StoreError: it cannot be written.
        """
        if not self._path.exists():
            return
        with self._use, self._said():
            try:
                self._drop_name(name)
            except sqlite3.Error as error:
                if not is_not_writable(error):
                    raise
                self._folder.spend_reserve()
                self._drop_name(name)

    def _drop_name(self, name: str) -> None:
        with self._changing() as db:
            db.execute("DELETE FROM entries WHERE name = ?", (name,))

    def tidy(self) -> None:
        """Copy the write-ahead log into the database where it is long. For the writer's thread.

        The reserve is written again, too, where a deletion has had its room.
        """
        if self._db is None:
            return
        self._keep_reserve()
        try:
            if self._path.with_name(self._path.name + "-wal").stat().st_size < _CHECKPOINT_BYTES:
                return
        except OSError:
            return
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self._connect()) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # a connection of its own blocks nobody

    def _write(self, entries: Sequence[_Entry]) -> None:
        with self._said(), self._changing() as db:
            self._drop_superseded(db)
            db.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", entries)
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        with contextlib.suppress(OSError):  # so little room: what is deleted has to do without
            self._folder.keep_reserve()

    def _drop_superseded(self, db: sqlite3.Connection) -> None:
        with self._lock:
            superseded, self._superseded = self._superseded, {}
        db.executemany(
            "DELETE FROM entries WHERE name = ? AND serial <= ?", list(superseded.items())
        )

    # Reading -----------------------------------------------------------------------------------

    def serials(self) -> dict[str, int]:
        """Return the latest serial number of each name that has an entry."""
        return dict(self._ask("SELECT name, MAX(serial) FROM entries GROUP BY name"))

    def after(self, name: str, serial: int) -> list[tuple[int, bytes]]:
        """Return the entries of a name behind a serial number, ascending, with their numbers."""
        return self._ask(
            "SELECT serial, payload FROM entries WHERE name = ? AND serial > ? ORDER BY serial",
            (name, serial),
        )

    def document(self, document_id: str) -> bytes | None:
        """Return a document; None where there is none of that id."""
        rows = self._ask("SELECT payload FROM documents WHERE id = ?", (document_id,))
        return rows[0][0] if rows else None

    def mentions(self, pattern: re.Pattern[bytes]) -> set[str]:
        """Return all that a pattern finds in entries and documents."""
        found: set[str] = set()
        for table in ("entries", "documents"):
            for (key,) in self._ask(f"SELECT rowid FROM {table}"):
                rows = self._ask(f"SELECT payload FROM {table} WHERE rowid = ?", (key,))
                found |= {match.decode() for row in rows for match in pattern.findall(row[0])}
        return found

    def check(self) -> bool:
        """Read all of it; false where it was damaged and is in the quarantine now."""
        n_before = self._events.count(EventKind.JOURNAL_DAMAGED)
        rows = self._ask("PRAGMA integrity_check")
        if rows and rows != [("ok",)]:
            with self._use:
                self._put_away(str(rows[0][0]))
        return self._events.count(EventKind.JOURNAL_DAMAGED) == n_before

    def _ask(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        if not self._path.exists():
            return []
        with self._use:
            for _ in range(2):
                try:
                    return self._opened().execute(sql, values).fetchall()
                except sqlite3.Error as error:
                    if is_not_writable(error):
                        with contextlib.suppress(sqlite3.Error, OSError):
                            return self._ask_copy(sql, values)
                    if not is_damage(error):
                        raise StoreError(f"{self._path} cannot be read ({error})") from error
                    self._put_away(str(error))
        return []

    def _ask_copy(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """Read a copy: SQLite reads a log only where it can write beside the database."""
        with tempfile.TemporaryDirectory(prefix="kvcellar-journal-") as folder:
            copied = Path(folder) / self._path.name
            for suffix in ("", "-wal"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(
                        self._path.with_name(self._path.name + suffix),
                        copied.with_name(copied.name + suffix),
                    )
            with contextlib.closing(sqlite3.connect(copied, isolation_level=None)) as db:
                self._prepare(db)
                return db.execute(sql, values).fetchall()

    # The file ----------------------------------------------------------------------------------

    def _opened(self) -> sqlite3.Connection:
        """Return the connection, made anew where another process has replaced the file."""
        if self._is_closed:
            raise StoreError("the store is closed; open it again")
        inode = 0
        with contextlib.suppress(FileNotFoundError):
            inode = self._path.stat().st_ino
        if self._db is None or inode != self._inode:
            self._let_go()
            if not inode:
                os.close(open_own(self._path, os.O_CREAT | os.O_RDWR))
            db = self._connect()
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
            self._db, self._inode = db, self._path.stat().st_ino
        return self._db

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
        )

    @staticmethod
    def _prepare(db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA wal_autocheckpoint = 0")  # see ``tidy``
        db.execute("BEGIN IMMEDIATE")
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version < SCHEMA_VERSION:  # documents came with the second version
                for statement in _SCHEMA[version:]:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise StoreError(
                    f"the journal of the store is of version {version}, this one knows "
                    f"{SCHEMA_VERSION}; use the version of kvcellar that wrote it"
                )
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Run the block as a transaction, durable when it is left. Only within ``_use``."""
        try:
            db = self._opened()
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            self._put_away(str(error))
            db = self._opened()
            db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the journal of the store cannot be written ({error})") from error

    def _put_away(self, why: str) -> None:
        self._let_go()
        for suffix in ("", "-wal", "-shm"):
            self._folder.put_away(self._path.with_name(self._path.name + suffix))
        self._events.add(
            EventKind.JOURNAL_DAMAGED,
            str(self._path),
            f"{why}; moved to quarantine; turns that no reference says yet are lost",
        )

    def _let_go(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _interrupted() -> StoreError:
    return StoreError("the write was interrupted before it was known to be on disk; write again")
