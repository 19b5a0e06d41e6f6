"""Residency of KV in the cache: reuse on the way in, the index on the way out, room in between.

Cells of ended sequences stay where they are, owned by the prefix index alone, until somebody needs
them: ``available = free + evictable``. A sequence locks the indexed prefix that it stands on for as
long as it lives, so nothing that is in use is ever evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

from kvcellar.bookkeeping.cells.compaction import Relocation
from kvcellar.cache import SeqCache
from kvcellar.engine.kv.snapshots import Snapshots
from kvcellar.engine.requests.prepared_step import Ahead
from kvcellar.engine.requests.request import Sequence
from kvcellar.pictures.tokens import usable
from kvcellar.prefix import PrefixIndex, PrefixMatch, key_of
from kvcellar.space import LONG, SHARED, Space
from kvcellar.states import NO_SLOT
from kvcellar.types import IntArray

AHEAD_SHARE, MAX_AHEAD = 32, 2048
"""Eviction frees one in so many cells of the cache at a time, and at most so many: what is freed
one by one comes back as single cells, and a sequence in crumbs is slow to plan and to read."""

MAX_EXPECTED = 1024
"""Tokens of an answer that its sequence is expected to have, at most."""


class KeepsRows(Protocol):
    """Protocol of what keeps KV of sequences that gave way, as ``host_offload.MovedOut`` does."""

    def ran(self, n_prefill: int, seconds: float) -> None:
        """Learn what a prompt's tokens take from a step that had so many of them."""
        ...

    def copy(self, sequence: Sequence) -> Any | None:
        """Copy the rows of a sequence that gives way; None where computing them is cheaper."""
        ...

    def keep(self, request_id: int, moved: Any) -> None:
        """Keep what ``copy`` gave until its sequence ends."""
        ...

    def bring(self, sequence: Sequence) -> None:
        """Put the rows of a sequence that is let in back into the cache."""
        ...

    def forget(self, request_id: int) -> None:
        """Let go of a sequence's rows, if there are any."""
        ...


class Holder(Protocol):
    """Something that knows cells by their numbers from one step to another."""

    def relocate(self, moved: Relocation) -> None:
        """Take note that cells have moved."""
        ...

    @property
    def end_slot(self) -> int:
        """The slot of the states that it goes on from; ``NO_SLOT``: none."""
        ...

    def lose(self, slots: set[int]) -> None:
        """Take note that the index has given up snapshots of states."""
        ...


@dataclass(slots=True)
class ResidencyCounts:
    """Counts of tokens reused and evicted, and of cells moved, since the engine was made."""

    reused_tokens: int = 0
    evicted_tokens: int = 0
    gathered_cells: int = 0
    taken_snapshots: int = 0
    evicted_snapshots: int = 0


@dataclass(slots=True, eq=False)
class Residency:
    """The cache and its prefix index, as one store of KV that sequences enter and leave."""

    cache: SeqCache
    index: PrefixIndex
    counts: ResidencyCounts = field(default_factory=ResidencyCounts)
    holders: WeakSet[Holder] = field(default_factory=WeakSet)
    """Who else has to be told where cells have moved, and which snapshots have gone."""
    offload: KeepsRows | None = None
    """KV of sequences that gave way; None: none is kept."""
    rope_border: int = 0
    """Tokens of the longest text that is computed as a short one; 0: all are."""
    is_whole: bool = False
    """Rows of a picture see each other both ways, so that half of one is not gone on from."""
    ahead: Ahead | None = None
    """The step that is begun while a device works; None: none ever is."""
    waiting: Seq[Sequence] = ()
    """Sequences that wait: what they would go on from goes after what nobody waits for."""
    snapshots: Snapshots = field(init=False)
    _seq_ids: itertools.count[int] = field(default_factory=itertools.count)
    _free_seq_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.snapshots = Snapshots(self.cache, self.index)

    # Room --------------------------------------------------------------------------------------

    @property
    def n_available(self) -> int:
        """Cells that are free, or would be after evicting all that may be evicted."""
        return self.cache.n_free + self.index.size_info().evictable

    def make_room_for(self, stretches: Seq[tuple[int, int]], n_slots: int | None = None) -> bool:
        """Evict until a step of these stretches finds its room; false where it cannot be had.

        Args:
            stretches: (seq_id, n_tokens) of each.
            n_slots: slots that it writes; None: one for each sequence.
        """
        if self.ahead is not None and self.ahead.is_for(stretches):
            return True
        n_slots = len({seq_id for seq_id, _ in stretches}) if n_slots is None else n_slots
        n_cells = sum(n_tokens for _, n_tokens in stretches)
        return self._evict_until(lambda: self.cache.can_begin_step(stretches), n_cells, n_slots)

    def make_room(self, n_cells: int, n_slots: int = 1) -> bool:
        """Evict until one sequence can claim so much; false where it cannot be had."""
        return self._evict_until(lambda: self.cache.can_extend(n_cells), n_cells, n_slots)

    def _evict_until(self, is_enough: Callable[[], bool], n_cells: int, n_slots: int) -> bool:
        """Give up snapshots where slots are short, and rows where cells are."""
        n_missing = self.cache.n_missing_slots(n_slots)
        if n_missing > 0 and not self._evict_snapshots(n_missing):
            return False
        while not is_enough():
            evictable = self.index.size_info().evictable
            if not evictable:
                return False
            ahead = min(self.cache.capacity // AHEAD_SHARE, MAX_AHEAD)
            n = max(1, n_cells - self.cache.n_free, ahead)
            evicted = self.index.evict(min(evictable, n))
            self.cache.release_cells(evicted.cells)
            self.counts.evicted_tokens += evicted.n_tokens
            if self.snapshots.has_states:
                self.counts.evicted_snapshots += len(evicted.cells[-1])
        return True

    def _evict_snapshots(self, n_slots: int) -> bool:
        """Give up the cheapest snapshots that free so many slots, or none; false: there are fewer.

        Those that somebody waiting would go on from go late, and those that somebody holds a
        history for go last.
        """
        shared = set(self.cache.shared_slots())
        held = {holder.end_slot for holder in self.holders}
        for spared in (shared | held | self._wanted(), shared | held, shared):
            evicted = self.index.evict_states(n_slots, spared)
            if len(evicted.cells[-1]):
                self.cache.release_cells(evicted.cells)
                self.counts.evicted_snapshots += n_slots
                for holder in list(self.holders):
                    holder.lose(set(evicted.cells[-1].tolist()))
                return True
        return False

    def has_slots_for(self, n_sequences: int) -> bool:
        """Return true if so many sequences could run at a time, once snapshots give way.

        With a memory budget only slots that it has granted, or would grant, count.
        """
        needed = n_sequences * self.snapshots.slots_per_sequence
        if n_sequences == 1 or needed == 0:
            return True
        slots = self.cache.usage().slots
        assert slots is not None, "where sequences need slots there are some"
        return self.cache.n_missing_slots(needed - slots.live) <= 0

    def pushes_out(self, sequence: Sequence, n_running: int) -> int:
        """Return what snapshots are worth, in tokens, that go if a sequence runs beside others.

        Those that its slots take the place of: what the others push out goes anyway.
        """
        n_own = self.snapshots.slots_per_sequence
        n_slots = n_own * (n_running + 1) + self.index.n_snapshots - self.cache.config.n_slots
        if not n_own or n_slots <= 0:
            return 0
        late = self._wanted(but=sequence) | {holder.end_slot for holder in self.holders}
        costs = self.index.states_costs(n_slots, late, self._end_slot(sequence))
        return sum(costs[-n_own:])

    def _wanted(self, but: Sequence | None = None) -> set[int]:
        """Return the slots that waiting sequences would go on from, of the first in order."""
        first = sorted(self.waiting, key=lambda s: s.order)[: self.cache.config.n_slots]
        return {self._end_slot(sequence) for sequence in first if sequence is not but}

    def _end_slot(self, sequence: Sequence) -> int:
        """Return the slot that a waiting sequence would go on from; ``NO_SLOT``: none."""
        states = self.index.peek_prefix(self._reusable(sequence))[-1]
        held = states[states >= 0]
        return int(held[-1]) if held.size else NO_SLOT

    # In ----------------------------------------------------------------------------------------

    def n_reusable(self, sequence: Sequence) -> int:
        """Return how many of a waiting sequence's tokens the cache holds; nothing is locked."""
        return self._match(sequence).length

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """Find what the index has of a waiting sequence's tokens, up to where it can go on."""
        key = self._reusable(sequence)
        match = self.index.match_prefix(key)
        while sequence.pictures:
            n = usable(sequence.tokens.tokens, match.length, is_whole=self.is_whole)
            if n == match.length:
                break
            match = self.index.match_prefix(key[:n])
        return match

    def _reusable(self, sequence: Sequence) -> IntArray:
        """Return what the index knows the tokens by whose KV may come from elsewhere."""
        return key_of(sequence.reusable, self.space_of(sequence))

    def space_of(self, sequence: Sequence) -> Space:
        """Return the space in which a sequence is computed that enters with the tokens it has."""
        space = sequence.request.space
        return space._replace(rope=LONG) if self.is_beyond(len(sequence.tokens)) else space

    def is_beyond(self, n_tokens: int) -> bool:
        """Return true if texts of so many tokens are turned by the factors of long ones."""
        return 0 < self.rope_border < n_tokens

    def enter(self, sequence: Sequence) -> None:
        """Give a waiting sequence its place, on as much KV as can be reused. Computes nothing."""
        sequence.space = self.space_of(sequence)
        if self.offload is not None:
            self.offload.bring(sequence)
        sequence.seq_id = self.take_seq_id()
        self._expect(sequence)
        match = self._match(sequence)
        if match.length:
            self.cache.seq_map(sequence.seq_id, match.cells)
            self.index.lock_handle(match.handle)
            sequence.handle, sequence.n_computed = match.handle, match.length
        sequence.resumable_at = sequence.n_computed
        sequence.publish_at |= self.snapshots.publish_at(sequence, match.n_matched)
        self.counts.reused_tokens += sequence.n_computed

    def _expect(self, sequence: Sequence) -> None:
        """Tell the cache how long the sequence may become."""
        self.cache.expect(sequence.seq_id, sequence.n_prompt + most_expected(sequence))

    def take_seq_id(self) -> int:
        """Return an id that no sequence has."""
        return self._free_seq_ids.pop() if self._free_seq_ids else next(self._seq_ids)

    def give_seq_id(self, seq_id: int) -> None:
        """Take back an id, whose sequence holds nothing any more."""
        self._free_seq_ids.append(seq_id)

    # Out ---------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Let others match what the sequence has computed; it lives on, and holds its lock."""
        n = self._told(sequence)
        if not n:
            return
        tables = self.cache.seq_table(sequence.seq_id, n)
        key = key_of(sequence.tokens[:n], sequence.space)
        inserted = self.index.insert_prefix(key, tables)
        self.cache.retain_cells(inserted.adopted)
        self.index.lock_handle(inserted.handle)
        if sequence.handle is not None:
            self.index.unlock_handle(sequence.handle)
        sequence.handle = inserted.handle
        sequence.publish_at = {stop for stop in sequence.publish_at if stop > n}
        if self.snapshots.has_states:
            self.counts.taken_snapshots += len(inserted.adopted[-1])
        if inserted.handle.length == n:
            sequence.resumable_at = n

    def _told(self, sequence: Sequence) -> int:
        """Return how many of a sequence's computed tokens may stand in the index.

        Never up to a row by which its picture is not told from another: what the index has up to
        there, and not further, is another picture's, and nothing behind it is put there.
        """
        tokens, n = sequence.tokens.tokens, sequence.n_computed
        if not sequence.pictures:
            return n
        n = usable(tokens, n, is_whole=self.is_whole)
        there = self.index.match_prefix(key_of(tokens[:n], sequence.space)).n_matched
        told = usable(tokens, there, is_whole=False)
        return n if there >= n or told == there else told

    def unlock(self, sequence: Sequence) -> bool:
        """Let what others can match of a sequence be evicted; true if it was locked.

        Its own cells stay its own. Where it computed what the index had meanwhile got from another
        sequence, its lock holds the other's cells, and that is more than it needs.
        """
        if sequence.handle is None:
            return False
        self.index.unlock_handle(sequence.handle)
        sequence.handle = None
        return True

    def give_way(self, sequence: Sequence) -> None:
        """Leave, to come back: where it is cheaper, with a copy of the KV in main memory."""
        moved = None if self.offload is None else self.offload.copy(sequence)
        self.leave(sequence)
        if self.offload is not None and moved is not None:
            self.offload.keep(sequence.request_id, moved)

    def leave(self, sequence: Sequence) -> None:
        """Publish what the sequence has computed, then let go of its cells and its lock."""
        self.publish(sequence)
        self._let_go(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Let go of a sequence's cells and its lock, wherever it is, and publish nothing."""
        if sequence.seq_id >= 0 and self.cache.has_seq(sequence.seq_id):
            self.cache.seq_rm(sequence.seq_id)
        sequence.n_computed = 0
        self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        if self.offload is not None:
            self.offload.forget(sequence.request_id)
        if sequence.n_computed:
            self.cache.seq_rm(sequence.seq_id)
        self.unlock(sequence)
        if sequence.seq_id >= 0:
            self.give_seq_id(sequence.seq_id)
        sequence.seq_id, sequence.handle, sequence.n_computed = -1, None, 0
        sequence.point = sequence.n_again = 0

    def demote(self, tokens: IntArray, space: Space = SHARED) -> None:
        """Evict first, when cells are short, what only this history needs; nothing goes now."""
        self.index.demote(self.index.find_prefix(key_of(tokens, space)))

    def drop(self, tokens: IntArray, keep: int = 0, space: Space = SHARED) -> int:
        """Free what only this history needs, down to its first ``keep`` tokens.

        What others share, and what a running sequence stands on, stays.

        Returns:
            The number of tokens that were freed.
        """
        path = self.index.find_prefix(key_of(tokens, space))
        dropped = self.index.drop_path(path, keep)
        self.cache.release_cells(dropped.cells)
        return dropped.n_tokens

    # At rest -----------------------------------------------------------------------------------

    def tidy(self, max_bytes: int) -> bool:
        """Copy together what histories have in crumbs, in about so many bytes; true: there is more.

        Between steps.
        """
        cell_bytes = sum(
            group.cell_bytes(self.cache.config.kv) for group in self.cache.config.params.groups
        )
        chains = [tuple(cells) for cells in self.index.chains()]
        done = self.cache.compact(chains, max(1, max_bytes // max(1, cell_bytes)))
        if done.n_cells:
            self.index.relocate(done.moved)
            for holder in list(self.holders):
                holder.relocate(done.moved)
            self.counts.gathered_cells += done.n_cells
        return not done.is_done


def most_expected(sequence: Sequence) -> int:
    """Return the tokens that an answer is expected to have at most."""
    limit = sequence.request.params.max_tokens
    return MAX_EXPECTED if limit is None else min(limit, MAX_EXPECTED)
