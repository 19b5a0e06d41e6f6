"""A digest of an index: what the index would match, to the chunk, from a few bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import PrefixError
from kvcellar.prefix import (
    HashedIndex,
    NaiveIndex,
    PrefixDigest,
    RadixIndex,
    chunk_hashes,
    digest_of,
    key_of,
)
from kvcellar.sight import FULL
from kvcellar.space import Space

HISTORIES = st.lists(st.lists(st.integers(0, 1), max_size=24), min_size=1, max_size=8)


def insert(index, tokens):
    cells = np.arange(len(tokens), dtype=np.int64)
    return index.insert_prefix(np.array(tokens, dtype=np.int64), [cells]).handle


@given(HISTORIES, st.sampled_from([(RadixIndex, 1), (RadixIndex, 2), (HashedIndex, 2)]), st.data())
def test_it_matches_what_the_index_holds_to_the_chunk(histories, made, data):
    kind, block_size = made
    index = kind((FULL,), block_size)
    handles = [insert(index, tokens) for tokens in histories]
    index.lock_handle(data.draw(st.sampled_from(handles)))
    index.evict(data.draw(st.integers(0, index.size_info().evictable)))
    digest = PrefixDigest.from_bytes(digest_of(index, chunk=4).to_bytes())
    for tokens in histories:
        held = len(index.peek_prefix(tokens)[0])
        assert digest.match(tokens) == held - held % 4
    behind = {h for t in histories for h in chunk_hashes(t, 4)[: digest.match(t) // 4]}
    assert set(digest.hashes.tolist()) == behind


@given(HISTORIES, st.integers(0, 4), st.sampled_from([RadixIndex, HashedIndex]))
def test_what_does_not_fit_is_what_was_used_longest_ago_and_nothing_stands_behind_a_gap(
    histories, most, kind
):
    index = kind((FULL,), 2)
    for tokens in histories:
        insert(index, tokens)
    digest = digest_of(index, chunk=2, most=most)
    assert len(digest.hashes) <= most
    assert digest.match(histories[-1]) >= min(2 * most, len(histories[-1]) // 2 * 2)
    behind = {h for t in histories for h in chunk_hashes(t, 2)[: digest.match(t) // 2]}
    assert set(digest.hashes.tolist()) == behind


def test_a_digest_may_have_a_hash_for_each_token():
    index = RadixIndex()
    insert(index, [3, 1, 2])
    digest = PrefixDigest.from_bytes(digest_of(index, chunk=1).to_bytes())
    assert [digest.match(tokens) for tokens in ([3, 1, 2], [3, 1, 4], [1])] == [3, 2, 0]


def test_a_digest_of_another_space_matches_nothing():
    tokens = np.arange(256, dtype=np.int64)
    index = RadixIndex()
    insert(index, key_of(tokens, Space(salt="ours")))
    digest = digest_of(index)
    assert digest.match(key_of(tokens, Space(salt="ours"))) == 256
    assert digest.match(tokens) == digest.match(key_of(tokens, Space(salt="theirs"))) == 0


def test_an_index_that_stores_nothing_has_an_empty_digest():
    digest = PrefixDigest.from_bytes(digest_of(NaiveIndex(), revision=7).to_bytes())
    assert digest.revision == 7 and digest_of(NaiveIndex()).revision == 0
    assert digest.match(range(1000)) == 0


def test_what_is_no_digest_is_refused():
    index = RadixIndex()
    insert(index, range(128))
    data = digest_of(index).to_bytes()
    for wrong, said in (
        (b"", "no digest"),
        (b"else" + data[4:], "no digest"),
        (data[:-1], "does not fit"),
        (data[:4] + b"\x09" + data[5:], "format 9"),
    ):
        with pytest.raises(PrefixError, match=said):
            PrefixDigest.from_bytes(wrong)
