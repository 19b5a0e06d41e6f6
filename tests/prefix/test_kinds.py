"""Which indexes there are, and the one that stores nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.errors import CacheFullError, ConfigError
from kvcellar.prefix import HashedIndex, NaiveIndex, RadixIndex, make_index
from kvcellar.sight import FULL, Sight


def test_the_naive_index_stores_nothing_and_finds_nothing():
    index = NaiveIndex((FULL, Sight(4)))
    trunk = list(range(10))
    inserted = index.insert_prefix(trunk, [np.arange(10), np.arange(10)])
    assert [c.tolist() for c in inserted.adopted] == [[], []]
    match = index.match_prefix(trunk)
    assert match.length == match.n_matched == 0
    assert [c.tolist() for c in match.cells] == [[], []]
    index.lock_handle(match.handle)
    index.unlock_handle(match.handle)
    assert index.size_info() == (0, 0, (0, 0))
    assert index.evict(0).n_tokens == 0
    with pytest.raises(CacheFullError, match="evict 1 tokens, 0 evictable"):
        index.evict(1)
    assert [c.tolist() for c in index.reset()] == [[], []]
    index.check()


def test_an_index_is_chosen_by_its_name():
    assert isinstance(make_index("radix", (FULL,), 4), RadixIndex)
    assert isinstance(make_index("hashed", (FULL,), 4), HashedIndex)
    assert isinstance(make_index("naive", (FULL,), 4), NaiveIndex)
    with pytest.raises(ConfigError, match="'trie' is not known; choose radix, hashed or naive"):
        make_index("trie", (FULL,))


@pytest.mark.parametrize("sights, block_size", [((), 1), ((FULL, 4), 1), ((FULL,), 0)])
def test_what_is_no_sight_and_blocks_below_1_are_refused(sights, block_size):
    with pytest.raises(ConfigError):
        RadixIndex(sights, block_size)
    with pytest.raises(ConfigError):
        HashedIndex(sights, block_size)
