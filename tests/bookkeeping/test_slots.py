"""Slots of states beside rows: who shares them, where sequences resume, what is freed."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.bookkeeping import OneSequence, Sequences, TreeSequences
from kvcellar.bookkeeping.cells.growth import ARRAY_BYTES, INDEX_BYTES
from kvcellar.budget import MemoryBudget
from kvcellar.cache_config import make_config
from kvcellar.errors import CacheFullError, ConfigError, RewindError, StepError
from kvcellar.states import NO_SLOT, StateGroup, StateShape
from kvcellar.types import LayerGroup, ModelCacheParams
from tests.stretches import stretches

STATE = StateGroup(((StateShape("recurrent", (4,)),), (StateShape("convolution", (2, 3)),)))


def config(n_slots=8, capacity=64, **more):
    return make_config(ModelCacheParams(1, 1, 4, state=STATE), capacity, n_slots=n_slots, **more)


def run(cache, seq_ids, *, layers=(0, 1)):
    """One forward; return the plan of its states."""
    cache.begin_step(stretches(seq_ids))
    cache.steps.plan(0, len(seq_ids), None)
    cache.steps.wrote(0)
    for layer in layers:
        plan = cache.steps.plan_states(layer, len(seq_ids), None)
        cache.steps.wrote_states(layer)
    return plan


def taken(cache):
    cache.end_step()
    cache.check()
    return cache.usage().slots.live


def test_a_step_reads_one_slot_and_writes_another():
    cache = Sequences(config())
    first = run(cache, [3, 3, 5])
    assert [tuple(a) for a in first.advances] == [(0, 2, NO_SLOT, 0), (2, 1, NO_SLOT, 1)]
    second = run(cache, [5, 3])
    assert [(a.src, a.dst) for a in second.advances] == [(1, 2), (0, 3)]
    assert second.n_slots == 4
    assert taken(cache) == 2


def test_a_step_counts_when_its_recurrent_layers_have_written_too():
    cache = Sequences(config())
    run(cache, [0], layers=(0,))
    assert cache.is_step_open
    cache.end_step()
    assert not cache.has_seq(0)
    assert taken(cache) == 0


def test_a_cancelled_step_leaves_the_states_of_before():
    cache = Sequences(config())
    run(cache, [0, 0])
    before = run(cache, [0]).advances[0].src
    cache.cancel_step()
    assert run(cache, [0]).advances[0].src == before
    assert taken(cache) == 1


def test_forks_share_a_slot_until_each_has_written_its_own():
    cache = Sequences(config())
    run(cache, [0, 0, 0])
    cache.seq_cp(0, 1)
    assert taken(cache) == 1
    assert cache.usage().slots.shared == 1
    plan = run(cache, [0, 1])
    assert len({a.src for a in plan.advances}) == 1
    assert len({a.dst for a in plan.advances}) == 2
    assert taken(cache) == 2


def test_a_history_goes_back_to_its_points_and_says_where_it_is():
    cache = Sequences(config())
    for n in (5, 20, 3):
        run(cache, [0] * n)
        if n < 20:
            cache.keep_point(0, cache.seq_len(0))
    assert [cache.resume_at(0, n) for n in (28, 27, 6, 5, 4)] == [28, 5, 5, 5, 0]
    assert taken(cache) == 2
    assert cache.seq_rm(0, 27) == 5
    assert cache.seq_len(0) == 5
    assert taken(cache) == 1
    assert cache.seq_rm(0, 4) == 0
    assert not cache.has_seq(0)
    assert taken(cache) == 0


def test_a_cache_says_which_slots_are_shared_and_how_many_a_step_would_lack():
    cache = Sequences(config(n_slots=4))
    run(cache, [0, 0])
    assert cache.shared_slots() == []
    run(cache, [1])
    cache.seq_cp(0, 2)
    assert cache.shared_slots() == [0]
    usage = cache.usage().slots
    assert (usage.capacity, usage.live, usage.shared, usage.n_cells) == (4, 2, 1, 2)
    assert (usage.window, usage.chunk, Sequences(config()).usage().slots.n_cells) == (None, None, 0)
    assert [cache.n_missing_slots(n) for n in (1, 2, 3, 4)] == [-1, 0, 1, 2]
    run(cache, [1])
    assert cache.n_missing_slots(3) == 1, "the slot that the finished step has read is free"
    rows_alone = Sequences(make_config(ModelCacheParams(1, 1, 4), 8))
    assert (rows_alone.n_missing_slots(9), rows_alone.shared_slots()) == (0, [])


def test_slots_that_a_budget_would_grant_are_not_missing():
    budget = MemoryBudget(20_000)
    cache = Sequences(config(n_slots=40, budget=budget))
    run(cache, [0])
    assert cache.n_missing_slots(9) == 0
    slot, held = STATE.slot_bytes + INDEX_BYTES, cache.steps.growth.sizes[-1]
    assert budget.ask(budget.available_bytes - 3 * slot - STATE.most_bytes * held)
    n_free = held - cache.usage().slots.live
    assert [cache.n_missing_slots(n_free + n) for n in (0, 1, 3, 4, 6)] == [0, 0, 0, 1, 3]
    cache.check()


def test_who_runs_all_layers_by_himself_has_the_plan_of_states_too():
    for cache in (Sequences(config()), OneSequence(config())):
        if isinstance(cache, Sequences):
            cache.begin_step([(0, 2)])
        cache.steps.plan_all(2, [0, 1])
        assert [tuple(one) for one in cache.steps.begun_states().advances] == [(0, 2, NO_SLOT, 0)]
        cache.steps.wrote_all()
        assert cache.usage().slots.live == 1 and not cache.is_step_open


def test_clear_forgets_slots_points_nodes_and_every_other_owner():
    cache = TreeSequences(config())
    run(cache, [0] * 3)
    cache.keep_point(0, 3)
    run(cache, [0])
    cache.end_step()
    cache.retain_cells(cache.seq_table(0))
    cache.propose([-1, 0])
    run(cache, [0] * 2)
    cache.clear()
    assert (taken(cache), cache.shared_slots(), cache.n_missing_slots(8)) == (0, [], 0)
    plan = run(cache, [0] * 4)
    assert [tuple(one) for one in plan.advances] == [(0, 4, NO_SLOT, 0)] and plan.n_slots == 1
    run(cache, [0])
    assert cache.resume_at(0, 4) == 0, "the point at 3 is forgotten, and that at 4 is none"
    assert taken(cache) == 1


def test_a_point_that_is_dropped_frees_its_slot():
    cache = Sequences(config())
    run(cache, [0])
    cache.keep_point(0, 1)
    cache.drop_point(0, 1)  # it goes on from there all the same
    assert cache.resume_at(0, 1) == 1
    cache.keep_point(0, 1)
    run(cache, [0])
    assert taken(cache) == 2
    cache.drop_point(0, 1)
    assert taken(cache) == 1
    assert cache.resume_at(0, 1) == 0


def test_what_states_cannot_give_is_refused_by_name():
    cache = Sequences(config())
    run(cache, [0] * 6)
    with pytest.raises(RewindError, match="take no holes"):
        cache.seq_rm(0, 2, 4)
    with pytest.raises(
        RewindError, match=r"recurrent state has let go .* resumes from 0 or from 6"
    ):
        cache.seq_cp(0, 1, 0, 4)
    with pytest.raises(
        RewindError, match=r"position 2 of sequence 0 to 1, which holds 0 .* known to be the same"
    ):
        cache.seq_cp(0, 1, 2)
    run(cache, [4] * 3)
    with pytest.raises(RewindError, match=r"4, which holds 3 tokens: .* known to be the same"):
        cache.seq_cp(0, 4, 3)
    cache.seq_rm(4)
    cache.seq_cp(0, 1)
    run(cache, [0, 0])
    cache.seq_cp(0, 1, 6)  # what it lacks of the same history
    assert cache.seq_len(1) == 8
    table = cache.seq_table(0)
    with pytest.raises(
        RewindError,
        match=r"^seq_map of 7 tokens for sequence 2: no states .* 7 tokens; begin with the first 0",
    ):
        cache.seq_map(2, [part[:7] for part in table])
    other = Sequences(config())
    run(other, [0] * 4)
    other.keep_point(0, 4)
    run(other, [0] * 3)
    with pytest.raises(RewindError, match=r"after 6 tokens; begin with the first 4"):
        other.seq_map(2, [part[:6] for part in other.seq_table(0)])
    assert taken(cache) == 1


def test_tables_tell_slots_and_an_index_keeps_them():
    cache = Sequences(config())
    run(cache, [0] * 4)
    cache.keep_point(0, 4)
    run(cache, [0] * 3)
    tables = cache.seq_table(0)
    assert np.flatnonzero(tables[1] >= 0).tolist() == [3, 6]
    cache.retain_cells(tables)
    cache.end_step()
    cache.seq_rm(0)
    cache.check(tables_held := [part[part >= 0] for part in tables])
    cache.seq_map(1, [part[:4] for part in tables])
    plan = run(cache, [1])
    assert plan.advances[0].src == tables[1][3]
    cache.end_step()
    cache.check(tables_held)
    cache.release_cells(tables)
    assert taken(cache) == 1


def test_slots_stay_where_they_are_when_rows_are_gathered():
    cache = Sequences(config())
    run(cache, [0] * 9)
    done = cache.compact([cache.seq_table(0)], 99)
    assert done.moved == (None, None) and done.is_done


def test_slots_come_behind_all_groups():
    groups = (LayerGroup((0,), 1, 4, 4), LayerGroup((1,), 1, 4, 4, window=3))
    cache = Sequences(make_config(ModelCacheParams(2, groups=groups, state=STATE), 64, n_slots=8))
    cache.begin_step([(0, 5)])
    cache.steps.plan_all(5, None)
    cache.steps.wrote_all()
    tables = cache.seq_table(0)
    cache.seq_map(1, tables)
    assert cache.shared_slots() == [0]
    with pytest.raises(RewindError, match="no states"):
        cache.seq_map(2, [*tables[:2], np.full(5, -1)])
    cache.check()


def test_rows_are_joined_beside_slots():
    cache = Sequences(config(), block_size=4)
    run(cache, [0] * 6)
    cache.seq_cp(0, 1)
    run(cache, [1] * 2)
    (zero, _), (one, slots) = cache.seq_table(0), cache.seq_table(1)
    tables = [np.concatenate([zero[:6], one[6:]]), slots]
    cache.retain_cells(tables)
    cache.seq_map(2, tables)
    assert cache.seq_len(2) == 8 and cache.shared_slots() == [int(slots[-1])]
    cache.check(tables_held := [part[part >= 0] for part in tables])
    assert len(tables_held[1]) == 1


def test_claimed_slots_before_the_last_are_points():
    cache = Sequences(config())
    rows, slots = np.arange(6), np.full(6, -1)
    slots[[1, 5]] = 0
    got = cache.seq_claim(0, [rows, slots])
    assert np.flatnonzero(got[1] >= 0).tolist() == [1, 5]
    assert taken(cache) == 2
    assert cache.seq_rm(0, 5) == 2


def test_without_a_free_slot_no_sequence_grows_though_there_are_cells():
    cache = Sequences(config(n_slots=2))
    run(cache, [0, 0])
    assert cache.can_extend(62)  # the slot that the finished step has read counts
    assert cache.n_free == 62
    cache.end_step()
    with pytest.raises(CacheFullError, match=r"2 slots of .*, 1 free of 2; .*raise n_slots \(2\)"):
        cache.begin_step([(0, 1), (1, 1)])
    run(cache, [1])
    assert not cache.can_extend(1)
    assert not cache.can_begin_step([(0, 1)])
    assert cache.n_free == 0
    cache.end_step()
    cache.check()


def test_each_node_of_a_tree_has_a_slot_and_the_accepted_one_stays():
    cache = TreeSequences(config())
    run(cache, [0, 0])
    cache.propose([-1, 0, 0, 1], 0)
    plan = run(cache, [0] * 4)
    root, (a, b, c, d) = plan.advances[0].src, (x.dst for x in plan.advances)
    assert [x.src for x in plan.advances] == [root, a, a, b]
    assert len({root, a, b, c, d}) == 5
    cache.commit([0, 2])
    assert run(cache, [0]).advances[0].src == c
    assert taken(cache) == 1


def test_a_tree_without_enough_slots_is_not_proposed():
    cache = TreeSequences(config(n_slots=4))
    run(cache, [0])
    with pytest.raises(
        CacheFullError, match=r"4 nodes .*, 63 free of 64 and 4 slots of 40 B, 3 free; release"
    ):
        cache.propose([-1, 0, 1, 2])
    assert not cache.has_tree()
    cache.propose([-1, 0, 1])
    assert not cache.can_extend(1)
    run(cache, [0] * 3)
    cache.commit([])
    assert taken(cache) == 1


def test_one_sequence_goes_back_to_points():
    cache = OneSequence(config(n_slots=3))
    assert cache.rewind(0) == 0, "nothing is taken from nothing"

    def feed(n):
        cache.steps.plan(0, n, None)
        cache.steps.wrote(0)
        for layer in (0, 1):
            plan = cache.steps.plan_states(layer, n, None)
            cache.steps.wrote_states(layer)
        return plan.advances[0]

    feed(4)
    cache.keep_point(4)
    at_4 = feed(3).src
    assert cache.rewind(6) == 4
    assert feed(1).src == at_4
    cache.keep_point(5)
    assert cache.rewind(5) == 5
    assert cache.can_extend(1)
    feed(1)
    cache.keep_point(6)
    assert not cache.can_extend(1)
    with pytest.raises(CacheFullError) as info:
        feed(1)
    assert str(info.value) == (
        "step needs 1 cells, 58 free of 64, and 1 slots of 40 B, 0 free of 3 (n_slots); drop "
        "points; rewind, clear, or raise capacity"
    )
    cache.drop_point(5)
    feed(1)
    assert cache.rewind(0) == 0
    assert feed(1).src == NO_SLOT


def held_bytes(cache):
    """Bytes of what a budget has granted, by the definition."""
    rows, slots = cache.steps.growth.sizes
    arrays = ARRAY_BYTES * sum(cache.steps.growth.limits)
    return rows * (32 + INDEX_BYTES) + slots * (STATE.slot_bytes + INDEX_BYTES) + arrays


@pytest.mark.parametrize("kind", [Sequences, TreeSequences])
def test_a_budget_grants_slots_by_their_bytes(kind):
    budget = MemoryBudget(20_000)
    cache = kind(config(n_slots=40, capacity=64, budget=budget))
    for seq in range(5):
        run(cache, [seq] * 3)
    cache.end_step()
    cache.check()
    assert cache.steps.growth.sizes[-1] >= 6
    assert budget.held_bytes == held_bytes(cache)


def test_where_a_budget_has_no_slot_left_nothing_grows_and_the_message_says_bytes():
    slot = STATE.slot_bytes + INDEX_BYTES
    budget = MemoryBudget(16 * 70 + 1000 + 6 * slot)
    cache = Sequences(config(n_slots=40, capacity=16, budget=budget))
    seq = 0
    while cache.can_begin_step([(seq, 1)]):
        assert cache.can_extend(1)
        run(cache, [seq])
        seq += 1
    assert 2 <= seq < 16
    assert not cache.can_extend(1)
    assert cache.n_free == 0
    with pytest.raises(CacheFullError, match=r"1 slots of 40 B, 0 free of .*give more memory"):
        cache.begin_step([(seq, 1)])
    cache.seq_rm(0)
    run(cache, [1])
    cache.end_step()
    cache.check()


def test_a_budget_without_room_for_two_slots_is_refused_with_figures():
    with pytest.raises(ConfigError, match=r"1 token take 64, 2 slots 40 each"):
        Sequences(config(capacity=16, budget=MemoryBudget(300)))


def test_one_sequence_grows_by_its_budget_and_says_when_slots_are_short():
    cache = OneSequence(config(n_slots=40, capacity=16, budget=MemoryBudget(2000)))
    n = 0
    while cache.can_extend(1):
        cache.steps.plan(0, 1, None)
        cache.steps.wrote(0)
        for layer in (0, 1):
            plan = cache.steps.plan_states(layer, 1, None)
            assert plan.n_slots == cache.steps.growth.sizes[-1]
            cache.steps.wrote_states(layer)
        n += 1
        cache.keep_point(n)
    assert 2 <= n < 16
    with pytest.raises(CacheFullError, match="slots of 40 B"):
        cache.steps.plan(0, 1, None)
    cache.rewind(2)
    assert cache.can_extend(1)
    cache.steps.growth.check()


def test_a_recurrent_layer_may_come_first_in_a_forward_that_nobody_began():
    cache = OneSequence(config())
    cache.steps.plan_states(0, 3, [0, 1, 2])
    assert cache.is_step_open
    with pytest.raises(StepError, match="recurrent layer 2 asked for its states; this cache has 2"):
        cache.steps.plan_states(2, 3, None)
    with pytest.raises(StepError, match="recurrent layer 1 brings 3 tokens and no step is open"):
        Sequences(config()).steps.plan_states(1, 3, None)


def test_states_come_with_a_history_whose_bytes_come_from_elsewhere():
    cache = OneSequence(config())
    cache.adopt(5, [5])
    (slot,) = cache.slots.table(0, 5)[4:]
    cache.steps.plan(0, 1, None)
    assert cache.steps.plan_states(0, 1, None).advances[0].src == slot
