"""The store: KV outside of the cache, in RAM and on disk, shared by all histories. Start here.

Save a history under a name and what is new of it is written in the background. Ask how much of any
tokens is stored, and load it block by block, every byte verified before it is given.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kvcellar.errors import StoreError, UnknownReferenceError
from kvcellar.history import History
from kvcellar.store.config import StoreConfig
from kvcellar.store.disk import exchange, upkeep
from kvcellar.store.disk.catalogue import Catalogue, RefRow
from kvcellar.store.disk.cold import ColdTier
from kvcellar.store.disk.folder import Folder
from kvcellar.store.disk.leases import Leases, LocalLeases
from kvcellar.store.disk.pictures import PictureFiles
from kvcellar.store.documents import Documents
from kvcellar.store.matching import BoundaryState, Finder, Loaded, Match
from kvcellar.store.saving import Saver
from kvcellar.store.shared.opening import open_place
from kvcellar.store.shared.tier import TIMEOUT_S, SharedTier
from kvcellar.store.tickets import HistoryState, Metadata, RowSource, SaveTicket
from kvcellar.store.values.blocks import chain
from kvcellar.store.values.layout import ModelKey
from kvcellar.store.values.references import Reference, checked_json, checked_name
from kvcellar.store.values.reports import (
    EventKind,
    EventLog,
    GcReport,
    StoreEvent,
    StoreStats,
    VerifyReport,
)
from kvcellar.store.warm import WarmTier
from kvcellar.store.writer import Writer
from kvcellar.types import IntArray

PICTURES_BETWEEN = 64
"""Pictures that are put before it is looked for some that nobody names."""

UNNAMED_S = 86400.0
"""How long a picture stays that nobody names, unless it is asked for sooner (``gc``)."""

Tokens = History | IntArray | Sequence[int]
Progress = Callable[[float, str], None]


class Store:
    """One folder and some RAM. For any thread; several processes may have one folder open.

    ``match``, ``load``, ``load_boundary`` and ``save`` never wait for a disk write. The verbs that
    change references (``delete``, ``gc``) run behind all saves that are queued, and wait for
    themselves. Trouble of a background write is in ``take_events`` and in the save's ticket.

    Use it as a context manager, or call ``close``.

    Attributes:
        config: what its owner set.
        path: the folder.
        leases: who may extend a history, among all processes.
        shared: the tier of several machines, where there is one.
    """

    def __init__(
        self,
        path: str | Path,
        config: StoreConfig | None = None,
        *,
        shared: str | None = None,
        on_event: Callable[[StoreEvent], None] | None = None,
    ) -> None:
        """Open the store in a folder, or make one; see what an interrupted writer left behind.

        Args:
            path: the folder.
            config: limits and policy.
            shared: URL of a place that several machines share, behind the folder.
            on_event: called where something happens.

        Raises:
            StoreError: the folder cannot hold a store, or is of another version.
            ConfigError: the URL names no place that can be shared.
        """
        self.config = config or StoreConfig()
        place = None if shared is None else open_place(shared, timeout_s=TIMEOUT_S)
        self.path = Path(path)
        self._events = EventLog(on_event)
        self._folder = Folder(self.path)
        self._cold = ColdTier(
            self._folder, self.config.cold_bytes, self.config.lock_timeout_s, self._events
        )
        self._warm = WarmTier(self.config.warm_bytes)
        self._writer = Writer(self.config.queue_bytes, self._on_writer_error)
        self._cold.on_change = self._writer.goes_on
        self._pictures = PictureFiles(self._folder, self._events)
        self.shared = (
            None if place is None else SharedTier(place, self._cold, self._pictures, self._events)
        )
        self._saver = Saver(
            self._warm,
            self._cold,
            self._writer,
            self._events,
            self.config,
            None if self.shared is None else self.shared.hand_in,
        )
        tiers = self._warm, self._cold, None if self.shared is None else self.shared.blocks
        self._finder = Finder(*tiers, self._on_read, self._saver.keep)
        local = self._local_leases = LocalLeases(self._folder)
        self.leases: Leases = local if self.shared is None else self.shared.leases(local)
        self._documents = Documents(self._cold.journal, self.shared)
        self._used: deque[bytes] = deque()
        self._n_pictures = 0

    def __enter__(self) -> Store:
        """Return the store itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all that was saved so far is written or has failed.

        Raises:
            StoreError: it took longer than ``timeout_s``, or the store is closed.
        """
        self._writer.call(lambda: None, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Write what is queued, then let go of the folder; what was only in RAM is gone.

        A no-op the second time.

        Raises:
            StoreError: it took longer; it goes on in the background and may be called again.
        """
        if not self._writer.is_closed:
            self._writer.offer(self._write_used, 0)
        if not self._writer.close(timeout_s):
            raise StoreError(
                f"the store was still writing {self._writer.queued_bytes} bytes after "
                f"{timeout_s:g} s; close it again to wait on"
            )
        self.leases.close()
        if self.shared is not None:
            self.shared.close()
        self._cold.close()

    # Finding and loading -----------------------------------------------------------------------

    def match(self, key: ModelKey, tokens: Tokens) -> Match:
        """Find out how much of a history's beginning is stored, to the token, and in which tier.

        A model's forward wants at least one token that is not loaded: leave out the last.
        """
        history = History(tokens)
        return self._finder.match(key.for_length(len(history)), history)

    def load(self, match: Match, start: int = 0, stop: int | None = None) -> Iterator[Loaded]:
        """Yield the rows of positions ``[start, stop)`` of a match, block by block.

        Every block is verified (checksum, address, tokens) before it is given. Where one is gone
        or damaged the iterator ends early and an event says so; what was given is good, and a new
        match finds no more than that.

        Args:
            match: what ``match`` has found.
            start: positions before it are not wanted: the cache has them.
            stop: one past the last position; None: ``match.n_resumable``.
        """
        try:
            yield from self._finder.load(match, start, match.n_resumable if stop is None else stop)
        finally:
            self._writer.offer(self._write_used, 0)

    def load_boundary(self, match: Match, limit: int | None = None) -> BoundaryState | None:
        """Load a history's windows and states at the greatest length up to ``limit`` that has them.

        Load it first: its ``n_tokens`` says how many rows are of use. None where there is no
        boundary at or before the limit (the history starts from nothing) and for models that see
        all of a history.
        """
        return self._finder.load_boundary(match, match.n_tokens if limit is None else limit)

    def reject(self, address: bytes, why: str) -> None:
        """Put away a block or boundary state whose rows turned out wrong, in every tier.

        Its bytes were what was saved; whoever loaded it found that they cannot be right. An event
        says so, and no match finds it again.
        """
        self._warm.discard(address)
        info = self._cold.info(address)
        if info is not None:
            self._cold.reject(info, why)
        else:
            self._events.add(EventKind.DAMAGED, address.hex(), f"{why}; dropped from RAM")

    def is_unproven(self, address: bytes) -> bool:
        """Return true if a block or boundary state was imported, and no model has agreed yet."""
        return self._cold.folder.is_unproven(address)

    def prove(self, address: bytes) -> None:
        """Note that a model agrees with a block or boundary state that may have been imported."""
        self._cold.folder.mark_proven(address)

    # Saving ------------------------------------------------------------------------------------

    def save(
        self,
        name: str,
        key: ModelKey,
        tokens: Tokens,
        source: RowSource | None = None,
        *,
        n_computed: int | None = None,
        boundaries: Sequence[int] = (),
        parent: str | None = None,
        parent_position: int | None = None,
        metadata: Metadata | None = None,
        may_read: bool = True,
    ) -> SaveTicket:
        """Publish the state of a history: what is new is taken now and written in the background.

        Whether the history is new, goes on, was cut back, or has another's beginning is found out
        here: what is stored of it, by whatever name, is referred to and not written again. Where
        the queue has no room for all that is new, the save covers as much of the beginning as fits
        (``SaveTicket.is_partial``), or is skipped; both are reported, and the next save goes on
        from there.

        Args:
            name: of the history.
            key: the model and layout of its rows.
            tokens: the whole history.
            source: gives the rows of blocks that are not stored yet; None: only what is stored is
                referred to.
            n_computed: leading tokens whose rows the source has; None: all, or without a source
                those that are stored.
            boundaries: shorter lengths that shall be resumable too, as the end of what was computed
                is; those that neither the source nor the store can give are left out.
            parent: name of the history it was forked from; None: as before.
            parent_position: tokens in common since the fork.
            metadata: JSON of the caller's own, or a function that returns it, which the writer's
                thread calls; None: as before.
            may_read: ask the catalogue which blocks are stored. Otherwise the caller waits for
                nothing: only what was seen there counts, and what is taken and was there already
                is not written again.

        Raises:
            StoreError: a name or metadata that cannot be, rows that are not of this history, or
                the store is closed; nothing was queued.
            ShapeError: rows that are not what the layout says; nothing was queued.
        """
        checked_name(name)
        if isinstance(metadata, Mapping):
            checked_json(metadata)
        history = History(tokens)
        key = key.for_length(len(history))
        if n_computed is None and source is None:
            found = self.match(key, history).n_resumable if may_read else self.seen(key, history)
            n_computed = found
        n = len(history) if n_computed is None else min(n_computed, len(history))
        state = HistoryState(name, key, history, parent, parent_position, metadata)
        return self._saver.save(state, n, source, boundaries, may_read=may_read)

    def seen(self, key: ModelKey, tokens: Tokens) -> int:
        """Return how much of a history's beginning was stored when that was last looked at.

        Waits for nothing; of a model that needs boundary states it says nothing: 0.
        """
        if key.layout.has_boundaries:
            return 0
        n = 0
        history = History(tokens)
        for link in chain(key.for_length(len(history)), history):
            if self._cold.seen(link.address) is None:
                break
            n = link.stop
        return n

    # References --------------------------------------------------------------------------------

    def get(self, name: str) -> Reference:
        """Return the published state of a history; a save that is queued is not there yet.

        Raises:
            UnknownReferenceError: there is none of that name.
            StoreError: its file is damaged, and so is that of the state before.
        """
        ref = self._cold.reference(checked_name(name))
        if ref is not None:
            return ref
        damage = self._cold.references.damage_of(name)
        if damage is None:
            raise self._unknown(name)
        raise StoreError(
            f"the history {name!r} is damaged ({damage}); `kvcellar store verify` puts it away"
        )

    def has_reference(self, name: str) -> bool:
        """Return true if a history of that name is published."""
        return self._folder.of_reference(checked_name(name)).exists()

    def references(self) -> list[RefRow]:
        """Return all published histories, the least recently used first."""
        return self._cold.ask(Catalogue.references)

    def reference_names(self) -> list[str]:
        """Return the names of all published histories, the least recently used first."""
        return self._cold.ask(Catalogue.reference_names)

    def revisions(self) -> dict[str, int]:
        """Return each published history's latest revision, the least recently used first.

        Costs one query: to ask whether another process has changed something, as often as wanted.
        """
        return self._cold.ask(Catalogue.revisions)

    def revision(self, name: str) -> int | None:
        """Return the revision of a history's latest state; None where it is not published."""
        return self._cold.ask(lambda catalogue: catalogue.revision(name))

    def record(self, name: str, serial: int, payload: bytes) -> None:
        """Make a small state of a history durable now, whatever waits to be written.

        It is there, behind the published state, until one is published whose metadata says
        ``serial`` and the same number or a greater one, or the history is deleted. For any thread;
        waits for one write of the disk and for nothing else.

        Args:
            name: of the history, which need not be published yet.
            serial: ascends with each state; one that is there already gives way.
            payload: whatever the caller reads.

        Raises:
            StoreError: it could not be written; nothing was changed.
        """
        self._cold.journal.put(checked_name(name), serial, payload)

    @property
    def is_failing(self) -> bool:
        """True while the last ``record`` did not succeed, or nothing that is written ends."""
        return self._cold.journal.is_failing or self._writer.is_stuck

    def recorded(self, name: str, after: int = 0) -> list[tuple[int, bytes]]:
        """Return what was recorded of a history behind a serial number, with the numbers."""
        return self._cold.journal.after(name, after)

    def recorded_serials(self) -> dict[str, int]:
        """Return the latest serial number of each history of which something is recorded."""
        return self._cold.journal.serials()

    def put_document(self, document_id: str, payload: bytes) -> None:
        """Make a document of the caller's durable now, in place of one of that id.

        Documents take at most 256 MiB and are at most 10,000; the oldest go.

        Raises:
            StoreError: it could not be written; nothing was changed.
        """
        self._documents.put(document_id, payload)

    def document(self, document_id: str) -> bytes | None:
        """Return a document; None where there is none of that id."""
        return self._documents.get(document_id)

    def delete_document(self, document_id: str) -> bool:
        """Forget a document, durably; false where there is none of that id."""
        return self._documents.drop(document_id)

    def put_picture(self, name: str, data: bytes) -> None:
        """Make a picture durable now, as the file that was sent; a no-op where it is there.

        It stays as long as a history, a record or a document names it. Now and then those that
        nobody names are removed, in the background.

        Raises:
            StoreError: it could not be written; nothing was changed.
        """
        self._pictures.put(name, data)
        self._n_pictures += 1
        if self._n_pictures % PICTURES_BETWEEN == 0:
            self._writer.offer(self._drop_pictures, 0)

    def _drop_pictures(self) -> None:
        """Remove pictures that nobody names any more, of days before. In the writer's thread."""
        with contextlib.suppress(StoreError), self._cold.locked():
            self._cold.refresh()
            self._pictures.remove(upkeep.named_pictures(self._cold), UNNAMED_S)

    def keep_picture(self, name: str) -> bool:
        """Have upkeep leave a picture alone for a while; false where it is not on this disk."""
        return self._pictures.keep(name)

    def picture(self, name: str) -> bytes | None:
        """Return the file of a picture, from here or from the shared tier; None: there is none."""
        found = self._pictures.get(name)
        if found is None and self.shared is not None:
            found = self.shared.pictures.get(name)
            if found is not None:
                with contextlib.suppress(StoreError):  # it is asked for again
                    self._pictures.put(name, found)
        return found

    def report(self, kind: EventKind, subject: str, detail: str) -> None:
        """Say what a caller found wrong with what it had stored, among the store's own events."""
        self._events.add(kind, subject, detail)

    def damaged_references(self) -> dict[str, str]:
        """Return the histories of which no state can be read, and what is wrong with each.

        By name, or by the name of the file where that cannot be read either.
        """
        return self._cold.damaged_references()

    def delete(self, name: str) -> None:
        """Forget a history; blocks that only it needed are garbage from then on.

        Raises:
            UnknownReferenceError: there is none of that name.
            StoreError: its file cannot be removed; it is still there.
        """

        def work() -> None:
            try:
                with self._cold.locked():
                    is_gone = self._cold.remove_reference(name)
                    if is_gone and self.shared is not None:
                        self.shared.delete(name)
            except OSError as error:
                raise StoreError(f"history {name!r} could not be deleted: {error}") from error
            if not is_gone:
                raise self._unknown(name)

        checked_name(name)
        self._writer.call(work)

    def export_reference(
        self,
        name: str,
        file: str | Path,
        *,
        pictures: Mapping[str, bytes] = MappingProxyType({}),
        on_progress: Progress | None = None,
    ) -> int:
        """Write a history with all of its blocks to one file; returns its bytes.

        Blocks are verified on the way; where one is gone or damaged the file holds what can be
        restored before it. The file is there whole or not at all.

        Args:
            name: of the history.
            file: where to.
            pictures: files of those that go along, by name.
            on_progress: takes how much is done, 0 to 1, and what comes now.

        Raises:
            UnknownReferenceError: there is none of that name.
            StoreError: the file cannot be written.
        """
        ref = self.get(name)
        return exchange.export_reference(self._cold, ref, pictures, Path(file), on_progress)

    def import_reference(
        self,
        file: str | Path,
        *,
        adopt: Callable[[Reference], Reference] | None = None,
        pictures_of: Callable[[Reference], Collection[str]] = lambda ref: (),
        brings_all: bool = False,
        on_progress: Progress | None = None,
    ) -> Reference:
        """Take in a file that ``export_reference`` made; all of it is verified first.

        Args:
            file: the file.
            adopt: from what was read and verified to what is published, such as one with another
                name and metadata; what it raises ends the import.
            pictures_of: returns the names of the pictures of a history that is read.
            brings_all: refuse one whose pictures are not all in the file: those that are here may
                be somebody else's.
            on_progress: takes how much is done, 0 to 1, and what comes now.

        Raises:
            StoreError: it is no such file, or damaged, or the name is taken, or there is no room;
                nothing was published.
        """
        path = Path(file)
        # Before anything waits for it: to decode them takes longer than to read the rest.
        named = set(pictures_of(exchange.reference_of(path)))
        pictures = exchange.checked_pictures(path, named)
        if brings_all and named != set(pictures):
            raise StoreError(
                f"{path} names {len(named)} pictures and has {len(pictures)} of them; export it "
                f"again; nothing was published"
            )

        def told(part: float, what: str) -> None:
            self._writer.goes_on()
            if on_progress is not None:
                on_progress(part, what)

        def work() -> Reference:
            with self._cold.locked():
                ref = exchange.verify_export(path, told)
                if adopt is not None:
                    ref = adopt(ref)
                self._check_free(checked_name(ref.name))
                ref = replace(ref, revision=1)
                for name in pictures:
                    self._pictures.put(name, exchange.picture_of_export(path, name))
                exchange.publish_export(self._cold, path, ref, self._saver.wanted())
                return ref

        return self._writer.call(work)

    # Upkeep ------------------------------------------------------------------------------------

    def verify(
        self,
        *,
        check: Callable[[Reference], None] | None = None,
        on_progress: Progress | None = None,
    ) -> VerifyReport:
        """Read every byte; put away what is damaged, restore what has a state before.

        Args:
            check: raises StoreError for a history that its owner cannot use; it is damaged too.
            on_progress: takes how much is done, 0 to 1, and what comes now.
        """
        return upkeep.verify(self._cold, self._pictures, on_progress, check or (lambda ref: None))

    def gc(self, *, grace_s: float = 0.0, is_emptying_quarantine: bool = False) -> GcReport:
        """Remove what no reference needs and nobody used for ``grace_s``, and all leftovers.

        Raises:
            StoreError: another process was writing for too long; nothing was removed.
        """
        self._local_leases.clear()
        return self._writer.call(
            lambda: upkeep.collect(
                self._cold,
                self._pictures,
                self._saver.wanted(),
                grace_s,
                is_emptying_quarantine,
            )
        )

    def stats(self) -> StoreStats:
        """Return all tiers, the queue and all counts, at this moment."""
        shared = None if self.shared is None else self.shared.stats()
        return upkeep.stats(
            self._cold, self._pictures, self._warm.stats(), self._writer.queued_bytes, shared
        )

    def take_events(self) -> list[StoreEvent]:
        """Return what happened since the last call, oldest first."""
        return self._events.take()

    # Inside ------------------------------------------------------------------------------------

    def _on_read(self, address: bytes) -> None:
        """Note that a block was used. It is not copied to RAM: the cache has it now."""
        self._used.append(address)

    def _write_used(self) -> None:
        used: set[bytes] = set()
        while self._used:
            used.add(self._used.popleft())
        if used:
            self._cold.tell(lambda catalogue: catalogue.touch(used, time.time()))

    def _on_writer_error(self, error: BaseException) -> None:
        self._events.add(EventKind.WRITE_FAILED, str(self.path), f"{type(error).__name__}: {error}")

    def _check_free(self, name: str) -> None:
        if self._folder.of_reference(name).exists():
            raise StoreError(f"there is a history {name!r} already; delete it or choose a new name")

    def _unknown(self, name: str) -> UnknownReferenceError:
        names = self.reference_names()
        shown = ", ".join(names[-5:]) + (", ..." if len(names) > 5 else "")
        return UnknownReferenceError(
            f"no history {name!r} is in {self.path}; it holds {shown or 'none'}"
        )
