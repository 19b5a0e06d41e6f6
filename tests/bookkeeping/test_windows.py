"""What a window lets go of, and from where its sequences can go on all the same."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.errors import RewindError, SequenceConflictError, StepError
from tests.bookkeeping.byte_simulator import (
    SimulatedContiguous,
    SimulatedSeq,
    SimulatedTree,
    config_of,
    snapshot,
    visible,
)
from tests.bookkeeping.held import seq_positions

WINDOW = 4
MIXED = (None, WINDOW)


def cache_of(windows=MIXED, slack=0, make=SimulatedSeq, capacity=2000):
    return make(config_of(windows, capacity, slack))


def bring(cache, seq, tokens):
    """One forward of one sequence; what each of its queries sees, per layer."""
    cache.begin_step([(seq, len(tokens))])
    seen = cache.forward(tokens)
    cache.end_step()
    return seen


def sees(cache, seq, history):
    """Assert that the next token of a sequence sees what it should of ``history``; take it back."""
    (position,) = cache.begin_step([(seq, 1)])
    for layer, window in enumerate(cache.layer_windows()):
        want = visible({**history, position: -2}, position, window)
        assert cache.run_layer(layer, [-2]) == [want]
    cache.cancel_step()


def let_go(n=200, **settings):
    """A cache whose sequence 0 has ``n`` tokens, of which the window holds the last few."""
    cache = cache_of(**settings)
    bring(cache, 0, list(range(n)))
    return cache


def feed(cache, seq, n):
    """Bring ``n`` more tokens, each the number of its position."""
    first = cache.seq_len(seq) if cache.has_seq(seq) else 0
    bring(cache, seq, list(range(first, first + n)))


def numbered(*positions):
    return {p: p for p in positions}


def test_a_sequence_that_has_only_windows_keeps_its_length_when_nothing_is_held():
    cache = let_go(windows=(1,))
    assert cache.usage().groups[0].live == 0
    assert cache.seq_len(0) == 200
    assert bring(cache, 0, [200])[0] == [[200]]


def test_a_hole_does_not_make_a_window_forget_what_it_let_go_of():
    cache = let_go()
    cache.seq_rm(0, 3, 5)
    assert cache.resumable_from(0) == 200
    assert cache.seq_rm(0, 100) == 0


def test_a_hole_at_the_end_does_not_make_a_window_forget_what_it_let_go_of():
    cache = let_go()
    cache.seq_rm(0, 150, 199)
    cache.seq_rm(0, 199)
    assert cache.cells[1].spans(0) == [], "the window holds nothing at all"
    assert not cache.can_resume(0, 150)
    sees(cache, 0, numbered(*range(150)))


def test_a_copy_of_a_hole_begins_no_sequence():
    cache = cache_of()
    feed(cache, 0, 9)
    cache.seq_rm(0, 2, 5)
    cache.seq_cp(0, 1, 2, 5)
    assert not cache.has_seq(1)
    cache.seq_cp(0, 1, 2, 6)
    assert cache.seq_len(1) == 6 and seq_positions(cache.cells[0], 1) == [5]


@pytest.mark.parametrize("stop, low", [(196, 200), (197, 103), (198, 103), (199, 103)])
def test_what_was_removed_was_not_let_go_of(stop, low):
    cache = let_go()
    assert cache.cells[1].first_pos(0) == 197
    cache.seq_rm(0, 100, stop)
    assert cache.resumable_from(0) == low
    if low == 200:
        return
    cache.seq_rm(0, 103)
    sees(cache, 0, numbered(*range(100)))


def test_a_history_that_is_removed_piece_by_piece_is_gone():
    cache = let_go()
    cache.seq_rm(0, 0, 10)
    cache.seq_rm(0, 10, 199)
    assert cache.has_seq(0)
    cache.seq_rm(0, 199)
    assert not cache.has_seq(0)
    assert cache.begin_step([(0, 1)]) == [0]


def test_a_window_can_always_be_cut_back_to_nothing():
    cache = let_go()
    assert cache.can_resume(0, 0)
    cache.seq_rm(0, 0)
    assert not cache.has_seq(0)
    assert bring(cache, 0, [7, 8])[1] == [[7], [7, 8]]
    assert cache.resumable_from(0) == 0, "a new history under an old id has let go of nothing"


def test_clear_forgets_what_windows_let_go_of():
    cache = let_go()
    cache.clear()
    bring(cache, 0, [1, 2, 3])
    assert cache.resumable_from(0) == 0


def test_a_fork_resumes_from_where_its_parent_does():
    cache = let_go(slack=5)
    assert cache.resumable_from(0) == 195
    with pytest.raises(RewindError):
        cache.seq_cp(0, 1, 0, 194)
    assert not cache.has_seq(1)
    cache.seq_cp(0, 1, 0, 195)
    sees(cache, 1, numbered(*range(195)))
    assert cache.resumable_from(1) == 195


def test_a_fork_that_was_made_in_time_can_be_cut_back_further_than_its_parent():
    cache = cache_of()
    bring(cache, 0, list(range(50)))
    cache.seq_cp(0, 1)
    bring(cache, 0, list(range(50, 200)))
    assert (cache.resumable_from(0), cache.resumable_from(1)) == (200, 0)
    cache.seq_rm(1, 10)
    sees(cache, 1, numbered(*range(10)))


def test_a_copy_onto_a_fork_leaves_the_fork_what_it_holds():
    cache = cache_of()
    bring(cache, 0, list(range(50)))
    cache.seq_cp(0, 1)
    bring(cache, 0, list(range(50, 200)))
    cache.seq_cp(0, 1)
    assert cache.resumable_from(1) == 200, "it lacks 50 to 196, as its parent does"
    cache.seq_rm(1, 0)
    cache.seq_cp(0, 1, 197)
    assert cache.resumable_from(1) == 0, "what was copied is all there"
    cache.seq_rm(1, 198)
    sees(cache, 1, numbered(197))


def test_a_copy_gives_back_a_part_of_what_a_window_let_go_of_and_no_more_is_promised():
    cache = cache_of()
    bring(cache, 0, list(range(60)))
    cache.seq_cp(0, 1)
    bring(cache, 0, list(range(60, 160)))
    cache.seq_cp(1, 0)
    assert seq_positions(cache.cells[1], 0) == [*range(60), 157, 158, 159]
    assert cache.resumable_from(0) == 160, "60 to 156 are gone for good"


def test_a_copy_does_not_make_a_sequence_forget_what_its_own_window_let_go_of():
    cache = cache_of()
    bring(cache, 0, list(range(10)))
    cache.seq_cp(0, 1)
    bring(cache, 1, list(range(10, 200)))
    assert cache.resumable_from(1) == 200
    cache.seq_cp(0, 1)
    assert cache.resumable_from(1) == 200
    assert seq_positions(cache.cells[1], 1) == [*range(10), 197, 198, 199]


def test_letting_go_of_what_a_copy_gave_back_does_not_forget_what_came_after_it():
    cache = cache_of((WINDOW,), capacity=30)

    def fill():
        """A full pool lets go of all that it can."""
        bring(cache, 2, list(range(500, 500 + cache.n_free)))
        cache.seq_rm(2)

    bring(cache, 0, list(range(10)))
    cache.seq_cp(0, 1)
    for token in range(10, 100):
        bring(cache, 1, [token])
    fill()
    cache.seq_cp(0, 1)
    assert seq_positions(cache.cells[0], 1) == [7, 8, 9, 97, 98, 99]
    cache.seq_rm(0)
    fill()
    assert seq_positions(cache.cells[0], 1) == [97, 98, 99]
    assert cache.resumable_from(1) == 100


def test_a_copy_that_gives_back_all_that_a_window_let_go_of_makes_rewinds_possible_again():
    cache = cache_of()
    cache.begin_step([(0, 67)])
    cache.forward(list(range(67)))
    tables = cache.seq_table(0)
    cache.retain_cells(tables)  # before the step is accepted and the window moves on
    cache.end_step()
    assert cache.resumable_from(0) == 67
    cache.seq_map(1, tables)
    assert cache.resumable_from(1) == 0
    cache.seq_cp(1, 0)
    assert cache.resumable_from(0) == 0
    cache.seq_rm(0, 10)
    sees(cache, 0, numbered(*range(10)))


def test_a_window_lets_go_of_tokens_and_not_of_the_hole_behind_them():
    cache = cache_of(slack=20)
    bring(cache, 0, list(range(80)))
    cache.seq_rm(0, 64, 79)
    bring(cache, 0, list(range(80, 88)))
    assert seq_positions(cache.cells[1], 0) == list(range(79, 88))
    assert cache.resumable_from(0) == 64 + WINDOW - 1
    cache.seq_rm(0, 67)
    sees(cache, 0, numbered(*range(64)))


# Tables: sequences that begin on held cells, or with bytes that come back -------------------------


def test_a_table_says_which_positions_are_held():
    cache = let_go(n=100)
    cache.seq_rm(0, 20, 30)
    full, window = cache.seq_table(0)
    assert np.flatnonzero(full >= 0).tolist() == [*range(20), *range(30, 100)]
    assert np.flatnonzero(window >= 0).tolist() == [97, 98, 99]
    assert cache.stored[0][full[full >= 0]].tolist() == [*range(20), *range(30, 100)]
    assert cache.stored[1][window[window >= 0]].tolist() == [97, 98, 99]
    assert [len(table) for table in cache.seq_table(0, 98)] == [98, 98]


@pytest.mark.parametrize("verb", ["seq_map", "seq_claim"])
def test_a_sequence_begins_only_where_every_window_can_go_on(verb):
    cache = let_go(slack=5)
    assert np.flatnonzero(cache.seq_table(0)[1] >= 0).tolist() == list(range(192, 200))
    with pytest.raises(RewindError) as info:
        getattr(cache, verb)(1, cache.seq_table(0, 194))
    assert str(info.value) == (
        f"{verb} of 194 tokens for sequence 1: a sliding window of 4 has let go of position 191, "
        f"which the next token sees; begin with a history whose last 3 tokens are held"
    )
    assert not cache.has_seq(1)
    getattr(cache, verb)(1, cache.seq_table(0, 195))
    assert (cache.seq_len(1), cache.resumable_from(1)) == (195, 195)
    if verb == "seq_map":
        sees(cache, 1, numbered(*range(195)))


@pytest.mark.parametrize("verb", ["seq_map", "seq_claim"])
def test_a_hole_was_removed_and_not_let_go_of(verb):
    cache = cache_of()
    bring(cache, 0, list(range(20)))
    cache.seq_rm(0, 17, 19)
    getattr(cache, verb)(1, cache.seq_table(0))
    assert cache.resumable_from(1) == 0
    if verb == "seq_map":
        sees(cache, 1, numbered(*range(17), 19))


def test_a_table_may_be_longer_than_its_sequence():
    cache = let_go(3)
    assert [table.tolist() for table in cache.seq_table(0, 5)] == [[0, 1, 2, -1, -1]] * 2
    assert [table.tolist() for table in cache.seq_table(0, 2)] == [[0, 1]] * 2


@pytest.mark.parametrize("verb", ["seq_map", "seq_claim"])
def test_a_sequence_of_no_tokens_does_not_begin(verb):
    cache = cache_of()
    bring(cache, 0, [1, 2])
    getattr(cache, verb)(1, cache.seq_table(0, 0))
    assert not cache.has_seq(1)


@pytest.mark.parametrize("verb", ["seq_map", "seq_claim"])
def test_a_sequence_that_is_there_does_not_begin_again(verb):
    cache = cache_of(make=SimulatedTree)
    bring(cache, 0, [1, 2])
    cache.propose([-1], 3)
    tables, before = cache.seq_table(0), snapshot(cache)
    with pytest.raises(SequenceConflictError, match="sequence 0 holds 2 tokens already; seq_rm it"):
        getattr(cache, verb)(0, tables)
    with pytest.raises(StepError, match="sequence 3 has 1 proposed nodes; commit them, or commit"):
        getattr(cache, verb)(3, tables)
    assert snapshot(cache) == before


def test_new_cells_keep_the_holes_and_the_order_of_a_table():
    cache = cache_of()
    bring(cache, 0, list(range(100)))
    cache.seq_rm(0, 20, 30)
    old = cache.seq_table(0)
    new = cache.seq_claim(1, old)
    for group in range(2):
        assert ((new[group] >= 0) == (old[group] >= 0)).all()
        assert not set(new[group].tolist()) & set(old[group][old[group] >= 0].tolist())
        assert seq_positions(cache.cells[group], 1) == seq_positions(cache.cells[group], 0)
    cache.check()


def test_positions_that_do_not_follow_each_other_are_no_span_even_where_their_cells_do():
    cache = cache_of((None,))
    bring(cache, 0, list(range(10)))
    cache.seq_rm(0, 4, 9)
    cache.seq_rm(0, 9)
    bring(cache, 0, [9])
    tables = cache.seq_table(0)
    assert tables[0].tolist() == [0, 1, 2, 3, -1, -1, -1, -1, -1, 4]
    cache.seq_map(1, tables)
    cache.check()
    sees(cache, 1, numbered(0, 1, 2, 3, 9))


def test_held_cells_outlive_their_sequence_and_what_is_not_there_is_not_held():
    cache = let_go(n=100)
    tables = cache.seq_table(0)
    cache.retain_cells(tables)
    cache.seq_rm(0)
    assert [usage.live for usage in cache.usage().groups] == [100, 3]
    cache.check([[c for c in table.tolist() if c >= 0] for table in tables])
    cache.seq_map(5, tables)
    sees(cache, 5, numbered(*range(100)))
    cache.release_cells(tables)
    cache.seq_rm(5)
    assert [usage.live for usage in cache.usage().groups] == [0, 0]
    cache.check()


def test_none_of_a_table_is_no_cell_even_before_cell_0():
    cache = cache_of((None,))
    bring(cache, 0, [1, 2])
    cache.retain_cells((np.array([-1, 0, 1]),))
    cache.check([[0, 1]])
    cache.release_cells((np.array([-1, 0, 1]),))
    cache.check()


def test_only_taken_cells_can_be_held():
    cache = cache_of((None,))
    bring(cache, 0, [1, 2])
    with pytest.raises(AssertionError, match="not all taken"):
        cache.retain_cells((np.array([1, 2]),))


def test_cells_cannot_be_let_go_of_twice():
    cache = cache_of((None,))
    bring(cache, 0, [1, 2])
    tables = cache.seq_table(0)
    cache.seq_rm(0)
    with pytest.raises(AssertionError, match="released twice"):
        cache.release_cells(tables)


# Trees on windows ---------------------------------------------------------------------------------


def test_a_tree_deeper_than_its_window_sees_the_window_alone():
    cache = cache_of(make=SimulatedTree)
    bring(cache, 0, list(range(100)))
    chain = list(range(-1, 9))
    cache.propose(chain)
    cache.begin_step([(0, 10)])
    seen = cache.forward(list(range(100, 110)))
    history = numbered(*range(110))
    assert seen[0] == [visible(history, p, None) for p in range(100, 110)]
    assert seen[1] == [visible(history, p, WINDOW) for p in range(100, 110)]
    cache.commit(list(range(10)))
    bring(cache, 0, [110])
    sees(cache, 0, numbered(*range(111)))
    assert cache.resumable_from(0) >= 100


# Points to resume at ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SimulatedSeq, SimulatedTree])
def test_a_point_that_was_kept_is_resumed_at_when_the_window_has_moved_on(make):
    cache = cache_of((None, 4), make=make)
    feed(cache, 0, 20)
    cache.keep_point(0, 18)
    for _ in range(30):
        feed(cache, 0, 10)
    assert not cache.can_resume(0, 17) and not cache.can_resume(0, 19)
    assert [cache.resume_at(0, n) for n in (17, 18, 19, 100)] == [0, 18, 18, 18]
    assert cache.resume_at(0, 1000) == cache.seq_len(0), "no further than it is long"
    with pytest.raises(RewindError, match="resumes from 18 or from 280 to 320; raise window_slack"):
        cache.seq_cp(0, 1, 0, 100)
    held = seq_positions(cache.cells[1], 0)
    assert held[:3] == [15, 16, 17] and len(held) < 90, "a window, not all that came since"
    cache.seq_cp(0, 1, 0, 18)
    cache.seq_rm(0, 18)
    for seq in (0, 1):
        assert cache.seq_len(seq) == 18 and cache.can_resume(seq, 18)
        cache.begin_step([(seq, 1)])
        seen = cache.forward([999])
        assert seen[1] == [[15, 16, 17, 999]]
    cache.check()


def test_a_point_is_forgotten_when_its_sequence_is_cut_back_below_it():
    cache = cache_of((4,))
    feed(cache, 0, 40)
    cache.keep_point(0, 38)
    cache.seq_rm(0, 37)
    feed(cache, 0, 200)
    assert cache.resume_at(0, 40) == 0
    assert seq_positions(cache.cells[0], 0) == list(range(234, 237))


def test_a_point_that_cannot_be_had_any_more_is_refused():
    cache = cache_of((4,))
    feed(cache, 0, 200)
    with pytest.raises(RewindError, match="keep_point of sequence 0 at 100"):
        cache.keep_point(0, 100)


def test_what_a_point_needs_is_not_let_go_of_to_make_room():
    cache = cache_of((4,), capacity=40)
    feed(cache, 0, 10)
    cache.keep_point(0, 10)
    feed(cache, 0, 28)
    assert cache.n_free == 40 - 6, "a window at the point and one at the end"
    feed(cache, 1, 34)
    cache.seq_rm(0, 10)
    assert not cache.can_extend(1 + cache.n_free)
    cache.check()


def test_what_a_dropped_point_needed_is_room_again():
    cache = cache_of((4,), capacity=40)
    feed(cache, 0, 10)
    cache.keep_point(0, 10)
    feed(cache, 0, 28)
    cache.drop_point(0, 9)
    assert cache.n_free == 34, "that was no point"
    cache.drop_point(0, 10)
    assert cache.n_free == 37
    feed(cache, 1, 36)
    assert cache.resume_at(0, 10) == 0
    cache.check()


def test_a_contiguous_history_keeps_its_points_too():
    cache = SimulatedContiguous(config_of((4,), 2000, 0, min_chunk=8))
    for n in range(30):
        cache.forward([n])
    cache.keep_point(29)
    for n in range(30, 300):
        cache.forward([n])
    assert cache.rewind(29) == 29
    assert cache.forward([999])[0] == [[26, 27, 28, 999]]
    cache.drop_point(29)
    for n in range(30, 300):
        cache.forward([n])
    assert cache.rewind(29) == 0
