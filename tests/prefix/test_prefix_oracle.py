"""Radix and hashed index against one slow oracle: a dict from token tuples to blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.errors import CacheFullError, PrefixError
from kvcellar.prefix import HashedIndex, RadixIndex
from kvcellar.prefix import tree as prefix_tree
from kvcellar.sight import Sight
from kvcellar.states import STATE_SIGHT
from tests.bookkeeping.byte_simulator import Window, first_seen, sight_of


@dataclass(eq=False)
class Block:
    """The cells of one block, per group and position, and when it was used last."""

    cells: list[list[int]]
    used: int = 0


@dataclass
class Blocks:
    """The oracle: every stored block under the tokens up to its end. Walks all of it every time."""

    windows: tuple[Window, ...]
    size: int
    blocks: dict[tuple[int, ...], Block] = field(default_factory=dict)
    locks: list[tuple[int, ...]] = field(default_factory=list)
    clock: int = 0
    level: int = 0
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of snapshots, by slot: the level when they were used last, and when that was."""

    def keys(self, tokens):
        """The whole blocks of a history, shortest first."""
        return [tuple(tokens[:n]) for n in range(self.size, len(tokens) + 1, self.size)]

    def touch(self, keys):
        self.clock += 1
        for key in keys:
            self.blocks[key].used = self.clock

    @property
    def has_states(self):
        return self.windows[-1] is STATE_SIGHT

    def use(self, slots):
        for slot in slots:
            if self.has_states and slot >= 0:
                self.clock += 1
                self.marks[slot] = (self.level, self.clock)

    def snapshots(self):
        """Every snapshot: (slot, key of its block, index in the block, tokens that it saves)."""
        found = []
        for key, block in self.blocks.items():
            for i, slot in enumerate(block.cells[-1]):
                if slot >= 0:
                    length = len(key) - self.size + i + 1
                    before = [p + 1 for p, c in enumerate(self.cells(key)[-1]) if c >= 0]
                    saved = length - max((n for n in before if n < length), default=0)
                    found.append((slot, key, i, saved))
        return found

    def evict_states(self, n_slots, held):
        gone = []
        there = [one for one in self.snapshots() if one[0] not in held]
        while len(gone) < n_slots * self.has_states and (gone or len(there) >= n_slots):
            there = [one for one in self.snapshots() if one[0] not in held]
            worth = {s: (self.marks[s][0] + saved, self.marks[s][1]) for s, _, _, saved in there}
            slot, key, i, _ = min(there, key=lambda one: worth[one[0]])
            self.level = max(self.level, worth[slot][0])
            self.blocks[key].cells[-1][i] = -1
            gone.append(slot)
        return gone

    def cells(self, key):
        """Per group, the cells of this path."""
        blocks = [self.blocks[k].cells for k in self.keys(key)]
        return [[c for block in blocks for c in block[g]] for g in range(len(self.windows))]

    def resumes(self, key):
        return all(
            all(c >= 0 for c in cells[first_seen(window, len(key)) :]) or window is None
            for window, cells in zip(self.windows, self.cells(key), strict=True)
        )

    def match(self, tokens):
        stored = [key for key in self.keys(tokens) if key in self.blocks]
        longest = max((key for key in stored if self.resumes(key)), key=len, default=())
        self.touch(self.keys(longest))
        if longest:
            self.use(self.blocks[longest].cells[-1][-1:])
        return longest, len(max(stored, key=len, default=()))

    def insert(self, tokens, given):
        adopted = [[] for _ in self.windows]
        n_present = 0
        for key in self.keys(tokens):
            lo, hi = len(key) - self.size, len(key)
            n_present = hi if key in self.blocks else n_present
            nothing = Block([[-1] * self.size for _ in self.windows])
            block = self.blocks.setdefault(key, nothing)
            for g, cells in enumerate(block.cells):
                for i, cell in enumerate(given[g][lo:hi]):
                    if cells[i] < 0 <= cell:
                        cells[i] = cell
                        adopted[g].append(cell)
        self.touch(self.keys(tokens))
        self.use(adopted[-1])
        for key in self.keys(tokens)[-1:]:
            self.use(self.blocks[key].cells[-1][-1:])
        return n_present, adopted

    def is_locked(self, key):
        return any(lock[: len(key)] == key for lock in self.locks)

    def is_leaf(self, key):
        return not any(k[: len(key)] == key for k in self.blocks if len(k) > len(key))

    def unlock(self, key):
        self.locks.remove(key)
        self.touch([k for k in self.keys(key) if not self.is_locked(k)])

    def sizes(self):
        free = [k for k in self.blocks if not self.is_locked(k)]
        cells = [
            sum(c >= 0 for k in free for c in self.blocks[k].cells[g])
            for g in range(len(self.windows))
        ]
        n_free = self.size * len(free)
        return n_free, self.size * len(self.blocks) - n_free, tuple(cells)

    def evict(self, n_tokens):
        """One block at a time, and after each one what nothing can be resumed from."""
        gone = [[] for _ in self.windows]
        n_gone = 0
        while n_gone < n_tokens:
            leaves = [k for k in self.blocks if self.is_leaf(k) and not self.is_locked(k)]
            key = min(leaves, key=lambda k: self.blocks[k].used)
            while True:
                for g, cells in enumerate(self.blocks.pop(key).cells):
                    gone[g].extend(c for c in cells if c >= 0)
                n_gone += self.size
                key = key[: -self.size]
                if not key or self.is_locked(key) or not self.is_leaf(key) or self.resumes(key):
                    break
        return n_gone, gone


WINDOWS = st.sampled_from(
    [
        *((None,), (None,), (None, 3), (2,), (1,), (None, 5, 2), (7, None), (40, None)),
        *((Sight(chunk=4),), (None, Sight(chunk=6)), (Sight(chunk=1), 3), (None, Sight(chunk=40))),
        *((None, STATE_SIGHT), (None, 5, STATE_SIGHT), (Sight(chunk=4), STATE_SIGHT)),
    ]
)


HISTORY = {
    "base": st.integers(0, 30),
    "cut": st.integers(0, 3),
    "words": st.lists(st.integers(0, 2), max_size=8),
    "rest": st.integers(0, 15),
}


class IndexAgainstBlocks(RuleBasedStateMachine):
    """Histories that share prefixes are stored, matched, locked and evicted."""

    index_type: type

    @initialize(
        windows=WINDOWS,
        block_size=st.sampled_from([1, 1, 4, 16]),
        look=st.sampled_from([1, 5, 256]),
    )
    def start(self, windows, block_size, look):
        self.index = self.index_type(tuple(map(sight_of, windows)), block_size)
        self.want = Blocks(windows, block_size)
        self.held = [Counter() for _ in windows]
        self.known = [[]]
        self.handles = []
        self.locked = []
        self.n_cells = 0
        self.first_look = prefix_tree.FIRST_LOOK
        prefix_tree.FIRST_LOOK = look

    def history(self, base, cut, words, rest):
        """A known history up to some block, then more blocks, then a rest that fills none."""
        size = self.want.size
        blocks = [[7] * size, [7] * (size - 1) + [8], [8] * size]
        start = self.known[base % len(self.known)]
        tokens = start[: len(start) // size * size]
        tokens = tokens[: max(0, len(tokens) - cut * size)]
        for word in words:
            tokens = tokens + blocks[word]
        return tokens + blocks[0][: rest % size]

    def remember(self, handle, key):
        blocks = [self.want.blocks[k] for k in self.want.keys(key)]
        self.handles.append((handle, key, blocks))

    @rule(
        **HISTORY,
        tail=st.sampled_from([0, 1, 2, 4, 6, 45, 200]),
        hole=st.sampled_from([0, 0, 0, 1, 2, 3, 9]),
        early=st.sampled_from([-99, -99, 0, 1, 3, 6]),
    )
    def insert(self, base, cut, words, rest, tail, hole, early):
        tokens = self.history(base, cut, words, rest)
        n = len(tokens)
        given = []
        for window in self.want.windows:
            cells = list(range(self.n_cells, self.n_cells + n))
            self.n_cells += n
            if window is STATE_SIGHT:
                every = 1 + tail % 5
                cells = [
                    cell if p == n - 1 - hole or (p + early) % 7 % every == 1 else -1
                    for p, cell in enumerate(cells)
                ]
            elif window is not None:
                kept = range(early, early + sight_of(window).most_before + 1)
                missing = {*range(n - tail)} - {*kept} | {n - hole}
                cells = [-1 if p in missing else cell for p, cell in enumerate(cells)]
            given.append(cells)
        inserted = self.index.insert_prefix(tokens, [np.array(c, dtype=np.int64) for c in given])
        n_present, adopted = self.want.insert(tokens, given)
        assert inserted.n_present == n_present
        assert inserted.handle.length == n - n % self.want.size
        assert [sorted(cells.tolist()) for cells in inserted.adopted] == [
            sorted(cells) for cells in adopted
        ]
        for held, cells in zip(self.held, inserted.adopted, strict=True):
            held.update(cells.tolist())
        self.known.append(tokens)
        self.remember(inserted.handle, tuple(tokens[: inserted.handle.length]))

    @rule(**HISTORY)
    def match(self, base, cut, words, rest):
        self.match_tokens(self.history(base, cut, words, rest))

    def match_tokens(self, tokens):
        sizes = self.index.size_info()
        match = self.index.match_prefix(np.array(tokens, dtype=np.int32))
        key, n_matched = self.want.match(tokens)
        assert match.length == len(key) == match.handle.length
        assert match.n_matched == n_matched
        assert [cells.tolist() for cells in match.cells] == self.want.cells(key)
        assert self.index.size_info() == sizes
        for cells in match.cells:
            cells.fill(-7)  # the arrays are the caller's own
        self.remember(match.handle, key)

    @rule(i=st.integers(0, 30), drop=st.sampled_from([0, 0, 1, 2, 5]))
    def match_a_known_history(self, i, drop):
        tokens = self.known[i % len(self.known)]
        self.match_tokens(tokens[: max(0, len(tokens) - drop)])

    @precondition(lambda self: self.handles)
    @rule(i=st.integers(0, 99))
    def lock(self, i):
        handle, key, blocks = self.handles[i % len(self.handles)]
        now = [self.want.blocks.get(k) for k in self.want.keys(key)]
        if any(a is not b for a, b in zip(blocks, now, strict=True)):
            with pytest.raises(PrefixError, match="stale"):
                self.index.lock_handle(handle)
            return
        self.index.lock_handle(handle)
        self.want.locks.append(key)
        self.locked.append((handle, key))

    @precondition(lambda self: self.locked)
    @rule(i=st.integers(0, 99))
    def unlock(self, i):
        handle, key = self.locked.pop(i % len(self.locked))
        self.index.unlock_handle(handle)
        self.want.unlock(key)

    @precondition(lambda self: self.handles)
    @rule(i=st.integers(0, 99))
    def unlock_what_is_not_locked(self, i):
        handle, key, _ = self.handles[i % len(self.handles)]
        if key and key not in self.want.locks:
            with pytest.raises(PrefixError, match="not locked"):
                self.index.unlock_handle(handle)

    @rule(n=st.integers(0, 70))
    def evict(self, n):
        evictable = self.index.size_info().evictable
        if n > evictable:
            with pytest.raises(CacheFullError, match=f"{n} tokens, {evictable} evictable"):
                self.index.evict(n)
            return
        evicted = self.index.evict(n)
        n_gone, gone = self.want.evict(n)
        assert evicted.n_tokens == n_gone >= n
        assert [sorted(cells.tolist()) for cells in evicted.cells] == [sorted(c) for c in gone]
        self.let_go(evicted.cells)

    @rule(n=st.integers(0, 6), held=st.integers(0, 5))
    def evict_states(self, n, held):
        slots = {slot for slot in self.held[-1].elements() if slot % 4 == held}
        evicted = self.index.evict_states(n, slots)
        assert evicted.n_tokens == 0
        assert evicted.cells[-1].tolist() == self.want.evict_states(n, slots)
        assert not any(cells.size for cells in evicted.cells[:-1]), "rows stay"
        self.let_go(evicted.cells)

    @rule(**HISTORY)
    def find(self, base, cut, words, rest):
        """What is stored is found, whether a sequence can go on from it or not."""
        tokens = self.history(base, cut, words, rest)
        handle = self.index.find_prefix(tokens)
        key = max((k for k in self.want.keys(tokens) if k in self.want.blocks), key=len, default=())
        assert handle.length == len(key)
        self.want.touch(self.want.keys(key))
        if key:
            self.want.use(self.want.blocks[key].cells[-1][-1:])
        self.remember(handle, key)

    @rule(**HISTORY)
    def peek(self, base, cut, words, rest):
        """To look is not to use: what goes next shows whether it was."""
        tokens = self.history(base, cut, words, rest)
        key = max((k for k in self.want.keys(tokens) if k in self.want.blocks), key=len, default=())
        assert [cells.tolist() for cells in self.index.peek_prefix(tokens)] == self.want.cells(key)

    def let_go(self, cells):
        for held, gone in zip(self.held, cells, strict=True):
            held.subtract(gone.tolist())

    @rule(by=st.integers(1, 999))
    def relocate(self, by):
        """All cells have other numbers, in one of the groups none has."""
        moved = [np.append((np.arange(self.n_cells) + by) % max(1, self.n_cells), -1)]
        moved = [*(moved * (len(self.want.windows) - 1)), None if by % 2 else moved[0]]
        self.index.relocate(moved)
        for g, new in enumerate(moved):
            if new is not None:
                self.held[g] = Counter({int(new[c]): n for c, n in self.held[g].items()})
                for block in self.want.blocks.values():
                    block.cells[g] = new[block.cells[g]].tolist()
        if moved[-1] is not None and self.want.has_states:
            self.want.marks = {int(moved[-1][s]): m for s, m in self.want.marks.items() if s >= 0}

    @rule(dice=st.integers(0, 9))
    def reset(self, dice):
        if dice:
            return
        self.let_go(self.index.reset())
        self.want = Blocks(self.want.windows, self.want.size, clock=self.want.clock)
        for handle, key in self.locked:
            if key:
                with pytest.raises(PrefixError):
                    self.index.unlock_handle(handle)
        self.locked.clear()
        self.handles = [(h, key, blocks) for h, key, blocks in self.handles if key]

    @invariant()
    def agrees(self):
        self.index.check()
        info = self.index.size_info()
        assert info == self.want.sizes()
        assert info.total == self.want.size * len(self.want.blocks)
        blocks = self.want.blocks.values()
        for g, (held, cells) in enumerate(zip(self.held, self.index.held_cells(), strict=True)):
            assert set(held.values()) <= {0, 1}, "a cell is adopted once and released once"
            assert sorted(cells.tolist()) == sorted(held.elements())
            assert sorted(held.elements()) == sorted(
                c for block in blocks for c in block.cells[g] if c >= 0
            )
        locked = [block for key, block in self.want.blocks.items() if self.want.is_locked(key)]
        for g, cells in enumerate(self.index.locked_cells()):
            assert sorted(cells.tolist()) == sorted(
                c for block in locked for c in block.cells[g] if c >= 0
            )
        assert self.index.n_snapshots == (held.total() if self.want.has_states else 0)

    @invariant()
    def nothing_branches_off_inside_a_chain(self):
        keys = set(self.want.blocks)
        parents = Counter(key[: -self.want.size] for key in keys)
        heads = [k for k in keys if k == k[: self.want.size] or parents[k[: -self.want.size]] > 1]
        want = []
        for key in heads:
            follows = [key]
            while follows:
                path = follows[0]
                follows = [k for k in keys if k[: -self.want.size] == path]
                if len(follows) != 1:
                    break
            first = len(key) - self.want.size
            want.append([cells[first:] for cells in self.want.cells(path)])
        assert sorted(want) == sorted(chain.tolist() for chain in self.index.chains())

    def teardown(self):
        prefix_tree.FIRST_LOOK = self.first_look
        for handle, _ in self.locked:
            self.index.unlock_handle(handle)
        info = self.index.size_info()
        assert info.protected == 0
        evicted = self.index.evict(info.evictable)
        self.let_go(evicted.cells)
        assert self.index.size_info().total == 0
        assert all(not list(held.elements()) for held in self.held)
        self.index.check()


class RadixAgainstBlocks(IndexAgainstBlocks):
    index_type = RadixIndex


class HashedAgainstBlocks(IndexAgainstBlocks):
    index_type = HashedIndex


TestRadixAgainstBlocks = RadixAgainstBlocks.TestCase
TestHashedAgainstBlocks = HashedAgainstBlocks.TestCase
for case in (TestRadixAgainstBlocks, TestHashedAgainstBlocks):
    case.settings = settings(max_examples=4 * settings().max_examples)  # cheap, and deep
del case
