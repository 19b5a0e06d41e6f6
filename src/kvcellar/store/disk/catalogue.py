"""The catalogue: an index of the files in SQLite. What is true is in the files.

It can be lost at any time and is made again from them. All times are seconds since 1970.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.home import open_own
from kvcellar.store.values.blocks import Info, Kind
from kvcellar.store.values.references import Reference

SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 10.0
MAX_CHILDREN = 512
_MAX_VARIABLES = 500

_SCHEMA = """
CREATE TABLE blocks (
    address BLOB PRIMARY KEY, kind TEXT NOT NULL, root BLOB NOT NULL, parent BLOB NOT NULL,
    start INTEGER NOT NULL, stop INTEGER NOT NULL, tokens BLOB NOT NULL, first INTEGER NOT NULL,
    is_exact INTEGER NOT NULL, size_bytes INTEGER NOT NULL, checksum TEXT NOT NULL,
    last_used REAL NOT NULL
);
CREATE INDEX blocks_by_parent ON blocks (parent, kind);
CREATE TABLE refs (
    name TEXT PRIMARY KEY, root BLOB NOT NULL, n_tokens INTEGER NOT NULL,
    n_stored INTEGER NOT NULL, parent TEXT, parent_position INTEGER,
    is_evicted INTEGER NOT NULL, revision INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
    stamp TEXT NOT NULL, last_used REAL NOT NULL, tip BLOB
);
CREATE TABLE holds (name TEXT NOT NULL, address BLOB NOT NULL, PRIMARY KEY (name, address));
CREATE INDEX holds_by_address ON holds (address);
"""

_COLUMNS = (
    "address, kind, root, parent, start, stop, tokens, first, is_exact, size_bytes, checksum, "
    "last_used"
)
_UNHELD = "NOT EXISTS (SELECT 1 FROM holds WHERE holds.address = blocks.address)"


@dataclass(frozen=True, slots=True)
class RefRow:
    """Row of the catalogue: one reference.

    Attributes:
        name: of the history.
        n_tokens: length of the history.
        n_stored: leading tokens whose blocks it needs.
        parent: name of the history that it was forked from.
        parent_position: tokens in common since the fork.
        is_evicted: whether its KV was given up.
        revision: of its latest state.
        size_bytes: of its file, without blocks.
    """

    name: str
    n_tokens: int
    n_stored: int
    parent: str | None
    parent_position: int | None
    is_evicted: bool
    revision: int
    size_bytes: int


class Catalogue:
    """One process's connection to the index. For any thread; nothing here waits for a disk write.

    Readers never wait for writers, of this process or another: the journal is a write-ahead log,
    and reads have a connection of their own.
    """

    def __init__(self, path: Path | None) -> None:
        """Open or create the file; ``None`` for one in memory.

        Raises:
            sqlite3.Error: it cannot be used, or is of another version.
            OSError: it cannot be made, or is a link.
        """
        self.path = path
        self.is_new = False
        """Whether it was empty when it was opened."""
        self._write = self._connect()
        self._write_lock = threading.Lock()
        self._read, self._read_lock = self._write, self._write_lock
        try:
            self._prepare()
            if path is not None:
                self._read, self._read_lock = self._connect(), threading.Lock()
            self.inode = _inode(path)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        if self.path is None:
            return sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        # Closing a file of our own that SQLite has open would drop its locks: only look at it.
        if self.path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and none is followed here", self.path)
        if not self.path.exists():
            os.close(open_own(self.path, os.O_CREAT | os.O_RDWR))  # its WAL gets its mode
        return sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
        )

    def _prepare(self) -> None:
        db = self._write
        if self.path is not None:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
        with self._writing():
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self.is_new = True
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"schema version {version} is not known")

    def close(self) -> None:
        """Close the connections; a no-op the second time."""
        for db in {id(db): db for db in (self._read, self._write)}.values():
            db.close()

    @property
    def is_replaced(self) -> bool:
        """True if another process has put a new file in this one's place."""
        return self.path is not None and _inode(self.path) != self.inode

    # Reading -----------------------------------------------------------------------------------

    def info(self, address: bytes) -> Info | None:
        """Return what is listed under an address."""
        rows = self._select(f"SELECT {_COLUMNS} FROM blocks WHERE address = ?", (address,))
        return _info(rows[0]) if rows else None

    def children(self, parents: Sequence[bytes], kind: Kind) -> list[Info]:
        """Return blocks or boundary states behind any of these addresses, latest used first."""
        found: list[Info] = []
        for at in range(0, len(parents), _MAX_VARIABLES):
            some = parents[at : at + _MAX_VARIABLES]
            marks = ",".join("?" * len(some))
            rows = self._select(
                f"SELECT {_COLUMNS} FROM blocks WHERE parent IN ({marks}) AND kind = ? "
                f"ORDER BY last_used DESC LIMIT {MAX_CHILDREN}",
                (*some, kind.value),
            )
            found += map(_info, rows)
        return found

    def addresses(self) -> dict[bytes, Kind]:
        """Return everything that is listed."""
        rows = self._select("SELECT address, kind FROM blocks")
        return {address: Kind(kind) for address, kind in rows}

    def garbage(self) -> list[tuple[bytes, Kind, int, float]]:
        """Return (address, kind, size_bytes, last_used) of what no reference needs, oldest first.

        Deepest, because a block without those before it is of no use.
        """
        rows = self._select(
            f"SELECT address, kind, size_bytes, last_used FROM blocks WHERE {_UNHELD} "
            f"ORDER BY last_used, stop DESC"
        )
        return [(address, Kind(kind), size, used) for address, kind, size, used in rows]

    def is_held(self, address: bytes) -> bool:
        """Return true if a reference needs it."""
        return bool(self._select("SELECT 1 FROM holds WHERE address = ? LIMIT 1", (address,)))

    def held_by(self, name: str) -> set[bytes]:
        """Return the addresses that a reference needs."""
        rows = self._select("SELECT address FROM holds WHERE name = ?", (name,))
        return {address for (address,) in rows}

    def references(self) -> list[RefRow]:
        """Return all references, least recently used first."""
        rows = self._select(
            "SELECT name, n_tokens, n_stored, parent, parent_position, is_evicted, "
            "revision, size_bytes FROM refs ORDER BY last_used, name"
        )
        return [
            RefRow(name, n, n_stored, parent, at, bool(is_evicted), *rest)
            for name, n, n_stored, parent, at, is_evicted, *rest in rows
        ]

    def reference_names(self) -> list[str]:
        """Return the names of all references, least recently used first."""
        return [name for (name,) in self._select("SELECT name FROM refs ORDER BY last_used, name")]

    def revisions(self) -> dict[str, int]:
        """Return the revision of each reference's latest state, the least recently used first."""
        return dict(self._select("SELECT name, revision FROM refs ORDER BY last_used, name"))

    def revision(self, name: str) -> int | None:
        """Return the revision of a reference; None where there is none of that name."""
        rows = self._select("SELECT revision FROM refs WHERE name = ?", (name,))
        return int(rows[0][0]) if rows else None

    def stamps(self) -> dict[str, str]:
        """Return what each reference's file looked like when it was listed."""
        return dict(self._select("SELECT name, stamp FROM refs"))

    def totals(self) -> dict[str, int]:
        """Return counts and bytes: blocks, block_bytes, refs, ref_bytes, held and unshared."""
        (blocks,) = self._select("SELECT COUNT(*), COALESCE(SUM(size_bytes), 0) FROM blocks")
        (refs,) = self._select("SELECT COUNT(*), COALESCE(SUM(size_bytes), 0) FROM refs")
        (held,) = self._select(
            f"SELECT COALESCE(SUM(size_bytes), 0) FROM blocks WHERE NOT {_UNHELD}"
        )
        (unshared,) = self._select(
            "SELECT COALESCE(SUM(size_bytes), 0) FROM holds JOIN blocks USING (address)"
        )
        names = ("blocks", "block_bytes", "refs", "ref_bytes", "held", "unshared")
        return dict(zip(names, (*blocks, *refs, *held, *unshared), strict=True))

    def check(self) -> None:
        """Read all of it.

        Raises:
            sqlite3.DatabaseError: it is damaged.
        """
        rows = self._select("PRAGMA integrity_check")
        if rows != [("ok",)]:
            raise sqlite3.DatabaseError(str(rows[0][0]))

    # Writing -----------------------------------------------------------------------------------

    def add_blocks(self, infos: Iterable[Info], now: float) -> None:
        """List blocks and boundary states; what was listed of them is replaced."""
        values = [
            (
                info.address,
                info.kind.value,
                info.root,
                info.parent,
                info.start,
                info.stop,
                info.tokens.astype("<i8", copy=False).tobytes(),
                info.first,
                info.is_exact,
                info.size_bytes,
                info.checksum,
                now,
            )
            for info in infos
        ]
        marks = ",".join("?" * 12)
        with self._writing() as db:
            db.executemany(f"INSERT OR REPLACE INTO blocks ({_COLUMNS}) VALUES ({marks})", values)

    def drop_blocks(self, addresses: Iterable[bytes]) -> None:
        """Forget blocks and boundary states."""
        with self._writing() as db:
            db.executemany("DELETE FROM blocks WHERE address = ?", [(a,) for a in addresses])

    def touch(self, addresses: Iterable[bytes], now: float) -> None:
        """Note a use of blocks, and of the references whose last block is among them."""
        values = [(now, address) for address in addresses]
        with self._writing() as db:
            db.executemany("UPDATE blocks SET last_used = ? WHERE address = ?", values)
            db.executemany("UPDATE refs SET last_used = ? WHERE tip = ?", values)

    def put_reference(
        self, ref: Reference, root: bytes, size_bytes: int, stamp: str, last_used: float
    ) -> None:
        """List the state of a reference, in place of the one before."""
        with self._writing() as db:
            db.execute(
                f"INSERT OR REPLACE INTO refs VALUES ({','.join('?' * 12)})",
                (
                    ref.name,
                    root,
                    len(ref.tokens),
                    ref.n_stored,
                    ref.parent,
                    ref.parent_position,
                    ref.is_evicted,
                    ref.revision,
                    size_bytes,
                    stamp,
                    last_used,
                    ref.blocks[-1] if ref.blocks else None,
                ),
            )
            db.execute("DELETE FROM holds WHERE name = ?", (ref.name,))
            holds = [(ref.name, address) for address in ref.addresses]
            db.executemany("INSERT INTO holds VALUES (?, ?)", holds)

    def drop_reference(self, name: str) -> None:
        """Forget a reference; what it needed may be garbage now."""
        with self._writing() as db:
            db.execute("DELETE FROM refs WHERE name = ?", (name,))
            db.execute("DELETE FROM holds WHERE name = ?", (name,))

    def _select(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._read_lock:
            return self._read.execute(sql, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock:
            self._write.execute("BEGIN IMMEDIATE")
            try:
                yield self._write
            except BaseException:
                if self._write.in_transaction:
                    self._write.execute("ROLLBACK")
                raise
            self._write.execute("COMMIT")


def _info(row: tuple[Any, ...]) -> Info:
    address, kind, root, parent, start, _stop, tokens, first, is_exact, size, checksum, _ = row
    numbers = np.frombuffer(tokens, "<i8")
    return Info(
        Kind(kind), address, root, parent, start, numbers, first, bool(is_exact), size, checksum
    )


def _inode(path: Path | None) -> int:
    if path is None:
        return 0
    try:
        return path.stat().st_ino
    except OSError:
        return -1


_NOT_WRITABLE = frozenset(
    {
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_IOERR,  # also where a full disk has no page left for shared memory
        sqlite3.SQLITE_PERM,
    }
)
_WHOLE = _NOT_WRITABLE | {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM}


def is_not_writable(error: sqlite3.Error) -> bool:
    """Return true if an error says that the folder of a database takes no bytes now."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _NOT_WRITABLE


def is_damage(error: sqlite3.Error) -> bool:
    """Return true if an error means a database that has to be made again.

    One that is in use, or on a disk that is full, is read-only or has failed, is none.
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # Python's own have none
    return code & 0xFF not in _WHOLE
