"""The cold tier: files of blocks and references in a folder, with room made below a limit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvcellar.errors import StoreError
from kvcellar.home import open_own
from kvcellar.store.disk.catalogue import Catalogue
from kvcellar.store.disk.folder import Folder, stamp_of
from kvcellar.store.disk.journal import Journal
from kvcellar.store.disk.listing import Listing
from kvcellar.store.disk.reference_files import ReferenceFiles
from kvcellar.store.values.blocks import Info, Kind, Sealed, read_sealed
from kvcellar.store.values.format import DamagedError
from kvcellar.store.values.references import DROPPED, Reference
from kvcellar.store.values.reports import EventKind, EventLog

T = TypeVar("T")

LATEST = 2
"""Boundary states that a history keeps as long as it keeps its KV: the last turn's."""

MAX_SEEN = 1 << 18
"""Addresses that are remembered to be stored; more than that, and all are forgotten."""


class ColdTier:
    """Blocks and references on disk. Reads are for any thread, changes for one at a time.

    Invariant: outside of ``locked`` the files of blocks, boundary states and references, and the
    quarantine, take at most ``limit_bytes``, unless it was lowered and tokens alone take more.
    """

    def __init__(
        self, folder: Folder, limit_bytes: int, lock_timeout_s: float, events: EventLog
    ) -> None:
        """Open the catalogue, or make it again, and see what the last writer left behind."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.events = events
        self.journal = Journal(folder, events)
        self.references = ReferenceFiles(folder, events)
        self._listing = Listing(folder, self.references, events)
        self.on_change: Callable[[], None] = lambda: None
        """Called with each block that was written or removed."""
        self._lock_timeout_s = lock_timeout_s
        self._seen: dict[bytes, bool] = {}
        """Addresses that were stored when they were last looked at, and whether exactly."""
        try:
            with folder.locked(min(1.0, lock_timeout_s)):
                folder.clear_staging()
                self._listing.replace(None)
        except (StoreError, OSError):
            self._listing.replace(None)
            self._listing.is_stale = True  # others are writing; seen to with our first save

    def close(self) -> None:
        """Close the catalogue; from then on nothing can be asked."""
        self.journal.close()
        self._listing.close()

    # Asking ------------------------------------------------------------------------------------

    def ask(self, question: Callable[[Catalogue], T]) -> T:
        """Return the catalogue's answer; where it is damaged, that of the one in its place."""
        return self._listing.ask(question)

    def tell(self, change: Callable[[Catalogue], None]) -> None:
        """Change the catalogue; where that fails it is made again from the files."""
        self._listing.tell(change)

    def refresh(self) -> None:
        """Make the catalogue say what the files say."""
        self._listing.refresh()

    def info(self, address: bytes) -> Info | None:
        """Return what is listed under an address."""
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

    def reference(self, name: str) -> Reference | None:
        """Return the published state of a name; the one before it where the file is damaged."""
        return self.references.get(name)

    def damaged_references(self) -> dict[str, str]:
        """Return the references without a state that can be read, and what is wrong with each."""
        return self.references.damaged(self.ask(Catalogue.stamps))

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
        """Return a verified block or boundary state; a wrong one is put away, and that said."""
        path = self.folder.of(kind, address)
        try:
            return read_sealed(path, address)
        except FileNotFoundError:
            if self.info(address) is not None:
                self._listing.say_missing(address)  # else it was removed meanwhile: no fault
        except DamagedError as error:
            self._listing.quarantine(address.hex(), path, str(error))
        except OSError as error:
            self.events.add(EventKind.UNREADABLE, address.hex(), f"{error}; it is left where it is")
            return None
        self._unlist(address)
        return None

    def reject(self, info: Info, why: str) -> None:
        """Put away a file whose bytes are whole and whose content is wrong."""
        path = self.folder.of(info.kind, info.address)
        self._listing.quarantine(info.address.hex(), path, why)
        self._unlist(info.address)

    def correct(self, info: Info) -> None:
        """List what a good file says, of which the catalogue said something else."""
        self.events.add(
            EventKind.CATALOGUE_WRONG,
            info.address.hex(),
            "the catalogue listed other tokens than the file holds; corrected",
        )
        self.tell(lambda catalogue: catalogue.add_blocks([info], time.time()))

    # Changing ----------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only writer, with a catalogue that says what the files say.

        Raises:
            StoreError: others were writing for too long.
        """
        with self.folder.locked(self._lock_timeout_s):
            self._listing.look_again()
            try:
                yield
            except OSError:  # a file may have its name, and not be listed
                self._listing.is_stale = True
                raise

    def put(
        self,
        sealed: Sealed,
        protect: Collection[bytes],
        keep: str | None,
        *,
        is_imported: bool = False,
    ) -> None:
        """Publish a block; its folder is not settled yet. Only within ``locked``.

        One that is there already stays, unless it is less exact, or came from somebody else and
        this one did not. One that is imported is used by nobody before a model agrees with it.

        Raises:
            StoreError: there is no room that may be made.
            OSError: it could not be written; nothing was changed.
        """
        path = self.folder.of(sealed.info.kind, sealed.info.address)
        have = self.info(sealed.info.address)
        is_kept = have is not None and have.is_exact >= sealed.info.is_exact and path.exists()
        is_healed = not is_imported and self.folder.is_unproven(sealed.info.address)
        if is_kept and not is_healed:
            return
        self.make_room(sealed.size_bytes, protect, keep)
        if is_imported:
            self.folder.mark_unproven(sealed.info.address)
        self.folder.publish(self.folder.write(sealed.file.data), path)
        if is_healed:
            self.folder.mark_proven(sealed.info.address)
        self.tell(lambda catalogue: catalogue.add_blocks([sealed.info], time.time()))
        self.note_there(sealed.info.address, sealed.info.is_exact)
        self.on_change()

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
        self.make_room(packed.data.nbytes, {*protect, *ref.addresses}, ref.name)
        path = self.references.publish(ref.name, packed)
        self._listing.put_reference(ref, path, stamp_of(path), time.time())
        self.journal.supersede(ref.name, ref.serial)
        self.journal.tidy()

    def remove_reference(self, name: str) -> bool:
        """Forget a name, its journal first; false where there is none. Only within ``locked``."""
        self.journal.forget(name)
        there = self.references.remove(name)
        self.tell(lambda catalogue: catalogue.drop_reference(name))
        return there

    def remove_superseded(
        self, old: Reference, new: Reference, protect: Collection[bytes]
    ) -> list[bytes]:
        """Remove the tail and boundary states of ``old`` that ``new`` has made needless.

        Only what ``new`` contains: an abandoned continuation stays until room is needed.
        """
        n_common = new.tokens.common_prefix(old.tokens)
        removed = []
        for address in old.addresses - new.addresses - set(protect):
            info = self.info(address)
            if info is None or self._is_held(address):
                continue
            if info.stop <= n_common and (info.kind is Kind.BOUNDARY or info.stop <= new.n_stored):
                self._remove(info.kind, address)
                removed.append(address)
        return removed

    def _remove(self, kind: Kind, address: bytes) -> None:
        self.folder.of(kind, address).unlink(missing_ok=True)
        self._unlist(address)
        self.on_change()

    def _unlist(self, address: bytes) -> None:
        self.folder.mark_proven(address)
        self.note_gone(address)
        self.tell(lambda catalogue: catalogue.drop_blocks([address]))

    # Room --------------------------------------------------------------------------------------

    def size_bytes(self) -> int:
        """Return the bytes that count against the limit."""
        totals = self.ask(Catalogue.totals)
        quarantined = sum(size for _, size in self.folder.quarantine_files())
        return totals["block_bytes"] + totals["ref_bytes"] + quarantined

    def make_room(
        self, n_bytes: int, protect: Collection[bytes] = (), keep: str | None = None
    ) -> None:
        """Remove until ``n_bytes`` more fit. Only within ``locked``.

        First the quarantine, then what no reference needs, then histories that were dropped, oldest
        first, then all but the latest boundary states of histories, then whole histories' KV, least
        recently used first; never what is in ``protect``, or the KV of ``keep``.

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
        for give_up in self._victims(keep):
            if excess <= 0:
                return
            give_up()
            excess = self.size_bytes() + n_bytes - self.limit_bytes
            if excess > 0:
                excess -= self._remove_garbage(excess, protect)
        if excess > 0:
            raise StoreError(
                f"{self.folder.path} needs room for {n_bytes} bytes, {excess} more than may be "
                f"made below its limit of {self.limit_bytes}; what is left is being "
                f"saved; delete histories, or raise the limit"
            )

    def _victims(self, keep: str | None) -> Iterator[Callable[[], None]]:
        """Yield ways to make room, by giving one history up each: the most dispensable first."""
        rows = [row for row in self.ask(Catalogue.references) if row.name != keep]
        for name in sorted(row.name for row in rows if row.name.startswith(DROPPED)):
            yield partial(self._forget_dropped, name)
        for give_up in (self._give_up_boundaries, self._give_up):
            for row in rows:
                ref = self.reference(row.name) if self._holds(row.name) else None
                if ref is not None and (give_up == self._give_up or ref.boundaries[LATEST:]):
                    yield partial(give_up, ref)

    def _forget_dropped(self, name: str) -> None:
        """Delete a history that was dropped."""
        self.remove_reference(name)
        self.events.add(
            EventKind.EVICTED, name, "what was dropped cannot be brought back: its room is used"
        )

    def _give_up_boundaries(self, ref: Reference) -> None:
        """Drop a history's boundary states but the latest, from which it goes on."""
        self._shrink(replace(ref, boundaries=ref.boundaries[-LATEST:]))
        first = ref.boundaries[-LATEST].length
        self.events.add(
            EventKind.EVICTED,
            ref.name,
            f"its boundary states before {first} tokens were given up to stay below "
            f"{self.limit_bytes} bytes; it can be resumed from there on",
        )

    def _shrink(self, ref: Reference) -> None:
        """Publish a reference on less than it had; the file is smaller than the one before."""
        less = replace(ref, revision=ref.revision + 1)
        path = self.references.publish(ref.name, less.pack(), keeps_before=False)
        self._listing.put_reference(less, path, stamp_of(path), time.time())

    def _give_up(self, ref: Reference) -> None:
        """Drop a history's KV and keep its tokens."""
        self._shrink(replace(ref, blocks=(), n_stored=0, boundaries=(), is_evicted=True))
        self.events.add(
            EventKind.EVICTED,
            ref.name,
            f"the KV of {ref.n_stored} tokens was given up to stay below {self.limit_bytes} bytes; "
            f"the {len(ref.tokens)} tokens remain",
        )

    def _remove_garbage(self, n_bytes: int, protect: Collection[bytes]) -> int:
        """Remove what no reference needs, until ``n_bytes`` are free. Returns bytes."""
        freed = 0
        for address, kind, size, _ in self.ask(Catalogue.garbage):
            if freed >= n_bytes:
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
