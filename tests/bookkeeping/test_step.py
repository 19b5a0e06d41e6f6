"""The life of one forward: begun, written layer by layer, accepted, or taken back."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.cache_config import CacheConfig
from kvcellar.errors import (
    CacheFullError,
    ConfigError,
    PositionError,
    ProposalError,
    RewindError,
    StepError,
    UnknownSequenceError,
)
from kvcellar.types import LayerGroup, ModelCacheParams
from tests.bookkeeping.byte_simulator import (
    SimulatedContiguous,
    SimulatedSeq,
    SimulatedTree,
    config_of,
    snapshot,
)
from tests.bookkeeping.held import seq_cells

MIXED = (None, 4)
"""Layers 0 and 2 keep all of the history, layer 1 a window of 4."""

SEQ_CACHES = pytest.mark.parametrize("make", [SimulatedSeq, SimulatedTree])
ALL_CACHES = pytest.mark.parametrize("make", [SimulatedContiguous, SimulatedSeq, SimulatedTree])


def begin(cache, n):
    """Begin a step of ``n`` tokens of sequence 0, where the cache wants that."""
    if not isinstance(cache, SimulatedContiguous):
        cache.begin_step([(0, n)])


def length(cache):
    return cache.length if isinstance(cache, SimulatedContiguous) else cache.seq_len(0)


@ALL_CACHES
def test_the_layers_of_a_group_share_one_plan(make):
    cache = make(config_of(MIXED))
    begin(cache, 3)
    plans = [cache.plan(layer, 3, None) for layer in range(3)]
    assert plans[0] is plans[2]
    assert plans[1] is not plans[0]


@ALL_CACHES
def test_tokens_count_once_every_layer_has_written(make):
    cache = make(config_of(MIXED))
    begin(cache, 3)
    for layer in range(3):
        if make is SimulatedContiguous:
            assert cache.length == 0
        else:
            assert not cache.has_seq(0) and cache.seq_ids() == []
        cache.run_layer(layer, [1, 2, 3])
    assert length(cache) == 3
    assert not cache.is_step_open


@ALL_CACHES
def test_a_layer_that_reports_twice_counts_once(make):
    cache = make(config_of(MIXED))
    begin(cache, 1)
    cache.run_layer(0, [1])
    cache.wrote(0)
    cache.run_layer(1, [1])
    assert cache.is_step_open


@ALL_CACHES
def test_a_layer_cannot_have_written_before_it_asked_for_its_plan(make):
    cache = make(config_of(MIXED))
    with pytest.raises(AssertionError):
        cache.wrote(0)
    begin(cache, 1)
    cache.run_layer(0, [1])
    with pytest.raises(AssertionError):
        cache.wrote(1)


SHARED = ModelCacheParams(
    4,
    groups=(LayerGroup((0,), 1, 1, 1), LayerGroup((1,), 1, 1, 1, window=4)),
    shared=((2, 0), (3, 1)),
)
"""Layers 2 and 3 share the rows of layers 0 and 1."""


@ALL_CACHES
def test_a_layer_that_shares_rows_reads_by_the_plan_of_the_one_that_stores_them(make):
    cache = make(CacheConfig(SHARED, 64, "float32", min_chunk=8, window_slack=0))
    begin(cache, 3)
    plans = [cache.run_layer(layer, [1, 2, 3]) and cache.plans[layer] for layer in (0, 1)]
    assert [cache.steps.stores(layer) for layer in range(4)] == [True, True, False, False]
    for layer in (2, 3):
        assert cache.is_step_open, "tokens count when it has attended too"
        assert cache.plan(layer, 3, None) is plans[layer - 2]
        cache.wrote(layer)
    assert length(cache) == 3


@ALL_CACHES
def test_a_layer_that_shares_rows_comes_after_the_one_that_stores_them(make):
    cache = make(CacheConfig(SHARED, 64, "float32", min_chunk=8, window_slack=0))
    begin(cache, 3)
    refused = "layer 2 attends over the rows of layer 0, which has not written those of this forw"
    with pytest.raises(StepError, match=refused):
        cache.plan(2, 3, None)
    plan = cache.plan(0, 3, None)
    assert not cache.take_plan(2, plan)
    with pytest.raises(StepError, match=refused):
        cache.plan(2, 3, None)
    cache.wrote(0)
    assert cache.take_plan(2, plan)


@ALL_CACHES
def test_positions_are_compared_once_per_forward(make):
    cache = make(config_of(MIXED))
    begin(cache, 2)
    assert cache.needs_positions()
    cache.run_layer(0, [1, 2], [0, 1])
    assert not cache.needs_positions()
    cache.run_layer(1, [1, 2], None)
    cache.run_layer(2, [1, 2], None)
    assert cache.needs_positions()


@ALL_CACHES
def test_positions_may_be_an_array(make):
    cache = make(config_of(MIXED))
    begin(cache, 2)
    cache.forward([1, 2], np.array([0, 1]))
    assert length(cache) == 2


@ALL_CACHES
def test_a_step_that_is_taken_back_leaves_the_cache_as_it_was(make):
    cache = make(config_of(MIXED))
    begin(cache, 5)
    cache.forward([1, 2, 3, 4, 5])
    cache.end_step()
    cache.steps._pools = cache.ids = None  # what a cancelled step wrote to free cells is no state
    before = snapshot(cache)
    for n_layers in range(4):
        begin(cache, 2)
        for layer in range(n_layers):
            cache.plan(layer, 2, [5, 6])
            cache.wrote(layer)
        if n_layers or make is not SimulatedContiguous:
            cache.cancel_step()
        assert snapshot(cache) == before
        cache.cancel_step()
        assert snapshot(cache) == before, "there is nothing left to take back"


@ALL_CACHES
def test_an_accepted_step_stays(make):
    cache = make(config_of(MIXED))
    begin(cache, 2)
    cache.forward([1, 2])
    cache.end_step()
    cache.cancel_step()
    assert length(cache) == 2


@ALL_CACHES
def test_the_next_verb_undoes_what_a_raised_forward_left_behind(make):
    cache = make(config_of(MIXED, capacity=6))
    begin(cache, 2)
    cache.forward([1, 2])
    begin(cache, 4)
    cache.run_layer(0, [3, 4, 5, 6])
    cache.end_step()
    assert length(cache) == 2
    assert [usage.live for usage in cache.usage().groups] == [2, 2]
    begin(cache, 4)  # the four cells are free again
    cache.forward([3, 4, 5, 6])
    assert length(cache) == 6


def test_a_forward_that_is_run_again_without_cancel_starts_over():
    for make in (SimulatedContiguous, SimulatedTree):
        cache = make(config_of(MIXED, capacity=6))
        cache.run_layer(0, [1, 2, 3, 4])
        cache.run_layer(1, [1, 2, 3, 4])
        assert cache.forward([5, 6])[0] == [[5], [5, 6]]
        assert length(cache) == 2


@SEQ_CACHES
def test_a_step_under_way_is_no_sequence_yet_and_none_when_it_is_taken_back(make):
    cache = make(config_of(MIXED))
    cache.begin_step([(4, 1), (5, 1)])
    assert cache.seq_ids() == []
    cache.cancel_step()
    assert cache.seq_ids() == [] and cache.cells[0].seq_ids() == []
    assert cache.begin_step([(4, 1)]) == [0]


@SEQ_CACHES
def test_a_window_lets_go_only_once_the_step_is_accepted(make):
    cache = make(config_of((4,), capacity=200))
    cache.begin_step([(0, 80)])
    cache.forward(list(range(80)))
    assert cache.usage().groups[0].live == 80
    cache.cancel_step()
    assert cache.usage().groups[0].live == 0
    cache.begin_step([(0, 80)])
    cache.forward(list(range(80)))
    cache.end_step()
    assert cache.usage().groups[0].live == 3
    assert cache.resumable_from(0) == 80


def test_a_window_keeps_its_slack():
    for make, cut in ((SimulatedContiguous, "rewind"), (SimulatedSeq, "seq_rm")):
        cache = make(config_of((4,), capacity=500, slack=10))
        for start in range(0, 300, 100):
            begin(cache, 100)
            cache.forward(list(range(start, start + 100)))
        cache.end_step()
        args = (290,) if cut == "rewind" else (0, 290)
        getattr(cache, cut)(*args)
        begin(cache, 1)
        assert cache.forward([900])[0] == [[287, 288, 289, 900]]


def test_one_sequence_needs_no_begin_step_in_a_tree_cache():
    cache = SimulatedTree(config_of(MIXED))
    assert cache.forward([10, 11])[0] == [[10], [10, 11]]
    cache.propose([-1, -1])
    assert cache.forward([12, 13], [2, 2])[0] == [[10, 11, 12], [10, 11, 13]]
    cache.commit([1])
    assert cache.forward([14], [3])[0] == [[10, 11, 13, 14]]
    assert cache.seq_len(0) == 4


def test_a_tree_that_was_forwarded_brings_nothing_until_it_is_committed_or_grows():
    cache = SimulatedTree(config_of(MIXED))
    cache.propose([-1, 0])
    cache.forward([10, 11])
    cache.end_step()
    before = snapshot(cache)
    for n in (1, 2, 3):
        assert message(StepError, cache.begin_step, [(0, n)]) == (
            "the tree of sequence 0 awaits its commit; commit a chain, commit([]) to drop it, or "
            "propose the next frontier"
        )
        assert snapshot(cache) == before
    cache.propose([1])
    assert message(StepError, cache.begin_step, [(0, 2)]) == (
        "sequence 0 proposed 1 nodes, which come in one stretch; the step brings 2 tokens for it"
    )
    assert cache.forward([12])[0] == [[10, 11, 12]]


def test_the_nodes_of_a_frontier_come_in_one_stretch():
    cache = SimulatedTree(config_of(MIXED))
    cache.propose([-1, -1])
    said = message(StepError, cache.begin_step, [(0, 1), (0, 1)])
    assert said.endswith("the step brings 1 + 1 tokens for it")
    assert cache.begin_step([(0, 2)]) == [0, 0]


def test_a_chain_in_scattered_cells_is_brought_into_order():
    cache = SimulatedTree(config_of((None,), capacity=12))
    cache.begin_step([(1, 10)])
    cache.forward(list(range(100, 110)))
    for hole in (1, 3, 5):
        cache.seq_rm(1, hole, hole + 1)
    cache.propose([-1, -1, 1, 2, 3])
    cache.begin_step([(0, 5)])
    cache.forward([0, 1, 2, 3, 4])
    assert len(cache.plans[0].writes) >= 3
    cache.commit([1, 2, 3, 4])
    cache.begin_step([(0, 1)])
    assert cache.forward([5])[0] == [[1, 2, 3, 4, 5]]
    assert cache.stored[0][seq_cells(cache.cells[0], 0)].tolist() == [1, 2, 3, 4, 5]


def test_a_chain_that_is_in_order_already_is_not_moved():
    cache = filled(SimulatedTree, windows=MIXED)
    cache.propose([-1, 0, 1, 0])
    cache.forward([1, 2, 3, 4])
    cache.ids.fails_after = 0
    assert cache.commit([0, 1, 2]) == [0, 1, 2]
    assert cache.seq_len(0) == 6


def test_each_sequence_has_its_own_tree():
    cache = SimulatedTree(config_of(MIXED))
    cache.propose([-1, -1, 0], 2)
    cache.propose([-1])
    assert [cache.n_nodes(seq) for seq in (0, 1, 2)] == [1, 0, 3] and cache.n_nodes() == 1
    assert [cache.has_tree(seq) for seq in (0, 1, 2)] == [True, False, True] and cache.has_tree()
    cache.commit([])
    assert not cache.has_tree() and cache.has_tree(2)


def test_several_sequences_need_begin_step_in_a_tree_cache_too():
    cache = SimulatedTree(config_of(MIXED))
    cache.begin_step([(0, 1), (1, 1)])
    cache.forward([10, 11])
    cache.end_step()
    before = snapshot(cache)
    with pytest.raises(StepError, match="call begin_step"):
        cache.plan(0, 1, [1])
    assert snapshot(cache) == before


@ALL_CACHES
def test_who_runs_all_layers_by_himself_has_all_plans_at_once(make):
    cache = make(config_of(MIXED))
    steps = cache.steps
    begin(cache, 3)
    assert len(steps.begun_plans()) == (0 if make is SimulatedContiguous else 2)
    assert steps.needs_positions()
    plans = steps.plan_all(3, [0, 1, 2])
    assert steps.needs_positions() and list(steps.begun_plans()) == list(plans)
    assert steps.begun_states() is None, "no layer is recurrent"
    assert [(steps.n_seen(layer), steps.awaits(layer)) for layer in range(3)] == [(0, True)] * 3
    assert steps.plan(1, 3, [0, 1, 2]) is plans[1], "others may ask one by one all the same"
    assert [(steps.n_seen(layer), steps.awaits(layer)) for layer in range(3)] == [
        *((0, True), (3, False), (0, True))
    ]
    cache.cancel_step()
    begin(cache, 3)
    steps.plan_all(3, None)
    steps.wrote_all()
    assert length(cache) == 3 and not cache.is_step_open
    assert steps.begun_plans() == () and steps.needs_positions()
    assert [(steps.n_seen(layer), steps.awaits(layer)) for layer in range(3)] == [(None, False)] * 3


@ALL_CACHES
def test_who_asks_for_all_plans_at_once_is_held_to_the_step_too(make):
    cache = make(config_of(MIXED))
    begin(cache, 2)
    with pytest.raises(PositionError):
        cache.steps.plan_all(2, [0, 2])
    if make is not SimulatedContiguous:
        with pytest.raises(StepError, match="brings 3 tokens to the forward; the step was begun"):
            cache.steps.plan_all(3, None)


@SEQ_CACHES
@pytest.mark.parametrize("stretches", [["12"], [(0, 1), {0: 1, 1: 1}], [(0, 1, 2)], [7], 7, None])
def test_what_is_no_stretch_is_refused_as_it_came(make, stretches):
    cache = make(config_of(MIXED))
    for verb in (cache.begin_step, cache.can_begin_step):
        with pytest.raises(StepError) as info:
            verb(stretches)
        assert str(info.value) == (
            f"begin_step takes a pair (seq_id, n_tokens) for each stretch of the batch, got "
            f"{stretches!r}"
        )


# Errors, as a user reads them ---------------------------------------------------------------------


def message(error, verb, *args):
    with pytest.raises(error) as info:
        verb(*args)
    return str(info.value)


def filled(make=SimulatedSeq, n=3, **settings):
    """A cache whose sequence 0 has ``n`` tokens."""
    cache = make(config_of(**settings))
    begin(cache, n)
    cache.forward(list(range(n)))
    cache.end_step()
    return cache


def test_a_forward_without_begin_step_says_what_to_call():
    assert message(StepError, SimulatedSeq(config_of()).plan, 0, 7, None) == (
        "layer 0 brings 7 tokens and no step is open for them; "
        "call begin_step(stretches) before each forward"
    )


def test_a_layer_that_comes_twice_in_one_step_says_what_to_call():
    cache = filled()
    cache.begin_step([(0, 1)])
    cache.run_layer(0, [9])
    before = snapshot(cache)
    assert message(StepError, cache.plan, 0, 1, None) == (
        "layer 0 has had its turn in this step, which is still open; "
        "if its forward raised, call cancel_step and begin_step again"
    )
    assert snapshot(cache) == before


def test_a_forward_with_another_number_of_tokens_says_both_numbers():
    cache = filled()
    cache.begin_step([(0, 2)])
    before = snapshot(cache)
    assert message(StepError, cache.plan, 1, 3, None) == (
        "the forward brings 3 tokens to layer 1; the step was begun for 2; "
        "cancel_step takes the step back"
    )
    assert snapshot(cache) == before


def test_a_forward_at_other_positions_says_both():
    cache = filled()
    cache.begin_step([(0, 2)])
    before = snapshot(cache)
    assert message(PositionError, cache.plan, 0, 2, [0, 1]) == (
        "the forward brings positions [0, 1]; the step claimed [3, 4]; "
        "begin_step returns the positions that its tokens get"
    )
    assert snapshot(cache) == before
    cache.forward([7, 8], [3, 4])
    cache.begin_step([(0, 20)])
    assert "[5, 6, ... 24] (20 of them)" in message(PositionError, cache.plan, 0, 20, range(20))


def test_eight_positions_are_said_one_by_one_and_of_more_the_ends():
    cache = filled()
    cache.begin_step([(0, 8)])
    assert "claimed [3, 4, 5, 6, 7, 8, 9, 10];" in message(PositionError, cache.plan, 0, 8, [0] * 8)
    cache.begin_step([(0, 9)])
    assert "claimed [3, 4, ... 11] (9 of them);" in message(PositionError, cache.plan, 0, 9, [0])
    cache = filled(SimulatedContiguous)
    said = message(PositionError, cache.plan, 0, 8, range(1, 9))
    assert "brings [1, 2, 3, 4, 5, 6, 7, 8]; call rewind" in said
    said = message(PositionError, cache.plan, 0, 9, range(1, 10))
    assert "brings [1, 2, 3, 4, 5, 6, 7, 8] ...; call rewind" in said


def test_an_unknown_layer_says_how_many_there_are():
    cache = filled()
    for layer in (2, -1):
        assert message(StepError, cache.plan, layer, 1, None) == (
            f"layer {layer} asked for its cache; this cache has 2"
        )


SEQ_ID = (UnknownSequenceError, "seq_id")
REFUSALS = {
    **dict.fromkeys(
        (
            *("has_seq", "seq_len", "seq_rm", "seq_keep", "seq_table", "seq_usage", "has_tree"),
            *("n_nodes", "resumable_from"),
        ),
        (SEQ_ID, ()),
    ),
    **dict.fromkeys(("can_resume", "keep_point", "drop_point", "expect"), (SEQ_ID, (1,))),
    "seq_cp": (SEQ_ID, (1,)),
    "seq_map": (SEQ_ID, ([],)),
    "seq_claim": (SEQ_ID, ([],)),
    "can_extend": ((ConfigError, "n"), ()),
    "propose": ((ProposalError, "parents"), ()),
    "commit": ((ProposalError, "accepted"), ()),
}


@pytest.mark.parametrize("verb", REFUSALS)
def test_what_is_no_whole_number_is_refused_by_the_name_of_the_argument(verb):
    cache = filled(SimulatedTree)
    cache.propose([-1])
    (error, name), more = REFUSALS[verb]
    assert f"{name} must be " in message(error, getattr(cache, verb), "x", *more)


def test_other_arguments_are_refused_by_their_names_too():
    cache = filled(SimulatedTree)
    for verb, args, error, name in (
        (cache.seq_cp, (0, "x"), UnknownSequenceError, "seq_id"),
        (cache.seq_cp, (0, 1, "x"), PositionError, "p0"),
        (cache.seq_cp, (0, 1, 0, "x"), PositionError, "p1"),
        (cache.seq_rm, (0, "x"), PositionError, "p0"),
        (cache.seq_rm, (0, 0, "x"), PositionError, "p1"),
        (cache.seq_table, (0, "x"), PositionError, "length"),
        (cache.seq_table, (0, -1), PositionError, "length"),
        (cache.seq_table, (0, 2**40), PositionError, "length"),
        (cache.resume_at, (0, "x"), RewindError, "length"),
        (cache.can_resume, (0, "x"), RewindError, "length"),
        (cache.keep_point, (0, "x"), RewindError, "length"),
        (cache.drop_point, (0, "x"), RewindError, "length"),
        (cache.rows_to_freeze, (0, "x"), RewindError, "length"),
        (cache.expect, (0, "x"), ConfigError, "n_tokens"),
        (cache.begin_step, ([(0, "x")],), StepError, "n_tokens"),
        (cache.begin_step, ([("x", 1)],), UnknownSequenceError, "seq_id"),
        (cache.propose, ([-1], "x"), UnknownSequenceError, "seq_id"),
        (cache.commit, ([], "x"), UnknownSequenceError, "seq_id"),
        (cache.plan, (0, 1, ["x"]), PositionError, "positions"),
    ):
        assert f"{name} must be " in message(error, verb, *args)
    cache.begin_step([(0, 1)])
    assert "positions must be " in message(PositionError, cache.plan, 0, 1, ["x"])
    one = filled(SimulatedContiguous)
    for verb, args, error, name in (
        (one.can_extend, ("x",), ConfigError, "n"),
        (one.rewind, ("x",), RewindError, "new_length"),
        (one.keep_point, ("x",), RewindError, "new_length"),
        (one.drop_point, ("x",), RewindError, "length"),
        (one.plan, (0, 1, ["x"]), PositionError, "positions"),
    ):
        assert f"{name} must be " in message(error, verb, *args)


@pytest.mark.parametrize(
    "tables",
    [
        *([], [[0]], [[0], [1, 2]], [[[0]], [[0]]], [[0.5], [0.5]], [["a"], ["a"]], 7),
        *([[-2], [0]], [[64], [0]], [[0], [64]]),
    ],
)
def test_what_is_no_table_of_this_cache_is_refused_as_it_came(tables):
    cache = SimulatedSeq(config_of(MIXED))
    for verb in (cache.seq_map, cache.seq_claim):
        assert message(PositionError, verb, 0, tables) == (
            f"tables must be 2 rows of cells of one length, as seq_table gives them, got {tables!r}"
        )
    assert cache.seq_ids() == []


def test_a_plan_is_taken_once_by_each_layer_of_its_group_in_its_forward():
    cache = filled(windows=MIXED)
    cache.begin_step([(0, 1)])
    plan = cache.plan(0, 1, None)
    assert not cache.take_plan(1, plan), "it is of another group"
    assert not cache.take_plan(0, plan), "it has had its turn"
    assert cache.take_plan(2, plan) and not cache.take_plan(2, plan)
    cache.cancel_step()
    assert not cache.take_plan(2, plan), "no step is open"
    cache.begin_step([(0, 1)])
    assert not cache.take_plan(2, plan), "another one is"


def test_usage_says_the_bytes_of_the_pools():
    cache = filled()
    cache.ids.size_bytes = 77
    assert cache.usage().size_bytes == 77


def test_cells_of_a_sequence_are_counted_over_all_groups():
    cache = filled(windows=MIXED, n=5)
    assert cache.seq_usage(0) == (10, 0)
    cache.seq_cp(0, 1, 0, 4)
    assert (cache.seq_usage(0), cache.seq_usage(1)) == ((10, 8), (8, 8))


def test_a_full_cache_says_what_was_needed_and_what_was_free():
    cache = filled(capacity=8, n=6)
    assert message(CacheFullError, cache.begin_step, [(0, 4)]) == (
        "step needs 4 cells, 2 free of 8; release a sequence or raise capacity"
    )
    for windows in ((None, 4), (4, None)):
        cache = filled(windows=windows, capacity=100, n=95)
        assert message(CacheFullError, cache.begin_step, [(0, 7)]) == (
            "step needs 7 cells, 5 free of 100; release a sequence or raise capacity"
        ), "of the group that lacks most"
    cache = filled(SimulatedContiguous, capacity=8, n=6)
    assert message(CacheFullError, cache.plan, 0, 4, None) == (
        "step needs 4 cells, 2 free of 8; rewind, clear, or raise capacity"
    )


def test_tokens_that_do_not_follow_say_what_would():
    cache = filled(SimulatedTree)
    before = snapshot(cache)
    assert message(PositionError, cache.plan, 0, 2, [5, 6]) == (
        "the forward brings positions [5, 6]; the step claimed [3, 4]; "
        "begin_step returns the positions that its tokens get"
    )
    assert snapshot(cache) == before
    cache = filled(SimulatedContiguous)
    assert message(PositionError, cache.plan, 0, 1, [5]) == (
        "this cache holds positions 0 to 2 of one sequence, so the next tokens are 3, 4, ...; "
        "the forward brings [5]; call rewind to go back"
    )
    assert message(PositionError, cache.plan, 0, 2, [3]) == (
        "the forward brings 2 tokens and 1 positions; give every token one position"
    )
    cache = SimulatedContiguous(config_of())
    assert message(PositionError, cache.plan, 0, 1, [5]) == (
        "this cache is empty, so its tokens start at position 0 and follow each other; "
        "the forward brings [5]"
    )


def test_a_forward_without_tokens_says_so():
    assert "at least one token" in message(StepError, filled().begin_step, [])
    for cache in (filled(SimulatedContiguous), SimulatedContiguous(config_of())):
        assert "at least one token" in message(StepError, cache.plan, 0, 0, [])
    cache = SimulatedTree(config_of())
    assert "at least 1" in message(StepError, cache.plan, 0, 0, None)
    assert not cache.is_step_open


def test_an_unknown_sequence_says_which_there_are():
    cache = filled()
    assert message(UnknownSequenceError, cache.seq_len, 9) == (
        "sequence 9 holds no tokens here; there are: 0"
    )
    for verb in (cache.seq_rm, cache.seq_keep, cache.resumable_from, cache.seq_usage):
        assert message(UnknownSequenceError, verb, 9).startswith("sequence 9 holds no tokens")
    assert message(UnknownSequenceError, cache.seq_cp, 9, 1).startswith("sequence 9 holds no")
    assert message(UnknownSequenceError, cache.can_resume, 9, 1).startswith("sequence 9 holds no")
    cache.clear()
    assert message(UnknownSequenceError, cache.seq_len, 9).endswith("there are: none")
    for n, shown in ((8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7, ...")):
        cache.begin_step([(n - 1, 1)] if n > 8 else [(seq, 1) for seq in range(n)])
        cache.forward([0] * (1 if n > 8 else n))
        assert message(UnknownSequenceError, cache.seq_len, 9).endswith(f"there are: {shown}")


def test_a_negative_sequence_is_refused_wherever_it_could_start_one():
    cache = filled(SimulatedTree)
    before = snapshot(cache)
    for verb, args in (
        (cache.begin_step, ([(-1, 1)],)),
        (cache.seq_cp, (0, -1)),
        (cache.propose, ([-1], -1)),
    ):
        assert message(UnknownSequenceError, verb, *args) == "seq_ids are 0 or more, got -1"
        assert snapshot(cache) == before


def test_a_rewind_that_grows_says_what_is_possible():
    cache = filled(SimulatedContiguous)
    assert message(RewindError, cache.rewind, 5) == (
        "rewind to 5: the cache holds 3 tokens and rewinding cannot grow; ask for 0 to 3"
    )
    assert "ask for 0 to 3" in message(RewindError, cache.rewind, -1)


def test_a_window_that_has_moved_on_says_from_where_it_can_resume():
    cache = filled(SimulatedContiguous, windows=(4,), capacity=300, n=100, slack=2)
    begin(cache, 1)
    cache.forward([100])
    assert message(RewindError, cache.keep_point, 50) == (
        "keep_point to 50: a sliding window has let go of what was before; this history resumes "
        "from 0 or from 98 to 101; raise window_slack (2) to keep more"
    )
    assert [cache.rewind(n) for n in (99, 50)] == [99, 0]
    cache = filled(windows=(4,), capacity=300, n=100, slack=2)
    assert message(RewindError, cache.seq_cp, 0, 1, 0, 50) == (
        "seq_cp of sequence 0 at 50: a sliding window has let go of what was before; it resumes "
        "from 0 or from 98 to 100; raise window_slack (2) to keep more"
    )
    assert not cache.has_seq(1)
    assert [cache.seq_rm(0, n) for n in (99, 50)] == [99, 0]


def test_a_length_below_0_is_none_to_resume_at():
    cache = filled()
    assert message(RewindError, cache.resume_at, 0, -1) == "length must be at least 0, got -1"
    assert [cache.resume_at(0, n) for n in (0, 3, 4)] == [0, 3, 3]
    assert not cache.can_resume(0, -1) and not cache.can_resume(0, 4) and cache.can_resume(0, 3)


def test_a_chain_that_cannot_be_committed_says_why():
    cache = filled(SimulatedTree)
    assert message(ProposalError, cache.commit, []) == (
        "sequence 0 has no proposed nodes; call propose first"
    )
    cache.propose([-1, 0, -1])
    cache.forward([10, 11, 12])
    cache.propose([1])
    before = snapshot(cache)
    assert message(ProposalError, cache.commit, [0, 7]) == (
        "commit names node 7; 4 nodes are proposed, 0 to 3"
    )
    assert message(ProposalError, cache.commit, [-1]).startswith("commit names node -1; 4 nodes")
    assert message(ProposalError, cache.commit, [0, 2]) == (
        "commit needs a chain from a root downwards: node 2 hangs off -1, the chain so far ends "
        "at 0 (-1 is the last committed token)"
    )
    assert "node 1 hangs off 0, the chain so far ends at -1" in message(
        ProposalError, cache.commit, [1]
    )
    assert message(ProposalError, cache.commit, [0, 1, 3]) == (
        "commit names node 3, whose frontier has not been through a forward yet; run it first"
    )
    assert snapshot(cache) == before


def test_a_frontier_that_cannot_be_proposed_says_why():
    cache = filled(SimulatedTree, capacity=8)
    assert message(ProposalError, cache.propose, []) == (
        "propose got no nodes; a frontier has at least one"
    )
    assert message(ProposalError, cache.propose, [-1, 0, 2]) == (
        "node 2 names parent 2; a parent is -1 (the last committed token) or an earlier node, "
        "0 to 1"
    )
    assert message(CacheFullError, cache.propose, [-1] * 6) == (
        "a frontier of 6 nodes needs as many cells, 5 free of 8; release a sequence or raise "
        "capacity"
    )
    assert not cache.has_tree()
    cache.propose([-1, -1])
    before = snapshot(cache)
    assert message(ProposalError, cache.propose, [0]) == (
        "sequence 0 has a frontier of 2 nodes that awaits its forward; run it, or commit([]) to "
        "drop the tree"
    )
    assert message(CacheFullError, cache.propose, [-1] * 4, 1).startswith(
        "a frontier of 4 nodes needs as many cells, 3 free of 8;"
    ), "what is proposed already is promised"
    assert snapshot(cache) == before


def test_a_history_under_a_tree_cannot_change_and_says_so():
    cache = filled(SimulatedTree)
    cache.propose([-1, -1])
    before = snapshot(cache)
    for part in ((2,), (0, 1), (1, 2)):
        assert message(StepError, cache.seq_rm, 0, *part) == (
            "sequence 0 has 2 proposed nodes; commit them, or commit([]) to drop them, before a "
            "part of its history is dropped"
        )
    cache.begin_step([(5, 1)])
    cache.cancel_step()
    assert "before it gets other tokens" in message(StepError, cache.seq_cp, 5, 0)
    assert snapshot(cache) == before
    cache.seq_rm(0)
    assert not cache.has_seq(0) and not cache.has_tree()


def test_promised_cells_are_left_to_the_nodes_that_they_were_promised_to():
    cache = filled(SimulatedTree, capacity=8)
    cache.propose([-1] * 3)
    assert cache.can_extend(2) and not cache.can_extend(3)
    assert message(CacheFullError, cache.begin_step, [(1, 3)]).startswith(
        "step needs 3 cells, 2 free of 8;"
    )
    cache.begin_step([(1, 2), (0, 3)])
    assert cache.n_free == 0
