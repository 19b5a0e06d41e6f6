"""The catalogue kept in step with the files: asked and told, and made again where it is bad."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvcellar.errors import StoreError
from kvcellar.store.disk.catalogue import Catalogue, is_damage
from kvcellar.store.disk.folder import Folder
from kvcellar.store.disk.reference_files import ReferenceFiles
from kvcellar.store.values.blocks import Kind, read_info
from kvcellar.store.values.format import DamagedError
from kvcellar.store.values.layout import root_address
from kvcellar.store.values.references import Reference
from kvcellar.store.values.reports import EventKind, EventLog

T = TypeVar("T")

ROOM_BYTES = 16 << 20
"""Bytes that are free on a disk before a catalogue that had to be in memory goes back there."""


class Listing:
    """One catalogue at a time, which says what the files say. For any thread.

    Attributes:
        is_stale: whether others were writing when it was opened, or a change of the files has
            failed, so that it has to be looked at again before the next change.
    """

    def __init__(self, folder: Folder, references: ReferenceFiles, events: EventLog) -> None:
        """Create a listing that has no catalogue yet: ``replace`` makes one."""
        self.is_stale = False
        self._folder = folder
        self._references = references
        self._events = events
        self._recovery = threading.RLock()
        self._is_closed = False
        self._retired: list[Catalogue] = []
        """Catalogues that were replaced; other threads may still be reading them."""
        self._catalogue = Catalogue(None)

    def close(self) -> None:
        """Close all catalogues; from then on nothing can be asked."""
        self._is_closed = True
        for catalogue in (*self._retired, self._catalogue):
            catalogue.close()

    def ask(self, question: Callable[[Catalogue], T]) -> T:
        """Return the catalogue's answer; where it is damaged, that of the one in its place."""
        try:
            return question(self.current())
        except sqlite3.Error as error:
            self.replace(error)
            return question(self._catalogue)

    def tell(self, change: Callable[[Catalogue], None]) -> None:
        """Change the catalogue; where that fails it is made again from the files."""
        try:
            change(self.current())
        except sqlite3.Error as error:
            self.replace(error)

    def refresh(self) -> None:
        """Make the catalogue say what the files say; where it cannot be changed, make another."""
        try:
            self._sync(self.current())
        except sqlite3.Error as error:
            self.replace(error)

    def look_again(self) -> None:
        """See to what others may have changed: before a change of the files, within their lock.

        A catalogue in memory is looked at each time, since nobody else can see it or change it;
        where there can be one on disk again, and not of the last room, that takes its place.
        """
        if self.current().path is None:
            try:
                with self._recovery:
                    if shutil.disk_usage(self._folder.path).free >= ROOM_BYTES:
                        catalogue = self._on_disk()
                        self._retired.append(self._catalogue)
                        self._catalogue = catalogue
                        return
            except OSError:
                pass
            except sqlite3.Error as error:
                if is_damage(error):
                    self.replace(error)
                    return
            self.refresh()
        elif self.is_stale:
            self.refresh()

    def current(self) -> Catalogue:
        """Return the catalogue, opened again where another process has replaced its file.

        Raises:
            StoreError: the store is closed.
        """
        if self._is_closed:
            raise StoreError("the store is closed; open it again")
        if self._catalogue.is_replaced:
            with self._recovery:
                if self._catalogue.is_replaced:
                    self.replace(None)
        return self._catalogue

    def replace(self, error: Exception | None) -> None:
        """Make another catalogue from the files: on disk, or in memory where there can be none.

        A damaged one is put away. ``error`` is None where another process has replaced the file.
        """
        with self._recovery:
            self._retired.append(self._catalogue)
            for _ in range(2):
                if error is not None and not (
                    isinstance(error, sqlite3.Error) and is_damage(error)
                ):
                    break  # it is in use, or there is no room: nothing is wrong with the file
                if error is not None:
                    self._put_away()
                try:
                    catalogue = self._on_disk()
                except (sqlite3.Error, OSError) as second:
                    error = second
                    continue
                self._catalogue = catalogue
                has_lost = catalogue.is_new and any(self._folder.block_paths())
                if error is not None or has_lost:
                    self._say_rebuilt("it was missing" if error is None else str(error))
                return
            catalogue = Catalogue(None)
            self._sync(catalogue)
            self._catalogue = catalogue
            self._say_rebuilt(str(error))

    def put_reference(self, ref: Reference, path: Path, stamp: str, used_s: float) -> None:
        """List a reference's file as it was just written."""
        size = self._references.size_bytes(path)
        self.tell(lambda c: c.put_reference(ref, root_of(ref), size, stamp, used_s))

    def quarantine(self, subject: str, path: Path, why: str) -> None:
        """Put a damaged file away and say so."""
        is_away = self._folder.put_away(path)
        what = "moved to quarantine" if is_away else "could not be moved to quarantine"
        said = f"{why}; {what}; what follows it is computed again"
        self._events.add(EventKind.DAMAGED, subject, said)

    def say_missing(self, address: bytes) -> None:
        """Say that a file that is listed is not there."""
        said = "its file is gone; what follows it is computed again"
        self._events.add(EventKind.MISSING, address.hex(), said)

    # Inside ------------------------------------------------------------------------------------

    def _on_disk(self) -> Catalogue:
        """Open the catalogue of the folder, and make it say what the files say.

        Raises:
            sqlite3.Error, OSError: it cannot be opened, or not be changed.
        """
        catalogue = Catalogue(self._folder.catalogue)
        try:
            self._sync(catalogue)  # before anybody reads it
        except BaseException:
            catalogue.close()
            raise
        return catalogue

    def _put_away(self) -> None:
        path = self._folder.catalogue
        for suffix in ("", "-wal", "-shm"):
            self._folder.put_away(path.with_name(path.name + suffix))

    def _say_rebuilt(self, why: str) -> None:
        kind = "in memory" if self._catalogue.path is None else "on disk"
        said = f"{why}; made again from the files, {kind}"
        self._events.add(EventKind.CATALOGUE_REBUILT, str(self._folder.path), said)

    def _sync(self, catalogue: Catalogue) -> None:
        """Make a catalogue say what the files say.

        Raises:
            sqlite3.Error: it cannot be changed.
        """
        stamps = catalogue.stamps()
        known = set(stamps.values())
        paths = self._folder.reference_paths()
        for path, stamp in paths.items():
            if stamp not in known:
                self._list_reference(catalogue, path, stamp)
        for name in stamps:
            if self._folder.of_reference(name) not in paths:
                catalogue.drop_reference(name)
        listed = catalogue.addresses()
        there: set[bytes] = set()
        for kind, address, path in self._folder.block_paths():
            there.add(address)
            if address not in listed:
                self._list_block(catalogue, kind, address, path)
        gone = listed.keys() - there
        for address in gone:
            if catalogue.is_held(address):
                self.say_missing(address)
        if gone:
            catalogue.drop_blocks(gone)
        self.is_stale = False

    def _list_block(self, catalogue: Catalogue, kind: Kind, address: bytes, path: Path) -> None:
        try:
            info = read_info(path)
            if info.address != address or info.kind is not kind:
                raise DamagedError(f"it is the file of {info.address.hex()}")
        except DamagedError as error:
            self.quarantine(address.hex(), path, str(error))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._events.add(EventKind.UNREADABLE, address.hex(), str(error))
        else:
            with contextlib.suppress(FileNotFoundError):
                catalogue.add_blocks([info], path.stat().st_mtime)

    def _list_reference(self, catalogue: Catalogue, path: Path, stamp: str) -> None:
        ref = self._references.read(path)
        if ref is not None:
            with contextlib.suppress(FileNotFoundError):
                size = self._references.size_bytes(path)
                catalogue.put_reference(ref, root_of(ref), size, stamp, path.stat().st_mtime)


def root_of(ref: Reference) -> bytes:
    """Return the root of the model key whose KV a reference needs."""
    return root_address(ref.fingerprint, ref.layout_json)
