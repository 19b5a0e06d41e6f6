"""The cold tier: files in a folder, a catalogue of them, and what is done when either is bad."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvcellar.errors import StoreError
from kvcellar.home import open_own
from kvcellar.store.blocks import Info, Kind, Sealed, read_info, read_sealed
from kvcellar.store.catalogue import Catalogue, is_damage
from kvcellar.store.facts import text
from kvcellar.store.folder import PREVIOUS, Folder, stamp_of
from kvcellar.store.format import DamagedError, FileBytes, read_file, read_header
from kvcellar.store.journal import Journal
from kvcellar.store.layout import root_address
from kvcellar.store.references import DROPPED, Reference, file_stem, unpack_reference
from kvcellar.store.reports import EventKind, EventLog

T = TypeVar("T")

MAX_SEEN = 1 << 18
"""Addresses that are remembered to be stored; more than that, and all are forgotten."""


class ColdTier:
    """Blocks and references on disk. Reads are for any thread, changes for one at a time.

    Invariant: outside of ``locked`` the files of blocks, window states and references, and the
    quarantine, take at most ``limit_bytes``, unless pinned histories alone take more because the
    limit was lowered.
    """

    def __init__(
        self, folder: Folder, limit_bytes: int, lock_timeout_s: float, events: EventLog
    ) -> None:
        """Open the catalogue, or make it again, and see what the last writer left behind."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.events = events
        self.journal = Journal(folder, events)
        self._lock_timeout_s = lock_timeout_s
        self._recovery = threading.RLock()
        self._is_stale = False
        self._is_closed = False
        self._retired: list[Catalogue] = []
        """Catalogues that were replaced; other threads may still be reading them."""
        self._seen: dict[bytes, bool] = {}
        """Addresses that were stored when they were last looked at, and whether exactly."""
        self._damaged: dict[tuple[Path, str], tuple[str, str]] = {}
        """By file and stamp what was found wrong with it, and the name that it says."""
        self._catalogue = Catalogue(None)  # until there is one
        try:
            with folder.locked(min(1.0, lock_timeout_s)):
                folder.clear_staging()
                self._replace_catalogue(None)
        except (StoreError, OSError):
            self._replace_catalogue(None)
            self._is_stale = True  # others are writing; seen to with our first save

    def close(self) -> None:
        """Close the catalogue; from then on nothing can be asked."""
        self._is_closed = True
        self.journal.close()
        for catalogue in (*self._retired, self._catalogue):
            catalogue.close()

    # The catalogue -----------------------------------------------------------------------------

    def ask(self, question: Callable[[Catalogue], T]) -> T:
        """The catalogue's answer; where it is damaged, that of the one made in its place."""
        try:
            return question(self._current())
        except sqlite3.Error as error:
            self._replace_catalogue(error)
            return question(self._catalogue)

    def info(self, address: bytes) -> Info | None:
        """What is listed under an address."""
        info = self.ask(lambda catalogue: catalogue.info(address))
        if info is not None:
            self.note_there(address, info.is_exact)
        else:
            self.note_gone(address)
        return info

    def note_there(self, address: bytes, is_exact: bool) -> None:
        """Remember that a block is stored, for those who cannot wait for an answer."""
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[address] = is_exact

    def note_gone(self, address: bytes) -> None:
        """Forget that a block is stored."""
        self._seen.pop(address, None)

    def seen(self, address: bytes) -> bool | None:
        """Tell whether a block that was stored when it was last looked at was exact; else None.

        Asks nobody, and so may be wrong: whoever writes looks again.
        """
        return self._seen.get(address)

    def _is_held(self, address: bytes) -> bool:
        return self.ask(lambda catalogue: catalogue.is_held(address))

    def _holds(self, name: str) -> bool:
        return bool(self.ask(lambda catalogue: catalogue.held_by(name)))

    def tell(self, change: Callable[[Catalogue], None]) -> None:
        """Change the catalogue; where that fails it is made again from the files."""
        try:
            change(self._current())
        except sqlite3.Error as error:
            self._replace_catalogue(error)

    def _current(self) -> Catalogue:
        if self._is_closed:
            raise StoreError("the store is closed; open it again")
        if self._catalogue.is_replaced:
            with self._recovery:
                if self._catalogue.is_replaced:
                    self._replace_catalogue(None)
        return self._catalogue

    def _replace_catalogue(self, error: Exception | None) -> None:
        """Another catalogue, from the files: on disk, or in memory where there can be none.

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
                    self._put_catalogue_away()
                try:
                    catalogue = Catalogue(self.folder.catalogue)
                    self._sync(catalogue)  # before anybody reads it
                except (sqlite3.Error, OSError) as second:
                    error = second
                    continue
                self._catalogue = catalogue
                has_lost = catalogue.is_new and any(self.folder.block_paths())
                if error is not None or has_lost:
                    self._rebuilt("it was missing" if error is None else str(error))
                return
            catalogue = Catalogue(None)
            self._sync(catalogue)
            self._catalogue = catalogue
            self._rebuilt(str(error))

    def _put_catalogue_away(self) -> None:
        path = self.folder.catalogue
        for suffix in ("", "-wal", "-shm"):
            self.folder.put_away(path.with_name(path.name + suffix))

    def _rebuilt(self, why: str) -> None:
        kind = "in memory" if self._catalogue.path is None else "on disk"
        self.events.add(
            EventKind.CATALOGUE_REBUILT,
            str(self.folder.path),
            f"{why}; made again from the files, {kind}",
        )

    def refresh(self) -> None:
        """Make the catalogue say what the files say; where it cannot be changed, make another."""
        try:
            self._sync(self._current())
        except sqlite3.Error as error:
            self._replace_catalogue(error)

    def _sync(self, catalogue: Catalogue) -> None:
        """Make a catalogue say what the files say.

        Raises:
            sqlite3.Error: it cannot be changed.
        """
        listed = catalogue.addresses()
        there: set[bytes] = set()
        for kind, address, path in self.folder.block_paths():
            there.add(address)
            if address not in listed:
                self._list_file(catalogue, kind, address, path)
        gone = listed.keys() - there
        if gone:
            for address in gone:
                if catalogue.is_held(address):
                    self._missing(address)
            catalogue.drop_blocks(gone)
        stamps = catalogue.stamps()
        known = set(stamps.values())
        paths = self.folder.reference_paths()
        for path, stamp in paths.items():
            if stamp not in known:
                self._list_reference(catalogue, path, stamp)
        for name in stamps:
            if self.folder.of_reference(name) not in paths:
                catalogue.drop_reference(name)
        self._is_stale = False

    def _list_file(self, catalogue: Catalogue, kind: Kind, address: bytes, path: Path) -> None:
        try:
            info = read_info(path)
            if info.address != address or info.kind is not kind:
                raise DamagedError(f"it is the file of {info.address.hex()}")
        except DamagedError as error:
            self._quarantine(address.hex(), path, str(error))
        except FileNotFoundError:
            pass
        except OSError as error:
            self.events.add(EventKind.UNREADABLE, address.hex(), str(error))
        else:
            with contextlib.suppress(FileNotFoundError):
                catalogue.add_blocks([info], path.stat().st_mtime)

    def _list_reference(self, catalogue: Catalogue, path: Path, stamp: str) -> None:
        ref = self._read_reference(path)
        if ref is not None:
            with contextlib.suppress(FileNotFoundError):
                size = self._reference_bytes(path)
                catalogue.put_reference(ref, root_of(ref), size, stamp, path.stat().st_mtime)

    # Reading -----------------------------------------------------------------------------------

    def expect(self, kind: Kind, address: bytes) -> None:
        """Let the system begin to read a file that is wanted soon, where it takes such hints."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                fd = open_own(self.folder.of(kind, address), os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(fd)

    def read(self, kind: Kind, address: bytes) -> Sealed | None:
        """A verified block or window state; what is wrong with it is reported and put away."""
        path = self.folder.of(kind, address)
        try:
            return read_sealed(path, address)
        except FileNotFoundError:
            if self.info(address) is not None:
                self._missing(address)  # else it was removed since it was found: no fault
        except DamagedError as error:
            self._quarantine(address.hex(), path, str(error))
        except OSError as error:
            self.events.add(EventKind.UNREADABLE, address.hex(), f"{error}; it is left where it is")
            return None
        self.note_gone(address)
        self.tell(lambda catalogue: catalogue.drop_blocks([address]))
        return None

    def reject(self, info: Info, why: str) -> None:
        """Put away a file whose bytes are whole and whose content is wrong."""
        self.note_gone(info.address)
        self._quarantine(info.address.hex(), self.folder.of(info.kind, info.address), why)
        self.tell(lambda catalogue: catalogue.drop_blocks([info.address]))

    def correct(self, info: Info) -> None:
        """The file is good and the catalogue said something else of it."""
        self.events.add(
            EventKind.CATALOGUE_WRONG,
            info.address.hex(),
            "the catalogue listed other tokens than the file holds; corrected",
        )
        self.tell(lambda catalogue: catalogue.add_blocks([info], time.time()))

    def _missing(self, address: bytes) -> None:
        self.events.add(
            EventKind.MISSING, address.hex(), "its file is gone; what follows it is computed again"
        )

    def _quarantine(self, subject: str, path: Path, why: str) -> None:
        is_away = self.folder.put_away(path)
        what = "moved to quarantine" if is_away else "could not be moved to quarantine"
        self.events.add(
            EventKind.DAMAGED, subject, f"{why}; {what}; what follows it is computed again"
        )

    def reference(self, name: str) -> Reference | None:
        """The published state of a name; the one before it where the file is damaged."""
        return self._read_reference(self.folder.of_reference(name))

    def damage_of(self, name: str) -> str | None:
        """What is wrong with the file of a name; None where it is good, or gone."""
        path = self.folder.of_reference(name)
        try:
            _reference_from(path, path.stem)
        except FileNotFoundError:
            return None
        except (DamagedError, OSError) as error:
            return str(error)
        return None

    def damaged_references(self) -> dict[str, str]:
        """References without a state that can be read, and what is wrong with each.

        By name, or by the stem of its file where the name cannot be read either. As far as the
        folder's names say: a file that went bad where it lies is found when it is read.
        """
        stamps = self.ask(Catalogue.stamps)
        listed = set(stamps.values())
        names = {file_stem(name): name for name in stamps}
        found: dict[tuple[Path, str], tuple[str, str]] = {}
        for key in self.folder.reference_paths().items():
            path, stamp = key
            if stamp in listed:
                continue
            if key in self._damaged:
                found[key] = self._damaged[key]
                continue
            try:
                _reference_from(path, path.stem)
            except FileNotFoundError:
                continue
            except (DamagedError, OSError) as error:
                name = names.get(path.stem) or _name_in(path) or path.stem
                found[key] = (name, str(error))
        self._damaged = found
        return dict(found.values())

    def _read_reference(self, path: Path) -> Reference | None:
        try:
            return _reference_from(path, path.stem)
        except FileNotFoundError:
            return None
        except (DamagedError, OSError) as error:
            try:
                before = _reference_from(_previous(path), path.stem)
            except (DamagedError, OSError):
                before = None
            self._say_damaged(path, before, str(error))
            return before

    def _say_damaged(self, path: Path, before: Reference | None, why: str) -> None:
        self.events.add(
            EventKind.REFERENCE_DAMAGED,
            path.stem if before is None else before.name,
            f"{why}; "
            + ("there is no state before" if before is None else "the state before is used"),
        )

    def _reference_bytes(self, path: Path) -> int:
        size = path.stat().st_size
        with contextlib.suppress(FileNotFoundError):
            size += _previous(path).stat().st_size
        return size

    # Changing ----------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only writer, with a catalogue that says what the files say.

        Raises:
            StoreError: others were writing for too long.
        """
        with self.folder.locked(self._lock_timeout_s):
            self._current()
            if self._is_stale:
                self.refresh()
            yield

    def put(self, sealed: Sealed, protect: Collection[bytes], keep: str | None) -> None:
        """Publish a block; its folder is not settled yet. Only within ``locked``.

        One that is there already stays, unless it is less exact.

        Raises:
            StoreError: there is no room that may be made.
            OSError: it could not be written; nothing was changed.
        """
        path = self.folder.of(sealed.info.kind, sealed.info.address)
        have = self.info(sealed.info.address)
        if have is not None and have.is_exact >= sealed.info.is_exact and path.exists():
            return
        self.make_room(sealed.size_bytes, protect, keep)
        self.folder.publish(self.folder.write(sealed.file.data), path)
        self.tell(lambda catalogue: catalogue.add_blocks([sealed.info], time.time()))
        self.note_there(sealed.info.address, sealed.info.is_exact)

    def settle(self) -> None:
        """Make published blocks durable."""
        self.folder.settle((self.folder.blocks, self.folder.windows))

    def put_reference(self, ref: Reference, protect: Collection[bytes] = ()) -> None:
        """Publish a state of a name; the one before is kept beside it. Only within ``locked``.

        Raises:
            StoreError: there is no room that may be made, or its metadata is no JSON.
            OSError: it could not be written; the state before is still the published one.
        """
        packed = ref.pack()
        path = self.folder.of_reference(ref.name)
        self.make_room(packed.data.nbytes, {*protect, *ref.addresses}, ref.name)
        with contextlib.suppress(FileNotFoundError, DamagedError):
            before = read_file(path)
            self.folder.publish(self.folder.write(before.data), _previous(path))
        self.folder.publish(self.folder.write(packed.data), path)
        self.folder.settle([self.folder.references])
        size, stamp = self._reference_bytes(path), stamp_of(path)
        self.tell(lambda c: c.put_reference(ref, root_of(ref), size, stamp, time.time()))
        self.journal.supersede(ref.name, ref.serial)
        self.journal.tidy()

    def remove_reference(self, name: str) -> bool:
        """Forget a name, its journal first; false where there is none. Only within ``locked``."""
        self.journal.forget(name)
        path = self.folder.of_reference(name)
        there = path.exists()
        _previous(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        self.folder.settle([self.folder.references])
        self.tell(lambda catalogue: catalogue.drop_reference(name))
        return there

    def remove_superseded(
        self, old: Reference, new: Reference, protect: Collection[bytes]
    ) -> list[bytes]:
        """Remove the tail and window states of ``old`` that ``new`` has made needless.

        Only what ``new`` contains: an abandoned continuation stays until room is needed.
        """
        n_common = new.tokens.common_prefix(old.tokens)
        removed = []
        for address in old.addresses - new.addresses - set(protect):
            info = self.info(address)
            if info is None or self._is_held(address):
                continue
            if info.stop <= n_common and (info.kind is Kind.WINDOW or info.stop <= new.n_stored):
                self._remove(info.kind, address)
                removed.append(address)
        return removed

    def _remove(self, kind: Kind, address: bytes) -> None:
        self.note_gone(address)
        self.folder.of(kind, address).unlink(missing_ok=True)
        self.tell(lambda catalogue: catalogue.drop_blocks([address]))

    # Room --------------------------------------------------------------------------------------

    def size_bytes(self) -> int:
        """Bytes that count against the limit."""
        totals = self.ask(Catalogue.totals)
        quarantined = sum(size for _, size in self.folder.quarantine_files())
        return totals["block_bytes"] + totals["ref_bytes"] + quarantined

    def make_room(
        self, n_bytes: int, protect: Collection[bytes] = (), keep: str | None = None
    ) -> None:
        """Remove until ``n_bytes`` more fit.

        First the quarantine, then what no reference needs, then histories that were dropped, oldest
        first, then whole histories' KV, least recently used first; never what a pinned reference
        needs, what is in ``protect``, or the KV of ``keep``. Only within ``locked``.

        Raises:
            StoreError: that is not enough; what could be removed was removed.
        """
        excess = self.size_bytes() + n_bytes - self.limit_bytes
        if excess <= 0:
            return
        for path, size in self.folder.quarantine_files():
            path.unlink(missing_ok=True)
            excess -= size
            if excess <= 0:
                return
        excess -= self._remove_garbage(excess, protect)
        rows = self.ask(Catalogue.references)
        for name in sorted(row.name for row in rows if row.name.startswith(DROPPED)):
            if excess <= 0:
                return
            if name == keep:
                continue
            self.remove_reference(name)
            self.events.add(
                EventKind.EVICTED, name, "what was dropped cannot be brought back: its room is used"
            )
            excess = self.size_bytes() + n_bytes - self.limit_bytes
            if excess > 0:
                excess -= self._remove_garbage(excess, protect)
        for row in rows:
            if excess <= 0:
                break
            if row.is_pinned or row.name == keep or not self._holds(row.name):
                continue
            ref = self.reference(row.name)
            if ref is None:
                continue
            self._give_up(ref)
            excess = self.size_bytes() + n_bytes - self.limit_bytes
            if excess > 0:
                excess -= self._remove_garbage(excess, protect)
        if excess > 0:
            raise StoreError(
                f"{self.folder.path} needs room for {n_bytes} bytes, {excess} more than may be "
                f"made below its limit of {self.limit_bytes}; what is left is pinned or being "
                f"saved; unpin or delete histories, or raise the limit"
            )

    def _give_up(self, ref: Reference) -> None:
        """Drop a history's KV and keep its tokens; the file is smaller than the one before."""
        path = self.folder.of_reference(ref.name)
        bare = replace(
            ref, blocks=(), n_stored=0, boundaries=(), is_evicted=True, revision=ref.revision + 1
        )
        self.folder.publish(self.folder.write(bare.pack().data), path)
        _previous(path).unlink(missing_ok=True)
        self.folder.settle([self.folder.references])
        last_used = time.time()
        size, stamp = self._reference_bytes(path), stamp_of(path)
        self.tell(lambda c: c.put_reference(bare, root_of(bare), size, stamp, last_used))
        self.events.add(
            EventKind.EVICTED,
            ref.name,
            f"the KV of {ref.n_stored} tokens was given up to stay below {self.limit_bytes} bytes; "
            f"the {len(ref.tokens)} tokens remain",
        )

    def _remove_garbage(self, n_bytes: int | None, protect: Collection[bytes]) -> int:
        """Remove what no reference needs, until ``n_bytes`` are free; None: all. Returns bytes."""
        freed = 0
        for address, kind, size, _ in self.ask(Catalogue.garbage):
            if n_bytes is not None and freed >= n_bytes:
                break
            if address not in protect:
                self._remove(kind, address)
                freed += size
        return freed

    def collect(self, protect: Collection[bytes], grace_s: float) -> tuple[int, int]:
        """Remove all that no reference needs and nobody used for a while: how many, bytes."""
        n = freed = 0
        latest = time.time() - grace_s
        for address, kind, size, last_used in self.ask(Catalogue.garbage):
            if address not in protect and last_used <= latest:
                self._remove(kind, address)
                n, freed = n + 1, freed + size
        return n, freed

    def repair_reference(self, path: Path, check: Callable[[Reference], None]) -> str | None:
        """Read a reference's file; a damaged one goes to the quarantine, for the state before it.

        Only within ``locked``.

        Args:
            path: the file.
            check: raises StoreError for a reference that its owner cannot use.

        Returns:
            Its name where the file is good.
        """
        try:
            ref = _reference_from(path, path.stem)
            check(ref)
            return ref.name
        except FileNotFoundError:
            return None
        except (DamagedError, StoreError, OSError) as error:
            before = None
            with contextlib.suppress(DamagedError, StoreError, OSError):
                found = _reference_from(_previous(path), path.stem)
                check(found)
                before = found
            self._say_damaged(path, before, str(error))
            self.folder.put_away(path)
            if before is not None:
                self.folder.publish(_previous(path), path)
                self.folder.settle([self.folder.references])
            else:
                self.folder.put_away(_previous(path))
        return None


def root_of(ref: Reference) -> bytes:
    """The root of the model key whose KV a reference needs."""
    return root_address(ref.fingerprint, ref.layout_json)


def _previous(path: Path) -> Path:
    return path.with_name(path.name + PREVIOUS)


def _name_in(path: Path) -> str | None:
    """The name that a reference's file says, where it is the one that the file is named after."""
    with contextlib.suppress(
        DamagedError, OSError, ValueError, KeyError, TypeError, RecursionError
    ):
        name = text(json.loads(read_header(path)[0]["facts"])["name"], "name")
        if file_stem(name) == path.stem:
            return name
    return None


def _reference_from(path: Path, stem: str) -> Reference:
    file: FileBytes = read_file(path)
    ref = unpack_reference(file)
    if file_stem(ref.name) != stem:
        raise DamagedError(f"it is the reference of {ref.name!r}")
    return ref
