"""Many sequences, mixed layer groups, whole and broken forwards, against dicts of token ids."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvcellar.bookkeeping.cells.compaction import relocated
from kvcellar.errors import (
    CacheFullError,
    PositionError,
    RewindError,
    SequenceConflictError,
    StepError,
    UnknownSequenceError,
)
from kvcellar.sight import Sight
from kvcellar.types import runs_of
from tests.bookkeeping.actions import ActionMachine, action
from tests.bookkeeping.byte_simulator import (
    SimulatedSeq,
    check_causal_masks,
    config_of,
    first_seen,
    settled,
    sight_of,
    snapshot,
    visible,
)
from tests.bookkeeping.held import seq_cells, seq_positions
from tests.stretches import stretches as stretches_of

SEQ = st.integers(0, 5)
PICK = st.integers(0, 11)
"""A sequence, most often one that is there: see ``picked``."""
PLACE = st.integers(0, 400)
"""A place in a history of any length, often at or near one of its ends: see ``place``."""
BOOL = st.booleans()
STRETCH = st.sampled_from([1, 1, 1, 1, 2, 3, 5, 9, 20, 70])
WINDOWS = st.sampled_from(
    [
        *((None,), (None, 4), (None, 1, 7), (3,), (4, 9), (1,), (None, 70), (None, 2, 20)),
        *((None, Sight(chunk=4)), (Sight(chunk=9),), (None, Sight(chunk=1), 5)),
        *((Sight(chunk=70), None), (Sight(chunk=6), Sight(chunk=4)), (3, Sight(chunk=20))),
    ]
)
CAPACITY = st.sampled_from([300, 90, 30, 30, 9, 1])
SLACK = st.sampled_from([0, 0, 1, 5, 20])
END = st.sampled_from(["finish", "finish", "finish", "finish", "cancel", "abandon"])


@dataclass
class History:
    """What one sequence is by the rule: its next position, and the token at each position."""

    length: int = 0
    tokens: dict[int, int] = field(default_factory=dict)


@dataclass
class Kept:
    """A history and the cells that it had, outside of any sequence.

    In ``held`` the cells have an owner, as from a prefix index; in ``saved`` only bytes are kept.
    """

    history: History
    tables: tuple[np.ndarray, ...]


class SeqCacheAgainstHistories(ActionMachine):
    """The oracle: one history per sequence. Every forward is checked, query by query."""

    cache_class = SimulatedSeq

    @initialize(windows=WINDOWS, capacity=CAPACITY, slack=SLACK)
    def start(self, windows, capacity, slack):
        self.windows, self.capacity, self.slack = windows, capacity, slack
        self.cache = self.cache_class(config_of(windows, capacity, slack))
        self.want: dict[int, History] = {}
        self.held: list[Kept] = []
        self.saved: list[Kept] = []
        self.points: dict[int, set[int]] = {}  # where sequences were asked to stay resumable
        self.undo = None  # what cancel_step goes back to
        self.n_ids = 0

    # The oracle's own words -----------------------------------------------------------------------

    def new_ids(self, n):
        self.n_ids += n
        return list(range(self.n_ids - n, self.n_ids))

    def picked(self, draw):
        there = sorted(self.want)
        return there[draw % len(there)] if there and draw < 10 else draw % 6

    def place(self, seq, draw):
        if seq not in self.want:
            return draw
        length = self.want[seq].length
        if draw >= 360:
            return 0
        if draw >= 200:
            return max(0, length + 1 - draw % 9)
        return draw % (length + 3)

    def state(self):
        return self.want

    def restore(self, state):
        self.want = state

    def n_needed(self, group):
        """Cells that a group cannot do without: each token that some sequence may still see."""
        needed = set()
        for seq, history in self.want.items():
            needed |= {t for p, t in history.tokens.items() if self.is_due(group, seq, p)}
        for held in self.held:
            needed |= {held.history.tokens[p] for p in np.flatnonzero(held.tables[group] >= 0)}
        return len(needed)

    def is_due(self, group, seq, p):
        """True if the group must keep a position: for the next token, the slack, or a point."""
        window, length = self.windows[group], self.want[seq].length
        if p >= first_seen(window, max(0, length - self.slack)):
            return True
        return any(first_seen(window, at) <= p < at for at in self.points.get(seq, ()))

    def may_be_full(self, n):
        return any(self.n_needed(g) + n > self.capacity for g in range(len(self.windows)))

    def must_be_full(self, n):
        full = [g for g, window in enumerate(self.windows) if window is None]
        return any(self.n_needed(g) + n > self.capacity for g in full)

    def lost(self, cache, seq):
        """Per window group, the positions of the history that are gone from its cells."""
        return {
            group: set(self.want[seq].tokens) - set(seq_positions(pool, seq))
            for group, pool in enumerate(cache.cells)
            if self.windows[group] is not None
        }

    def refused(self, error, verb, *args):
        """The verb raises and leaves the cache as the next verb would have found it."""
        before = snapshot(settled(self.cache))
        self.undo = None
        with pytest.raises(error) as info:
            verb(*args)
        assert len(str(info.value)) > 20
        assert snapshot(settled(self.cache)) == before
        self.check()

    def check(self):
        """The cache's own proof, told of the owners that it does not know."""
        held = [
            [c for held in self.held for c in held.tables[group].tolist() if c >= 0]
            for group in range(len(self.windows))
        ]
        self.cache.check(held)

    # Forwards -------------------------------------------------------------------------------------

    def batch_of(self, draws):
        """[(seq_id, positions, tokens)] for a drawn batch; or None where it must be refused."""
        at = {}
        stretches = []
        for seq, n in draws:
            length = self.want[seq].length if seq in self.want else 0
            first = at.get(seq, length)
            stretches.append((seq, list(range(first, first + n)), self.new_ids(n)))
            at[seq] = first + n
        return stretches

    def expected(self, stretches, window):
        after = copy.deepcopy(self.want)
        for seq, positions, tokens in stretches:
            after.setdefault(seq, History()).tokens.update(zip(positions, tokens, strict=True))
        return [
            visible(after[seq].tokens, p, window)
            for seq, positions, _ in stretches
            for p in positions
        ]

    def accept(self, stretches):
        for seq, positions, tokens in stretches:
            history = self.want.setdefault(seq, History())
            history.tokens.update(zip(positions, tokens, strict=True))
            history.length = positions[-1] + 1

    @action(
        weight=14,
        draws=st.lists(st.tuples(SEQ, STRETCH), min_size=1, max_size=5),
        end=END,
        n_layers=st.integers(0, 4),
        say_positions=st.booleans(),
    )
    def step(self, draws, end, n_layers, say_positions):
        stretches = self.batch_of(draws)
        if stretches is None:
            ids = [seq for seq, n in draws for _ in range(n)]
            self.refused(StepError, self.cache.begin_step, stretches_of(ids))
            return
        ids = [seq for seq, positions, _ in stretches for _ in positions]
        positions = [p for _, positions, _ in stretches for p in positions]
        tokens = [t for _, _, tokens in stretches for t in tokens]
        before = settled(self.cache)
        if not self.fits(before, stretches, ids):
            self.refused(CacheFullError, self.cache.begin_step, stretches_of(ids))
            return
        self.undo = None
        got = self.cache.begin_step(stretches_of(ids))
        assert got == positions
        self.check_masks(stretches)
        n_layers = self.cache.n_layers if end == "finish" else min(n_layers, self.cache.n_layers)
        if end == "abandon":
            n_layers = min(n_layers, self.cache.n_layers - 1)
        for layer, window in list(enumerate(self.cache.layer_windows()))[:n_layers]:
            said = positions if say_positions or layer == 0 else None
            assert self.cache.run_layer(layer, tokens, said) == self.expected(stretches, window)
        assert self.cache.is_step_open == (n_layers < self.cache.n_layers)
        if end == "finish":
            self.undo = copy.deepcopy(self.state())
            self.accept(stretches)
        elif end == "cancel":
            self.cache.cancel_step()
            if all(len(ids) + self.n_pending() <= pool.n_free for pool in before.cells):
                assert self.unwritten(self.cache) == self.unwritten(before)
            self.check()

    def fits(self, before, stretches, ids):
        """True if the step has its cells: all that the cache says beforehand, shown to be true."""
        said_to_fit = self.cache.can_extend(len(ids)) or self.cache.can_begin_step(
            stretches_of(ids)
        )
        n_new = len(ids) - self.n_proposed(stretches)
        fits = before.can_extend(n_new)
        assert fits == before.can_begin_step(stretches_of(ids)) == (n_new <= before.n_free)
        if fits:
            assert not self.must_be_full(n_new)
        else:
            assert self.may_be_full(n_new) and not said_to_fit
        return fits

    def n_pending(self):
        """Tokens that are proposed and await their forward."""
        return 0

    def n_proposed(self, stretches):
        """Tokens of a step that were proposed before, so that their cells are promised."""
        return 0

    @action(weight=2, seq=SEQ, other=SEQ, over=st.sampled_from([0, 0, 1, 2]), end=END)
    def step_to_the_brim(self, seq, other, over, end):
        n = settled(self.cache).n_free + over
        if 0 < n <= 120:
            draws = [(seq, n)] if n == 1 else [(seq, n - n // 2), (other, n // 2)]
            self.step(draws=draws, end=end, n_layers=1, say_positions=False)

    def unwritten(self, cache):
        """All state but the bytes: a cancelled step may have written to cells that are free."""
        cache = copy.deepcopy(cache)
        cache.ids = None
        cache.steps._pools = None
        return snapshot(cache)

    def check_masks(self, stretches):
        for group, window in enumerate(self.windows):
            check_causal_masks(self.cache.plans[group].reads, window)

    @action(weight=2)
    def cancel(self):
        self.cache.cancel_step()
        if self.undo is not None:
            self.restore(self.undo)
        self.undo = None

    @action()
    def end_step(self):
        self.cache.end_step()
        self.undo = None

    # Sequences ------------------------------------------------------------------------------------

    @action(weight=5, pick=PICK, at=PLACE)
    def cut(self, pick, at):
        self.cut_seq(self.picked(pick), at)

    def cut_seq(self, seq, at):
        p0 = self.place(seq, at)
        if seq not in self.want:
            self.refused(UnknownSequenceError, self.cache.seq_rm, seq, p0)
            return
        history = self.want[seq]
        if p0 < history.length and not self.may_resume(seq, p0):
            p0, asked = settled(self.cache).resume_at(seq, p0), p0  # shown to be the deepest
            assert p0 < asked
            self.may_resume(seq, p0)
        self.undo = None
        at = self.cache.seq_rm(seq, p0)
        assert at == (min(p0, history.length) if self.cache.has_seq(seq) else 0)
        if p0 < history.length:
            history.tokens = {p: t for p, t in history.tokens.items() if p < p0}
            history.length = p0
            self.points[seq] = {at for at in self.points.get(seq, ()) if at <= p0}
        self.drop_if_empty(seq)
        self.probe(seq)

    @action(weight=2)
    def let_windows_go(self):
        """Let go at once, as when cells are short, and not by the run."""
        self.cache.end_step()
        self.undo = None
        for layout in self.cache.layouts:
            for seq in self.want:
                layout.let_go(seq, batch=1)
        for seq in self.want:
            self.probe(seq)

    @action(weight=2, pick=PICK, at=PLACE)
    def keep_point(self, pick, at):
        self.keep_point_of(self.picked(pick), at)

    def keep_point_of(self, seq, at):
        if seq not in self.want:
            self.refused(UnknownSequenceError, self.cache.keep_point, seq, 0)
            return
        length = self.place(seq, at)
        if length > self.want[seq].length or not self.may_resume(seq, length):
            self.refused(RewindError, self.cache.keep_point, seq, length)
            return
        self.undo = None
        self.cache.keep_point(seq, length)
        self.points.setdefault(seq, set()).add(length)

    def may_resume(self, seq, length):
        """What the cache answers, once it is shown to be the truth."""
        before = settled(self.cache)
        allowed = before.can_resume(seq, length)
        low = before.resumable_from(seq)
        history = self.want[seq]
        lows = [layout.low(seq) for layout in before.layouts]
        assert allowed == (length <= history.length and self.may_all_resume(seq, length, lows))
        assert before.resume_at(seq, length) == next(
            n
            for n in range(min(length, history.length), -1, -1)
            if self.may_all_resume(seq, n, lows)
        )
        missing = False
        exact_low = 0
        for group, lost in self.lost(before, seq).items():
            window = self.windows[group]
            missing |= any(first_seen(window, length) <= p < length for p in lost)
            if lost:
                clear = (n for n in count(max(lost) + 1) if first_seen(window, n) > max(lost))
                exact_low = max(exact_low, next(clear))
        assert not (allowed and missing), "what it allows, it can serve"
        assert low >= exact_low
        if sorted(history.tokens) == list(range(history.length)):
            assert low == exact_low, "what it refuses, it cannot serve"
        return allowed

    def may_all_resume(self, seq, length, lows):
        """Every group can: from there on, at a point, or where a query sees itself alone."""
        return length in {0, *self.points.get(seq, ())} or all(
            low <= length or first_seen(window, length) == length
            for low, window in zip(lows, self.windows, strict=True)
        )

    @action(weight=3, pick=PICK, a=PLACE, b=PLACE)
    def make_a_hole(self, pick, a, b):
        self.make_a_hole_in(self.picked(pick), a, b)

    def make_a_hole_in(self, seq, a, b):
        if seq not in self.want:
            return
        p0, p1 = sorted((self.place(seq, a), self.place(seq, b)))
        history = self.want[seq]
        if p1 >= history.length:
            return
        self.undo = None
        self.cache.seq_rm(seq, p0, p1)
        history.tokens = {p: t for p, t in history.tokens.items() if not p0 <= p < p1}
        self.drop_if_empty(seq)
        self.probe(seq)

    def drop_if_empty(self, seq):
        if not self.want[seq].tokens and not self.is_kept_empty(seq):
            del self.want[seq]

    def is_kept_empty(self, seq):
        """Where no group keeps all, nobody knows whether what windows passed was removed since."""
        return None not in self.windows and self.cache.has_seq(seq)

    @action(weight=7, pick=PICK, dst=SEQ, a=PLACE, b=PLACE, whole=BOOL, to_end=BOOL)
    def copy(self, pick, dst, a, b, whole, to_end):
        self.copy_seq(self.picked(pick), dst, a, b, whole, to_end)

    def copy_seq(self, src, dst, a, b, whole, to_end):
        if src not in self.want:
            self.refused(UnknownSequenceError, self.cache.seq_cp, src, dst)
            return
        length = self.want[src].length
        p0, p1 = sorted((self.place(src, a), self.place(src, b)))
        p0, p1 = (0 if whole else p0), (None if to_end else p1)
        stop = length if p1 is None else min(p1, length)
        if stop <= p0 or src == dst:
            before = snapshot(settled(self.cache))
            self.undo = None
            self.cache.seq_cp(src, dst, p0, p1)
            assert snapshot(self.cache) == before
            return
        part = {p: t for p, t in self.want[src].tokens.items() if p0 <= p < stop}
        mine = self.want.get(dst, History())
        if not self.may_resume(src, stop):
            self.refused(RewindError, self.cache.seq_cp, src, dst, p0, p1)
            return
        if any(mine.tokens.get(p, t) != t for p, t in part.items()):
            if None in self.windows:  # elsewhere a window may have let go of the proof
                self.refused(SequenceConflictError, self.cache.seq_cp, src, dst, p0, p1)
            return
        free = [pool.n_free for pool in settled(self.cache).cells]
        self.undo = None
        self.cache.seq_cp(src, dst, p0, p1)
        assert [pool.n_free for pool in self.cache.cells] == free, "a copy takes no cells"
        if part:
            mine.tokens |= part
            mine.length = max(mine.length, stop)
            self.want[dst] = mine
        elif self.is_kept_empty(dst):
            assert self.cache.seq_len(dst) in (mine.length, max(mine.length, stop))
            mine.length = self.cache.seq_len(dst)
            self.want[dst] = mine
        self.probe(dst)

    @action(pick=PICK)
    def keep(self, pick):
        self.keep_seq(self.picked(pick))

    def keep_seq(self, seq):
        if seq not in self.want:
            self.refused(UnknownSequenceError, self.cache.seq_keep, seq)
            return
        self.undo = None
        self.cache.seq_keep(seq)
        self.want = {seq: self.want[seq]}

    @action()
    def clear(self):
        self.cache.clear()
        self.want.clear()
        self.held.clear()
        self.undo = None
        assert all(pool.n_free == self.capacity for pool in self.cache.cells)

    # Cells that outlive their sequence, bytes that come back --------------------------------------

    @action(weight=3, pick=PICK, at=PLACE)
    def hold(self, pick, at):
        seq = self.picked(pick)
        if seq in self.want:
            length = min(self.place(seq, at), self.want[seq].length)
            history = self.history_of(seq, length)
            tables = self.cache.seq_table(seq, length)
            for group, window in enumerate(self.windows):
                if window is None:
                    assert np.flatnonzero(tables[group] >= 0).tolist() == sorted(history.tokens)
            if history.tokens:
                self.cache.end_step()  # a step that may be taken back is not to be held
                self.undo = None
                tables = self.cache.seq_table(seq, length)
                self.cache.retain_cells(tables)
                self.held.append(Kept(history, tables))

    def history_of(self, seq, length):
        tokens = {p: t for p, t in self.want[seq].tokens.items() if p < length}
        return History(length, tokens)

    @action(weight=2, which=st.integers(0, 9))
    def let_go(self, which):
        if self.held:
            self.undo = None
            self.cache.release_cells(self.held.pop(which % len(self.held)).tables)

    @action(weight=3, which=st.integers(0, 9), seq=SEQ)
    def begin_on_held_cells(self, which, seq):
        if not self.held:
            return
        held = self.held[which % len(self.held)]
        if self.may_begin(seq, held, self.cache.seq_map):
            free = [pool.n_free for pool in settled(self.cache).cells]
            self.undo = None
            self.cache.seq_map(seq, held.tables)
            assert [pool.n_free for pool in self.cache.cells] == free
            self.want[seq] = copy.deepcopy(held.history)
            self.probe(seq)

    def may_begin(self, seq, source, verb):
        if seq in self.want:
            self.refused(SequenceConflictError, verb, seq, source.tables)
            return False
        for window, table in zip(self.windows, source.tables, strict=True):
            length = source.history.length
            is_due = source.history.tokens if None in self.windows else range(length)
            if any(table[p] < 0 for p in is_due if window and p >= first_seen(window, length)):
                self.refused(RewindError, verb, seq, source.tables)
                return False
        return True

    @action(weight=2, pick=PICK, at=PLACE)
    def save(self, pick, at):
        seq = self.picked(pick)
        if seq in self.want:
            length = min(self.place(seq, at), self.want[seq].length)
            history = self.history_of(seq, length)
            if history.tokens:
                tables = self.cache.seq_table(seq, length)
                self.saved.append(Kept(history, tables))

    @action(weight=2, which=st.integers(0, 9), seq=SEQ)
    def restore_saved(self, which, seq):
        if not self.saved:
            return
        saved = self.saved[which % len(self.saved)]
        if not self.may_begin(seq, saved, self.cache.seq_claim):
            return
        before = settled(self.cache)
        n_cells = [int((table >= 0).sum()) + self.n_pending() for table in saved.tables]
        free = [layout.n_free_later() for layout in before.layouts]
        if any(n > f for n, f in zip(n_cells, free, strict=True)):
            assert self.may_be_full(max(n_cells))
            self.refused(CacheFullError, self.cache.seq_claim, seq, saved.tables)
            return
        self.undo = None
        tables = self.cache.seq_claim(seq, saved.tables)
        tokens = dict(
            zip(saved.history.tokens, self.new_ids(len(saved.history.tokens)), strict=True)
        )
        for layer in range(self.cache.n_layers):
            group = self.cache.group_of(layer)
            here = np.flatnonzero(tables[group] >= 0)
            assert here.tolist() == np.flatnonzero(saved.tables[group] >= 0).tolist()
            self.cache.stored[layer][tables[group][here]] = [tokens[p] for p in here]
        self.want[seq] = History(saved.history.length, tokens)
        self.probe(seq)

    @action(weight=2, seq=SEQ, n=st.sampled_from([0, 1, 20, 100, 5000]))
    def expect(self, seq, n):
        self.cache.expect(seq, n)

    @action(weight=3, first=SEQ, n=st.sampled_from([1, 4, 30, 1000]))
    def compact(self, first, n):
        """Histories of sequences and of holders are copied together; nobody sees a difference."""
        self.cache.end_step()
        self.undo = None
        wanted = [self.cache.seq_table(seq) for seq in sorted(self.want)]
        wanted += [held.tables for held in self.held]
        wanted = wanted[first:] + wanted[:first]
        free = [pool.n_free for pool in self.cache.cells]
        n_runs = [self.n_runs(tables) for tables in wanted]
        done = self.cache.compact(wanted, n)
        assert [pool.n_free for pool in self.cache.cells] == free
        now = [relocated(tables, done.moved) for tables in wanted]
        assert bool(done.n_cells) == any(moved is not None for moved in done.moved)
        if done.n_cells and len(wanted) == 1:
            assert self.n_runs(now[0]) < n_runs[0]
        for held in self.held:
            held.tables = relocated(held.tables, done.moved)
        self.check()
        for seq in sorted(self.want):
            self.probe(seq)

    def n_runs(self, tables):
        return sum(len(runs_of(table[table >= 0])) for table in tables)

    def probe(self, seq):
        """One more token, taken back: what the sequence sees from where it stands now."""
        twin = copy.deepcopy(self.cache)
        if twin.can_extend(1):
            length = self.want[seq].length if seq in self.want else 0
            stretches = [(seq, [length], [-2])]
            assert twin.begin_step([(seq, 1)]) == [length]
            for layer, window in enumerate(twin.layer_windows()):
                assert twin.run_layer(layer, [-2]) == self.expected(stretches, window)

    # What is refused, what is asked ---------------------------------------------------------------

    @action(seq=SEQ, off=st.sampled_from([-1, 1, 5]), n=st.integers(1, 3))
    def forward_at_other_positions(self, seq, off, n):
        self.undo = None
        try:
            positions = self.cache.begin_step([(seq, n)])
        except (CacheFullError, StepError):  # of a tree that awaits its commit
            return
        for wrong in ([p + off for p in positions], [*positions, positions[-1] + 1], []):
            self.refused(PositionError, self.cache.plan, 0, n, wrong)
        self.cache.cancel_step()

    @action()
    def begin_with_nothing(self):
        self.refused(StepError, self.cache.begin_step, [])
        self.refused(UnknownSequenceError, self.cache.begin_step, [(0, 1), (-1, 1)])

    @action(weight=2, n=st.integers(0, 100), seq=SEQ, length=st.integers(-1, 100))
    def questions_change_nothing(self, n, seq, length):
        before = snapshot(self.cache)
        self.ask(n, seq, length)
        assert snapshot(self.cache) == before

    def ask(self, n, seq, length):
        cache = self.cache
        cache.can_extend(n), cache.is_step_open, cache.needs_positions(), cache.usage()
        cache.seq_ids(), self.check(), cache.capacity
        assert cache.n_free <= min(pool.capacity for pool in cache.cells)
        assert cache.can_extend(max(0, cache.n_free)) or cache.n_free < 0
        assert not cache.can_extend(cache.n_free + 1)
        with contextlib.suppress(StepError):  # of a tree that awaits its commit
            cache.can_begin_step([(seq, max(1, n))])
        if cache.has_seq(seq):
            cache.can_resume(seq, length), cache.resumable_from(seq), cache.seq_usage(seq)
            cache.seq_len(seq), cache.seq_table(seq), cache.seq_table(seq, length + 1)
        else:
            for ask in (cache.seq_len, cache.resumable_from, cache.seq_usage):
                with pytest.raises(UnknownSequenceError, match="holds no tokens here; there are:"):
                    ask(seq)

    # What always holds ----------------------------------------------------------------------------

    @invariant()
    def agrees(self):
        cache = self.cache
        self.points = {seq: at for seq, at in self.points.items() if seq in self.want}
        self.check()
        assert sorted(cache.seq_ids()) == sorted(self.want)
        for seq in range(6):
            assert cache.has_seq(seq) == (seq in self.want)
        for seq, history in self.want.items():
            assert cache.seq_len(seq) == history.length
            self.check_cells(seq, history)
        if not cache.is_step_open:
            self.check_usage()

    def check_cells(self, seq, history):
        """Each token is where its sequence says, in every layer; none is missing that is due."""
        for group, pool in enumerate(self.cache.cells):
            window = self.windows[group]
            cells = dict(zip(seq_positions(pool, seq), seq_cells(pool, seq), strict=True))
            held = {p: c for p, c in cells.items() if p < history.length}
            nodes = self.nodes_of(seq)
            assert set(cells) - set(held) == set(nodes) or self.cache.is_step_open
            held |= {p: cells[p] for p in nodes}
            tokens = history.tokens | nodes
            if window is None:
                assert set(held) == set(tokens)
            for p, cell in held.items():
                for layer in self.cache.groups[group].layers:
                    assert self.cache.stored[layer][cell] == tokens[p]

    def nodes_of(self, seq):
        """The proposed nodes that have been through a forward: place -> token."""
        return {}

    def extra_cells(self, group):
        """Cells of a full group that no history accounts for."""
        return 0

    def check_usage(self):
        histories = [*self.want.values(), *(held.history for held in self.held)]
        owners = [t for history in histories for t in history.tokens.values()]
        for group, usage in enumerate(self.cache.usage().groups):
            assert Sight(usage.window, usage.chunk) == sight_of(self.windows[group])
            assert usage.live + usage.free == usage.capacity == self.capacity
            assert usage.live <= usage.n_cells <= self.capacity
            if self.windows[group] is None:
                assert usage.live == len(set(owners)) + self.extra_cells(group)
                assert usage.shared == sum(owners.count(t) > 1 for t in set(owners))


TestSeqCacheAgainstHistories = SeqCacheAgainstHistories.TestCase
TestSeqCacheAgainstHistories.settings = settings(max_examples=2 * settings().max_examples)
