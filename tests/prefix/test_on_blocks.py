"""Indexes over a paged cache: blocks are shared, kept, found again and given up, never mixed up.

The cache holds tokens in place of K and V, so each position of a sequence says whose it is.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.cache_config import make_config
from kvcellar.prefix import HashedIndex, PrefixIndex, RadixIndex
from kvcellar.prefix.hashed import block_digest
from kvcellar.sight import FULL
from tests.engine.fakes import FULL_PARAMS, KINDS, PARAMS, HashRunner

PROMPT = list(range(11))


class Told:
    """A paged cache, an index, and the histories that go through both, as an engine drives them."""

    def __init__(self, index: PrefixIndex, n_blocks: int, block_size: int, params=FULL_PARAMS):
        config = make_config(params, n_blocks * block_size, block_size=block_size)
        self.cache = KINDS["paged"](config)
        self.runner = HashRunner(self.cache, 8)
        self.index = index
        self.tokens: dict[int, list[int]] = {}
        self.handles = {}

    def make_room(self, seq_id: int, n: int) -> bool:
        while not self.cache.can_begin_step([(seq_id, n)]):
            evictable = self.index.size_info().evictable
            if not evictable:
                return False
            self.cache.release_cells(self.index.evict(1).cells)
        return True

    def start(self, seq_id: int, tokens: list[int]) -> int:
        """Let a sequence stand on what is stored of its tokens but the last; how many those are."""
        match = self.index.match_prefix(tokens[:-1])
        self.tokens[seq_id] = tokens[: match.length]
        if match.length:
            self.cache.seq_map(seq_id, match.cells)
            self.index.lock_handle(match.handle)
            self.handles[seq_id] = match.handle
        return match.length

    def write(self, seq_id: int, tokens: list[int]) -> bool:
        """A forward with these tokens; false where there is no room for them."""
        if not self.make_room(seq_id, len(tokens)):
            return False
        positions = self.cache.begin_step([(seq_id, len(tokens))])
        self.runner.forward(tokens, positions)
        self.cache.end_step()
        self.tokens[seq_id] = self.tokens[seq_id] + tokens
        return True

    def publish(self, seq_id: int) -> None:
        tokens = self.tokens[seq_id]
        inserted = self.index.insert_prefix(tokens, self.cache.seq_table(seq_id, len(tokens)))
        self.cache.retain_cells(inserted.adopted)
        self.index.lock_handle(inserted.handle)
        self.unlock(seq_id)
        self.handles[seq_id] = inserted.handle

    def unlock(self, seq_id: int) -> None:
        handle = self.handles.pop(seq_id, None)
        if handle is not None:
            self.index.unlock_handle(handle)

    def end(self, seq_id: int) -> None:
        self.unlock(seq_id)
        if self.tokens.pop(seq_id):
            self.cache.seq_rm(seq_id)

    def run(self, seq_id: int, tokens: list[int]) -> int:
        """The whole life of a prompt; how many of its tokens were found."""
        n = self.start(seq_id, tokens)
        assert self.write(seq_id, tokens[n:])
        self.publish(seq_id)
        self.check()
        return n

    def check(self) -> None:
        self.index.check()
        self.cache.check(self.index.held_cells())
        assert sorted(self.cache.seq_ids()) == sorted(s for s, t in self.tokens.items() if t)
        for seq_id, tokens in self.tokens.items():
            if not tokens:
                continue
            assert self.cache.seq_len(seq_id) == len(tokens)
            for group, table in enumerate(self.cache.seq_table(seq_id)):
                held = table >= 0
                stored = self.cache.stored[group][table[held]]
                assert stored.tolist() == np.asarray(tokens)[held].tolist(), "another's cells"


INDEXES = {"radix": RadixIndex, "hashed": HashedIndex}


@pytest.fixture(params=INDEXES)
def told(request) -> Told:
    return Told(INDEXES[request.param]((FULL,), block_size=4), n_blocks=8, block_size=4)


def free_blocks(told: Told) -> int:
    return told.cache.n_free // 4


def test_an_index_holds_whole_blocks_and_hands_them_to_the_next_sequence(told):
    assert told.run(0, PROMPT) == 0
    table = told.cache.seq_table(0)[0]
    told.end(0)
    assert free_blocks(told) == 8 - 2, "the partial block is left out"
    assert told.run(5, PROMPT) == 8
    assert told.cache.seq_table(5)[0].tolist()[:8] == table.tolist()[:8]
    assert free_blocks(told) == 8 - 3, "a full block is shared, not copied"
    told.end(5)
    told.cache.release_cells(told.index.evict(8).cells)
    assert free_blocks(told) == 8


def test_a_block_in_use_is_shared_and_the_partial_last_one_is_not(told):
    told.run(0, PROMPT)
    assert told.run(1, PROMPT) == 8
    first, second = (told.cache.seq_table(s)[0] // 4 for s in (0, 1))
    assert first[:8].tolist() == second[:8].tolist() and first[8] != second[8]
    assert free_blocks(told) == 8 - 4


def test_nothing_is_found_before_it_was_published(told):
    told.start(0, PROMPT)
    assert told.write(0, PROMPT[:5])
    assert told.run(1, PROMPT) == 0
    told.publish(0)
    told.end(1)
    assert told.start(2, PROMPT) == 8


def test_what_two_computed_side_by_side_is_kept_once(told):
    for seq_id in (0, 1):
        told.start(seq_id, PROMPT)
        assert told.write(seq_id, PROMPT)
    for seq_id in (0, 1):
        told.publish(seq_id)
        told.end(seq_id)
    assert free_blocks(told) == 8 - 2
    assert told.run(2, PROMPT) == 8


def test_a_decoded_block_is_found_once_it_is_full(told):
    told.run(0, PROMPT[:6])
    for token in (6, 7, 8):
        assert told.write(0, [token])
        told.publish(0)
    assert told.start(1, PROMPT) == 8


def test_blocks_that_nobody_uses_go_when_they_are_needed_the_last_of_a_path_first(told):
    told.run(0, [1] * 4 + [2] * 4 + [3] * 4)
    told.end(0)
    told.run(1, [9] * 24)  # takes the five that are free, and one of the three
    told.end(1)
    assert told.start(2, [1] * 4 + [2] * 4 + [3] * 4) == 8


def test_what_a_sequence_stands_on_is_not_given_up_for_another(told):
    told.run(0, PROMPT)
    told.end(0)
    assert told.start(1, PROMPT) == 8
    told.tokens[2] = []
    assert not told.write(2, [7] * 28)
    assert told.write(2, [7] * 24)
    told.check()


def test_a_full_block_that_is_cut_and_written_again_keeps_what_the_index_has_of_it(told):
    told.run(0, PROMPT[:8])
    told.cache.seq_rm(0, 6)
    told.tokens[0] = PROMPT[:6]
    assert told.write(0, [90, 91])
    told.check()
    assert told.start(1, [*PROMPT[:8], 1]) == 8
    told.check()
    told.publish(0)
    assert told.start(2, [*PROMPT[:6], 90, 91, 1]) == 8
    told.check()


class IndexOnBlocks(RuleBasedStateMachine):
    """Sequences start, fork, grow, are cut and end; what they published is found and evicted."""

    @initialize(
        kind=st.sampled_from(["radix", "hashed"]),
        n_blocks=st.integers(3, 9),
        size=st.sampled_from([1, 2, 3]),
        params=st.sampled_from([FULL_PARAMS, PARAMS]),
        n_digests=st.sampled_from([None, None, 1, 3]),
    )
    def start(self, kind, n_blocks, size, params, n_digests):
        sights = tuple(group.sight for group in params.groups)
        index = INDEXES[kind](sights, size)
        if kind == "hashed" and n_digests is not None:
            index = HashedIndex(sights, size, digest=lambda b, t: block_digest(b, t) % n_digests)
        self.told = Told(index, n_blocks, size, params)
        self.known = [[]]
        self.next_id = 0

    def a_seq(self, i):
        return sorted(self.told.tokens)[i % len(self.told.tokens)]

    @rule(
        base=st.integers(0, 20),
        cut=st.sampled_from([0, 0, 1, 4]),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        is_published=st.booleans(),
    )
    def prompt(self, base, cut, more, is_published):
        tokens = self.known[base % len(self.known)]
        tokens = tokens[: max(0, len(tokens) - cut)] + more
        seq_id = self.next_id
        self.next_id += 1
        n = self.told.start(seq_id, tokens)
        assert n < len(tokens)
        if not self.told.write(seq_id, tokens[n:]):
            self.told.end(seq_id)
            return
        self.known.append(tokens)
        if is_published:
            self.told.publish(seq_id)

    @precondition(lambda self: self.told.tokens)
    @rule(i=st.integers(0, 9), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, i, tokens):
        seq_id = self.a_seq(i)
        if self.told.write(seq_id, tokens):
            self.known.append(self.told.tokens[seq_id])

    @precondition(lambda self: self.told.tokens)
    @rule(i=st.integers(0, 9))
    def publish(self, i):
        self.told.publish(self.a_seq(i))

    @precondition(lambda self: self.told.tokens)
    @rule(i=st.integers(0, 9))
    def fork(self, i):
        src = self.a_seq(i)
        self.told.cache.seq_cp(src, self.next_id)
        self.told.tokens[self.next_id] = self.told.tokens[src]
        self.next_id += 1

    @precondition(lambda self: self.told.tokens)
    @rule(i=st.integers(0, 9), back=st.integers(1, 7))
    def cut(self, i, back):
        seq_id = self.a_seq(i)
        n = len(self.told.tokens[seq_id]) - back
        if n > 0 and self.told.cache.can_resume(seq_id, n):
            self.told.cache.seq_rm(seq_id, n)
            self.told.tokens[seq_id] = self.told.tokens[seq_id][:n]

    @precondition(lambda self: self.told.tokens)
    @rule(i=st.integers(0, 9))
    def end(self, i):
        self.told.end(self.a_seq(i))

    @precondition(lambda self: self.told.cache.n_free < 2 and self.told.tokens)
    @rule(i=st.integers(0, 9))
    def end_where_blocks_are_scarce(self, i):
        self.told.end(self.a_seq(i))

    @invariant()
    def agrees(self):
        self.told.check()

    def teardown(self):
        for seq_id in list(self.told.tokens):
            self.told.end(seq_id)
        evictable = self.told.index.size_info().evictable
        self.told.cache.release_cells(self.told.index.evict(evictable).cells)
        assert self.told.index.size_info().total == 0
        assert all(group.live == 0 for group in self.told.cache.usage().groups)


TestIndexOnBlocks = IndexOnBlocks.TestCase
TestIndexOnBlocks.settings = settings(max_examples=2 * settings().max_examples)
