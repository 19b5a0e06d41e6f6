"""Whose KV is in the cache: reuse on the way in, the prefix index on the way out, room in between.

Cells of ended sequences stay where they are, owned by the prefix index alone, until somebody needs
them: ``available = free + evictable``. A sequence locks the indexed prefix that it stands on for as
long as it lives, so nothing that is in use is ever evicted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

from kvcellar.bookkeeping.compaction import Relocation
from kvcellar.cache import SeqCache
from kvcellar.engine.request import Sequence
from kvcellar.prefix import PrefixIndex
from kvcellar.types import IntArray

__all__ = ["MovedOut", "MovingCache", "Residency", "ResidencyCounts"]

AHEAD_SHARE, MAX_AHEAD = 32, 2048
"""Eviction frees one in so many cells of the cache at a time, and at most so many: what is freed
one by one comes back as single cells, and a sequence in crumbs is slow to plan and to read."""

MAX_EXPECTED = 1024
"""Tokens of an answer that its sequence is expected to have, at most."""


@runtime_checkable
class MovingCache(Protocol):
    """A cache whose cells' bytes can be copied to host memory and back."""

    def read_cells(self, tables: Seq[IntArray]) -> Any:
        """The bytes of some cells, per layer group; -1 is skipped."""
        ...

    def write_cells(self, tables: Seq[IntArray], rows: Any) -> None:
        """Put back what ``read_cells`` gave, in cells of the same order."""
        ...

    def seq_claim(self, seq_id: int, tables: Seq[IntArray]) -> tuple[IntArray, ...]:
        """Start a sequence on new cells, wherever the tables have a cell."""
        ...


class Holder(Protocol):
    """Something that knows cells by their numbers from one step to another."""

    def relocate(self, moved: Relocation) -> None:
        """The cells have moved."""
        ...


@dataclass(slots=True)
class MovedOut:
    """A sequence's KV in host memory."""

    tables: tuple[IntArray, ...]
    rows: Any
    size_bytes: int


@dataclass(slots=True)
class ResidencyCounts:
    """What has happened so far."""

    reused_tokens: int = 0
    evicted_tokens: int = 0
    moved_out_tokens: int = 0
    moved_in_tokens: int = 0
    recompute_preemptions: int = 0
    move_preemptions: int = 0
    gathered_cells: int = 0


@dataclass(slots=True)
class Rate:
    """Seconds per unit, learnt from what was measured; the newest counts most."""

    seconds_per_unit: float | None = None

    def learn(self, units: int, seconds: float) -> None:
        """One more measurement."""
        if units <= 0:
            return
        new = seconds / units
        old = self.seconds_per_unit
        self.seconds_per_unit = new if old is None else 0.7 * old + 0.3 * new


@dataclass(slots=True, eq=False)
class Residency:
    """The cache and its prefix index, as one store of KV that sequences enter and leave."""

    cache: SeqCache
    index: PrefixIndex
    max_moved_bytes: int = 0
    counts: ResidencyCounts = field(default_factory=ResidencyCounts)
    prefill_rate: Rate = field(default_factory=Rate)
    move_rate: Rate = field(default_factory=Rate)
    moved: dict[int, MovedOut] = field(default_factory=dict)
    holders: WeakSet[Holder] = field(default_factory=WeakSet)
    """Who else has to be told where cells have moved."""
    _seq_ids: itertools.count[int] = field(default_factory=itertools.count)
    _free_seq_ids: list[int] = field(default_factory=list)

    # Room --------------------------------------------------------------------------------------

    @property
    def n_available(self) -> int:
        """Cells that are free, or would be after evicting all that may be evicted."""
        return self.cache.n_free + self.index.size_info().evictable

    def make_room_for(self, seq_ids: Seq[int]) -> bool:
        """Evict until a step with these tokens finds its cells; false where they cannot be had."""
        return self._evict_until(lambda: self.cache.can_begin_step(seq_ids), len(seq_ids))

    def make_room(self, n_cells: int) -> bool:
        """Evict until one sequence can claim ``n_cells``; false where they cannot be had."""
        return self._evict_until(lambda: self.cache.can_extend(n_cells), n_cells)

    def _evict_until(self, is_enough: Callable[[], bool], n_cells: int) -> bool:
        while not is_enough():
            evictable = self.index.size_info().evictable
            if not evictable:
                return False
            ahead = min(self.cache.capacity // AHEAD_SHARE, MAX_AHEAD)
            n = max(1, n_cells - self.cache.n_free, ahead)
            evicted = self.index.evict(min(evictable, n))
            self.cache.release_cells(evicted.cells)
            self.counts.evicted_tokens += evicted.n_tokens
        return True

    # In ----------------------------------------------------------------------------------------

    def n_reusable(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that the cache holds already; a hint, nothing is locked."""
        moved = self.moved.get(sequence.request_id)
        if moved is not None:
            return 0  # they come back, and need cells
        held = self._parent_tokens(sequence)
        return max(held, self.index.match_prefix(sequence.reusable).length)

    def enter(self, sequence: Sequence) -> None:
        """Give a waiting sequence its place, on as much KV as can be reused. Computes nothing."""
        sequence.seq_id = self.take_seq_id()
        self._expect(sequence)
        if self._move_in(sequence):
            return
        n_parent = self._parent_tokens(sequence)
        match = self.index.match_prefix(sequence.reusable)
        parent = sequence.parent
        if parent is not None and n_parent >= match.length and n_parent:
            self.cache.seq_cp(parent.seq_id, sequence.seq_id, 0, n_parent)
            handle, sequence.n_computed = parent.handle, n_parent
        elif match.length:
            self.cache.seq_map(sequence.seq_id, match.cells)
            handle, sequence.n_computed = match.handle, match.length
        else:
            handle = None
        if handle is not None:
            self.index.lock_handle(handle)
            sequence.handle = handle
        if match.n_matched > sequence.n_computed:  # a window had moved on: make it a resume point
            sequence.publish_at.add(match.n_matched)
        sequence.parent = None
        self.counts.reused_tokens += sequence.n_computed

    def _expect(self, sequence: Sequence) -> None:
        """Tell the cache how long the sequence may become."""
        limit = sequence.request.params.max_tokens
        n_answer = MAX_EXPECTED if limit is None else min(limit, MAX_EXPECTED)
        self.cache.expect(sequence.seq_id, sequence.n_prompt + n_answer)

    def _parent_tokens(self, sequence: Sequence) -> int:
        """How much of its parent a fork can share, so that every layer group goes on from there."""
        parent = sequence.parent
        if parent is None or not parent.n_computed:
            return 0
        n = min(parent.n_computed, sequence.n_inherited)  # the parent has gone its own way since
        return n if self.cache.can_resume(parent.seq_id, n) else 0

    def take_seq_id(self) -> int:
        """An id that no sequence has."""
        return self._free_seq_ids.pop() if self._free_seq_ids else next(self._seq_ids)

    def give_seq_id(self, seq_id: int) -> None:
        """The sequence of that id holds nothing any more."""
        self._free_seq_ids.append(seq_id)

    # Out ---------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Let others match what the sequence has computed; it lives on, and holds its lock."""
        n = sequence.n_computed
        if not n:
            return
        tables = self.cache.seq_table(sequence.seq_id, n)
        inserted = self.index.insert_prefix(sequence.token_array()[:n], tables)
        self.cache.retain_cells(inserted.adopted)
        self.index.lock_handle(inserted.handle)
        if sequence.handle is not None:
            self.index.unlock_handle(sequence.handle)
        sequence.handle = inserted.handle

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

    def take_over(self, heir: Sequence, kept: Sequence) -> None:
        """A new request goes on in the place of a kept one."""
        heir.seq_id, heir.handle = kept.seq_id, kept.handle
        heir.n_computed = kept.n_computed
        kept.seq_id, kept.handle, kept.n_computed = -1, None, 0
        heir.parent = None
        self._expect(heir)
        self.counts.reused_tokens += heir.n_computed

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.n_computed:
            self.cache.seq_rm(sequence.seq_id)
        self.unlock(sequence)
        if sequence.seq_id >= 0:
            self.give_seq_id(sequence.seq_id)
        sequence.seq_id, sequence.handle, sequence.n_computed = -1, None, 0

    def demote(self, tokens: IntArray) -> None:
        """What only this history needs goes first when cells are short; nothing goes now."""
        self.index.demote(self.index.match_prefix(tokens).handle)

    def drop(self, tokens: IntArray, keep: int = 0) -> int:
        """Free what only this history needs, down to its first ``keep`` tokens; how many tokens.

        What others share, and what a running sequence stands on, stays.
        """
        dropped = self.index.drop_path(self.index.match_prefix(tokens).handle, keep)
        self.cache.release_cells(dropped.cells)
        return dropped.n_tokens

    # At rest -----------------------------------------------------------------------------------

    def tidy(self, max_bytes: int) -> bool:
        """Copy together what histories have in crumbs, in about so many bytes; true: there is more.

        Between steps.
        """
        cell_bytes = sum(
            group.cell_bytes(self.cache.config.kv) for group in self.cache.config.rank_groups
        )
        chains = [tuple(cells) for cells in self.index.chains()]
        done = self.cache.compact(chains, max(1, max_bytes // max(1, cell_bytes)))
        if done.n_cells:
            self.index.relocate(done.moved)
            for holder in list(self.holders):
                holder.relocate(done.moved)
            self.counts.gathered_cells += done.n_cells
        return not done.is_done

    # Preemption --------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence) -> bool:
        """Take a running sequence's cells away, the cheaper way; true if its KV was moved out.

        Recompute leaves the KV to the index, where others may evict it; moving it out copies it to
        host memory and brings it back later. Which is cheaper is measured: seconds per prefilled
        token against seconds per byte, out and in.
        """
        if self._moves_cheaper(sequence) and self._move_out(sequence):
            self.counts.move_preemptions += 1
            return True
        self.leave(sequence)
        self.counts.recompute_preemptions += 1
        return False

    def _moves_cheaper(self, sequence: Sequence) -> bool:
        if not self.max_moved_bytes or not sequence.n_computed:
            return False
        if not isinstance(self.cache, MovingCache):
            return False
        size = self._size_bytes(sequence.n_computed)
        if sum(m.size_bytes for m in self.moved.values()) + size > self.max_moved_bytes:
            return False
        prefill, move = self.prefill_rate.seconds_per_unit, self.move_rate.seconds_per_unit
        if prefill is None:
            return False
        if move is None:
            return True  # once, to measure it
        return 2 * size * move < sequence.n_computed * prefill

    def _size_bytes(self, n_tokens: int) -> int:
        """About the bytes of so many tokens' KV: what the pools hold, per cell."""
        usage = self.cache.usage()
        cells = max((group.n_cells for group in usage.groups), default=0)
        return usage.size_bytes * n_tokens // max(1, cells)

    def _move_out(self, sequence: Sequence) -> bool:
        """Copy a sequence's KV to host memory and let go of its cells; false: no memory for it."""
        assert isinstance(self.cache, MovingCache)
        size = self._size_bytes(sequence.n_computed)
        budget = self.cache.config.budget
        if budget is not None and not budget.ask(size):
            return False
        tables = self.cache.seq_table(sequence.seq_id, sequence.n_computed)
        started = time.perf_counter()
        rows = self.cache.read_cells(tables)
        self.move_rate.learn(size, time.perf_counter() - started)
        self.moved[sequence.request_id] = MovedOut(tables, rows, size)
        self.counts.moved_out_tokens += sequence.n_computed
        self._let_go(sequence)
        return True

    def _move_in(self, sequence: Sequence) -> bool:
        """Bring moved KV back; false where there is none, or the index holds as much."""
        moved = self.moved.get(sequence.request_id)
        if moved is None:
            return False
        assert isinstance(self.cache, MovingCache)
        n = len(moved.tables[0])
        self.forget_moved(sequence.request_id)
        if self.index.match_prefix(sequence.token_array()[:-1]).length >= n or not self.make_room(
            n
        ):
            return False
        tables = self.cache.seq_claim(sequence.seq_id, moved.tables)
        started = time.perf_counter()
        self.cache.write_cells(tables, moved.rows)
        self.move_rate.learn(moved.size_bytes, time.perf_counter() - started)
        sequence.n_computed = n
        self.counts.moved_in_tokens += n
        return True

    def forget_moved(self, request_id: int) -> None:
        """Drop KV that was moved out and will not be wanted."""
        moved = self.moved.pop(request_id, None)
        budget = self.cache.config.budget
        if moved is not None and budget is not None:
            budget.give_back(moved.size_bytes)
