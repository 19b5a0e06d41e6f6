"""Saving: what is new is taken from the cache at once and written in the background."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from kvcellar.errors import StoreError
from kvcellar.history import History
from kvcellar.store.blocks import (
    Draft,
    Kind,
    Sealed,
    boundary_link,
    chain,
    draft_block,
    draft_window,
)
from kvcellar.store.cold import ColdTier
from kvcellar.store.layout import ModelKey, Rows, WindowRows
from kvcellar.store.matching import Finder
from kvcellar.store.precision import EXACT
from kvcellar.store.references import Boundary, Reference
from kvcellar.store.reports import EventKind, EventLog
from kvcellar.store.warm import Item, WarmTier
from kvcellar.store.writer import Writer


class RowSource(Protocol):
    """Where a history's rows are taken from: a cache, as someone joins it to the store.

    What is returned belongs to the store from then on: copies, which nobody writes to.
    """

    def read_rows(self, p0: int, p1: int) -> Rows:
        """Per full-history group the K and V of positions ``[p0, p1)``."""
        ...

    def read_window(self, n: int) -> Sequence[WindowRows]:
        """Per sliding-window group what it holds of the positions below ``n``.

        At least the last ``window - 1``, or all where there are fewer; more allow a resume at
        lengths before ``n`` too.
        """
        ...


class SaveState(enum.StrEnum):
    """What became of a save.

    QUEUED: it waits to be written.
    PUBLISHED: it is on disk (or, for what is only kept, in RAM).
    SKIPPED: it was not taken, the queue being full.
    FAILED: it could not be written; the state before is the published one.
    """

    QUEUED = "queued"
    PUBLISHED = "published"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class SaveTicket:
    """One save and what becomes of it.

    Attributes:
        name: the history; None for blocks without a name.
        n_tokens: tokens whose KV there was to save.
        n_stored: of these, leading ones that the save covers.
        n_shared: of these, tokens that were stored already.
        lacks_window: whether a window state at its end is missing: it can be resumed before it.
        new_bytes: bytes that had to be taken from the cache.
        state: see :class:`SaveState`.
        reason: why it was skipped or has failed.
        reference: what was published.
    """

    name: str | None
    n_tokens: int
    n_stored: int = 0
    n_shared: int = 0
    lacks_window: bool = False
    new_bytes: int = 0
    state: SaveState = SaveState.QUEUED
    reason: str = ""
    reference: Reference | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def is_partial(self) -> bool:
        """Whether it covers less than there was; the next save goes on from there."""
        return self.n_stored < self.n_tokens or self.lacks_window

    def wait(self, timeout_s: float | None = None) -> SaveState:
        """Wait until it is over, or for so long; returns the state at that time."""
        self._is_over.wait(timeout_s)
        return self.state

    def end(self, state: SaveState, reason: str = "") -> None:
        """It is over."""
        self.state, self.reason = state, reason
        self._is_over.set()


@dataclass(frozen=True, slots=True)
class Naming:
    """What a save says of its reference beside tokens and blocks; None: as it was before."""

    name: str
    parent: str | None = None
    parent_position: int | None = None
    metadata: Mapping[str, Any] | None = None
    is_pinned: bool | None = None


@dataclass(slots=True, eq=False)
class Plan:
    """What one save takes from the cache and what it needs of the store."""

    ticket: SaveTicket
    blocks: list[bytes] = field(default_factory=list)
    boundary: Boundary | None = None
    items: list[Item] = field(default_factory=list)
    needs: dict[bytes, Kind] = field(default_factory=dict)


class _Reading(NamedTuple):
    """Where a save looks for what is stored already.

    Attributes:
        is_cold: on disk, and not in RAM alone.
        may_wait: in the catalogue, and not only among what was seen there.
    """

    is_cold: bool
    may_wait: bool


class Saver:
    """Takes rows in the caller's thread, never waiting; writes them in the writer's."""

    def __init__(
        self,
        warm: WarmTier,
        cold: ColdTier,
        finder: Finder,
        writer: Writer,
        events: EventLog,
        *,
        warm_precision: str,
        cold_precision: str,
        max_boundaries: int,
    ) -> None:
        """Nothing saved yet."""
        self._warm = warm
        self._cold = cold
        self._finder = finder
        self._writer = writer
        self._events = events
        self._warm_precision = warm_precision
        self._cold_precision = cold_precision
        self._max_boundaries = max_boundaries
        self._wanted: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def wanted(self) -> set[bytes]:
        """Addresses that queued saves rely on."""
        with self._lock:
            return set(self._wanted)

    # In the caller's thread --------------------------------------------------------------------

    def save(
        self,
        naming: Naming | None,
        key: ModelKey,
        tokens: History,
        n_computed: int,
        source: RowSource | None,
        *,
        is_cold: bool,
        may_read: bool = True,
    ) -> SaveTicket:
        """Take what is new and queue it; see ``Store.save`` and ``Store.keep_warm``."""
        ticket = SaveTicket(naming.name if naming else None, n_computed)
        room = self._writer.n_free_bytes - tokens.tokens.nbytes
        reading = _Reading(is_cold, may_read)
        plan = self._take(ticket, key, tokens.prefix(n_computed), source, room, reading)
        subject = ticket.name or "unnamed blocks"
        if plan is None or (naming is None and n_computed and not plan.needs):
            return self._skipped(ticket)
        if naming is None and not plan.items:
            ticket.end(SaveState.PUBLISHED)
            return ticket
        with self._lock:
            self._wanted.update(plan.needs.keys())
        self._warm.hold(plan.items, is_cold)
        size = tokens.tokens.nbytes + sum(item.size_bytes for item in plan.items)

        def job() -> None:
            self._run(plan, naming, key, tokens, is_cold)

        shortened = None
        if ticket.is_partial and source is not None:  # said of the ticket before it can fail
            shortened = (
                f"{ticket.n_stored} of {n_computed} tokens"
                + (" and no window state" if ticket.lacks_window else "")
                + ", the queue having no room for more; the next save goes on from there"
            )
        if not self._writer.offer(job, size):
            self._let_go(plan, {})
            return self._skipped(ticket)
        if shortened is not None:
            self._events.add(EventKind.SAVE_PARTIAL, subject, shortened)
        return ticket

    def _skipped(self, ticket: SaveTicket) -> SaveTicket:
        writer = self._writer
        reason = (
            "the store is closed"
            if writer.is_closed
            else f"{writer.queued_bytes} of {writer.limit_bytes} bytes wait to be written"
        )
        ticket.n_stored = 0
        ticket.end(SaveState.SKIPPED, reason)
        self._events.add(EventKind.SAVE_SKIPPED, ticket.name or "unnamed blocks", reason)
        return ticket

    def _take(
        self,
        ticket: SaveTicket,
        key: ModelKey,
        tokens: History,
        source: RowSource | None,
        room: int,
        reading: _Reading,
    ) -> Plan | None:
        """Drafts of the blocks that the store lacks, as far as there is room; None: none at all."""
        if room < 0:
            return None
        plan = Plan(ticket)
        if key.layout.full_groups:
            for link in chain(key, tokens):
                part = tokens[link.start : link.stop]
                item = self._known(link.address, reading)
                if item is False:
                    size = part.nbytes + key.layout.rows_bytes(len(part))
                    if source is None or size > room:
                        break
                    rows = source.read_rows(link.start, link.stop)
                    item = draft_block(key, link, part, rows)
                    ticket.new_bytes += item.size_bytes
                    room -= item.size_bytes
                    plan.items.append(item)
                elif item is not True:
                    room -= item.size_bytes
                    plan.items.append(item)
                    ticket.n_shared += len(part)
                else:
                    ticket.n_shared += len(part)
                plan.needs[link.address] = Kind.BLOCK
                plan.blocks.append(link.address)
                ticket.n_stored = link.stop
        else:
            ticket.n_stored = len(tokens)
        if key.layout.window_groups and ticket.n_stored == len(tokens) and len(tokens):
            self._take_window(plan, key, tokens, source, room, reading)
        return plan

    def _take_window(
        self,
        plan: Plan,
        key: ModelKey,
        tokens: History,
        source: RowSource | None,
        room: int,
        reading: _Reading,
    ) -> None:
        link = boundary_link(key, tokens)
        item = self._known(link.address, reading)
        if item is False:
            if source is None:
                plan.ticket.lacks_window = True
                return
            windows = source.read_window(len(tokens))
            item = draft_window(key, link, tokens[link.start :], windows)
            plan.ticket.new_bytes += item.size_bytes
        if item is not True:
            if item.size_bytes > room:
                plan.ticket.lacks_window = True
                return
            plan.items.append(item)
        plan.needs[link.address] = Kind.WINDOW
        plan.boundary = Boundary(len(tokens), link.address)

    def _known(self, address: bytes, reading: _Reading) -> Item | bool:
        """Return whether a block is stored as it should be, or what RAM has of it to write."""
        entry = self._warm.entry(address)
        wants_exact = reading.is_cold and self._cold_precision == EXACT
        if entry is not None and not entry.item.info.is_exact and wants_exact:
            entry = None
        if entry is not None and (not reading.is_cold or (entry.n_queued and entry.is_cold)):
            return True
        if reading.may_wait:
            info = self._cold.info(address)
            is_exact = None if info is None else info.is_exact
        else:
            is_exact = self._cold.seen(address)
        if is_exact is not None and is_exact >= wants_exact:
            return True
        return False if entry is None else entry.item

    # In the writer's thread --------------------------------------------------------------------

    def _run(
        self,
        plan: Plan,
        naming: Naming | None,
        key: ModelKey,
        tokens: History,
        is_cold: bool,
    ) -> None:
        ticket = plan.ticket
        stays: dict[bytes, tuple[Item | None, bool]] = {}
        try:
            if is_cold:
                self._write(plan, naming, key, tokens, stays)
            else:
                for item in plan.items:
                    stays[item.info.address] = (self._in_precision(item, key, False), False)
            ticket.state = SaveState.PUBLISHED
        except Exception as error:
            ticket.n_stored = 0
            ticket.state, ticket.reason = SaveState.FAILED, str(error)
            self._events.add(
                EventKind.WRITE_FAILED,
                ticket.name or "unnamed blocks",
                f"{error}; the state before is the published one",
            )
        finally:
            try:
                self._let_go(plan, stays)
            finally:  # somebody may be waiting for it
                ticket.end(ticket.state, ticket.reason)

    def _let_go(self, plan: Plan, stays: Mapping[bytes, tuple[Item | None, bool]]) -> None:
        """The writes of a plan are over; what may stays in RAM."""
        with self._lock:
            self._wanted.subtract(plan.needs.keys())
            self._wanted += Counter()  # drops zeros
        for item in plan.items:
            address = item.info.address
            kept, is_cold = stays.get(address, (None, False))
            self.spill(self._warm.release(address, kept, is_cold))

    def _write(
        self,
        plan: Plan,
        naming: Naming | None,
        key: ModelKey,
        tokens: History,
        stays: dict[bytes, tuple[Item | None, bool]],
    ) -> None:
        keep = naming.name if naming else None
        protect = {*plan.needs, *self.wanted()}
        with self._cold.locked():
            ours = {item.info.address for item in plan.items}
            for address, kind in plan.needs.items():
                if address not in ours and not self._cold.folder.of(kind, address).exists():
                    self._cold.note_gone(address)
                    raise StoreError(
                        f"block {address.hex()} was removed while the save waited; save again"
                    )
            for item in plan.items:
                sealed = self._in_precision(item, key, True)
                self._cold.put(sealed, protect, keep)
                stays[item.info.address] = (self._for_warm(item, sealed, key), True)
            if plan.items:
                self._cold.settle()
            if naming is not None:
                before = self._cold.reference(naming.name)
                ref = self._reference(plan, naming, key, tokens, before)
                if before is not None and before.serial > ref.serial > 0:
                    return  # another process has published a later state meanwhile: that one stays
                self._cold.put_reference(ref, protect)
                plan.ticket.reference = ref
                if before is not None:
                    self._cold.remove_superseded(before, ref, self.wanted() - plan.needs.keys())

    def _reference(
        self,
        plan: Plan,
        naming: Naming,
        key: ModelKey,
        tokens: History,
        before: Reference | None,
    ) -> Reference:
        boundaries = [] if plan.boundary is None else [plan.boundary]
        root = key.fingerprint, key.layout.as_json
        if before is not None and (before.fingerprint, before.layout_json) == root:
            n_common = tokens.common_prefix(before.tokens)
            known = {boundary.address for boundary in boundaries}
            boundaries += [
                boundary
                for boundary in before.boundaries
                if boundary.length <= min(n_common, plan.ticket.n_stored)
                and boundary.address not in known
            ]
        boundaries.sort(key=lambda boundary: boundary.length)
        ref = Reference(
            name=naming.name,
            fingerprint=key.fingerprint,
            layout_json=key.layout.as_json,
            tokens=tokens,
            blocks=tuple(plan.blocks),
            n_stored=plan.ticket.n_stored,
            boundaries=tuple(boundaries[-self._max_boundaries :]),
            parent=naming.parent,
            parent_position=naming.parent_position,
            metadata=naming.metadata or {},
            is_pinned=bool(naming.is_pinned),
            saved_at=time.time(),
        )
        if before is None:
            return ref
        return replace(
            ref,
            parent=before.parent if naming.parent is None else naming.parent,
            parent_position=before.parent_position
            if naming.parent is None
            else naming.parent_position,
            metadata=before.metadata if naming.metadata is None else naming.metadata,
            is_pinned=before.is_pinned if naming.is_pinned is None else naming.is_pinned,
            revision=before.revision + 1,
        )

    def spill(self, items: Sequence[Item]) -> None:
        """Queue blocks that leave RAM and are not on disk; without room they are dropped."""
        for item in items:
            ticket = SaveTicket(None, len(item.info.tokens))
            plan = Plan(ticket, items=[item], needs={item.info.address: item.info.kind})
            self._warm.hold([item], True)
            with self._lock:
                self._wanted.update(plan.needs.keys())
            if not self._writer.offer(self._spill_job(plan), item.size_bytes):
                self._let_go(plan, {})
                self._events.add(
                    EventKind.SPILL_SKIPPED,
                    item.info.address.hex(),
                    f"{item.size_bytes} bytes left RAM and the queue to disk had no room; what "
                    f"they held is computed again",
                )

    def _spill_job(self, plan: Plan) -> Callable[[], None]:
        def job() -> None:
            try:
                with self._cold.locked():
                    (item,) = plan.items
                    sealed = item if isinstance(item, Sealed) else item.seal(self._cold_precision)
                    self._cold.put(sealed, {*plan.needs, *self.wanted()}, None)
                    self._cold.settle()
            except Exception as error:
                self._events.add(
                    EventKind.WRITE_FAILED, plan.items[0].info.address.hex(), f"{error}; dropped"
                )
            finally:
                self._let_go(plan, {})

        return job

    def _in_precision(self, item: Item, key: ModelKey, is_cold: bool) -> Sealed:
        """The block as a tier holds it; what has lost its exactness stays as it is."""
        precision = self._cold_precision if is_cold else self._warm_precision
        if isinstance(item, Draft):
            return item.seal(precision)
        if item.info.is_exact and precision != EXACT:
            return as_draft(item, key).seal(precision)
        return item

    def _for_warm(self, item: Item, sealed: Sealed, key: ModelKey) -> Item | None:
        if not self._warm.limit_bytes:
            return None
        if self._warm_precision == self._cold_precision:
            return sealed
        return self._in_precision(item, key, False)


def as_draft(sealed: Sealed, key: ModelKey) -> Draft:
    """A sealed block as rows again."""
    if sealed.info.kind is Kind.BLOCK:
        return Draft(key, sealed.info, rows=sealed.rows_for(key))
    return Draft(key, sealed.info, windows=sealed.windows_for(key))
