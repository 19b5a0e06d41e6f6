"""The cell pool against dicts and sets, and where it puts things."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcellar.bookkeeping.cells.free_runs import FreeRuns, find_room, take_runs
from kvcellar.bookkeeping.cells.pool import MIN_RUN, BlockPool
from kvcellar.bookkeeping.cells.spans import Span, as_runs, merged, positions_of, without
from kvcellar.errors import CacheFullError, PositionError, SequenceConflictError
from kvcellar.types import Run, cells_of, runs_of
from tests.bookkeeping.actions import ActionMachine, action
from tests.bookkeeping.byte_simulator import cp, snapshot
from tests.bookkeeping.held import seq_cells, seq_positions


class FreeRunsAgainstASet(RuleBasedStateMachine):
    """The oracle: the set of free cells."""

    @initialize(n_cells=st.integers(1, 24))
    def start(self, n_cells):
        self.n_cells = n_cells
        self.free = FreeRuns(n_cells)
        self.want = set(range(n_cells))

    @rule(start=st.integers(0, 23), length=st.integers(1, 24))
    def take(self, start, length):
        cells = set(range(start, start + length))
        if cells <= self.want:
            self.free.take(start, length)
            self.want -= cells

    @rule(start=st.integers(0, 23), length=st.integers(1, 24))
    def give(self, start, length):
        cells = set(range(start, start + length))
        if cells <= set(range(self.n_cells)) - self.want:
            self.free.give(start, length)
            self.want |= cells

    @invariant()
    def agrees(self):
        runs = runs_of(sorted(self.want))
        assert list(self.free) == [(run.start, run.stop) for run in runs]
        assert self.free.n_free == len(self.want)
        assert self.free.high_water == (runs[-1].start if runs else None)
        assert self.free.last_stop == (runs[-1].stop if runs else 0)
        for cell in range(self.n_cells + 1):
            room = next(i for i in range(self.n_cells + 2) if cell + i not in self.want)
            assert self.free.room_at(cell) == room


TestFreeRunsAgainstASet = FreeRunsAgainstASet.TestCase


@pytest.mark.parametrize("start, length", [(3, 2), (5, 1), (2, 3), (7, 2), (0, 8)])
def test_cells_that_are_not_free_cannot_be_taken(start, length):
    free = FreeRuns(8)
    free.take(4, 2)
    with pytest.raises(AssertionError, match="not all free"):
        free.take(start, length)


@pytest.mark.parametrize("start, length", [(0, 1), (3, 2), (5, 2), (4, 4), (3, 1), (6, 2)])
def test_a_cell_that_is_free_cannot_be_given_again(start, length):
    free = FreeRuns(8)
    free.take(4, 2)
    with pytest.raises(AssertionError, match="free already"):
        free.give(start, length)


SEQ = st.integers(0, 3)
PICK = st.integers(0, 9)
"""A sequence, most often one that is there: see ``picked``."""
PLACE = st.integers(0, 40)
"""A position in a sequence of any length: taken modulo the length and a little more."""


class CellPoolAgainstDicts(ActionMachine):
    """The oracle: one dict per sequence, position -> cell, and one list of cells per holder."""

    @initialize(
        capacity=st.sampled_from([1, 5, 24, 40]),
        min_run=st.sampled_from([1, 2, 5, MIN_RUN]),
        reuse_first=st.booleans(),
    )
    def start(self, capacity, min_run, reuse_first):
        self.capacity = capacity
        self.pool = BlockPool(capacity, min_run=min_run, reuse_first=reuse_first)
        self.want: dict[int, dict[int, int]] = {}
        self.held: list[list[Run]] = []

    def taken(self):
        held = {cell for runs in self.held for cell in cells_of(runs).tolist()}
        return held.union(*(cells.values() for cells in self.want.values()))

    def picked(self, draw):
        there = sorted(self.want)
        return there[draw % len(there)] if there and draw < 9 else draw % 4

    def range_of(self, seq, a, b, to_end):
        """p0 and p1 as a caller gives them, most often inside of the sequence; what p1 means."""
        n = max(self.want.get(seq, {}), default=0) + 4
        p0, p1 = a % n - 1, None if to_end else b % n
        if a > 32:
            p0 = 0
        return p0, p1, 10**9 if p1 is None else p1

    def refused(self, error, verb, *args):
        before = snapshot(self.pool)
        with pytest.raises(error):
            verb(*args)
        assert snapshot(self.pool) == before

    @action(weight=12, seq=SEQ, gap=st.sampled_from([0, 0, 0, 2]), n=st.integers(0, 12))
    def claim(self, seq, gap, n):
        cells = self.want.get(seq, {})
        first = max(cells, default=-1) + 1 + gap
        if n > self.capacity - len(self.taken()):
            self.refused(CacheFullError, self.pool.claim, seq, first, n)
            return
        before = self.taken()
        new = cells_of(self.pool.claim(seq, first, n)).tolist()
        assert len(set(new)) == n and not set(new) & before
        assert set(new) <= set(range(self.capacity))
        if n:
            self.want[seq] = cells | dict(zip(range(first, first + n), new, strict=True))

    @action(seq=SEQ, back=st.integers(1, 4))
    def claim_a_position_that_is_held(self, seq, back):
        first = max(self.want.get(seq, {}), default=-1) + 1 - back
        if first >= 0:
            self.refused(PositionError, self.pool.claim, seq, first, 1)

    @action(weight=3, pick=PICK, a=PLACE, b=PLACE, to_end=st.booleans())
    def retain_what_a_sequence_holds(self, pick, a, b, to_end):
        seq = self.picked(pick)
        p0, p1, _ = self.range_of(seq, a, b, to_end)
        runs = list(self.pool.runs(seq, p0, p1))
        if runs:
            self.pool.retain(runs)
            self.held.append(runs)

    @action(weight=3, which=st.integers(0, 9))
    def release(self, which):
        if self.held:
            self.pool.release(self.held.pop(which % len(self.held)))

    @action(weight=6, pick=PICK, dst=SEQ, a=PLACE, b=PLACE, to_end=st.booleans())
    def seq_cp(self, pick, dst, a, b, to_end):
        src = self.picked(pick)
        p0, p1, end = self.range_of(src, a, b, to_end)
        part = {p: c for p, c in self.want.get(src, {}).items() if p0 <= p < end}
        mine = self.want.get(dst, {})
        if any(mine.get(p, c) != c for p, c in part.items()):
            self.refused(SequenceConflictError, cp, self.pool, src, dst, p0, p1)
        else:
            cp(self.pool, src, dst, p0, p1)
            if part:
                self.want[dst] = mine | part

    @action(weight=5, pick=PICK, a=PLACE, b=PLACE, to_end=st.booleans())
    def seq_rm(self, pick, a, b, to_end):
        seq = self.picked(pick)
        p0, p1, end = self.range_of(seq, a, b, to_end)
        self.pool.seq_rm(seq, p0, p1)
        left = {p: c for p, c in self.want.pop(seq, {}).items() if not p0 <= p < end}
        if left:
            self.want[seq] = left

    @action()
    def clear(self):
        self.pool.clear()
        self.want.clear()
        self.held.clear()

    @action(weight=2, pick=PICK, a=PLACE, b=PLACE, to_end=st.booleans())
    def reads_by_range(self, pick, a, b, to_end):
        seq = self.picked(pick)
        p0, p1, end = self.range_of(seq, a, b, to_end)
        part = {p: c for p, c in self.want.get(seq, {}).items() if p0 <= p < end}
        assert seq_positions(self.pool, seq, p0, p1) == sorted(part)
        assert cells_of(self.pool.runs(seq, p0, p1)).tolist() == [part[p] for p in sorted(part)]

    @invariant()
    def agrees(self):
        held = [cell for runs in self.held for cell in cells_of(runs).tolist()]
        self.pool.check(held)
        assert sorted(self.pool.seq_ids()) == sorted(self.want)
        owners = list(held)
        for seq in range(4):
            want = self.want.get(seq, {})
            assert seq_cells(self.pool, seq) == [want[p] for p in sorted(want)]
            owners += want.values()
            top = max(want, default=-1)
            hole = max((p for p in range(top) if p not in want), default=-1)
            assert self.pool.retained_from(seq) == hole + 1
        for seq, want in self.want.items():
            assert self.pool.n_shared(seq) == sum(owners.count(c) > 1 for c in want.values())
            spans = self.pool.spans(seq)
            assert all(a.stop < b.pos or a.cell + a.length != b.cell for a, b in pairwise(spans)), (
                "spans that continue each other are joined"
            )
        taken = self.taken()
        assert self.pool.n_free == self.capacity - len(taken)
        assert self.pool.n_cells == max(taken, default=-1) + 1


TestCellPoolAgainstDicts = CellPoolAgainstDicts.TestCase
TestCellPoolAgainstDicts.settings = settings(max_examples=2 * settings().max_examples)


# Where cells are handed out -----------------------------------------------------------------------


@dataclass
class How:
    """Preferences, as a pool has them."""

    min_blocks: int = 1
    reuse_first: bool = False
    tails: dict[int, int] = field(default_factory=dict)

    def gaps(self):
        return self.tails


def in_three_parts():
    """Free are [10, 20), [30, 60) and [70, 100)."""
    free = FreeRuns(100)
    for start in (0, 20, 60):
        free.take(start, 10)
    return free


@pytest.mark.parametrize(
    "how, n, after, found",
    [
        (How(), 10, None, (10, 10)),
        (How(), 11, None, (30, 30)),
        (How(11), 1, None, (30, 30)),
        (How(), 31, None, (30, 30)),  # none has so much room: the first of the largest
        (How(tails={10: 4}), 6, None, (14, 6)),
        (How(tails={10: 4}), 7, None, (30, 30)),
        (How(tails={10: 40}), 5, None, (15, 5)),  # at most half of it is left free
        (How(tails={30: 1}), 31, None, (70, 30)),
        (How(), 50, 10, (10, 10)),  # a sequence goes on where it ended
        (How(tails={10: 4}), 50, 10, (10, 10)),
        (How(), 1, 55, (55, 5)),
        (How(), 1, 75, (75, 25)),
        (How(), 1, 0, (10, 10)),
        (How(reuse_first=True), 50, 30, (30, 30)),
        (How(reuse_first=True), 5, 70, (10, 10)),  # where nothing was used yet, it does not
        (How(reuse_first=True), 5, 75, (10, 10)),
        (How(reuse_first=True), 31, 75, (75, 25)),  # unless there is no room elsewhere
        (How(reuse_first=True, tails={30: 9, 70: 9}), 30, 70, (70, 30)),  # its own tail
    ],
)
def test_a_run_goes_where_its_sequence_ended_or_first_has_room(how, n, after, found):
    assert find_room(in_three_parts(), how, n, after) == found


@pytest.mark.parametrize(
    "n, after, wanted, runs",
    [
        (0, None, 0, []),
        (12, None, 0, [Run(30, 12)]),
        (5, None, 20, [Run(30, 5)]),  # it will take more in the end
        (35, None, 0, [Run(30, 30), Run(10, 5)]),
        (35, None, 41, [Run(30, 30), Run(70, 5)]),
        (35, None, 40, [Run(30, 30), Run(10, 5)]),
        (4, 17, 0, [Run(17, 3), Run(10, 1)]),
        (70, None, 0, [Run(30, 30), Run(70, 30), Run(10, 10)]),
    ],
)
def test_runs_are_few_and_have_room_for_what_is_wanted_in_the_end(n, after, wanted, runs):
    free = in_three_parts()
    assert take_runs(free, How(), n, after, wanted) == runs
    assert free.n_free == 70 - n


@pytest.mark.parametrize(
    "size, n, expected, gap",
    [
        *((1, 20, None, 64), (1, 1000, None, 500), (1, 9000, None, 2048), (1, 20, 300, 280)),
        *((1, 20, 10, 64), (16, 20, None, 4), (16, 1000, None, 31), (16, 9000, None, 128)),
        *((16, 20, 1000, 61), (4096, 9000, None, 1)),
    ],
)
def test_a_tail_is_left_what_it_is_expected_to_need_or_half_of_what_it_has(size, n, expected, gap):
    pool = BlockPool(12288, size)
    pool.expect(5, expected)
    pool.claim(5, 0, n)
    assert pool.gaps() == {-(-n // size): gap}


def test_what_a_sequence_has_let_go_of_says_nothing_of_what_it_will_need():
    pool = BlockPool(4000)
    pool.claim(0, 0, 1000)
    pool.seq_rm(0, 0, 600)
    assert pool.gaps() == {1000: 200}


@pytest.mark.parametrize("reuse_first", [False, True])
def test_a_fresh_pool_hands_out_cells_in_ascending_order(reuse_first):
    pool = BlockPool(1000, reuse_first=reuse_first)
    for p in range(0, 1000, 10):
        assert pool.claim(7, p, 10) == [Run(p, 10)]
    assert pool.spans(7) == [Span(0, 0, 1000)]


def test_a_new_run_starts_at_the_lowest_free_cells_that_have_room():
    pool = BlockPool(1000, min_run=10)
    pool.claim(0, 0, 300)
    pool.seq_rm(0, 50, 55)  # room for 5
    pool.seq_rm(0, 100, 120)  # room for 20
    pool.seq_rm(0, 200, 250)  # room for 50
    assert pool.claim(1, 0, 12) == [Run(100, 12)]
    assert pool.claim(2, 0, 40) == [Run(200, 40)]


def test_a_sequence_goes_on_where_it_ended_while_it_can():
    pool = BlockPool(1000, min_run=10)
    pool.claim(0, 0, 20)
    pool.claim(1, 0, 20)
    assert pool.claim(0, 20, 5) == [Run(20, 5)]
    assert pool.spans(0) == [Span(0, 0, 25)]


def test_a_new_sequence_leaves_room_behind_the_others():
    pool = BlockPool(1000)
    pool.claim(0, 0, 20)
    assert pool.claim(1, 0, 20) == [Run(20 + MIN_RUN, 20)]


def test_a_sequence_that_is_expected_to_grow_starts_where_it_has_room_and_is_left_room():
    pool = BlockPool(2000, min_run=10)
    pool.claim(0, 0, 900)
    pool.seq_rm(0, 100, 160)  # room for 60
    pool.seq_rm(0, 300, 700)  # room for 400
    pool.expect(1, 300)
    assert pool.claim(1, 0, 20) == [Run(300, 20)]
    assert pool.claim(2, 0, 70) == [Run(510, 70)], "half of what the first may need is left"
    pool.expect(1, None)
    assert pool.claim(3, 0, 70) == [Run(330, 70)], "ten are"


def test_a_pool_gathers_what_fits():
    pool = BlockPool(100, min_run=1)
    pool.claim(0, 0, 60)
    for p in range(1, 60, 3):
        pool.seq_rm(0, p, p + 1)
    cells = np.array(seq_cells(pool, 0))
    assert len(cells) == 40 and pool.place_for(cells[:1]) is None, "one run is not gathered"
    whole = pool.place_for(cells)
    assert (whole.base, len(whole.src_cells)) == (60, 40)
    later = pool.place_for(cells[1:])
    assert (later.base, later.src_cells.tolist()) == (60, cells[1:].tolist())
    pool.claim(1, 0, 20)
    part = pool.place_for(cells)
    assert part.base == 60 and len(part.src_cells) == 19, "a run is not cut in two"
    pool.claim(2, 0, pool.n_free)
    assert pool.place_for(cells) is None


def test_spans_are_joined_where_positions_and_cells_go_on_and_are_clipped_by_position():
    first = Span(3, 5, 2)
    for after, want in (
        (Span(5, 7, 1), [Span(3, 5, 3)]),
        (Span(5, 3, 1), [first, Span(5, 3, 1)]),
        (Span(6, 7, 1), [first, Span(6, 7, 1)]),
        (Span(5, 8, 1), [first, Span(5, 8, 1)]),
    ):
        assert merged([first, after]) == want
    assert first.clip(0, 9) == first and first.clip(4, 9) == (4, 6, 1) and first.clip(0, 4)[2] == 1
    assert first.clip(5, 9).length <= 0
    assert without([Span(0, 10, 9), Span(20, 5, 2)], 3, 5) == [(0, 10, 3), (5, 15, 4), (20, 5, 2)]
    assert without([Span(0, 10, 3), Span(3, 20, 3)], 0, 4) == [(4, 21, 2)]
    assert as_runs([first]) == (Run(5, 2),) and as_runs([]) == ()
    assert as_runs([first, Span(9, 7, 1), Span(20, 0, 2)]) == (Run(5, 3), Run(0, 2))
    assert positions_of([first, Span(9, 7, 1)]).tolist() == [3, 4, 9]
    assert positions_of([]).tolist() == []


def test_a_pool_knows_where_a_sequence_begins_and_ends():
    pool = BlockPool(100)
    assert pool.first_pos(0) is None and pool.retained_from(0) == 0 and pool.spans(0) == []
    pool.claim(0, 5, 10)
    pool.seq_rm(0, 7, 9)
    assert (pool.first_pos(0), pool.retained_from(0), pool.retained_from(0, 7)) == (5, 9, 5)
    assert pool.retained_from(0, 20) == 20, "there is nothing at 19"


def test_a_full_pool_hands_out_the_gaps_behind_tails_too():
    pool = BlockPool(100)
    pool.claim(0, 0, 20)
    pool.claim(1, 0, 80)
    assert pool.n_free == 0
    assert sorted(seq_cells(pool, 0) + seq_cells(pool, 1)) == list(range(100))


def test_eight_sequences_that_decode_side_by_side_stay_in_few_runs():
    pool = BlockPool(16_384)
    for p in range(500):
        for seq in range(8):
            pool.claim(seq, p, 1)
    n_runs = [len(pool.runs(seq)) for seq in range(8)]
    assert max(n_runs) <= 10, n_runs
    assert pool.n_cells <= 1.5 * 8 * 500


def test_eight_prefilled_sequences_that_decode_side_by_side_stay_in_few_runs():
    pool = BlockPool(8 * 4096 + 8 * 1024)
    for seq in range(8):
        pool.claim(seq, 0, 4096)
    for p in range(4096, 4596):
        for seq in range(8):
            pool.claim(seq, p, 1)
    assert max(len(pool.spans(seq)) for seq in range(8)) <= 10


def test_forks_of_one_trunk_that_decode_side_by_side_stay_in_few_runs():
    pool = BlockPool(8192)
    pool.claim(0, 0, 1000)
    for fork in range(1, 8):
        cp(pool, 0, fork)
    for p in range(1000, 1500):
        for seq in range(8):
            pool.claim(seq, p, 1)
    assert max(len(pool.spans(seq)) for seq in range(8)) <= 11
    assert pool.capacity - pool.n_free == 1000 + 8 * 500


def test_a_fork_of_32k_tokens_is_one_span_and_moves_nothing():
    pool = BlockPool(40_000)
    pool.claim(0, 0, 32_768)
    refs = pool.refs.copy()
    cp(pool, 0, 1)
    assert pool.spans(1) == [Span(0, 0, 32_768)]
    assert pool.n_free == 40_000 - 32_768
    assert np.array_equal(pool.refs, refs + (refs > 0))


def test_a_cell_lives_until_its_last_owner_lets_go():
    pool = BlockPool(8)
    runs = pool.claim(0, 0, 3)
    cp(pool, 0, 1)
    pool.retain(runs)
    pool.seq_rm(0)
    pool.seq_rm(1)
    assert pool.n_free == 5
    pool.check([0, 1, 2])
    pool.release(runs)
    assert pool.n_free == 8
    pool.check()


def test_of_one_run_only_the_cells_without_an_owner_come_free():
    pool = BlockPool(12)
    pool.claim(0, 0, 10)
    cp(pool, 0, 1, 2, 4)
    cp(pool, 0, 2, 7, 8)
    pool.seq_rm(0)
    pool.check()
    assert (pool.refs > 0).nonzero()[0].tolist() == [2, 3, 7]
    assert pool.n_free == 9


def test_more_sequences_than_64_share_one_trunk():
    pool = BlockPool(16)
    pool.claim(0, 0, 10)
    for seq in range(1, 200):
        cp(pool, 0, seq)
    pool.seq_rm(0)
    assert seq_cells(pool, 199) == list(range(10))
    for seq in range(1, 199):
        pool.seq_rm(seq)
    assert pool.n_free == 6
    pool.check()


def test_the_error_of_a_full_pool_says_what_was_asked_what_was_there_and_the_way_out():
    pool = BlockPool(8)
    pool.claim(0, 0, 6)
    with pytest.raises(CacheFullError) as full:
        pool.claim(1, 0, 4)
    assert str(full.value) == (
        "step needs 4 cells, 2 free of 8; release a sequence or raise capacity"
    )


@pytest.mark.parametrize("first", [0, 4, 5])
def test_a_position_that_is_held_cannot_be_claimed_again(first):
    pool = BlockPool(16)
    pool.claim(0, 0, 6)
    before = snapshot(pool)
    with pytest.raises(PositionError) as info:
        pool.claim(0, first, 2)
    assert str(info.value) == (
        f"sequence 0 holds positions up to 5; asked to claim {first}; remove the tail with seq_rm "
        f"first"
    )
    assert snapshot(pool) == before


def test_the_error_of_a_conflict_names_the_sequence_and_the_positions():
    pool = BlockPool(8)
    pool.claim(0, 0, 3)
    pool.claim(1, 0, 2)
    with pytest.raises(SequenceConflictError, match=r"sequence 1 .* \[0, 2\); seq_rm"):
        cp(pool, 0, 1)
