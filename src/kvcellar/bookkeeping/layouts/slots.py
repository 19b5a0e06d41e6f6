"""The layout of a model's states: slots, each of one sequence's states at one position.

A slot never changes once it is written: a step reads one slot of a sequence and writes another. So
nothing is ever copied. Sequences that fork share a slot until each has written its own; a step that
is undone frees what it wrote; a snapshot is one more owner of a slot.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvcellar.bookkeeping.cells.pool import Appends
from kvcellar.bookkeeping.layouts.drafts import Drafts, DraftTree
from kvcellar.bookkeeping.layouts.layout import Demand, Lengths, Stretch
from kvcellar.budget import format_size
from kvcellar.cache_config import CacheConfig, GroupUsage
from kvcellar.errors import RewindError
from kvcellar.states import NO_SLOT, Advance, StatePlan
from kvcellar.types import MOST_CELLS, IntArray


class Slots:
    """Slots by sequence and length, and the number of owners of each. Integers only.

    A layout, see :class:`kvcellar.bookkeeping.layouts.layout.SharedLayout`, whose cells are slots.
    A sequence of n tokens holds one slot for its states after n tokens, and one for each point that
    ``keep_point`` was told of.

    Invariants (asserted by ``check``):
      - a slot is free exactly when it has no owner: a sequence, a node of a draft tree, the step
        that is open, or a holder that called ``retain``;
      - a step writes slots that nobody else holds;
      - a sequence of n > 0 tokens holds the slot of its states after them.
    """

    unit = 1
    """Slots are taken one by one."""

    capacity = MOST_CELLS
    """The most tokens that one sequence may have: any number, they share a state."""

    def __init__(
        self,
        slot_bytes: int,
        n_slots: int,
        lengths: Lengths,
        drafts: Drafts,
        *,
        n_granted: int | None = None,
    ) -> None:
        """Create slots that nobody owns.

        Args:
            slot_bytes: bytes of one slot, for messages.
            n_slots: the most slots.
            lengths: the sequences' lengths; whoever has the layout keeps them.
            drafts: their draft trees: each node gets a slot.
            n_granted: slots that a memory budget has granted so far; None: there is none.
        """
        self.n_slots = n_slots
        self._slot_bytes = slot_bytes
        self._lengths = lengths
        self._drafts = drafts
        self._n_granted = n_granted
        self._refs: dict[int, int] = {}  # slot -> owners
        self._freed: list[int] = []  # a heap: those below the top that nobody owns
        self._top = 0
        self._held: dict[int, dict[int, int]] = {}  # sequence -> length -> slot
        self._points: dict[int, set[int]] = {}
        self._next: dict[int, int] = {}  # what the last step wrote, until it is accepted
        self._nodes: dict[int, list[int]] = {}  # sequence -> the slot of each node of its tree

    # Owners ------------------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Slots that a step could write, with those that the finished step no longer needs."""
        most = self.n_slots if self._n_granted is None else self._n_granted
        return most - len(self._refs) + (self._n_passed() if self._next else 0)

    def _n_passed(self) -> int:
        """Return the slots that nobody owns once the finished step is accepted."""
        gone = Counter(
            slot
            for seq_id in self._next
            if self._is_done(seq_id)
            for at, slot in self._held.get(seq_id, {}).items()
            if at not in self._points.get(seq_id, ())
        )
        return sum(n == self._refs[slot] for slot, n in gone.items())

    def _is_done(self, seq_id: int) -> bool:
        """Return true if a sequence's tokens of the last step count: every layer has written."""
        return self._lengths.get(seq_id, 0) > max(self._held.get(seq_id, ()), default=0)

    def _claim(self) -> int:
        """Take the lowest free slot; there is one."""
        if self._freed:
            slot = heapq.heappop(self._freed)
        else:
            slot, self._top = self._top, self._top + 1
        self._refs[slot] = 1
        return slot

    def retain(self, slots: Iterable[int]) -> None:
        """Add an owner to slots that have one."""
        for slot in slots:
            assert slot in self._refs, f"slot {slot} is not taken"
            self._refs[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Drop an owner of slots; one without an owner is free."""
        for slot in slots:
            self._refs[slot] -= 1
            if not self._refs[slot]:
                del self._refs[slot]
                heapq.heappush(self._freed, slot)

    def shared(self) -> list[int]:
        """Return the slots that have several owners."""
        return [slot for slot, n in self._refs.items() if n > 1]

    # A step ------------------------------------------------------------------------------------

    def begin(self, stretches: Sequence[Stretch], n_tokens: int, n_held: int | None) -> StatePlan:
        """Claim the slots that a step writes and plan it; arguments as in ``Layout.begin``."""
        advances: list[Advance] = []
        for stretch in stretches:
            if stretch.tree is None:
                advances.append(self._advance(stretch))
            else:
                advances += self._advance_nodes(stretch, stretch.tree)
        return StatePlan(n_tokens, tuple(advances), self._top if n_held is None else n_held)

    def _advance(self, stretch: Stretch) -> Advance:
        """Plan tokens: from the sequence's slot, or from what the step wrote of it before."""
        seq_id = stretch.seq_id
        src = self._next.get(seq_id)
        if src is None:
            src = self._slot_at(seq_id, stretch.first_pos)
            self._next[seq_id] = self._claim()
        return Advance(stretch.q_start, stretch.n_tokens, src, self._next[seq_id])

    def _advance_nodes(self, stretch: Stretch, tree: DraftTree) -> list[Advance]:
        """Plan a frontier: each node goes on from its parent's slot and writes its own."""
        nodes = self._nodes.setdefault(stretch.seq_id, [])
        root = self._slot_at(stretch.seq_id, tree.base)
        advances = []
        for i, parent in enumerate(tree.parents[tree.frontier_start :]):
            src = nodes[parent] if parent >= 0 else root
            nodes.append(self._claim())
            advances.append(Advance(stretch.q_start + i, 1, src, nodes[-1]))
        return advances

    def _slot_at(self, seq_id: int, length: int) -> int:
        return self._held[seq_id][length] if length else NO_SLOT

    def undo(self, stretches: Sequence[Stretch]) -> None:
        """Free what ``begin`` claimed for these, however much of it that was."""
        for stretch in stretches:
            seq_id = stretch.seq_id
            if stretch.tree is not None:
                self._keep_nodes(seq_id, stretch.tree.frontier_start)
            elif seq_id in self._next:
                self.release([self._next.pop(seq_id)])

    def _keep_nodes(self, seq_id: int, n_nodes: int) -> None:
        """Free the slots of a tree's nodes but the first ones."""
        nodes = self._nodes.get(seq_id, [])
        self.release(nodes[n_nodes:])
        del nodes[n_nodes:]
        if not nodes:
            self._nodes.pop(seq_id, None)

    def accept(self, seq_ids: Iterable[int]) -> None:
        """Let sequences hold what the step wrote of them, and of what was before their points."""
        for seq_id in seq_ids:
            if seq_id in self._next:
                self._set_live(seq_id, self._lengths[seq_id], self._next.pop(seq_id))

    def _set_live(self, seq_id: int, length: int, slot: int) -> None:
        """Have a sequence go on from an owned slot, and hold its points besides."""
        self._drop(
            seq_id, [at for at in self._held.get(seq_id, ()) if not self._is_kept(seq_id, at)]
        )
        self._held.setdefault(seq_id, {})[length] = slot

    def _is_kept(self, seq_id: int, length: int) -> bool:
        return length in self._points.get(seq_id, ())

    def _drop(self, seq_id: int, lengths: Iterable[int]) -> None:
        """Take the slots at some lengths from a sequence."""
        held = self._held.get(seq_id, {})
        self.release([held.pop(at) for at in lengths])
        if not held:
            self._held.pop(seq_id, None)

    def nodes_to_tokens(self, seq_id: int, base: int, rows: Sequence[int]) -> None:
        """Have the chain ``rows`` of a tree follow ``base`` tokens, and free the other nodes."""
        if rows:
            slot = self._nodes[seq_id][rows[-1]]
            self.retain([slot])
            self._set_live(seq_id, base + len(rows), slot)
        self._keep_nodes(seq_id, 0)

    # Room --------------------------------------------------------------------------------------

    def in_words(self, n_units: int) -> str:
        """Return a number of slots as messages say it, with their bytes."""
        return f"{n_units} slots of {format_size(self._slot_bytes)}"

    def demand(self, appends: Appends) -> Demand:
        """Return what it takes to grow sequences: one slot for each, one for each node."""
        needed = sum(
            n_tokens if self._drafts.of(seq_id) is not None else min(n_tokens, 1)
            for seq_id, (_, n_tokens) in appends.items()
        )
        return Demand(needed, self.n_free)

    def demand_of(self, table: IntArray, promised: Appends) -> Demand:
        """Return what it takes to begin a sequence with slots where ``table`` has some."""
        needed, n_free, _ = self.demand(promised)
        return Demand(int(np.count_nonzero(table >= 0)), n_free - needed)

    def n_missing(self, n: int, promised: Appends) -> int:
        """Return the slots that are missing so that any one sequence could take steps."""
        return min(n, 1) - self.n_sure(promised)

    def n_sure(self, promised: Appends) -> int:
        """Return the slots that are free besides what is promised; may be negative."""
        needed, n_free, _ = self.demand(promised)
        return n_free - needed

    def n_fitting(self, promised: Appends) -> int:
        """Return the most tokens that fit for any one sequence: any, where a slot is free."""
        return MOST_CELLS if self.n_sure(promised) > 0 else 0

    def let_go(self, seq_id: int, batch: int) -> None:
        """Do nothing: points say what is kept."""

    def n_to_place(self, demand: Demand) -> int:
        """Return 0: a slot lies as well in one place as in another."""
        return 0

    def grant(self, n_cells: int) -> None:
        """Have so many slots, which the memory budget has granted."""
        self._n_granted = n_cells

    # Resuming ----------------------------------------------------------------------------------

    def _kept(self, seq_id: int) -> dict[int, int]:
        """Return the slots of a sequence by length, as if its finished step were accepted."""
        held = self._held.get(seq_id, {})
        if seq_id not in self._next or not self._is_done(seq_id):
            return held
        points = {at: slot for at, slot in held.items() if self._is_kept(seq_id, at)}
        return {**points, self._lengths[seq_id]: self._next[seq_id]}

    def resume_at(self, seq_id: int, length: int) -> int:
        """Return the greatest length up to ``length`` at which the sequence's states are held."""
        return max((at for at in self._kept(seq_id) if at <= length), default=0)

    def keep_point(self, seq_id: int, length: int) -> None:
        """Keep the states at ``length``, which are held now, until the sequence is cut back."""
        if length:
            self._points.setdefault(seq_id, set()).add(length)

    def drop_point(self, seq_id: int, length: int) -> None:
        """Let go of the states at ``length``, unless the sequence goes on from there."""
        points = self._points.get(seq_id, set())
        if length in points:
            points.remove(length)
            if length != self._lengths[seq_id]:
                self._drop(seq_id, [length])

    # Sequences ---------------------------------------------------------------------------------

    def seq_ids(self) -> list[int]:
        """Return the sequences that hold slots."""
        return list(dict.fromkeys((*self._held, *self._next, *self._nodes)))

    def cut(self, seq_id: int, p0: int, p1: int) -> None:
        """Take the tail from ``p0`` on from a sequence, whose states there are held, or all."""
        self._drop(seq_id, [at for at in self._held.get(seq_id, ()) if at > p0 or not p0])
        points = {at for at in self._points.pop(seq_id, ()) if 0 < at <= p0}
        if points:
            self._points[seq_id] = points

    def clear(self) -> None:
        """Forget every sequence, and every other owner of slots."""
        for by_seq in (self._held, self._points, self._next, self._nodes, self._refs):
            by_seq.clear()
        self._freed.clear()
        self._top = 0

    def share(self, src: int, dst: int, stop: int) -> None:
        """Have ``dst``, which is shorter than ``stop``, go on from the states of ``src`` there."""
        slot = self._held[src][stop]
        self.retain([slot])
        self._set_live(dst, stop, slot)

    # Tables ------------------------------------------------------------------------------------

    def table(self, seq_id: int, length: int) -> IntArray:
        """Return at position n - 1 of ``[length]`` the slot after n tokens, -1 where none is."""
        table = np.full(length, NO_SLOT, dtype=np.int64)
        for at, slot in self._kept(seq_id).items():
            if at <= length:
                table[at - 1] = slot
        return table

    def check_start(self, table: IntArray, who: str) -> None:
        """Make sure that a history with this table can go on.

        Raises:
            RewindError: it has no slot at its last position; ``who`` begins it.
        """
        if len(table) and table[-1] < 0:
            near = np.flatnonzero(table >= 0)
            raise RewindError(
                f"{who}: no states of recurrent layers are held after {len(table)} tokens; begin "
                f"with the first {int(near[-1]) + 1 if near.size else 0}"
            )

    def start(self, seq_id: int, table: IntArray) -> None:
        """Have a sequence go on from the last slot of a table, which gets one more owner."""
        if len(table):
            self.retain([int(table[-1])])
            self._set_live(seq_id, len(table), int(table[-1]))

    def claim_table(self, seq_id: int, table: IntArray) -> None:
        """Take new slots for a sequence wherever ``table`` has one, see ``claim_at``."""
        if len(table):
            self.claim_at(seq_id, (np.flatnonzero(table >= 0) + 1).tolist())

    def claim_at(self, seq_id: int, lengths: Sequence[int]) -> None:
        """Take new slots for a sequence that holds none: at its length, the last, and at points."""
        self._held[seq_id] = {at: self._claim() for at in lengths}
        for at in lengths[:-1]:
            self.keep_point(seq_id, at)

    # What is there -----------------------------------------------------------------------------

    def usage(self) -> GroupUsage:
        """Return the slots taken and shared."""
        shared = sum(n > 1 for n in self._refs.values())
        top = max(self._refs, default=-1) + 1
        return GroupUsage(None, self.n_slots, len(self._refs), shared, top)

    def check(self, held: Sequence[int] = ()) -> None:
        """Assert the invariants; ``held`` are slots with an owner that is no sequence."""
        by_length = (slot for slots in self._held.values() for slot in slots.values())
        nodes = (slot for slots in self._nodes.values() for slot in slots)
        owners = Counter([*by_length, *nodes, *self._next.values(), *map(int, held)])
        assert owners == Counter(self._refs), "refs are not the number of owners"
        assert sorted([*self._freed, *self._refs]) == list(range(self._top)), "a slot is lost"
        most = self.n_slots if self._n_granted is None else self._n_granted
        assert self._top <= most <= self.n_slots, f"{self._top} slots are taken of {most}"
        for seq_id, slot in self._next.items():
            is_own = self._is_done(seq_id) or self._refs[slot] == 1
            assert is_own, f"sequence {seq_id} writes a slot that others hold"
        for seq_id, length in self._lengths.items():
            self._check_seq(seq_id, length, self._kept(seq_id))

    def _check_seq(self, seq_id: int, length: int, kept: Mapping[int, int]) -> None:
        points = self._points.get(seq_id, set())
        wanted = {at for at in (*points, length) if at}
        assert set(kept) == wanted, f"sequence {seq_id} holds slots at {sorted(kept)}"


def make_slots(config: CacheConfig, lengths: Lengths, drafts: Drafts) -> Slots | None:
    """Create the slots of a cache; None for a model without recurrent layers."""
    state = config.params.state
    if state is None:
        return None
    n_granted = None if config.budget is None else 0
    return Slots(state.slot_bytes, config.n_slots, lengths, drafts, n_granted=n_granted)
