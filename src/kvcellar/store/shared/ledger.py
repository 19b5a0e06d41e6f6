"""The ledger of what is in the shared tier: the states that it and this machine's store had last.

It is an index: where it is lost, states that are equal are found to be so again, and others that
this machine has not handed in count as its own.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from pathlib import Path
from typing import NamedTuple

from kvcellar.home import open_own
from kvcellar.store.disk.catalogue import BUSY_TIMEOUT_S, is_damage

_SCHEMA = """CREATE TABLE IF NOT EXISTS shared (
    place TEXT NOT NULL, register TEXT NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL,
    serial INTEGER NOT NULL, n_stored INTEGER NOT NULL, n_boundaries INTEGER NOT NULL,
    PRIMARY KEY (place, register))"""


DELETED = -1
"""Serial number of what was deleted here, and may still be in the tier."""


class Known(NamedTuple):
    """The last state of a history that both this store and the tier had.

    Attributes:
        name: of the history.
        number: of the state in the tier.
        serial: of the state; 0: the tier says that it was deleted; DELETED: it was here.
        n_stored: leading tokens whose blocks are in the tier.
        n_boundaries: boundary states of it that are.
    """

    name: str
    number: int
    serial: int
    n_stored: int
    n_boundaries: int


class Ledger:
    """States by register, of one place. For any thread and several processes."""

    def __init__(self, path: Path, place: str) -> None:
        """Open the file, or make it; in memory where it cannot be used."""
        self._place = place
        self._lock = threading.Lock()
        try:
            self._db = self._opened(path)
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, sqlite3.Error) and is_damage(error):
                with contextlib.suppress(sqlite3.Error, OSError):
                    path.unlink()
                    self._db = self._opened(path)
                    return
            self._db = self._opened(None)

    @staticmethod
    def _opened(path: Path | None) -> sqlite3.Connection:
        if path is not None:
            os.close(open_own(path, os.O_CREAT | os.O_RDWR))  # which sets its mode
        db = sqlite3.connect(
            path or ":memory:",
            timeout=BUSY_TIMEOUT_S,
            check_same_thread=False,
            isolation_level=None,
        )
        try:
            db.execute(_SCHEMA)
        except BaseException:
            db.close()
            raise
        return db

    def get(self, register: str) -> Known | None:
        """Return what is known of a register."""
        return self.all().get(register)

    def all(self) -> dict[str, Known]:
        """Return all that is known, by register."""
        with self._lock:
            rows = self._db.execute(
                "SELECT register, name, number, serial, n_stored, n_boundaries FROM shared "
                "WHERE place = ?",
                (self._place,),
            ).fetchall()
        return {register: Known(*facts) for register, *facts in rows}

    def put(self, register: str, known: Known) -> None:
        """Note a state that both have."""
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO shared VALUES (?, ?, ?, ?, ?, ?, ?)",
                (self._place, register, *known),
            )

    def drop(self, register: str) -> None:
        """Forget a register."""
        with self._lock:
            self._db.execute(
                "DELETE FROM shared WHERE place = ? AND register = ?", (self._place, register)
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()
