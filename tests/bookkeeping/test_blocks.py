"""Blocks against dicts: who holds which, when one is copied, what fits, and what the bytes say."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvcellar.bookkeeping.cells.pool import MIN_RUN, BlockPool
from kvcellar.bookkeeping.cells.spans import Span, spans_of
from kvcellar.errors import (
    CacheFullError,
    ConfigError,
    PositionError,
    RewindError,
    SequenceConflictError,
    UnknownSequenceError,
)
from kvcellar.sight import Sight
from kvcellar.types import Run, cells_of, runs_of
from tests.bookkeeping.actions import ActionMachine, action
from tests.bookkeeping.byte_simulator import (
    SimulatedPaged,
    SimulatedSeq,
    config_of,
    cp,
    first_seen,
    settled,
    sight_of,
    snapshot,
)
from tests.bookkeeping.held import block_table, seq_cells, seq_positions
from tests.bookkeeping.test_sequences import (
    BOOL,
    END,
    PICK,
    PLACE,
    SEQ,
    SLACK,
    STRETCH,
    WINDOWS,
    History,
    SeqCacheAgainstHistories,
)
from tests.bookkeeping.test_tree import TreeCacheAgainstHistories
from tests.stretches import stretches as stretches_of

POS = st.integers(0, 30)
STOP = st.none() | st.integers(0, 30)


class BlocksAgainstDicts(ActionMachine):
    """The oracle: position -> (cell, token) per sequence, the cells of holders, bytes by cell."""

    @initialize(
        capacity=st.sampled_from([5, 24, 41]),
        size=st.sampled_from([1, 2, 4, 5]),
        min_run=st.sampled_from([1, 6, MIN_RUN]),
        reuse_first=st.booleans(),
    )
    def start(self, capacity, size, min_run, reuse_first):
        self.size = size
        self.pool = BlockPool(capacity, size, min_run=min_run, reuse_first=reuse_first)
        self.n_blocks = capacity // size
        assert self.pool.capacity == self.n_blocks * size <= capacity
        self.want: dict[int, dict[int, tuple[int, int]]] = {}
        self.held: list[list[Run]] = []
        self.bytes = np.full(self.pool.capacity, -1)
        self.n_tokens = 0

    # The oracle's own words -----------------------------------------------------------------------

    def cells(self, seq):
        return {p: cell for p, (cell, _) in self.want.get(seq, {}).items()}

    def n_owners(self):
        """Block -> cells of it that somebody owns, once per owner: its reference count."""
        cells = [cell for seq in self.want for cell in self.cells(seq).values()]
        cells += [cell for runs in self.held for cell in cells_of(runs).tolist()]
        return Counter(cell // self.size for cell in cells)

    def free(self):
        return set(range(self.n_blocks)) - set(self.n_owners())

    def part(self, seq, pos):
        """What the sequence has of the block that ``pos`` lives in: position -> cell."""
        return {p: c for p, c in self.cells(seq).items() if p // self.size == pos // self.size}

    def is_shared(self, seq, pos):
        part = self.part(seq, pos)
        return bool(part) and self.n_owners()[next(iter(part.values())) // self.size] > len(part)

    def move(self, moves):
        for base, src_cells in moves:
            self.bytes[base : base + len(src_cells)] = self.bytes[src_cells].copy()

    def relocate(self, seq, positions, block):
        for p in positions:
            self.want[seq][p] = (block * self.size + p % self.size, self.want[seq][p][1])

    def refused(self, error, verb, *args):
        before = snapshot(self.pool)
        with pytest.raises(error):
            verb(*args)
        assert snapshot(self.pool) == before

    # Growing --------------------------------------------------------------------------------------

    @action(weight=6, seq=SEQ, gap=st.sampled_from([0, 0, 0, 2, 7]), n=st.integers(1, 12))
    def append(self, seq, gap, n):
        """Append as a step does: first an own block, then cells."""
        first = max(self.cells(seq), default=-1) + 1 + gap
        free = self.free()
        needed = len({p // self.size for p in range(first, first + n)})
        needed -= bool(self.part(seq, first))
        is_shared = self.is_shared(seq, first)
        assert self.pool.n_blocks_needed({seq: (first, n)}) == needed + is_shared
        if needed + is_shared > len(free):
            if not is_shared:
                self.refused(CacheFullError, self.pool.claim, seq, first, n)
            elif not free:
                self.refused(CacheFullError, self.pool.unshare, seq, first)
            return
        self.unshare(seq, first)
        old = {p // self.size: c // self.size for p, c in self.part(seq, first).items()}
        free = self.free()
        new = cells_of(self.pool.claim(seq, first, n)).tolist()
        assert len(new) == n
        for p, cell in zip(range(first, first + n), new, strict=True):
            block = cell // self.size
            assert cell % self.size == p % self.size
            assert old.setdefault(p // self.size, block) == block
            assert block in free or p // self.size == first // self.size
            self.bytes[cell] = self.n_tokens
            self.want.setdefault(seq, {})[p] = (cell, self.n_tokens)
            self.n_tokens += 1

    @action(seq=SEQ, pos=POS)
    def unshare(self, seq, pos):
        part, free = self.part(seq, pos), self.free()
        if self.is_shared(seq, pos) and not free:
            self.refused(CacheFullError, self.pool.unshare, seq, pos)
            return
        was_shared = self.is_shared(seq, pos)
        made = self.pool.unshare(seq, pos)
        assert (made is not None) == was_shared, "only what somebody else holds is copied"
        if made is not None:
            assert made.dst_block in free
            assert made.src_block == next(iter(part.values())) // self.size
            self.move([made.move])
            self.relocate(seq, part, made.dst_block)

    @action(weight=2, seq=SEQ, pos=POS)
    def unshare_and_take_back(self, seq, pos):
        if self.is_shared(seq, pos) and self.free():
            before = self.snapshot_of_owners()
            made = self.pool.unshare(seq, pos)
            self.pool.take_back(made)
            assert self.snapshot_of_owners() == before

    def snapshot_of_owners(self):
        pool = copy.deepcopy(self.pool)
        pool._token = None
        return snapshot(pool)

    @action(seq=SEQ, back=st.integers(1, 4))
    def claim_a_position_that_is_held(self, seq, back):
        first = max(self.cells(seq), default=-1) + 1 - back
        if first >= 0:
            self.refused(PositionError, self.pool.claim, seq, first, 1)

    @action()
    def claim_nothing(self):
        assert self.pool.claim(9, 3, 0) == []
        assert 9 not in self.pool.seq_ids()

    # Sharing --------------------------------------------------------------------------------------

    @action(weight=4, src=SEQ, dst=SEQ, p0=POS, p1=STOP)
    def seq_cp(self, src, dst, p0, p1):
        stop = 99 if p1 is None else p1
        theirs = {p: x for p, x in self.want.get(src, {}).items() if p0 <= p < stop}
        mine = self.want.get(dst, {})
        if src == dst:
            return
        if any(p in mine and mine[p][1] != token for p, (_, token) in theirs.items()):
            self.refused(SequenceConflictError, self.pool.shareable, src, dst, p0, p1)
            return
        new = {p: x for p, x in theirs.items() if p not in mine}
        joints = {
            p // self.size
            for p, (cell, _) in new.items()
            if self.part(dst, p)
            and cell // self.size not in {c // self.size for c in self.part(dst, p).values()}
        }
        in_need = {i for i in joints if self.is_shared(dst, i * self.size)}
        parts = self.pool.shareable(src, dst, p0, p1)
        assert self.pool.n_joints(dst, parts) == len(in_need)
        if len(in_need) > len(self.free()):
            return
        n_free = len(self.free())
        moves = self.pool.share(dst, parts)
        assert bool(moves) == bool(joints), "bytes move only to join blocks"
        self.move(moves)
        if new:
            mine = self.want.setdefault(dst, {})
            tokens = {p: token for p, (_, token) in (mine | new).items()}
            found = dict(zip(seq_positions(self.pool, dst), seq_cells(self.pool, dst), strict=True))
            assert set(found) == set(tokens)
            for p, cell in found.items():
                if p // self.size not in joints:
                    assert cell == (mine | new)[p][0]
            self.want[dst] = {p: (found[p], tokens[p]) for p in found}
        assert len(self.free()) == n_free - len(in_need)

    @action(weight=3, seq=SEQ, p0=POS, p1=STOP)
    def seq_rm(self, seq, p0, p1):
        self.pool.seq_rm(seq, p0, p1)
        stop = 99 if p1 is None else p1
        left = {p: x for p, x in self.want.get(seq, {}).items() if not p0 <= p < stop}
        self.want.pop(seq, None)
        if left:
            self.want[seq] = left

    @action(weight=4, src=SEQ, dst=SEQ, cut=POS, ns=st.tuples(*[st.integers(0, 3)] * 2))
    def fork_and_grow(self, src, dst, cut, ns):
        """What happens most: a trunk, a fork somewhere, and both go on."""
        if src != dst:
            self.append(src, 0, 6)
            self.seq_rm(dst, 0, None)
            self.seq_cp(src, dst, 0, cut)
            for seq, n in zip((src, dst), ns, strict=True):
                if n:
                    self.append(seq, 0, n)

    @action(weight=2, src=SEQ, dst=SEQ, n=st.integers(1, 9), gap=st.integers(0, 2))
    def graft(self, src, dst, n, gap):
        """A sequence of its own, continued by a part of another."""
        if src != dst:
            self.seq_rm(dst, 0, None)
            self.append(dst, 0, n)
            self.seq_cp(src, dst, n + gap, None)

    @action(weight=2, seq=SEQ, p0=POS, p1=STOP)
    def retain(self, seq, p0, p1):
        runs = list(self.pool.runs(seq, p0, p1))
        if runs:
            self.pool.retain(runs)
            self.held.append(runs)

    @action(weight=2, which=st.integers(0, 9), at=st.integers(0, 12))
    def release_some(self, which, at):
        """Holders let go of any of their cells, in any order."""
        if self.held:
            cells = cells_of(self.held.pop(which % len(self.held))).tolist()
            kept = cells[: at % (len(cells) + 1)]
            self.pool.release(runs_of(cells[len(kept) :]))
            if kept:
                self.held.append(runs_of(kept))

    @action()
    def clear(self):
        self.pool.clear()
        self.want.clear()
        self.held.clear()

    # What is asked, what always holds -------------------------------------------------------------

    @action(weight=2, draws=st.dictionaries(SEQ, st.integers(1, 12), min_size=1))
    def a_batch_needs_what_it_then_takes(self, draws):
        pool = copy.deepcopy(self.pool)
        appends = {s: (max(self.cells(s), default=-1) + 1, n) for s, n in draws.items()}
        needed, n_free = pool.n_blocks_needed(appends), pool.n_free_blocks
        if needed > n_free:
            return
        for seq, (first, n) in appends.items():
            pool.unshare(seq, first)
            pool.claim(seq, first, n)
        assert n_free - pool.n_free_blocks == needed

    @invariant()
    def agrees(self):
        self.pool.check([cell for runs in self.held for cell in cells_of(runs).tolist()])
        assert sorted(self.pool.seq_ids()) == sorted(self.want)
        owners = self.n_owners()
        assert self.pool.n_free_blocks == self.n_blocks - len(owners)
        assert self.pool.n_free == self.pool.n_free_blocks * self.size
        assert self.pool.n_cells == (max(owners, default=-1) + 1) * self.size
        for seq in range(6):
            cells = self.cells(seq)
            assert seq_positions(self.pool, seq) == sorted(cells)
            assert seq_cells(self.pool, seq) == [cells[p] for p in sorted(cells)]
            for cell, token in self.want.get(seq, {}).values():
                assert self.bytes[cell] == token
            table = [-1] * (max(cells, default=-1) // self.size + 1)
            for p, cell in cells.items():
                assert table[p // self.size] in (-1, cell // self.size)
                table[p // self.size] = cell // self.size
            assert block_table(self.pool, seq) == table


TestBlocksAgainstDicts = BlocksAgainstDicts.TestCase
TestBlocksAgainstDicts.settings = settings(max_examples=2 * settings().max_examples)


def test_blocks_that_follow_each_other_are_one_run():
    pool = BlockPool(64, 4)
    pool.claim(0, 0, 6)
    pool.claim(0, 6, 7)
    assert pool.runs(0) == (Run(0, 13),)
    assert block_table(pool, 0) == [0, 1, 2, 3]


def test_sequences_that_decode_side_by_side_stay_in_long_runs():
    pool = BlockPool(4096, 16)
    for _ in range(200):
        for seq in range(4):
            pool.claim(seq, len(seq_cells(pool, seq)), 1)
    assert all(len(pool.runs(seq)) <= 3 for seq in range(4))


def test_a_window_goes_back_to_blocks_that_were_used_before():
    pool = BlockPool(4096, 16, reuse_first=True)
    for p in range(3000):
        pool.claim(0, p, 1)
        pool.seq_rm(0, 0, (p - 100) // 16 * 16)
    assert pool.n_cells <= 512


def test_a_new_sequence_leaves_room_behind_the_one_before():
    pool = BlockPool(4096, 16)
    pool.claim(0, 0, 500)
    pool.claim(1, 0, 10)
    assert block_table(pool, 1) == [32 + 500 // 2 // 16]
    pool.claim(0, 500, 12 + 15 * 16)
    assert pool.runs(0) == (Run(0, 752),)


def test_all_blocks_that_nobody_holds_any_more_are_freed():
    pool = BlockPool(64, 4)
    pool.claim(0, 0, 12)
    pool.retain([Run(5, 2)])
    pool.seq_rm(0)
    assert pool.n_free_blocks == 15
    pool.release([Run(5, 1)])
    assert pool.n_free_blocks == 15
    pool.release([Run(6, 1)])
    assert pool.n_free_blocks == 16


def test_a_part_that_joins_a_sequence_s_own_block_takes_no_other():
    pool = BlockPool(12, 4)
    pool.claim(0, 0, 6)
    pool.claim(1, 4, 1)
    assert pool.n_free_blocks == 0
    ((base, src_cells),) = cp(pool, 0, 1, 5)
    assert (base, src_cells.tolist()) == (9, [5])
    assert block_table(pool, 1) == [-1, 2]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tokens_that_were_computed_apart_are_others(size):
    pool = BlockPool(24, size)
    for seq in (0, 1):
        pool.claim(seq, 0, 3)
    with pytest.raises(SequenceConflictError):
        pool.shareable(0, 1)
    pool.claim(2, 0, 4)
    pool.claim(0, 3, 1)
    pool.claim(3, 0, 4)
    for seq in (1, 2, 3):
        for p in range(3 if seq == 1 else 4):
            with pytest.raises(SequenceConflictError):
                pool.shareable(0, seq, p, p + 1)


def test_the_rest_of_a_block_that_is_shared_already_is_not_copied():
    pool = BlockPool(32, 4)
    pool.claim(0, 0, 7)
    for p0, p1 in ((0, 5), (5, 6), (6, 7)):
        part = pool.shareable(0, 1, p0, p1)
        assert pool.n_joints(1, part) == 0 and pool.share(1, part) == []
    assert block_table(pool, 1) == block_table(pool, 0)


def test_a_fork_shares_the_partial_block_until_one_of_the_two_appends():
    pool = BlockPool(32, 4)
    pool.claim(0, 0, 6)
    assert cp(pool, 0, 1) == []
    assert block_table(pool, 1) == block_table(pool, 0) == [0, 1]
    made = pool.unshare(1, 6)
    assert made is not None and made.src_block == 1 and made.dst_block not in (0, 1)
    assert made.move.base == 4 * made.dst_block and made.move.src_cells.tolist() == [4, 5]
    assert block_table(pool, 1) == [0, made.dst_block]
    assert pool.unshare(0, 6) is None, "the last one keeps the block"
    assert pool.unshare(1, 6) is None
    assert pool.unshare(0, 8) is None, "no block is there yet"


def test_a_full_block_is_never_copied():
    pool = BlockPool(32, 4)
    pool.claim(0, 0, 8)
    cp(pool, 0, 1)
    assert pool.unshare(0, 8) is None
    assert pool.n_blocks_needed({0: (8, 1), 1: (8, 1)}) == 2


def test_copies_of_one_token_are_no_conflict_and_other_tokens_are():
    pool = BlockPool(32, 4)
    pool.claim(0, 0, 6)
    cp(pool, 0, 1)
    pool.unshare(1, 6)
    before = seq_cells(pool, 1)
    assert cp(pool, 0, 1) == []
    assert seq_cells(pool, 1) == before
    pool.claim(0, 6, 1)
    pool.claim(1, 6, 1)
    with pytest.raises(SequenceConflictError, match=r"positions \[4, 7\)"):
        cp(pool, 0, 1)


def test_cells_of_other_positions_are_not_shared():
    with pytest.raises(AssertionError, match="other positions"):
        BlockPool(32, 4).share(0, [Span(1, 8, 2)])


# The cache ----------------------------------------------------------------------------------------


class PagedCacheAgainstHistories(SeqCacheAgainstHistories):
    """All of the sequence cache's rules, with exact admission by blocks.

    The oracle of admission walks the batch token by token over plain dicts: it looks up the block,
    copies it if anybody else holds it, takes a new one where there is none, and counts.
    """

    @initialize(
        windows=WINDOWS,
        n_blocks=st.sampled_from([1, 3, 7, 20, 60]),
        size=st.sampled_from([1, 2, 3, 4, 16]),
        rest=st.integers(0, 2),
        slack=SLACK,
    )
    def start(self, windows, n_blocks, size, rest, slack):
        super().start(windows, n_blocks * size, slack)
        self.size, self.n_blocks = size, n_blocks
        config = config_of(windows, n_blocks * size + min(rest, size - 1), slack)
        self.cache = SimulatedPaged(replace(config, block_size=size))
        assert self.cache.capacity == self.capacity
        self.windows_let_go = False

    # The oracle of admission ----------------------------------------------------------------------

    def owners(self, cache, group, let_go=True):
        """Per sequence, position -> cell; with ``let_go`` only what windows have not passed."""
        pool, window = cache.cells[group], self.windows[group]
        tables = {}
        for seq in pool.seq_ids():
            cells = dict(zip(seq_positions(pool, seq), seq_cells(pool, seq), strict=True))
            if window is not None and let_go:
                length = cache.seq_len(seq) if cache.has_seq(seq) else 0  # of a tree alone
                ranges = [(first_seen(window, max(0, length - self.slack)), 10**9)]
                ranges += [(first_seen(window, at), at) for at in self.points.get(seq, ())]
                due = {p // self.size for p0, p1 in ranges for p in cells if p0 <= p < p1}
                low = ranges[0][0] - ranges[0][0] % self.size
                cells = {p: c for p, c in cells.items() if p >= low or p // self.size in due}
            tables[seq] = cells
        return tables

    def holders(self, group):
        cells = [held.tables[group] for held in self.held]
        return {("held", i): set(part[part >= 0].tolist()) for i, part in enumerate(cells)}

    def n_blocks_after(self, cache, group, batch, let_go=True):
        """Blocks in use once the batch [(seq, n)] has its cells."""
        tables = self.owners(cache, group, let_go)
        blocks = {}
        for seq, cells in tables.items():
            for cell in cells.values():
                blocks.setdefault(cell // self.size, set()).add(seq)
        for holder, cells in self.holders(group).items():
            for cell in cells:
                blocks.setdefault(cell // self.size, set()).add(holder)
        table = {
            (seq, p // self.size): cell // self.size
            for seq, cells in tables.items()
            for p, cell in cells.items()
        }
        at = {seq: self.end_of(seq) for seq, _ in batch}
        for seq, n in batch:
            for _ in range(n):
                p = at[seq] = at[seq] + 1
                key = (seq, (p - 1) // self.size)
                block = table.get(key)
                if block is None or blocks[block] != {seq}:
                    if block is not None:
                        blocks[block].discard(seq)
                    table[key] = ("new", *key)
                    blocks[table[key]] = {seq}
        return sum(bool(owners) for owners in blocks.values())

    def end_of(self, seq):
        """Where the next cells of a sequence begin, as a position."""
        return self.want[seq].length if seq in self.want else 0

    def has_blocks(self, cache, batch, let_go=True):
        groups = range(len(self.windows))
        return all(self.n_blocks_after(cache, g, batch, let_go) <= self.n_blocks for g in groups)

    def promised(self):
        """Tokens [(seq, n)] whose cells nobody else is given."""
        return []

    def can_extend(self, cache, n):
        """What ``can_extend`` promises: for any one sequence."""
        return all(self.has_blocks(cache, [(seq, n)]) for seq in [*self.want, 99])

    def fits(self, before, stretches, ids):
        batch = [(seq, len(positions)) for seq, positions, _ in stretches]
        said_to_fit = self.cache.can_begin_step(stretches_of(ids))
        fits = self.has_blocks(before, batch)
        assert before.can_begin_step(stretches_of(ids)) == fits
        assert fits or not said_to_fit
        assert self.can_extend(before, len(ids)) == before.can_extend(len(ids))
        self.windows_let_go = not self.has_blocks(before, batch, let_go=False)
        return fits

    def unwritten(self, cache):
        """Nor do the numbers count that tokens of a cancelled step were given."""
        if self.windows_let_go:  # to make room for the step; that is not taken back
            return None
        cache = copy.deepcopy(cache)
        cache.ids = None
        cache.steps._pools = None
        for pool in cache.cells:
            pool._token, pool._n_tokens = None, 0
        return snapshot(cache)

    @action(
        weight=7,
        pick=PICK,
        dst=SEQ,
        at=st.none() | PLACE,
        draws=st.lists(st.tuples(BOOL, st.integers(1, 3)), min_size=1, max_size=4),
        end=END,
    )
    def fork_and_grow(self, pick, dst, at, draws, end):
        """What happens most: a trunk, a fork somewhere, and both go on."""
        src = self.picked(pick)
        if src != dst and src in self.want:
            if dst in self.want:
                self.cut_seq(dst, 0)
            self.copy_seq(src, dst, 0, at or 0, True, at is None)
            draws = [(src if is_src else dst, n) for is_src, n in draws]
            self.step(draws=draws, end=end, n_layers=1, say_positions=False)

    @action(
        weight=2,
        draws=st.lists(st.tuples(SEQ, STRETCH), min_size=1, max_size=5),
        which=st.integers(0, 3),
    )
    def a_copy_of_bytes_that_fails_leaves_no_cell_claimed(self, draws, which):
        self.cache.end_step()
        self.undo = None
        stretches = self.batch_of(draws)
        if stretches is None:
            return
        draws = [(seq, len(positions)) for seq, positions, _ in stretches]
        if not self.has_blocks(self.cache, draws, let_go=False):
            return
        twin = copy.deepcopy(self.cache)
        twin.ids.fails_after = which
        try:
            twin.begin_step(draws)
        except MemoryError:
            self.windows_let_go = False
            assert self.unwritten(twin) == self.unwritten(self.cache)

    # Sequences ------------------------------------------------------------------------------------

    def joints(self, cache, group, seq, new):
        """Blocks that it takes to give a sequence these cells too, position -> cell."""
        tables = self.owners(cache, group, let_go=False)
        others = [set(cells.values()) for s, cells in tables.items() if s != seq]
        others += self.holders(group).values()
        taken = {cell // self.size for cells in others for cell in cells}
        mine, wanted = {}, {}  # index in the block table -> blocks
        for p, cell in tables.get(seq, {}).items():
            mine.setdefault(p // self.size, set()).add(cell // self.size)
        for p, cell in new.items():
            wanted.setdefault(p // self.size, set()).add(cell // self.size)
        n = 0
        for index, blocks in wanted.items():
            there = mine.get(index, set())
            if len(there | blocks) > 1:
                n += not there or bool(there & taken)
        return n

    def copy_seq(self, src, dst, a, b, whole, to_end):
        if src not in self.want:
            self.refused(UnknownSequenceError, self.cache.seq_cp, src, dst)
            return
        length = self.want[src].length
        p0, p1 = sorted((self.place(src, a), self.place(src, b)))
        p0, p1 = (0 if whole else p0), (None if to_end else p1)
        stop = length if p1 is None else min(p1, length)
        if stop <= p0 or src == dst:
            return
        part = {p: t for p, t in self.want[src].tokens.items() if p0 <= p < stop}
        mine = self.want.get(dst, History())
        if not self.may_resume(src, stop):
            self.refused(RewindError, self.cache.seq_cp, src, dst, p0, p1)
            return
        if any(mine.tokens.get(p, t) != t for p, t in part.items()):
            if None in self.windows:
                self.refused(SequenceConflictError, self.cache.seq_cp, src, dst, p0, p1)
            return
        before = settled(self.cache)
        needed = []
        for group in range(len(self.windows)):
            tables = self.owners(before, group, let_go=False)
            cells = {p: c for p, c in tables.get(src, {}).items() if p0 <= p < stop}
            new = {p: c for p, c in cells.items() if p not in tables.get(dst, {})}
            needed.append(self.joints(before, group, dst, new))
        free = [pool.n_free_blocks for pool in before.cells]
        if part and any(n > f for n, f in zip(needed, free, strict=True)):
            self.refused(CacheFullError, self.cache.seq_cp, src, dst, p0, p1)
            return
        self.undo = None
        self.cache.seq_cp(src, dst, p0, p1)
        if part:
            left = [pool.n_free_blocks for pool in self.cache.cells]
            assert left == [f - n for f, n in zip(free, needed, strict=True)]
            mine.tokens |= part
            mine.length = max(mine.length, stop)
            self.want[dst] = mine
        elif self.is_kept_empty(dst):
            assert self.cache.seq_len(dst) in (mine.length, max(mine.length, stop))
            mine.length = self.cache.seq_len(dst)
            self.want[dst] = mine
        self.probe(dst)

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

    def restore_saved(self, which, seq):
        if not self.saved:
            return
        saved = self.saved[which % len(self.saved)]
        if not self.may_begin(seq, saved, self.cache.seq_claim):
            return
        before = settled(self.cache)
        needed = [len({p // self.size for p in np.flatnonzero(t >= 0)}) for t in saved.tables]
        promised = self.promised()
        used = [self.n_blocks_after(before, g, promised) for g in range(len(self.windows))]
        if any(n + u > self.n_blocks for n, u in zip(needed, used, strict=True)):
            self.refused(CacheFullError, self.cache.seq_claim, seq, saved.tables)
            return
        self.undo = None
        tables = self.cache.seq_claim(seq, saved.tables)
        tokens = {p: self.new_ids(1)[0] for p in saved.history.tokens}
        for layer in range(self.cache.n_layers):
            group = self.cache.group_of(layer)
            here = np.flatnonzero(tables[group] >= 0)
            assert here.tolist() == np.flatnonzero(saved.tables[group] >= 0).tolist()
            self.cache.stored[layer][tables[group][here]] = [tokens[p] for p in here]
        self.want[seq] = History(saved.history.length, tokens)
        self.probe(seq)

    # What is asked, what always holds -------------------------------------------------------------

    def ask(self, n, seq, length):
        super().ask(n, seq, length)
        twin = settled(self.cache)
        assert twin.n_free == max(
            n for n in range(self.capacity + self.size) if n == 0 or self.can_extend(twin, n)
        )

    def check_usage(self):
        for group, usage in enumerate(self.cache.usage().groups):
            assert Sight(usage.window, usage.chunk) == sight_of(self.windows[group])
            assert usage.live + usage.free == usage.capacity == self.capacity
            assert usage.live <= usage.n_cells <= self.capacity
            assert usage.live == self.size * self.n_blocks_after(self.cache, group, [], False)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        self.cache.end_step()
        for held in self.held:
            self.cache.release_cells(held.tables)
        for seq in self.cache.seq_ids():
            self.cache.seq_rm(seq)
        assert [pool.n_free for pool in self.cache.cells] == [self.capacity] * len(self.windows)
        assert self.cache.n_free == self.capacity
        self.cache.check()


TestPagedCacheAgainstHistories = PagedCacheAgainstHistories.TestCase


class TreesInBlocksAgainstHistories(TreeCacheAgainstHistories, PagedCacheAgainstHistories):
    """Trees whose nodes live in blocks: both oracles, and the promises that trees were made."""

    @initialize(
        windows=WINDOWS,
        n_blocks=st.sampled_from([1, 3, 7, 20, 60]),
        size=st.sampled_from([2, 3, 4, 16]),
        slack=SLACK,
    )
    def start(self, windows, n_blocks, size, slack):
        SeqCacheAgainstHistories.start(self, windows, n_blocks * size, slack)
        self.size, self.n_blocks = size, n_blocks
        config = config_of(windows, n_blocks * size, slack)
        self.cache = SimulatedPaged(replace(config, block_size=size))
        self.windows_let_go = False
        self.trees = {}

    def end_of(self, seq):
        return super().end_of(seq) + len(self.nodes_of(seq))

    def promised(self):
        return [(seq, len(tree.frontier())) for seq, tree in self.trees.items()]

    def has_blocks(self, cache, batch, let_go=True):
        promised = [(seq, n) for seq, n in self.promised() if seq not in dict(batch)]
        return super().has_blocks(cache, [*promised, *batch], let_go)

    def can_extend(self, cache, n):
        """For any one sequence that has no tree, besides what was proposed."""
        seqs = [*(self.want.keys() - self.trees.keys()), 99]
        return all(self.has_blocks(cache, [(seq, n)]) for seq in seqs)

    def fits_frontier(self, before, seq, n):
        return self.has_blocks(before, [(seq, n)])

    def teardown(self):
        for seq in getattr(self, "trees", {}):
            self.cache.commit([], seq)
        super().teardown()


TestTreesInBlocksAgainstHistories = TreesInBlocksAgainstHistories.TestCase


def cache_of(capacity, size, windows=(None,), slack=0):
    return SimulatedPaged(replace(config_of(windows, capacity, slack), block_size=size))


def run(cache, *batch):
    cache.begin_step(batch)
    cache.forward(list(range(sum(n for _, n in batch))))


def test_a_cache_says_what_its_cells_come_by():
    assert cache_of(16, 4).block_size == 4
    assert SimulatedSeq(config_of()).block_size == 1


def test_a_window_of_one_token_keeps_no_block_for_a_point():
    cache = cache_of(64, 4, windows=(1,))
    run(cache, (0, 9))
    cache.keep_point(0, 9)
    run(cache, (0, 30))
    assert cache.n_free == 64 - 4, "all but the block that the sequence ends in"


def test_a_capacity_without_a_block_is_refused():
    with pytest.raises(ConfigError, match="15 cells holds no block of 16"):
        cache_of(15, 16)


def test_what_cannot_fit_is_refused_in_blocks():
    cache = cache_of(16, 4)
    run(cache, (0, 5), (1, 5))
    with pytest.raises(CacheFullError, match="step needs 1 block of 4 cells, 0 free of 4"):
        cache.begin_step([(2, 1)])
    with pytest.raises(CacheFullError, match="step needs 2 blocks of 4 cells, 0 free of 4"):
        cache.begin_step([(0, 4), (1, 4)])
    run(cache, (0, 3), (1, 3))
    assert not cache.can_extend(1)


def test_a_batch_of_many_needs_more_than_one_sequence_of_as_many_tokens():
    cache = cache_of(16, 4)
    assert cache.n_free == 16 and cache.can_extend(16)
    assert cache.can_begin_step([(0, 16)])
    assert cache.can_begin_step([(0, 1), (1, 1), (2, 1), (3, 1)]) and not cache.can_begin_step(
        [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]
    )


def test_the_rest_of_a_partial_block_is_counted_for_its_own_sequence_alone():
    cache = cache_of(8, 4)
    run(cache, (0, 5))
    assert cache.n_free == 0 and not cache.can_extend(1)
    assert cache.can_begin_step([(0, 3)]) and not cache.can_begin_step([(0, 4)])
    assert not cache.can_begin_step([(1, 1)])


def test_the_copy_of_a_shared_partial_block_is_counted():
    cache = cache_of(12, 4)
    run(cache, (0, 6))
    cache.seq_cp(0, 1)
    assert cache.n_free == 2, "one block is left: two tokens of it go with the copy"
    assert cache.can_begin_step([(0, 1), (1, 2), (0, 1)])
    run(cache, (0, 1), (1, 1))
    assert not cache.can_extend(1)


def test_a_cancelled_step_gives_the_copied_block_back():
    cache = cache_of(32, 4)
    run(cache, (0, 6))
    cache.seq_cp(0, 1)
    cache.seq_cp(0, 2)
    before = [block_table(pool, seq) for pool in cache.cells for seq in range(3)]
    usage = cache.usage()
    run(cache, (2, 1), (0, 2), (1, 4))
    assert [block_table(pool, seq) for pool in cache.cells for seq in range(3)] != before
    cache.cancel_step()
    assert [block_table(pool, seq) for pool in cache.cells for seq in range(3)] == before
    assert cache.usage() == usage


def test_a_copied_block_holds_the_bytes_of_the_old_one():
    cache = cache_of(32, 4)
    run(cache, (0, 6))
    cache.seq_cp(0, 1)
    run(cache, (1, 1), (0, 1))
    for seq, last in ((0, 1), (1, 0)):
        for layer in range(cache.n_layers):
            cells = cache.seq_table(seq)[cache.group_of(layer)]
            assert cache.stored[layer][cells].tolist() == [*range(6), last]


@pytest.mark.parametrize("batch", [((0, 1), (1, 3)), ((1, 3), (0, 1))])
def test_a_cancelled_step_gives_back_bytes_that_nobody_has_written_over(batch):
    cache = cache_of(32, 4)
    run(cache, (0, 7))
    cache.seq_cp(0, 1, 0, 5)
    run(cache, *batch)
    cache.cancel_step()
    run(cache, (0, 1))
    cells = cache.seq_table(0)[0]
    assert cache.stored[0][cells].tolist() == [*range(7), 0]


def test_an_accepted_copy_is_not_taken_back_with_a_later_step():
    cache = cache_of(32, 4)
    run(cache, (0, 6))
    cache.seq_cp(0, 1)
    run(cache, (1, 1))
    cache.end_step()
    before = block_table(cache.cells[0], 1)
    run(cache, (1, 1))
    cache.cancel_step()
    assert block_table(cache.cells[0], 1) == before
    cache.check()


def test_a_step_whose_copy_failed_has_claimed_nothing():
    cache = cache_of(32, 4)
    run(cache, (0, 6))
    cache.seq_cp(0, 1)
    cache.end_step()
    before = cache.usage(), block_table(cache.cells[0], 1)
    cache.ids.fails_after = 0
    with pytest.raises(MemoryError):
        cache.begin_step([(2, 2), (1, 1), (0, 1)])
    assert (cache.usage(), block_table(cache.cells[0], 1)) == before
    assert cache.seq_ids() == [0, 1] and not cache.is_step_open
    cache.check()


def test_a_copy_that_only_a_passed_window_asks_for_is_not_counted():
    cache = cache_of(48, 4, windows=(5,))
    run(cache, (0, 8))
    cache.seq_cp(0, 1, 0, 6)
    run(cache, (0, 30))
    cache.seq_rm(0, 8, 32)  # sequence 0 has passed all that it shares, and holds it still
    run(cache, (7, 32))
    cache.end_step()
    cache.retain_cells(cache.seq_table(7))
    pool = cache.cells[0]
    assert pool.n_free_blocks == 0 and block_table(pool, 0)[:2] == block_table(pool, 1)
    assert cache.can_begin_step([(1, 1)]) and not cache.can_begin_step([(1, 3)])
    run(cache, (1, 1))
    assert block_table(pool, 0)[:2] == [-1, -1]


def test_a_history_that_comes_back_with_holes_is_counted_in_blocks():
    cache = cache_of(12, 4)
    run(cache, (0, 5))
    before = snapshot(settled(cache))
    with pytest.raises(CacheFullError, match="seq_claim needs 2 blocks of 4 cells, 1 free of 3"):
        cache.seq_claim(1, [np.asarray([-1, -1, -1, 3, 4])])
    assert snapshot(cache) == before
    (table,) = cache.seq_claim(1, [np.asarray([-1, -1, 2, 3])])
    assert table.tolist() == [-1, -1, 10, 11]


def test_a_history_that_comes_back_takes_all_that_a_proposed_tree_was_not_promised():
    cache = SimulatedPaged(replace(config_of((None,), 4), block_size=2))
    cache.propose([-1], seq_id=0)  # one block of the two
    with pytest.raises(CacheFullError, match="needs 2 blocks of 2 cells, 1 free of 2"):
        cache.seq_claim(1, [np.arange(3)])
    (table,) = cache.seq_claim(1, [np.arange(2)])
    assert cache.begin_step([(0, 1)]) and table.size == 2


def test_a_window_keeps_the_block_that_it_begins_in():
    cache = cache_of(64, 4, windows=(5,))
    run(cache, (0, 23))
    cache.end_step()
    pool = cache.cells[0]
    cache.layouts[0].let_go(0, batch=1)
    assert seq_positions(pool, 0)[0] == 16, "23 - 4 = 19 is in the block that begins at 16"
    assert cache.resumable_from(0) == 20
    cache.seq_rm(0, 20)
    run(cache, (0, 1))


def test_a_window_lets_go_of_a_block_when_every_owner_has_passed_it():
    cache = cache_of(256, 4, windows=(5,))
    run(cache, (0, 40))
    cache.seq_cp(0, 1)
    run(cache, (0, 80))
    cache.end_step()
    assert block_table(cache.cells[0], 0) == [-1] * 29 + block_table(cache.cells[0], 0)[29:]
    assert cache.cells[0].n_free_blocks == 64 - 10 - 1, "sequence 1 still holds its 10"
    run(cache, (1, 80))
    cache.end_step()
    assert cache.cells[0].n_free_blocks == 64 - 1 - 1


def test_what_follows_in_a_copy_of_a_block_is_joined_to_the_one_that_is_there():
    cache = cache_of(64, 4, windows=(None, 20))
    run(cache, (0, 6))
    cache.seq_cp(0, 1)
    run(cache, (0, 7))  # in a copy of the block that both held a part of
    before = [block_table(pool, 1) for pool in cache.cells]
    cache.seq_cp(0, 1, 6, 13)
    assert [block_table(pool, 1)[:2] for pool in cache.cells] == before
    for layer in range(cache.n_layers):
        cells = cache.seq_table(1)[cache.group_of(layer)]
        assert cache.stored[layer][cells].tolist() == [*range(6), *range(7)]
    cache.check()


def test_each_block_that_is_out_of_two_is_joined_in_one_of_its_own():
    cache = cache_of(64, 4)
    run(cache, (0, 12))
    cache.seq_cp(0, 1, 0, 6)
    run(cache, (1, 6))
    zero, one = (cache.seq_table(seq)[0] for seq in (0, 1))
    table = np.concatenate([zero[:6], one[6:8], zero[8:10], one[10:12]])
    cache.retain_cells([table])
    assert cache.cells[0].n_joints(2, spans_of(table)) == 2
    assert cache.cells[0].n_joints(2, spans_of(table[:8])) == 1
    cache.seq_map(2, [table])
    cells = cache.seq_table(2)[0]
    assert cache.stored[0][cells].tolist() == [*range(6), 0, 1, 8, 9, 4, 5]
    cache.check([table[table >= 0].tolist()])


def test_a_history_out_of_two_copies_of_one_block_is_joined_in_a_third():
    cache = cache_of(64, 4)
    run(cache, (0, 6))
    cache.seq_cp(0, 1)
    run(cache, (1, 2))
    table = cache.seq_table(0)[0].tolist() + cache.seq_table(1)[0].tolist()[6:]
    assert table[5] // 4 != table[6] // 4
    cache.retain_cells([np.asarray(table)])
    cache.seq_map(2, [np.asarray(table)])
    blocks = block_table(cache.cells[0], 2)
    assert blocks[0] == table[0] // 4 and blocks[1] not in {c // 4 for c in table}
    stored = cache.stored[0]
    assert stored[cache.seq_table(2)[0]].tolist() == [*range(6), 0, 1]
    cache.seq_cp(1, 2)
    assert block_table(cache.cells[0], 2) == blocks, "it has these tokens, if in copies"
    cache.seq_rm(2)
    while cache.can_begin_step([(7, 4)]):
        run(cache, (7, 4))
    with pytest.raises(CacheFullError) as info:
        cache.seq_map(2, [np.asarray(table)])
    assert str(info.value) == (
        "sequence 2 would hold parts of different blocks at the same block of its table, which "
        "takes 1 blocks to join, 0 free of 16; release a sequence or raise capacity"
    )
    assert not cache.has_seq(2)
