"""Saving: what is new is taken from the cache at once and written in the background."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvcellar.errors import StoreError
from kvcellar.history import History
from kvcellar.store.config import StoreConfig
from kvcellar.store.disk.cold import ColdTier
from kvcellar.store.tickets import HistoryState, RowSource, SaveState, SaveTicket
from kvcellar.store.values.blocks import (
    Kind,
    Sealed,
    Unsealed,
    boundary_link,
    chain,
    unsealed_block,
    unsealed_boundary,
)
from kvcellar.store.values.layout import ModelKey
from kvcellar.store.values.precision import EXACT
from kvcellar.store.values.references import Boundary, Reference
from kvcellar.store.values.reports import EventKind, EventLog
from kvcellar.store.warm import Item, WarmTier
from kvcellar.store.writer import Writer


@dataclass(slots=True, eq=False)
class _Taken:
    """Rows that one save has taken from the cache, and the blocks that it needs of the store.

    Attributes:
        state: what is to be published.
        ticket: what becomes of it.
        source: gives rows and states; None: only what is stored is referred to.
        room: bytes that may still be taken.
        may_read: whether the catalogue may be asked.
        blocks: addresses of the leading blocks.
        boundaries: the boundary states, by length ascending.
        items: what has to be written.
        needs: all addresses that have to be there.
    """

    state: HistoryState
    ticket: SaveTicket
    source: RowSource | None
    room: int
    may_read: bool
    blocks: list[bytes] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    needs: dict[bytes, Kind] = field(default_factory=dict)

    def add(self, kind: Kind, address: bytes, item: Item | bool) -> None:
        """Need what is stored under an address, and have it written where it is given."""
        if not isinstance(item, bool):
            self.room -= item.size_bytes
            self.items.append(item)
        self.needs[address] = kind


class Saver:
    """Takes rows in the caller's thread, never waiting; writes them in the writer's."""

    def __init__(
        self,
        warm: WarmTier,
        cold: ColdTier,
        writer: Writer,
        events: EventLog,
        config: StoreConfig,
        on_published: Callable[[str], None] | None,
    ) -> None:
        """Create a saver that has saved nothing yet; told of names that were published."""
        self._on_published = on_published
        self._warm = warm
        self._cold = cold
        self._writer = writer
        self._events = events
        self._warm_precision = config.warm_precision
        self._cold_precision = config.cold_precision
        self._max_boundaries = config.max_boundaries
        self._wanted: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def wanted(self) -> set[bytes]:
        """Return the addresses that queued saves rely on."""
        with self._lock:
            return set(self._wanted)

    # In the caller's thread --------------------------------------------------------------------

    def save(
        self,
        state: HistoryState,
        n_computed: int,
        source: RowSource | None,
        boundaries: Sequence[int],
        *,
        may_read: bool,
    ) -> SaveTicket:
        """Take what is new and queue it; see ``Store.save``."""
        ticket = SaveTicket(state.name, n_computed, _wait_for=self._writer.wait_for)
        size = state.tokens.tokens.nbytes
        taken = _Taken(state, ticket, source, self._writer.n_free_bytes - size, may_read)
        if taken.room < 0:
            return self._skipped(ticket)
        self._take(taken, state.tokens.prefix(n_computed), boundaries)
        if source is None:
            ticket.n_tokens = ticket.n_stored  # there are no others
        with self._lock:
            self._wanted.update(taken.needs.keys())
        self._warm.hold(taken.items)
        shortened = None
        if ticket.is_partial and source is not None:  # said of the ticket before it can fail
            shortened = (
                f"{ticket.n_stored} of {n_computed} tokens"
                + (" and no boundary state" if ticket.lacks_boundary else "")
                + ", the queue having no room for more; the next save goes on from there"
            )
        size += sum(item.size_bytes for item in taken.items)
        if not self._writer.offer(lambda: self._run(taken), size):
            self._let_go(taken, {})
            return self._skipped(ticket)
        if shortened is not None:
            self._events.add(EventKind.SAVE_PARTIAL, state.name, shortened)
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
        self._events.add(EventKind.SAVE_SKIPPED, ticket.name, reason)
        return ticket

    def _take(self, taken: _Taken, tokens: History, lengths: Sequence[int]) -> None:
        """Take the blocks that the store lacks, as far as there is room, and boundary states.

        Args:
            taken: what takes them.
            tokens: the history, as far as it was computed.
            lengths: shorter ones whose boundary states are wanted beside the one at its end.
        """
        key, ticket = taken.state.key, taken.ticket
        if not key.layout.full_groups:
            ticket.n_stored = len(tokens)
        for link in chain(key, tokens) if key.layout.full_groups else ():
            part = tokens[link.start : link.stop]
            item = self._known(link.address, taken.may_read)
            if item is False:
                size = part.nbytes + key.layout.rows_bytes(len(part))
                if taken.source is None or size > taken.room:
                    break
                rows = taken.source.read_rows(link.start, link.stop)
                item = unsealed_block(key, link, part, rows, taken.source.landing())
            else:
                ticket.n_shared += len(part)
            taken.add(Kind.BLOCK, link.address, item)
            taken.blocks.append(link.address)
            ticket.n_stored = link.stop
        if key.layout.has_boundaries:
            for n in sorted({*lengths, len(tokens)}, reverse=True):  # the last is worth most
                if 0 < n <= ticket.n_stored:
                    self._take_boundary(taken, tokens.prefix(n))

    def _take_boundary(self, taken: _Taken, tokens: History) -> None:
        """Take the boundary state at the end of a history, where there is room."""
        key, source = taken.state.key, taken.source
        link = boundary_link(key, tokens)
        item = self._known(link.address, taken.may_read)
        if item is False and (source is None or not source.holds_boundary(link.stop)):
            return
        is_too_large = key.layout.slot_bytes > taken.room
        if item is False and source is not None and not is_too_large:
            windows, landing = source.read_window(link.stop), source.landing()
            states = source.read_states(link.stop)
            item = unsealed_boundary(key, link, tokens[link.start :], windows, states, landing)
            is_too_large = item.size_bytes > taken.room
        if item is not True and is_too_large:
            taken.ticket.lacks_boundary = True
            return
        taken.add(Kind.BOUNDARY, link.address, item)
        taken.boundaries.insert(0, Boundary(link.stop, link.address))

    def _known(self, address: bytes, may_read: bool) -> Item | bool:
        """Return whether a block is stored as it should be, or what RAM has of it to write."""
        entry = self._warm.entry(address)
        wants_exact = self._cold_precision == EXACT
        if entry is not None and not entry.item.info.is_exact and wants_exact:
            entry = None
        if entry is not None and entry.n_queued:
            return True
        if may_read:
            info = self._cold.info(address)
            is_exact = None if info is None else info.is_exact
        else:
            is_exact = self._cold.seen(address)
        if is_exact is not None and is_exact >= wants_exact:
            return True
        return False if entry is None else entry.item

    def keep(self, sealed: Sealed) -> None:
        """Have a block that came from elsewhere on disk too, where the queue has room for it."""

        def work() -> None:
            with contextlib.suppress(StoreError), self._cold.locked():  # there may be no room
                self._cold.put(sealed, self.wanted(), None)
                self._cold.settle()

        self._writer.offer(work, sealed.size_bytes)

    # In the writer's thread --------------------------------------------------------------------

    def _run(self, taken: _Taken) -> None:
        ticket = taken.ticket
        stays: dict[bytes, Item | None] = {}
        try:
            self._write(taken, stays)
            ticket.state = SaveState.PUBLISHED
        except Exception as error:
            ticket.n_stored = 0
            ticket.state, ticket.reason = SaveState.FAILED, str(error)
            self._events.add(
                EventKind.WRITE_FAILED,
                ticket.name,
                f"{error}; the state before is the published one",
            )
        finally:
            try:
                self._let_go(taken, stays)
            finally:  # somebody may be waiting for it
                ticket.end(ticket.state, ticket.reason)

    def _let_go(self, taken: _Taken, stays: dict[bytes, Item | None]) -> None:
        """End the hold on what a save has taken; what is on disk may stay in RAM."""
        with self._lock:
            self._wanted.subtract(taken.needs.keys())
            self._wanted += Counter()  # drops zeros
        for item in taken.items:
            self._warm.release(item.info.address, stays.get(item.info.address))

    def _write(self, taken: _Taken, stays: dict[bytes, Item | None]) -> None:
        """Write what a save has taken, then publish its state.

        Raises:
            StoreError: a block that it needs is gone, or there is no room; nothing was published.
            OSError: it could not be written; nothing was published.
        """
        state = taken.state
        protect = {*taken.needs, *self.wanted()}
        with self._cold.locked():
            ours = {item.info.address for item in taken.items}
            for address, kind in taken.needs.items():
                if address not in ours and not self._cold.folder.of(kind, address).exists():
                    self._cold.read(kind, address)  # which lists it no more
                    raise StoreError(
                        f"block {address.hex()} was removed while the save waited; save again"
                    )
            for item in taken.items:
                sealed = _sealed(item, state.key, self._cold_precision)
                self._cold.put(sealed, protect, state.name)
                stays[item.info.address] = self._for_warm(item, sealed, state.key)
            if taken.items:
                self._cold.settle()
            before = self._cold.reference(state.name)
            ref = self._reference(taken, before)
            if before is not None and before.serial > ref.serial > 0:
                return  # another process has published a later state meanwhile: that one stays
            self._cold.put_reference(ref, protect)
            taken.ticket.reference = ref
            if self._on_published is not None:
                self._on_published(state.name)
            if before is not None:
                self._cold.remove_superseded(before, ref, self.wanted() - taken.needs.keys())

    def _reference(self, taken: _Taken, before: Reference | None) -> Reference:
        """Make the reference of a state, on the blocks that cover most of it.

        A published state that goes on behind this one may have a block that reaches over its end.
        """
        state, ticket = taken.state, taken.ticket
        metadata = state.metadata() if callable(state.metadata) else state.metadata
        made = Reference(
            name=state.name,
            fingerprint=state.key.fingerprint,
            layout_json=state.key.layout.as_json,
            tokens=state.tokens,
            blocks=tuple(taken.blocks),
            n_stored=ticket.n_stored,
            boundaries=tuple(taken.boundaries),
            parent=state.parent,
            parent_position=state.parent_position,
            metadata=metadata or {},
            saved_at=time.time(),
        )
        made = self._on_longer(made, ticket, before)
        if before is None:
            return made
        if state.parent is None:
            made = replace(made, parent=before.parent, parent_position=before.parent_position)
        return replace(
            made,
            metadata=before.metadata if metadata is None else metadata,
            revision=before.revision + 1,
        )

    def _on_longer(
        self, made: Reference, ticket: SaveTicket, before: Reference | None
    ) -> Reference:
        """Add what the state before, or else the parent's, has stored of the same history."""
        base = before
        if base is None and made.parent is not None and made.n_stored < len(made.tokens):
            base = self._cold.reference(made.parent)
        root = made.fingerprint, made.layout_json
        if base is None or (base.fingerprint, base.layout_json) != root:
            return made
        made = replace(made, is_evicted=base.is_evicted and not made.n_stored)
        n_common = made.tokens.common_prefix(base.tokens)
        covered = beginning_of(self._cold, base, n_common)
        if covered.n_stored > made.n_stored and n_common == len(made.tokens):
            made = replace(made, blocks=covered.blocks, n_stored=covered.n_stored)
            ticket.n_stored = covered.n_stored
        known = {boundary.address for boundary in made.boundaries}
        more = [
            boundary
            for boundary in covered.boundaries
            if boundary.length <= made.n_stored and boundary.address not in known
        ]
        n_more = max(0, self._max_boundaries - len(made.boundaries))
        kept = (*made.boundaries, *more[len(more) - min(n_more, len(more)) :])
        by_length = sorted(kept, key=lambda boundary: boundary.length)
        return replace(made, boundaries=tuple(by_length))

    def _for_warm(self, item: Item, sealed: Sealed, key: ModelKey) -> Item | None:
        """Return what RAM keeps of a block that is on disk now."""
        if not self._warm.limit_bytes:
            return None
        if self._warm_precision == self._cold_precision:
            return sealed
        return _sealed(item, key, self._warm_precision)


def beginning_of(cold: ColdTier, ref: Reference, position: int) -> Reference:
    """Cut a reference back to its first ``position`` tokens, on the blocks that these need.

    The last block may reach further than the history does: its beginning is what is needed.
    """
    n_stored = min(ref.n_stored, position)
    needed = []
    for address in ref.blocks:
        info = cold.info(address)
        if info is not None and info.start >= n_stored:
            break
        needed.append(address)
    return replace(
        ref,
        tokens=ref.tokens.prefix(position),
        n_stored=n_stored,
        blocks=tuple(needed),
        boundaries=tuple(b for b in ref.boundaries if b.length <= position),
    )


def _sealed(item: Item, key: ModelKey, precision: str) -> Sealed:
    """Return a block as a tier holds it; what has lost its exactness stays as it is."""
    if isinstance(item, Unsealed):
        return item.seal(precision)
    if not item.info.is_exact or precision == EXACT:
        return item
    if item.info.kind is Kind.BLOCK:
        return Unsealed(key, item.info, parts=item.rows_for(key)).seal(precision)
    windows, states = item.windows_for(key), item.states_for(key)
    return Unsealed(key, item.info, window_parts=windows, states=states).seal(precision)
