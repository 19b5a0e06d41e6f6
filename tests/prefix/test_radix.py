"""The radix index: splits, locks, whom it evicts, and windows, one sentence at a time."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from kvcellar.bookkeeping.cells.pool import BlockPool
from kvcellar.bookkeeping.cells.spans import spans_of
from kvcellar.errors import CacheFullError, PrefixError
from kvcellar.prefix import HashedIndex, RadixIndex, make_index
from kvcellar.sight import FULL, Sight
from kvcellar.types import Run
from tests.bookkeeping.held import seq_cells


def cells(first, n, missing=0):
    """Cells ``first, first + 1, ...``, of which the first ``missing`` are not held."""
    return np.where(np.arange(n) < missing, -1, np.arange(first, first + n))


def insert(index, tokens, first=0):
    """Insert with cells from ``first`` on, the same in each group."""
    return index.insert_prefix(tokens, [cells(first, len(tokens)) for _ in index.sights])


TRUNK = list(range(100, 110))


# Matching and splitting ---------------------------------------------------------------------------


def test_what_was_inserted_is_matched_up_to_the_first_difference():
    index = RadixIndex()
    assert insert(index, TRUNK).n_present == 0
    match = index.match_prefix([*TRUNK[:6], 1, 2])
    assert match.length == match.n_matched == 6
    assert match.cells[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_second_history_stores_only_what_is_new():
    index = RadixIndex()
    insert(index, TRUNK)
    inserted = insert(index, [*TRUNK[:6], 1, 2], first=50)
    assert inserted.n_present == 6
    assert inserted.adopted[0].tolist() == [56, 57]
    assert index.size_info().total == 12
    assert index.match_prefix([*TRUNK[:6], 1, 2]).cells[0].tolist() == [0, 1, 2, 3, 4, 5, 56, 57]


def test_matching_shows_no_difference_in_sizes_or_later_matches():
    index = RadixIndex()
    insert(index, TRUNK)
    before = index.size_info()
    for n in (3, 7, 1, 10, 0):
        assert index.match_prefix(TRUNK[:n]).length == n
    assert index.size_info() == before
    assert index.match_prefix(TRUNK).cells[0].tolist() == list(range(10))


def test_blocks_are_matched_whole_or_not_at_all():
    index = RadixIndex(block_size=4)
    assert insert(index, TRUNK).handle.length == 8  # the last 2 fill no block
    assert index.size_info().total == 8
    assert index.match_prefix(TRUNK).length == 8
    assert index.match_prefix([*TRUNK[:7], 1]).length == 4
    assert index.match_prefix(TRUNK[:3]).length == 0


def test_blocks_that_differ_in_their_last_token_only_are_siblings():
    index = RadixIndex(block_size=4)
    insert(index, [1, 2, 3, 4, 5, 5, 5, 5])
    assert insert(index, [1, 2, 3, 9, 5, 5, 5, 5], first=20).n_present == 0
    assert index.match_prefix([1, 2, 3, 4, 5, 5, 5, 5]).cells[0].tolist() == list(range(8))
    assert index.match_prefix([1, 2, 3, 9, 5, 5, 5, 5]).cells[0].tolist() == list(range(20, 28))


@pytest.mark.parametrize("tokens", [[], np.array([1, 2], dtype=np.uint16), (1, 2)])
def test_tokens_may_be_any_flat_integers(tokens):
    index = RadixIndex()
    insert(index, [1, 2, 3])
    assert index.match_prefix(tokens).length == len(tokens)


@pytest.mark.parametrize("tokens", [[1.0, 2.0], [[1, 2]], ["a"]])
def test_tokens_that_are_no_flat_integers_are_refused(tokens):
    array = np.asarray(tokens)
    with pytest.raises(PrefixError) as info:
        RadixIndex().match_prefix(tokens)
    assert str(info.value) == (
        f"tokens are a flat list of integers, got {array.dtype} of shape {array.shape}"
    )


@pytest.mark.parametrize(
    "given, message",
    [
        ([cells(0, 3)], r"3 tokens and \[3\] cells for 2"),
        ([cells(0, 3), cells(0, 2)], r"3 tokens and \[3, 2\] cells for 2"),
        (
            [cells(0, 3, missing=2), cells(0, 3)],
            "group 0 keeps all of the history, .* no cell for 2 of its positions from 0 on",
        ),
    ],
)
@pytest.mark.parametrize("make", [RadixIndex, lambda w: HashedIndex(w, 1)])
def test_cells_that_do_not_fit_the_tokens_are_refused_and_nothing_changes(make, given, message):
    index = make((FULL, Sight(4)))
    with pytest.raises(PrefixError, match=message):
        index.insert_prefix([1, 2, 3], given)
    assert index.size_info().total == 0


# Locks --------------------------------------------------------------------------------------------


def test_a_lock_protects_the_matched_node_itself():
    index = RadixIndex()
    handle = insert(index, TRUNK).handle
    index.lock_handle(handle)
    assert index.size_info()[:2] == (0, 10)
    with pytest.raises(CacheFullError, match="asked to evict 1 tokens, 0 evictable of 10 stored"):
        index.evict(1)
    index.unlock_handle(handle)
    assert index.size_info()[:2] == (10, 0)


def test_a_handle_locked_before_a_split_keeps_both_halves_and_unlocks_both():
    index = RadixIndex()
    handle = insert(index, TRUNK).handle
    index.lock_handle(handle)
    insert(index, [*TRUNK[:4], 1, 2], first=20)
    insert(index, [*TRUNK[:7], 3], first=30)
    assert index.size_info()[:2] == (3, 10)
    assert sorted(index.evict(3).cells[0].tolist()) == [24, 25, 37]
    index.unlock_handle(handle)
    index.check()
    assert index.size_info()[:2] == (10, 0)


def test_a_handle_matched_before_a_split_can_still_be_locked():
    index = RadixIndex()
    handle = insert(index, TRUNK).handle
    index.match_prefix(TRUNK[:3])
    index.lock_handle(handle)
    assert index.size_info()[:2] == (0, 10)


def test_a_lock_on_a_prefix_leaves_the_rest_evictable():
    index = RadixIndex()
    insert(index, TRUNK)
    index.lock_handle(index.match_prefix(TRUNK[:4]).handle)
    assert index.size_info()[:2] == (6, 4)
    assert sorted(index.evict(6).cells[0].tolist()) == [4, 5, 6, 7, 8, 9]


def test_a_handle_of_evicted_tokens_is_refused_even_after_they_came_back():
    index = RadixIndex()
    handle = insert(index, TRUNK).handle
    index.evict(1)
    for _ in range(2):
        with pytest.raises(PrefixError, match="stale"):
            index.lock_handle(handle)
        insert(index, TRUNK, first=40)
    assert index.size_info().protected == 0


def test_a_handle_is_unlocked_as_often_as_it_was_locked():
    index = RadixIndex()
    handle = insert(index, TRUNK).handle
    index.lock_handle(handle)
    index.lock_handle(handle)
    index.unlock_handle(handle)
    assert index.size_info().protected == 10
    index.unlock_handle(handle)
    with pytest.raises(PrefixError, match="not locked"):
        index.unlock_handle(handle)
    assert index.size_info()[:2] == (10, 0)


def test_a_stale_handle_does_not_take_back_the_lock_of_a_shorter_one():
    index = RadixIndex()
    stale = insert(index, TRUNK).handle
    index.evict(4)
    short = index.match_prefix(TRUNK).handle
    index.lock_handle(short)
    with pytest.raises(PrefixError, match="not locked"):
        index.unlock_handle(stale)
    assert index.size_info().protected == 6


def test_a_handle_of_another_index_is_refused():
    index, other = RadixIndex(), RadixIndex()
    handle = insert(other, TRUNK).handle
    other.lock_handle(handle)
    with pytest.raises(PrefixError, match="stale"):
        index.lock_handle(handle)
    with pytest.raises(PrefixError, match="not locked"):
        index.unlock_handle(handle)


# Eviction -----------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first():
    index = RadixIndex()
    for i in range(3):
        insert(index, [i, i, i], first=10 * i)
    index.match_prefix([0, 0, 0])
    assert sorted(index.evict(3).cells[0].tolist()) == [10, 11, 12]
    assert sorted(index.evict(3).cells[0].tolist()) == [20, 21, 22]


def test_using_the_head_of_a_history_does_not_keep_its_tail():
    index = RadixIndex()
    insert(index, TRUNK)
    insert(index, [1, 2, 3], first=20)
    index.match_prefix(TRUNK[:4])
    assert sorted(index.evict(6).cells[0].tolist()) == [4, 5, 6, 7, 8, 9]
    assert sorted(index.evict(3).cells[0].tolist()) == [20, 21, 22]


def test_unlocking_counts_as_use():
    index = RadixIndex()
    handle = insert(index, [1, 2]).handle
    index.lock_handle(handle)
    insert(index, [3, 4], first=10)
    index.unlock_handle(handle)
    assert sorted(index.evict(2).cells[0].tolist()) == [10, 11]


def test_a_long_leaf_is_trimmed_from_its_tail():
    index = RadixIndex()
    insert(index, TRUNK)
    evicted = index.evict(3)
    assert evicted.n_tokens == 3
    assert evicted.cells[0].tolist() == [7, 8, 9]
    assert index.match_prefix(TRUNK).length == 7


def test_a_leaf_behind_a_trunk_is_trimmed_from_its_tail_too():
    index = RadixIndex((FULL, Sight(4)))
    insert(index, TRUNK)
    insert(index, [*TRUNK[:4], 1, 2, 3, 4, 5], first=50)
    assert [c.tolist() for c in index.evict(2).cells] == [[8, 9], [8, 9]]
    assert index.size_info() == (13, 0, (13, 13))
    assert index.match_prefix(TRUNK).length == 8


def test_trimming_goes_by_whole_blocks():
    index = RadixIndex(block_size=4)
    insert(index, list(range(12)))
    assert index.evict(1).n_tokens == 4
    assert index.evict(5).n_tokens == 8


def test_evicting_nothing_does_nothing():
    index = RadixIndex()
    insert(index, TRUNK)
    assert index.evict(0).n_tokens == 0
    assert index.evict(-3).cells[0].tolist() == []
    assert index.size_info().total == 10


def test_evicting_too_much_is_refused_with_numbers_and_changes_nothing():
    index = RadixIndex()
    insert(index, TRUNK)
    index.lock_handle(index.match_prefix(TRUNK[:6]).handle)
    with pytest.raises(CacheFullError, match="evict 5 tokens, 4 evictable of 10 stored"):
        index.evict(5)
    assert index.size_info()[:2] == (4, 6)
    assert index.match_prefix(TRUNK).length == 10


def n_calls(verb):
    """How many calls, of Python or C, one call makes: the same on a slow machine."""
    count = 0

    def tally(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection would call whoever waits for one
    sys.setprofile(tally)
    try:
        verb()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("make", [RadixIndex, lambda: HashedIndex(block_size=1)])
def test_evicting_costs_as_many_calls_in_a_large_index_as_in_a_small_one(make):
    counts = []
    for n in (20, 5000):
        index = make()
        for i in range(n):
            insert(index, [i, 1], first=2 * i)
        for i in range(n // 2):
            index.match_prefix([i, 1])  # used since: a heap would have stale entries by now
        counts.append(n_calls(lambda index=index: index.evict(10)))
    assert counts[0] == counts[1]


def test_an_evicted_tail_does_not_keep_its_arrays_alive_through_the_head():
    index = RadixIndex()
    insert(index, list(range(1000)))
    index.match_prefix(list(range(10)))  # splits
    index.evict(990)
    index.check()
    (node,) = index._nodes()
    assert node.tokens.base is None and node.cells.base is None


def test_a_reset_gives_back_every_cell_and_makes_handles_stale():
    index = RadixIndex()
    handle = insert(index, TRUNK).handle
    index.lock_handle(handle)
    assert sorted(index.reset()[0].tolist()) == list(range(10))
    assert index.size_info() == (0, 0, (0,))
    with pytest.raises(PrefixError):
        index.unlock_handle(handle)


# Windows ------------------------------------------------------------------------------------------


def windowed(index, tokens, held, first=0):
    """Insert a history whose window holds the last ``held`` positions only."""
    n = len(tokens)
    return index.insert_prefix(tokens, [cells(first, n), cells(first, n, missing=n - held)])


def test_a_window_needs_one_position_less_than_its_width():
    for held, want in ((3, 10), (2, 0)):
        index = RadixIndex((FULL, Sight(4)))
        windowed(index, TRUNK, held)
        match = index.match_prefix([*TRUNK, 1])
        assert (match.length, match.n_matched) == (want, 10)
        assert match.handle.length == want


@pytest.mark.parametrize("length", [3, 4, 343, 344, 345, 1000, 1367, 1368, 1369, 1623, 1624])
@pytest.mark.parametrize("n_nodes", [1, 4])
def test_a_resumable_length_is_found_however_far_it_is_behind_the_match(length, n_nodes):
    index = RadixIndex((FULL, Sight(4)))
    tokens = np.arange(1624)
    window = np.where((tokens >= length - 3) & (tokens < length), tokens, -1)
    for stop in range(1624 // n_nodes, 1625, 1624 // n_nodes):
        index.insert_prefix(tokens[:stop], [tokens[:stop], window[:stop]])
    assert index.match_prefix(tokens).length == length


def test_a_match_ends_with_a_page_even_where_a_window_could_go_on_inside_one():
    index = RadixIndex((FULL, Sight(3)), block_size=4)
    tokens = list(range(12))
    index.insert_prefix(tokens, [cells(0, 12), np.array([-1, -1, 2, 3, 4, 5, 6, 7, 8, 9, -1, 11])])
    assert index.match_prefix(tokens).length == 8


def test_a_window_of_one_token_needs_nothing():
    index = RadixIndex((FULL, Sight(1)))
    windowed(index, TRUNK, held=0)
    assert index.match_prefix(TRUNK[:7]).length == 7
    assert index.evict(2).n_tokens == 2


def test_a_history_shorter_than_its_window_needs_all_of_it():
    index = RadixIndex((FULL, Sight(50)))
    windowed(index, TRUNK, held=10)
    assert index.match_prefix(TRUNK[:4]).length == 4
    index = RadixIndex((FULL, Sight(50)))
    windowed(index, TRUNK, held=9)
    assert index.match_prefix(TRUNK).length == 0


def test_a_trunks_end_and_a_turns_end_both_stay_resumable():
    index = RadixIndex((FULL, Sight(4)))
    windowed(index, TRUNK[:6], held=3)
    turn = windowed(index, TRUNK, held=3, first=20)
    assert turn.n_present == 6
    assert [c.tolist() for c in turn.adopted] == [[26, 27, 28, 29], [27, 28, 29]]
    assert index.match_prefix([*TRUNK, 1]).length == 10
    fork = index.match_prefix([*TRUNK[:8], 1])
    assert (fork.length, fork.n_matched) == (6, 8)
    assert fork.cells[1].tolist() == [-1, -1, -1, 3, 4, 5]


def test_inserting_known_tokens_again_brings_their_windows_cells():
    index = RadixIndex((FULL, Sight(4)))
    windowed(index, TRUNK, held=3)
    again = windowed(index, TRUNK[:7], held=3, first=50)
    assert again.n_present == 7
    assert [sorted(c.tolist()) for c in again.adopted] == [[], [54, 55, 56]]
    assert index.match_prefix([*TRUNK[:7], 1]).length == 7
    assert index.match_prefix(TRUNK).cells[1].tolist() == [-1] * 4 + [54, 55, 56, 7, 8, 9]


@pytest.mark.parametrize("make", [RadixIndex, HashedIndex])
def test_one_block_is_resumed_where_its_last_token_is_held(make):
    for window, length in ((np.array([-1, -1, -1, 3]), 4), (np.array([0, 1, 2, -1]), 0)):
        index = make((FULL, Sight(2)), 4)
        index.insert_prefix([1, 2, 3, 4], [np.arange(4), window])
        assert index.match_prefix([1, 2, 3, 4]).length == length


def test_chains_come_in_the_order_of_use_and_what_is_locked_first():
    index = RadixIndex()
    for i in range(4):
        insert(index, [i, i, i], first=10 * i)
    index.match_prefix([1, 1, 1])
    index.lock_handle(index.match_prefix([2, 2]).handle)
    firsts = [int(chain[0, 0]) for chain in index.chains()]
    assert firsts == [20, 10, 30, 0]


def test_cell_0_is_a_cell():
    index = RadixIndex((FULL, Sight(4)))
    windowed(index, TRUNK, held=0, first=50)
    again = index.insert_prefix(TRUNK[:2], [cells(70, 2), cells(0, 2)])
    assert [c.tolist() for c in again.adopted] == [[], [0, 1]]
    assert index.match_prefix(TRUNK).length == 2


def test_every_window_has_its_say():
    index = RadixIndex((FULL, Sight(3), Sight(5)))
    index.insert_prefix(TRUNK, [cells(0, 10), cells(0, 10), cells(0, 10, missing=7)])
    assert index.match_prefix(TRUNK).length == 0
    index.insert_prefix(TRUNK[:5], [cells(0, 5), cells(0, 5), cells(50, 5)])
    assert index.match_prefix(TRUNK).length == 5


def test_evicting_one_token_of_a_window_model_takes_what_can_no_longer_be_resumed():
    index = RadixIndex((FULL, Sight(4)))
    windowed(index, TRUNK[:6], held=3)
    windowed(index, TRUNK, held=3, first=20)
    evicted = index.evict(1)
    assert evicted.n_tokens == 4  # back to the trunk's end
    assert [c.tolist() for c in evicted.cells] == [[26, 27, 28, 29], [27, 28, 29]]
    assert index.match_prefix(TRUNK).length == 6
    assert index.evict(1).n_tokens == 6


def test_a_window_that_holds_more_than_it_needs_is_trimmed_by_one():
    index = RadixIndex((FULL, Sight(4)))
    windowed(index, TRUNK, held=5)
    assert index.evict(1).n_tokens == 1
    assert index.match_prefix(TRUNK).length == 9
    assert index.size_info() == (9, 0, (9, 4))


def test_a_trunk_that_nothing_resumes_from_goes_with_its_last_branch():
    index = RadixIndex((FULL, Sight(4)))
    windowed(index, [*TRUNK, 1, 1, 1], held=3)
    windowed(index, [*TRUNK, 2, 2, 2], held=3, first=20)
    assert index.evict(1).n_tokens == 3
    assert index.evict(1).n_tokens == 13
    assert index.size_info() == (0, 0, (0, 0))


def test_a_locked_trunk_stays_when_its_last_branch_goes_even_if_nothing_resumes_from_it():
    index = RadixIndex((FULL, Sight(4)))
    index.lock_handle(windowed(index, TRUNK, held=0).handle)
    windowed(index, [*TRUNK, 1, 1, 1], held=3)
    assert index.evict(1).n_tokens == 3
    assert index.size_info() == (0, 10, (0, 0))


def test_evictable_cells_say_what_a_window_can_give_back():
    index = RadixIndex((FULL, Sight(4)))
    handle = windowed(index, TRUNK, held=3).handle
    assert index.size_info() == (10, 0, (10, 3))
    index.lock_handle(handle)
    assert index.size_info() == (0, 10, (0, 0))
    windowed(index, [*TRUNK, 1, 2, 3], held=4, first=20)
    assert index.size_info() == (3, 10, (3, 3))


# Beside the cell pool -----------------------------------------------------------------------------


def runs(cells):
    return [Run(span.cell, span.length) for span in spans_of(cells)]


def test_spans_skip_what_is_not_held_and_join_what_continues():
    spans = spans_of(np.array([-1, 5, 6, 9, -1, 10, 11, 3]))
    assert spans == [(1, 5, 2), (3, 9, 1), (5, 10, 2), (7, 3, 1)]
    assert spans_of(np.array([-1, -1])) == spans_of(np.array([], dtype=int)) == []


@pytest.mark.parametrize("kind", ["radix", "hashed", "naive"])
def test_a_running_sequence_can_be_matched_and_in_the_end_every_cell_is_free(kind):
    pool, index = BlockPool(64), make_index(kind, (FULL,))
    prompt = list(range(20))

    def publish(seq, tokens):
        table = np.array(seq_cells(pool, seq))
        inserted = index.insert_prefix(tokens, [table])
        pool.retain(runs(inserted.adopted[0]))
        index.lock_handle(inserted.handle)
        return inserted.handle

    pool.claim(0, 0, 20)
    first = publish(0, prompt)  # after prefill; sequence 0 goes on
    pool.claim(0, 20, 5)
    match = index.match_prefix([*prompt, 99])
    assert match.length == (0 if kind == "naive" else 20)
    index.lock_handle(match.handle)
    pool.share(1, spans_of(match.cells[0]))
    pool.claim(1, match.length, 25 - match.length)
    second = publish(1, [*prompt, 99, 98, 97, 96, 95])
    index.unlock_handle(match.handle)
    last = publish(0, [*prompt, 1, 2, 3, 4, 5])
    index.unlock_handle(first)
    for seq, handle in ((0, last), (1, second)):
        pool.seq_rm(seq)
        index.unlock_handle(handle)
    pool.check(index.held_cells()[0].tolist())
    info = index.size_info()
    assert info.protected == 0
    assert pool.n_free + info.evictable == pool.capacity
    pool.release(runs(index.evict(info.evictable).cells[0]))
    assert pool.n_free == pool.capacity
    pool.check()
