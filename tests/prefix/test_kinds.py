"""Which indexes there are, and the one that stores nothing."""

from __future__ import annotations

import re

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
    for found in (index.peek_prefix(trunk), index.held_cells(), index.locked_cells()):
        assert [c.tolist() for c in found] == [[], []]
    assert index.find_prefix(trunk).length == inserted.n_present == inserted.handle.length == 0
    index.relocate((None, np.arange(3)))
    index.demote(match.handle)
    for gone in (index.evict(0), index.evict(-1), index.evict_states(3), index.drop_path(match[2])):
        assert (gone.n_tokens, [c.tolist() for c in gone.cells]) == (0, [[], []])
    assert index.chains() == list(index.by_use()) == index.states_costs(3, (), -1) == []
    assert index.n_snapshots == 0 and index.block_size == 1
    assert index.size_info() == (0, 0, (0, 0))
    with pytest.raises(CacheFullError, match="evict 1 tokens, 0 evictable"):
        index.evict(1)
    assert [c.tolist() for c in index.reset()] == [[], []]
    index.check()


def test_an_index_is_chosen_by_its_name():
    for kind, cls in (("radix", RadixIndex), ("hashed", HashedIndex), ("naive", NaiveIndex)):
        made = [make_index(kind, (FULL,)), make_index(kind, (FULL, Sight(4)), 4)]
        assert [type(index) for index in made] == [cls, cls]
        assert [index.block_size for index in made] == [1, 1 if kind == "naive" else 4]
        assert [index.sights for index in made] == [(FULL,), (FULL, Sight(4))]
    assert HashedIndex().block_size == 16 and RadixIndex().block_size == 1
    with pytest.raises(ConfigError, match="'trie' is not known; choose radix, hashed or naive"):
        make_index("trie", (FULL,))


@pytest.mark.parametrize("sights, block_size", [((), 1), ((FULL, 4), 1), ((FULL,), 0)])
def test_what_is_no_sight_and_blocks_below_1_are_refused(sights, block_size):
    said = re.escape(f"got block_size={block_size}" if sights == (FULL,) else f"got {sights!r}")
    for cls in (RadixIndex, HashedIndex):
        with pytest.raises(ConfigError, match=said):
            cls(sights, block_size)
