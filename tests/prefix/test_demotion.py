"""Whose cells go first, and whose go now: in both indexes that store something."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.prefix import PrefixIndex, make_index
from kvcellar.sight import FULL


def put(index: PrefixIndex, tokens: list[int], first_cell: int) -> None:
    index.insert_prefix(tokens, [np.arange(first_cell, first_cell + len(tokens))])


@pytest.mark.parametrize("kind", ["radix", "hashed"])
def test_a_demoted_history_is_evicted_before_older_ones_but_not_what_it_shares(kind):
    index = make_index(kind, (FULL,), block_size=4)
    trunk = [1] * 8
    put(index, [*trunk, *[2] * 8], 0)
    put(index, [*trunk, *[3] * 8], 100)
    put(index, [9] * 8, 200)
    put(index, [7] * 8, 300)
    index.demote(index.match_prefix([*trunk, *[3] * 8]).handle)
    index.check()
    gone = index.evict(8)
    assert sorted(gone.cells[0].tolist()) == list(range(108, 116))
    assert index.match_prefix([*trunk, *[2] * 8]).length == 16
    index.check()


@pytest.mark.parametrize("kind", ["radix", "hashed"])
def test_a_dropped_history_takes_what_only_it_needs_down_to_what_is_kept(kind):
    index = make_index(kind, (FULL,), block_size=4)
    trunk = [1] * 8
    put(index, [*trunk, *[2] * 8], 0)
    put(index, [*trunk, *[3] * 8], 100)
    whole = [*trunk, *[3] * 8]
    assert index.drop_path(index.match_prefix(whole).handle, keep=9).n_tokens == 4
    assert index.match_prefix(whole).length == 12
    gone = index.drop_path(index.match_prefix(whole).handle)
    assert sorted(gone.cells[0].tolist()) == list(range(108, 112))
    assert index.match_prefix(whole).length == 8
    index.check()
    locked = index.match_prefix([*trunk, *[2] * 8]).handle
    index.lock_handle(locked)
    assert index.drop_path(locked).n_tokens == 0
    index.demote(locked)
    index.check()
    index.unlock_handle(locked)
    assert index.drop_path(locked).n_tokens == 16
    assert index.drop_path(locked).n_tokens == 0, "it is stale"
    assert index.size_info().total == 0
    index.check()


def test_to_demote_what_others_go_on_from_changes_nothing():
    index = make_index("radix", (FULL,))
    put(index, [1] * 4, 0)
    put(index, [1] * 8, 0)
    index.demote(index.match_prefix([1] * 4).handle)
    index.check()
    assert index.drop_path(index.match_prefix([1] * 4).handle).n_tokens == 0


@pytest.mark.parametrize("kind", ["radix", "hashed"])
def test_a_dropped_history_says_all_that_went_of_it(kind):
    index = make_index(kind, (FULL,), block_size=4)
    whole = [*[1] * 8, *[3] * 8]
    put(index, [*[1] * 8, *[2] * 8], 0)
    put(index, whole, 100)
    index.drop_path(index.match_prefix([*[1] * 8, *[2] * 8]).handle, keep=8)
    gone = index.drop_path(index.match_prefix(whole).handle, keep=3)
    assert gone.n_tokens == 12 == gone.cells[0].size
    assert index.match_prefix(whole).length == 4
    index.check()
