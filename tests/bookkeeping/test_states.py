"""States beside rows, whatever the order of verbs: no slot is lost, none changes while it is held.

The oracle: the state after some tokens is the tuple of all of them; a dict has what was written to
each slot.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvcellar.bookkeeping import TreeSequences
from kvcellar.bookkeeping.cells.growth import ARRAY_BYTES, INDEX_BYTES
from kvcellar.budget import MemoryBudget
from kvcellar.cache_config import make_config
from kvcellar.errors import CacheFullError, RewindError
from kvcellar.states import NO_SLOT, StateGroup, StateShape
from kvcellar.types import LayerGroup, ModelCacheParams
from tests.bookkeeping.actions import ActionMachine, action
from tests.stretches import stretches

STATE = StateGroup(((StateShape("recurrent", (30,)),), (StateShape("convolution", (2, 3)),)))
PICK = st.integers(0, 99)
LENGTH = st.sampled_from([1, 1, 1, 2, 5])
BATCH = st.lists(st.tuples(st.integers(0, 4), LENGTH), min_size=1, max_size=4)


class Entry:
    """What an index holds: cells and slots of some tokens."""

    def __init__(self, tables, tokens):
        self.tables = tables
        self.tokens = tokens

    def lengths(self):
        """Lengths with states."""
        return (np.flatnonzero(self.tables[-1] >= 0) + 1).tolist()


class StatesAgainstHistories(ActionMachine):
    @initialize(
        n_slots=st.integers(3, 14),
        windows=st.sampled_from([(None,), (None, 4), (3,)]),
        block_size=st.sampled_from([1, 1, 4]),
        slots_in_budget=st.none() | st.integers(2, 12),
    )
    def make(self, n_slots, windows, block_size, slots_in_budget):
        groups = tuple(LayerGroup((i,), 1, 2, 2, window=w) for i, w in enumerate(windows))
        params = ModelCacheParams(len(groups), groups=groups, state=STATE)
        self.budget = None
        if slots_in_budget is not None:
            cell = sum(16 + INDEX_BYTES + ARRAY_BYTES for _ in groups)
            slots = slots_in_budget * (STATE.slot_bytes + INDEX_BYTES)
            self.budget = MemoryBudget(120 * cell + slots + 2000)
        config = make_config(
            params, 120, min_chunk=4, window_slack=2, n_slots=n_slots, budget=self.budget
        )
        self.cache = TreeSequences(config, block_size=block_size)
        self.windows = windows
        self.want: dict[int, tuple[int, ...]] = {}
        self.points: dict[int, set[int]] = {}
        self.nodes: dict[int, list[tuple[int, ...]]] = {}
        self.slots: dict[int, tuple[int, ...]] = {}  # what was written last
        self.entries: list[Entry] = []
        self.n_tokens = 0

    # What happens ---------------------------------------------------------------------------------

    def refused(self, error, verb, *args):
        self.cache.end_step()
        before = self.cache.usage(), self.seen()
        with pytest.raises(error):
            verb(*args)
        assert (self.cache.usage(), self.seen()) == before

    def seen(self):
        return {
            seq: [t.tolist() for t in self.cache.seq_table(seq)] for seq in self.cache.seq_ids()
        }

    @action(
        weight=10,
        batch=BATCH,
        fate=st.sampled_from(["done"] * 4 + ["cancelled", "raised"]),
        n_turns=st.integers(0, 3),
    )
    def step(self, batch, fate, n_turns):
        ids = [seq for seq, n in batch if seq not in self.nodes for _ in range(n)]
        if not ids:
            return
        if not self.cache.can_begin_step(stretches(ids)):
            self.refused(CacheFullError, self.cache.begin_step, stretches(ids))
            return
        self.forward(ids, fate, n_turns)

    @action(weight=3, pick=PICK, n=st.integers(1, 8))
    def ask(self, pick, n):
        """What can_extend says holds for each sequence, those that are not there yet included."""
        seqs = [seq for seq in range(6) if seq not in self.nodes]
        fits = [self.cache.can_begin_step([(seq, n)]) for seq in seqs]
        if self.cache.can_extend(n):
            assert all(fits)
        elif self.windows == (None,) and self.cache.block_size == 1:
            assert not any(fits)
        assert self.cache.can_extend(1) == (self.cache.n_free > 0)

    @action(weight=2, pick=PICK, n=st.integers(1, 3))
    def crawl(self, pick, n):
        """Tokens one by one, each of them a point."""
        seq = self.picked(pick)
        for _ in range(n):
            if seq is None or seq in self.nodes or not self.cache.can_begin_step([(seq, 1)]):
                return
            self.forward([seq], "done", 0)
            self.cache.keep_point(seq, len(self.want[seq]))
            self.points.setdefault(seq, set()).add(len(self.want[seq]))

    def forward(self, ids, fate, n_turns):
        """Run tokens of sequences, or the pending nodes of those that have a tree."""
        cache = self.cache
        held = self.held_slots()
        cache.begin_step(stretches(ids))
        after = self.expected(ids)
        layers = [("rows", i) for i in range(len(self.windows))]
        turns = [("states", 0), *layers, ("states", 1)]
        for kind, layer in turns if fate != "raised" else turns[: n_turns % len(turns)]:
            if kind == "rows":
                cache.steps.plan(layer, len(ids), None)
                cache.steps.wrote(layer)
                continue
            plan = cache.steps.plan_states(layer, len(ids), None)
            self.write(plan, ids, after, held)
            cache.steps.wrote_states(layer)
        if fate == "done":
            self.accept(ids, after)
        elif fate == "cancelled":
            cache.cancel_step()
        else:
            cache.end_step()

    def expected(self, ids):
        """Return the history after each token of a step."""
        now, after, at = dict(self.want), [], dict.fromkeys(self.nodes, 0)
        for seq in ids:
            tree = self.cache.steps.drafts.of(seq)
            if tree is None:
                before = now.get(seq, ())
            else:
                node = tree.frontier_start + at[seq]
                at[seq] += 1
                parent = tree.parents[node]
                mine = [
                    *self.nodes[seq],
                    *(a for s, a in zip(ids, after, strict=False) if s == seq),
                ]
                before = now.get(seq, ()) if parent < 0 else mine[parent]
            after.append((*before, self.n_tokens))
            self.n_tokens += 1
            if tree is None:
                now[seq] = after[-1]
        return after

    def write(self, plan, ids, after, held):
        """Take states on as the plan says, and see that they are those of the histories."""
        covered = []
        for q_start, n_tokens, src, dst in plan.advances:
            covered += range(q_start, q_start + n_tokens)
            assert dst not in held, "a slot that somebody holds never changes"
            assert max(src, dst) < plan.n_slots <= self.cache.config.n_slots
            before = () if src == NO_SLOT else self.slots[src]
            got = before + tuple(token[-1] for token in after[q_start : q_start + n_tokens])
            assert got == after[q_start + n_tokens - 1]
            self.slots[dst] = got
        assert covered == list(range(len(ids)))

    def accept(self, ids, after):
        for seq, tokens in zip(ids, after, strict=True):
            if seq in self.nodes:
                self.nodes[seq].append(tokens)
            else:
                self.want[seq] = tokens

    @action(weight=2, pick=PICK, point=PICK, dst=st.integers(0, 4))
    def fork(self, pick, point, dst):
        src = self.picked(pick)
        if src is None or src == dst or dst in self.nodes:
            return
        if dst in self.want:
            self.drop(dst)
        there = self.resumable(src)
        stop = there[point % len(there)]
        if not stop:
            return
        self.cache.seq_cp(src, dst, 0, stop)
        self.want[dst] = self.want[src][:stop]

    @action(pick=PICK, point=PICK, dst=st.integers(0, 4))
    def fork_where_no_states_are(self, pick, point, dst):
        src = self.picked(pick)
        if src is None or dst in self.want or dst in self.nodes:
            return
        stop = 1 + point % len(self.want[src])
        if stop not in self.resumable(src):
            self.refused(RewindError, self.cache.seq_cp, src, dst, 0, stop)
        elif stop > 1:
            self.refused(RewindError, self.cache.seq_cp, src, dst, 1, stop)

    @action(weight=3, pick=PICK, is_kept=st.booleans())
    def point(self, pick, is_kept):
        seq = self.picked(pick)
        points = self.points.setdefault(seq, set())
        if seq is not None and is_kept:
            self.cache.keep_point(seq, len(self.want[seq]))
            points.add(len(self.want[seq]))
        elif points:
            at = sorted(points)[pick % len(points)]
            self.cache.drop_point(seq, at)
            points.remove(at)

    @action(weight=3, pick=PICK, at=PICK)
    def cut(self, pick, at):
        seq = self.picked(pick)
        if seq is None or seq in self.nodes:
            return
        p0 = at % (len(self.want[seq]) + 2)
        if p0 and p0 + 1 < len(self.want[seq]):
            self.refused(RewindError, self.cache.seq_rm, seq, p0, p0 + 1)
        there = max((n for n in self.resumable(seq) if n <= p0), default=0)
        assert self.cache.seq_rm(seq, p0) == there
        self.want[seq] = self.want[seq][:there]
        self.points[seq] = {n for n in self.points.get(seq, ()) if n <= there}
        if not there:
            del self.want[seq]

    def drop(self, seq):
        self.cache.seq_rm(seq)
        for of_seq in (self.want, self.points, self.nodes):
            of_seq.pop(seq, None)

    @action(pick=PICK)
    def remove(self, pick):
        there = sorted({*self.want, *self.nodes})
        if there:
            self.drop(there[pick % len(there)])

    # Trees ----------------------------------------------------------------------------------------

    @action(weight=2, seq=st.integers(0, 4), draws=st.lists(PICK, min_size=1, max_size=4))
    def propose(self, seq, draws):
        there = self.nodes.get(seq, [])
        parents = [draw % (len(there) + i + 1) - 1 for i, draw in enumerate(draws)]
        try:
            self.cache.propose(parents, seq)
        except CacheFullError:
            assert self.cache.has_tree(seq) == bool(there)
            return
        self.nodes.setdefault(seq, [])
        others = {s for s, nodes in self.nodes.items() if s != seq}
        assert not others & {seq}
        self.forward([seq] * len(parents), "raised", len(draws) % 3)
        self.forward([seq] * len(parents), "cancelled", 0)
        self.forward([seq] * len(parents), "done", 0)

    @action(weight=2, pick=PICK, leaf=PICK, is_dropped=st.booleans())
    def commit(self, pick, leaf, is_dropped):
        if not self.nodes:
            return
        seq = sorted(self.nodes)[pick % len(self.nodes)]
        tree = self.cache.steps.drafts.of(seq)
        chain, node = [], leaf % len(self.nodes[seq])
        while node >= 0 and not is_dropped:
            chain.insert(0, node)
            node = tree.parents[node]
        self.cache.commit(chain, seq)
        nodes = self.nodes.pop(seq)
        if chain:
            self.want[seq] = nodes[chain[-1]]

    # An index -------------------------------------------------------------------------------------

    @action(weight=3, pick=PICK)
    def publish(self, pick):
        seq = self.picked(pick)
        if seq is not None:
            tables = self.cache.seq_table(seq)
            self.cache.retain_cells(tables)
            self.entries.append(Entry([table.copy() for table in tables], self.want[seq]))

    @action(weight=2, pick=PICK, at=PICK, seq=st.integers(0, 4))
    def resume(self, pick, at, seq):
        if not self.entries or seq in self.want or seq in self.nodes:
            return
        entry = self.entries[pick % len(self.entries)]
        n = 1 + at % len(entry.tokens)
        tables = [table[:n] for table in entry.tables]
        rows = self.windows == (None,) or n in (len(entry.tokens), 1)
        if n not in entry.lengths():
            self.refused(RewindError, self.cache.seq_map, seq, tables)
        elif rows or self.can_see(entry, n):
            self.cache.seq_map(seq, tables)
            self.want[seq] = entry.tokens[:n]

    def can_see(self, entry, n):
        """Return true if all rows that the next token sees are held."""
        return all(
            (table[max(0, n - (w or n + 1) + 1) : n] >= 0).all()
            for table, w in zip(entry.tables[:-1], self.windows, strict=True)
        )

    @action(weight=2, pick=PICK, states_alone=st.booleans())
    def evict(self, pick, states_alone):
        if not self.entries:
            return
        entry = self.entries.pop(pick % len(self.entries))
        if states_alone:
            none = [np.full(len(entry.tokens), -1)] * len(self.windows)
            self.cache.release_cells([*none, entry.tables[-1]])
            left = [*entry.tables[:-1], np.full(len(entry.tokens), -1)]
            self.entries.append(Entry(left, entry.tokens))
        else:
            self.cache.release_cells(entry.tables)

    @action(pick=PICK, seq=st.integers(0, 4), also=PICK)
    def restore(self, pick, seq, also):
        """Tokens of a sequence come back from elsewhere, with the states at some lengths."""
        if seq in self.want or seq in self.nodes:
            return
        tokens = tuple(range(self.n_tokens, self.n_tokens + 1 + pick % 12))
        self.n_tokens += len(tokens)
        tables = [np.arange(len(tokens)) for _ in (*self.windows, None)]
        lengths = sorted({len(tokens), 1 + also % len(tokens)})
        tables[-1] = np.full(len(tokens), -1)
        tables[-1][np.array(lengths) - 1] = 0
        try:
            held = self.held_slots()
            claimed = self.cache.seq_claim(seq, tables)
        except CacheFullError:
            return
        for at in lengths:
            slot = int(claimed[-1][at - 1])
            assert slot not in held
            self.slots[slot] = tokens[:at]
        self.want[seq] = tokens
        self.points[seq] = {*lengths} - {len(tokens)}

    @action()
    def end_step(self):
        self.cache.end_step()

    # What holds -----------------------------------------------------------------------------------

    def picked(self, pick):
        there = sorted(self.want)
        return there[pick % len(there)] if there else None

    def resumable(self, seq):
        """Lengths with states, where windows have what is needed too."""
        self.cache.end_step()
        there = {len(self.want[seq]), *self.points.get(seq, ())}
        low = [layout.resume_at for layout in self.cache.layouts]
        return sorted(n for n in there if all(at(seq, n) == n for at in low))

    def held_slots(self):
        """Slots that hold the states of somebody, once the last step is accepted."""
        self.cache.end_step()
        slots = [self.cache.seq_table(seq)[-1] for seq in self.want]
        slots += [entry.tables[-1] for entry in self.entries]
        nodes = [slot for of in self.cache.slots._nodes.values() for slot in of]
        return {int(slot) for table in slots for slot in table[table >= 0]} | set(nodes)

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        held = [
            np.concatenate([entry.tables[i][entry.tables[i] >= 0] for entry in self.entries])
            if self.entries
            else np.array([], dtype=int)
            for i in range(len(self.windows) + 1)
        ]
        self.cache.check(held)
        assert {seq: self.cache.seq_len(seq) for seq in self.cache.seq_ids()} == {
            seq: len(tokens) for seq, tokens in self.want.items()
        }
        for seq, tokens in self.want.items():
            table = self.cache.seq_table(seq)[-1]
            there = (np.flatnonzero(table >= 0) + 1).tolist()
            assert set(there) == {len(tokens), *self.points.get(seq, ())}
            for at in there:
                assert self.slots[int(table[at - 1])] == tokens[:at]
        for entry in self.entries:
            for at in entry.lengths():
                assert self.slots[int(entry.tables[-1][at - 1])] == entry.tokens[:at]

    def teardown(self):
        if hasattr(self, "cache"):
            for entry in self.entries:
                self.cache.release_cells(entry.tables)
            for seq in {*self.want, *self.nodes}:
                self.cache.seq_rm(seq)
            self.cache.check()
            assert self.cache.usage().slots.live == 0, "no slot is lost"


TestStatesAgainstHistories = StatesAgainstHistories.TestCase
