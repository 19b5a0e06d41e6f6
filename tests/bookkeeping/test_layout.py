"""Where sequences end up: few runs, small window pools, cheap forks."""

from __future__ import annotations

import pytest

from kvcellar.bookkeeping import Sequences, TreeSequences
from kvcellar.bookkeeping.cells.pool import MIN_RUN
from tests.bookkeeping.byte_simulator import config_of
from tests.stretches import stretches


def forward(cache, seq_ids):
    """A whole forward without bytes; the plan of the first layer."""
    cache.begin_step(stretches(seq_ids))
    plans = []
    for layer in range(cache.steps.n_layers):
        plans.append(cache.steps.plan(layer, len(seq_ids), None))
        cache.steps.wrote(layer)
    return plans[0]


def test_a_fresh_cache_hands_out_cells_in_ascending_order():
    cache = Sequences(config_of(capacity=100))
    for p in range(100):
        plan = forward(cache, [3])
        assert plan.write_cells.tolist() == [p]
        assert len(plan.reads[0].runs) == 1
        assert plan.n_cells == p + 1


def test_a_sequence_is_left_the_room_that_it_is_expected_to_need_where_all_of_it_is_kept():
    cache = Sequences(config_of((None, 4), capacity=2000))
    for expected in (300, None):
        if expected is not None:
            cache.expect(0, expected)
        forward(cache, [0] * 20)
        cache.end_step()
        gap = MIN_RUN if expected is None else expected - 20
        assert [layout.pool.gaps() for layout in cache.layouts] == [{20: gap}, {20: MIN_RUN}]
        cache.seq_rm(0)  # and with it what was expected


@pytest.mark.parametrize("n_prompt", [1, 100, 1000])
def test_eight_sequences_that_decode_in_one_batch_stay_in_few_runs(n_prompt):
    cache = Sequences(config_of(capacity=8 * 4096))
    for seq in range(8):
        forward(cache, [seq] * n_prompt)
    for _ in range(500):
        plan = forward(cache, list(range(8)))
    assert max(len(read.runs) for read in plan.reads) <= 10


def test_eight_prompts_in_interleaved_chunks_have_runs_of_at_least_a_chunk():
    cache = Sequences(config_of(capacity=8 * 8192))
    for _ in range(16):
        for seq in range(8):
            forward(cache, [seq] * 256)
    for _ in range(100):
        plan = forward(cache, list(range(8)))
    assert max(len(read.runs) for read in plan.reads) <= 16


def test_forks_of_32k_tokens_share_one_run_and_decode_in_few():
    cache = Sequences(config_of(capacity=40_000))
    for _ in range(32):
        forward(cache, [0] * 1024)
    for fork in range(1, 8):
        cache.seq_cp(0, fork)
    assert [len(cache.layouts[0].pool.spans(seq)) for seq in range(8)] == [1] * 8
    assert cache.usage().groups[0].live == 32_768
    for _ in range(200):
        plan = forward(cache, list(range(8)))
    assert max(len(read.runs) for read in plan.reads) <= 8
    assert cache.usage().groups[0].live == 32_768 + 8 * 200


@pytest.mark.parametrize("window, slack", [(16, 0), (128, 64), (1024, 64)])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("n_seqs", [1, 2, 8])
def test_the_cells_of_a_window_stay_few_however_long_its_sequences_grow(
    window, slack, chunk, n_seqs
):
    cache = Sequences(config_of((window,), 100_000, slack))
    bound = n_seqs * (window + slack + 2 * chunk + 6 * MIN_RUN)
    for _ in range(max(1500, 3 * window, 6 * chunk) // chunk):
        if chunk == 1:
            plans = [forward(cache, list(range(n_seqs)))]
        else:
            plans = [forward(cache, [seq] * chunk) for seq in range(n_seqs)]
        assert all(plan.n_cells <= bound for plan in plans)
        assert all(len(read.runs) <= 20 for plan in plans for read in plan.reads)


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_window_decodes_for_ever_in_a_capacity_of_little_more_than_the_window(chunk):
    window, slack = 8, 4
    cache = Sequences(config_of((window,), window - 1 + slack + chunk, slack))
    for _ in range(300):
        assert cache.can_extend(chunk)
        forward(cache, [0] * chunk)
    assert cache.seq_len(0) == 300 * chunk
    assert cache.resumable_from(0) <= 300 * chunk - slack


def test_a_commit_leaves_the_history_in_one_run():
    cache = TreeSequences(config_of(capacity=1000))
    forward(cache, [0] * 50)
    for _ in range(20):
        cache.propose([-1, -1, 0, 1, 1, 4])  # 1 -> 4 -> 5 is the longest chain
        forward(cache, [0] * 6)
        cache.commit([1, 4, 5])
    assert cache.seq_len(0) == 50 + 20 * 3
    assert len(cache.layouts[0].pool.spans(0)) == 1
    assert cache.usage().groups[0].n_cells == 110
