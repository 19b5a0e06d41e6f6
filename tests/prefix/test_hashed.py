"""The hashed index: the chain of digests, and what a digest alone does not prove."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.prefix import HashedIndex
from kvcellar.prefix.hashed import block_digest


def insert(index, tokens, first=0):
    return index.insert_prefix(tokens, [np.arange(first, first + len(tokens))])


def test_a_digest_is_xxhash64_over_the_one_before_and_int64_tokens():
    tokens = struct.pack("<4q", 1, 2, 3, -1)
    first = xxhash.xxh64(tokens).intdigest()
    assert block_digest(None, tokens) == first
    both = xxhash.xxh64()
    both.update(struct.pack("<Q", first))
    both.update(tokens)
    assert block_digest(first, tokens) == both.intdigest()


def test_a_digest_before_of_zero_is_a_prefix_too():
    tokens = struct.pack("<q", 5)
    assert block_digest(0, tokens) != block_digest(None, tokens)


def test_only_full_blocks_are_stored_and_matched():
    index = HashedIndex(block_size=4)
    assert insert(index, list(range(11))).handle.length == 8
    assert index.match_prefix(list(range(11))).length == 8
    assert index.match_prefix(list(range(7))).length == 4
    assert index.match_prefix(list(range(3))).length == 0


def test_the_same_block_behind_another_prefix_is_another_block():
    index = HashedIndex(block_size=2)
    insert(index, [1, 1, 5, 5])
    assert insert(index, [2, 2, 5, 5], first=10).n_present == 0
    assert index.match_prefix([2, 2, 5, 5]).cells[0].tolist() == [10, 11, 12, 13]


def test_nothing_is_looked_up_behind_the_first_missing_block():
    asked = []

    def digest(before, tokens):
        asked.append(tokens)
        return block_digest(before, tokens)

    index = HashedIndex(block_size=1, digest=digest)
    insert(index, [1, 2, 3, 4])
    asked.clear()
    assert index.match_prefix([1, 9, 3, 4]).length == 1
    assert len(asked) == 2


def test_equal_digests_of_different_tokens_are_no_hit():
    index = HashedIndex(block_size=2, digest=lambda before, tokens: 7)
    insert(index, [1, 1])
    assert index.match_prefix([2, 2]).length == 0
    assert index.match_prefix([1, 1]).length == 2


def test_equal_digests_and_tokens_behind_another_prefix_are_no_hit():
    # The chain collides: block [5] behind [1] and behind [2] have one digest.
    index = HashedIndex(block_size=1, digest=lambda before, tokens: 0 if before is None else 7)
    insert(index, [1, 5])
    assert index.match_prefix([5]).length == 0
    assert index.match_prefix([1, 5]).length == 2
    assert index.match_prefix([1, 5, 5]).length == 2


def test_a_history_whose_digest_is_taken_is_stored_up_to_there():
    index = HashedIndex(block_size=1, digest=lambda before, tokens: tokens[0] % 4)
    insert(index, [1, 2])
    inserted = insert(index, [0, 3, 5, 2], first=10)  # 5 has the digest of 1
    assert inserted.handle.length == 2
    assert inserted.adopted[0].tolist() == [10, 11]
    assert index.match_prefix([0, 3, 5, 2]).length == 2


@given(
    histories=st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=8),
    asked=st.lists(st.integers(0, 2), max_size=10),
    n_digests=st.sampled_from([1, 2, 5]),
)
def test_however_digests_collide_no_cell_is_given_for_another_history(histories, asked, n_digests):
    index = HashedIndex(block_size=2, digest=lambda b, t: block_digest(b, t) % n_digests)
    wrote = {}
    for i, tokens in enumerate(histories):
        insert(index, tokens, first=100 * i)
        wrote |= {100 * i + p: tokens[: p + 1] for p in range(len(tokens))}
        index.check()
    for tokens in [asked, *histories]:
        match = index.match_prefix(tokens)
        for p, cell in enumerate(match.cells[0].tolist()):
            assert wrote[cell] == tokens[: p + 1]


@pytest.mark.parametrize("n_tokens, n_gone", [(1, 4), (4, 4), (5, 8)])
def test_whole_blocks_are_evicted_from_the_tail(n_tokens, n_gone):
    index = HashedIndex(block_size=4)
    insert(index, list(range(12)))
    evicted = index.evict(n_tokens)
    assert evicted.n_tokens == n_gone
    assert sorted(evicted.cells[0].tolist()) == list(range(12 - n_gone, 12))
    assert index.match_prefix(list(range(12))).length == 12 - n_gone
