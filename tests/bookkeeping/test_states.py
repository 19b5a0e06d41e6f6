"""A group that keeps a state, not rows, beside groups of rows: steps and room take it as it is."""

from __future__ import annotations

import random
from functools import partial

import pytest

from kvcellar.bookkeeping import BlockPool, Steps
from kvcellar.bookkeeping.begin import begin_tokens, refuse, stretches_of
from kvcellar.bookkeeping.layout import Demand
from kvcellar.bookkeeping.room import Room
from kvcellar.bookkeeping.rows import Rows, appends_of
from kvcellar.cache_config import GroupUsage
from kvcellar.errors import CacheFullError
from kvcellar.sight import Sight
from kvcellar.types import MOST_CELLS, AttendKind, AttendSpec, Run, StepPlan, Write
from tests.bookkeeping.byte_simulator import TokenIds, config_of, seen_by, snapshot, visible

WINDOW, SLACK = 4, 1


class States:
    """One state per sequence, and one per point: a toy `SharedLayout`.

    A step reads a sequence's state and writes the next one elsewhere, so that it can be undone.
    """

    unit = 1
    capacity = MOST_CELLS

    def __init__(self, n_states, lengths):
        self.free = list(range(n_states))
        self.n_states = n_states
        self.lengths = lengths
        self.held: dict[int, dict[int, int]] = {}  # sequence -> length -> state
        self.points: dict[int, set[int]] = {}
        self.next: dict[int, int] = {}  # what the last step wrote, until it is accepted

    def begin(self, stretches, n_tokens, n_held):
        writes, reads = [], []
        for s in stretches:
            before = self.next.get(s.seq_id, self.held.get(s.seq_id, {}).get(s.first_pos))
            if s.seq_id not in self.next:
                self.next[s.seq_id] = self.free.pop()
            writes.append(Write(s.q_start, Run(self.next[s.seq_id], 1)))
            runs = () if before is None else (Run(before, 1),)
            reads.append(AttendSpec(s.q_start, s.n_tokens, runs, AttendKind.NONE))
        return StepPlan(n_tokens, tuple(writes), tuple(reads), self.n_states), []

    def undo(self, stretches):
        for seq in {s.seq_id for s in stretches} & self.next.keys():
            self.free.append(self.next.pop(seq))

    def accept(self, seq_ids):
        for seq in seq_ids:
            held, points = self.held.setdefault(seq, {}), self.points.get(seq, set())
            self.free += [held.pop(at) for at in list(held) if at not in points]
            held[self.lengths[seq]] = self.next.pop(seq)

    def resume_at(self, seq_id, length):
        there = {0, self.lengths.get(seq_id, 0), *self.points.get(seq_id, ())}
        return max(at for at in there if at <= length)

    def keep_point(self, seq_id, length):
        self.points.setdefault(seq_id, set()).add(length)

    def cut(self, seq_id, p0, p1):
        assert p1 == self.lengths[seq_id], "a state has no holes"
        held = self.held.get(seq_id, {})
        self.free += [held.pop(at) for at in list(held) if at > p0 or not p0]
        self.points[seq_id] = {at for at in self.points.get(seq_id, ()) if 0 < at <= p0}

    def clear(self):
        self.__init__(self.n_states, self.lengths)

    def usage(self):
        taken = self.n_states - len(self.free)
        return GroupUsage(None, self.n_states, taken, 0, self.n_states)

    def demand(self, appends):
        return Demand(len(appends), len(self.free))

    def n_missing(self, n, promised):
        return len(promised) + 1 - len(self.free)

    def n_fitting(self, promised):
        return MOST_CELLS if self.n_missing(1, promised) <= 0 else 0

    n_sure = n_fitting

    def let_go(self, seq_id, batch):
        """A state has nothing behind a window."""

    def n_to_place(self, demand):
        return 0

    def grant(self, n_cells):
        """Never called: there is no budget."""

    def in_words(self, n_units):
        return f"{n_units} states"


class Cache:
    """All of a history, a window of it, and a state that is the tuple of all its tokens."""

    def __init__(self, capacity=64, n_states=8):
        self.config = config_of((None, WINDOW, None), capacity, SLACK)
        self.ids = TokenIds(self.config)
        self.states = {}
        self.lengths = {}
        self.layouts = [
            Rows(BlockPool(capacity), self.lengths),
            Rows(BlockPool(capacity), self.lengths, sight=Sight(WINDOW), slack=SLACK),
            States(n_states, self.lengths),
        ]
        self.room = Room(self.config, self.layouts, self.lengths, None)
        unasked = partial(refuse, self.room)
        self.steps = Steps(
            self.config, self.layouts, self.lengths, self.ids, growth=None, unasked=unasked
        )

    def run(self, tokens, n_layers):
        """Run some layers; return per layer group what each query sees."""
        seen = {}
        for layer in range(n_layers):
            plan = self.steps.plan(layer, len(tokens), None)
            group = self.steps.group_of(layer)
            if group < 2:
                self.ids.stored[layer][plan.write_cells] = tokens
                seen[group] = [x for r in plan.reads for x in seen_by(r, self.ids.stored[layer])]
            else:
                seen[group] = []
                for read, write in zip(plan.reads, plan.writes, strict=True):
                    state = self.states[read.runs[0].start] if read.runs else ()
                    for token in tokens[read.q_start : read.q_start + read.q_len]:
                        state = (*state, token)
                        seen[group].append(sorted(state))
                    self.states[write.run.start] = state
            self.steps.wrote(layer)
        return seen

    def keep_point(self, seq):
        self.steps.settle()
        for layout in self.layouts:
            layout.keep_point(seq, self.lengths[seq])

    def cut(self, seq, length):
        for layout in self.layouts:
            layout.cut(seq, length, self.lengths[seq])
        if length:
            self.lengths[seq] = length
        else:
            del self.lengths[seq]
            for layout in self.layouts[:2]:
                layout.forget(seq)


def walk(rng):
    """Steps, points and ways back at random, against a list of tokens per sequence."""
    cache, want, points, token = Cache(), {}, {}, 0
    for _ in range(60):
        verb = rng.choice(["step"] * 4 + ["cancelled", "raised", "point", "back"])
        cache.steps.settle()
        seq = rng.randrange(3)
        if verb == "point" and seq in want and len(points.get(seq, ())) < 1:
            cache.keep_point(seq)
            points.setdefault(seq, set()).add(len(want[seq]))
        elif verb == "back" and seq in want:
            length = rng.randint(0, len(want[seq]))
            at = cache.steps.resume_at(seq, length)
            there = {0, len(want[seq]), *points.get(seq, ())}
            assert at == max(p for p in there if p <= length)
            cache.cut(seq, at)
            points[seq] = {p for p in points.get(seq, ()) if 0 < p <= at}
            want[seq] = want[seq][:at]
            if not at:
                del want[seq]
        elif verb in ("step", "cancelled", "raised"):
            ids = [s for s in rng.choices(range(3), k=3) for _ in range(rng.randint(1, 3))]
            tokens = list(range(token, token + len(ids)))
            token += len(ids)
            if not cache.room.fits(appends_of(stretches_of(cache.steps, ids)[0])):
                for s in list(want):
                    cache.cut(s, 0)
                want, points = {}, {}
            begin_tokens(cache.room, cache.steps, ids, None)
            seen = cache.run(tokens, 4 if verb != "raised" else rng.randint(0, 3))
            after = {s: list(t) for s, t in want.items()}
            for i, s in enumerate(ids):
                after.setdefault(s, []).append(tokens[i])
                for group, window in enumerate((None, WINDOW, None)):
                    if group in seen:
                        history = dict(enumerate(after[s]))
                        assert seen[group][i] == visible(history, len(after[s]) - 1, window)
            if verb == "step":
                want = after
            elif verb == "cancelled":
                cache.steps.cancel()
        cache.steps.settle()
        assert cache.lengths == {s: len(t) for s, t in want.items()}
        states = cache.layouts[2]
        n_held = sum(len({len(want[s]), *points.get(s, ())}) for s in want)
        assert len(states.free) == states.n_states - n_held, (
            "none is lost, none is kept for nothing"
        )


@pytest.mark.parametrize("seed", range(20))
def test_states_live_beside_rows_whatever_the_order_of_verbs(seed):
    walk(random.Random(seed))


def test_all_groups_go_back_to_where_the_state_has_a_point():
    cache = Cache()
    for n in (5, 20, 3):
        begin_tokens(cache.room, cache.steps, [0] * n, None)
        cache.run(list(range(n)), 4)
        if n < 20:
            cache.keep_point(0)
    assert [cache.steps.resume_at(0, n) for n in (28, 27, 6, 5, 4)] == [28, 5, 5, 5, 0]


def test_without_a_free_state_no_sequence_grows_though_there_are_cells():
    cache = Cache(n_states=2)
    begin_tokens(cache.room, cache.steps, [0, 0], None)
    cache.run([1, 2], 4)
    cache.steps.settle()
    assert cache.room.can_extend(62)
    assert cache.room.n_free() == 62
    assert not cache.room.fits({0: (2, 1), 1: (0, 1)})
    before = snapshot(cache.layouts)
    with pytest.raises(CacheFullError, match="step needs 2 states, 1 free of 2; release a seq"):
        begin_tokens(cache.room, cache.steps, [0, 1], None)
    assert snapshot(cache.layouts) == before
    begin_tokens(cache.room, cache.steps, [1], None)
    cache.run([3], 4)
    cache.steps.settle()
    assert not cache.room.can_extend(1)
    assert cache.room.n_free() == 0
    assert cache.room.capacity == 64
