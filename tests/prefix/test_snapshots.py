"""Snapshots that an index gives up: what costs least to compute again and is not used."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.prefix import PrefixIndex, make_index
from kvcellar.sight import FULL, Sight
from kvcellar.states import STATE_SIGHT

KINDS = pytest.mark.parametrize("kind", ["radix", "hashed"])


class Filled:
    """An index of rows and states that is told where there are snapshots; slots count upwards."""

    def __init__(self, kind: str, block_size: int = 1) -> None:
        self.index: PrefixIndex = make_index(kind, (FULL, STATE_SIGHT), block_size)
        self.n_cells = self.n_slots = 0

    def put(self, tokens: list[int], *lengths: int) -> None:
        rows = np.arange(self.n_cells, self.n_cells + len(tokens))
        slots = np.full(len(tokens), -1)
        slots[[n - 1 for n in lengths]] = range(self.n_slots, self.n_slots + len(lengths))
        self.n_cells += len(tokens)
        self.n_slots += len(lengths)
        self.index.insert_prefix(tokens, [rows, slots])
        self.index.check()

    def give_up(self, n: int, held: tuple[int, ...] = ()) -> list[int]:
        gone = self.index.evict_states(n, held)
        self.index.check()
        assert not gone.n_tokens and not gone.cells[0].size, "rows stay"
        slots: list[int] = gone.cells[1].tolist()
        return slots


@KINDS
def test_a_prompt_is_resumed_at_the_last_snapshot_before_it_leaves_what_is_stored(kind):
    filled = Filled(kind)
    filled.put(list(range(40)), 10, 30, 40)
    found = filled.index.match_prefix([*range(35), 7, 7])
    assert (found.length, found.n_matched) == (30, 35)
    assert found.cells[1].tolist() == [-1] * 9 + [0] + [-1] * 19 + [1]
    assert filled.index.find_prefix([*range(35), 7, 7]).length == 35


@KINDS
def test_the_snapshot_nearest_behind_another_goes_first_and_its_cost_is_the_next_ones(kind):
    filled = Filled(kind)
    filled.put(list(range(40)), 10, 13, 20, 40)  # they save 10, 3, 7 and 20 tokens
    assert filled.give_up(1) == [1]
    assert filled.give_up(2) == [0, 2]  # the third saves 10 since then, and is as young
    assert filled.index.match_prefix(list(range(40))).length == 40


@KINDS
def test_a_branch_costs_what_is_behind_the_trunks_snapshot(kind):
    filled = Filled(kind)
    filled.put(list(range(30)), 30)
    filled.put([*range(30), *[5] * 4], 34)
    filled.put([*range(30), *[6] * 8], 38)
    assert filled.give_up(3) == [1, 2, 0]


@KINDS
def test_what_is_used_stays_and_what_is_dear_and_never_used_goes_in_the_end(kind):
    filled = Filled(kind)
    dear = [9] * 60
    filled.put(dear, 60)
    for turn in range(40):  # each saves less, and is the newest
        filled.put([1] * 10 * (turn + 1), 10 * (turn + 1))
        if filled.give_up(1) == [0]:
            break
    else:
        pytest.fail("nobody used it, and it never went")
    assert turn > 1, "it was worth several cheap ones"
    assert filled.index.match_prefix([1] * 10 * (turn + 1)).length == 10 * (turn + 1)


@KINDS
def test_locks_keep_rows_and_no_snapshots_and_held_slots_stay(kind):
    filled = Filled(kind)
    filled.put(list(range(20)), 10, 20)
    match = filled.index.match_prefix(list(range(20)))
    filled.index.lock_handle(match.handle)
    assert filled.give_up(2, held=(1,)) == [], "all that are asked for or none"
    assert filled.give_up(1, held=(1,)) == [0]
    assert filled.give_up(1) == [1]
    assert filled.give_up(1) == []
    assert filled.index.match_prefix(list(range(20)))[::3] == (0, 20)
    filled.index.unlock_handle(match.handle)
    filled.put(list(range(20)), 15)
    assert filled.index.match_prefix(list(range(20))).length == 15, "states came back to the rows"


@KINDS
def test_a_demoted_historys_snapshots_go_first(kind):
    filled = Filled(kind)
    filled.put(list(range(50)), 50)
    filled.put([7] * 5, 5)
    filled.index.demote(filled.index.find_prefix(list(range(50))))
    assert filled.give_up(1) == [0]


@KINDS
def test_rows_that_are_evicted_take_their_snapshots_along_and_end_where_there_is_one(kind):
    filled = Filled(kind)
    filled.put(list(range(40)), 10, 30)
    gone = filled.index.evict(1)
    filled.index.check()
    assert gone.n_tokens == 10 and gone.cells[1].tolist() == [], "no use without a snapshot behind"
    gone = filled.index.evict(1)
    assert gone.n_tokens == 20 and gone.cells[1].tolist() == [1]
    assert filled.index.match_prefix(list(range(40))).length == 10


@KINDS
def test_snapshots_come_behind_all_groups(kind):
    index = make_index(kind, (FULL, Sight(3), STATE_SIGHT))
    rows, slots = np.arange(8), np.where(np.arange(8) % 4 == 3, np.arange(8) // 4 + 20, -1)
    index.insert_prefix(list(range(8)), [rows, np.where(rows < 6, -1, rows), slots])
    assert index.states_costs(9, (), -1) == [4, 8]
    gone = index.evict_states(1)
    assert [cells.tolist() for cells in gone.cells] == [[], [], [20]]
    assert index.match_prefix(list(range(8))).length == 8
    gone = index.evict(1)
    assert [sorted(cells.tolist()) for cells in gone.cells] == [list(range(8)), [6, 7], [21]]
    assert index.n_snapshots == 0
    index.check()


@KINDS
def test_what_is_worth_as_much_as_the_last_that_went_costs_nothing(kind):
    filled = Filled(kind)
    filled.put([8] * 5, 5)
    filled.put([9] * 5, 5)
    assert filled.give_up(1) == [0]
    assert filled.index.states_costs(1, (), -1) == [0]


@KINDS
def test_only_whole_blocks_have_snapshots(kind):
    filled = Filled(kind, block_size=4)
    filled.put(list(range(11)), 8, 11)
    assert filled.index.match_prefix(list(range(11))).length == 8
    assert filled.give_up(2) == []
    assert filled.give_up(1) == [0]


def test_an_index_without_states_gives_up_none():
    for kind in ("radix", "hashed", "naive"):
        index = make_index(kind, (FULL, FULL))
        index.insert_prefix([1, 2], [np.arange(2)] * 2)
        assert index.evict_states(3).cells[1].size == 0
        assert index.states_costs(3, (), -1) == []


@KINDS
def test_costs_are_those_of_the_next_to_go_and_what_is_wanted_goes_late(kind):
    filled = Filled(kind)
    filled.put(list(range(30)), 30)
    filled.put([*range(30), *[5] * 4], 34)
    filled.put([*range(30), *[6] * 8], 38)
    assert filled.index.states_costs(3, (), -1) == [4, 8, 30]
    assert filled.index.states_costs(2, {1}, -1) == [8, 30], "the trunk before what is wanted"
    assert filled.index.states_costs(9, {1}, -1) == [8, 30, 34], "which the trunk saved"
    assert filled.give_up(2) == [1, 2], "to look changes nothing"
    assert filled.index.states_costs(1, (), -1) == [22], "it was not used since one of 8 went"
    assert filled.index.states_costs(1, {0}, -1) == [30]
    filled.index.match_prefix(list(range(30)))
    assert filled.index.states_costs(1, (), -1) == [30]


@KINDS
def test_the_end_that_somebody_runs_on_from_costs_nothing_and_a_trunk_does(kind):
    filled = Filled(kind)
    filled.put(list(range(30)), 30)
    filled.put([*range(30), *[5] * 4], 34)
    filled.put([*range(30), *[6] * 8], 38)
    running = filled.index.match_prefix([*range(30), *[5] * 4])
    filled.index.lock_handle(running.handle)
    assert filled.index.states_costs(3, (), -1) == [8, 30]
    assert filled.index.states_costs(2, (), -1) == [8], "one of two costs nothing"
    assert filled.index.states_costs(1, (), -1) == []
    assert filled.index.states_costs(3, (), 2) == [30], "the other is about to run"
    assert filled.index.states_costs(3, {1}, 2) == [30, 34], "somebody else wants it"
