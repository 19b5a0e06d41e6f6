"""Sequences that begin with a frozen prefix: what they see of it, and that it stays whole."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.cache_config import FROZEN
from kvcellar.errors import CacheFullError, RewindError
from kvcellar.sight import Sight
from tests.bookkeeping.byte_simulator import (
    SimulatedContiguous,
    SimulatedPaged,
    SimulatedSeq,
    SimulatedTree,
    behind_frozen,
    config_of,
    frozen_id,
    snapshot,
    visible,
)

N = 10
"""Frozen tokens."""

CELLS = 160

WINDOWS = (None, 4, Sight(chunk=6), 30)
MAKERS = [SimulatedContiguous, SimulatedSeq, SimulatedPaged, SimulatedTree]
SHARED = pytest.mark.parametrize("make", MAKERS[1:])


def make_behind(make, windows=WINDOWS, slack=0):
    return make(behind_frozen(config_of(windows, capacity=CELLS, slack=slack), N))


def feed(cache, history, *batch):
    """One forward of ``(seq_id, n)``; each query sees what it would of a history without seams."""
    positions, tokens, histories = [], [], []
    for seq, n in batch:
        at = len(history[seq])
        positions += range(at, at + n)
        tokens += range(100 * seq + at, 100 * seq + at + n)
        history[seq] = history[seq] + list(range(100 * seq + at, 100 * seq + at + n))
        histories += [seq] * n
    if not isinstance(cache, SimulatedContiguous):
        assert cache.begin_step(batch) == positions
    for layer, window in enumerate(cache.layer_windows()):
        assert cache.run_layer(layer, tokens, positions) == [
            visible(dict(enumerate(history[seq])), p, window)
            for seq, p in zip(histories, positions, strict=True)
        ]
    cache.end_step()


def begun(n=1):
    return {seq: [frozen_id(p) for p in range(N)] for seq in range(n)}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("slack", [0, 3])
def test_what_follows_a_frozen_prefix_sees_it_as_if_it_were_its_own(make, slack):
    cache, history = make_behind(make, slack=slack), begun()
    for n in (1, 1, 3, 1, 9, 1, 40, 1, 1, 30, 1):
        feed(cache, history, (0, n))
    assert cache.usage().groups[0].live == (112 if make is SimulatedPaged else 99 - N)
    cache.clear()
    feed(cache, begun(), (0, 5))


@SHARED
def test_forks_share_the_frozen_prefix_and_what_is_their_own(make):
    cache, history = make_behind(make), begun(3)
    feed(cache, history, (0, 7), (1, 2))
    history[2] = history[0][:]
    cache.seq_cp(0, 2)
    feed(cache, history, (2, 3), (0, 1), (1, 12))
    assert [cache.seq_len(seq) for seq in range(3)] == [N + 8, N + 14, N + 10]
    assert cache.seq_rm(0, N + 5) == N + 5
    cache.seq_keep(2)
    feed(cache, history, (2, 1))
    assert cache.seq_ids() == [2]


@SHARED
def test_a_sequence_that_is_cut_back_to_the_frozen_prefix_holds_nothing(make):
    cache, history = make_behind(make), begun()
    begun_block = N if make is SimulatedPaged else 0
    assert cache.n_free == CELLS - begun_block == cache.capacity - begun_block

    for cut in (N, 0):
        feed(cache, history, (0, 6))
        assert cache.resume_at(0, N) == N and cache.can_resume(0, N)
        assert cache.resume_at(0, N - 1) == 0 and not cache.can_resume(0, N - 1)
        assert cache.seq_rm(0, cut) == N
        assert not cache.has_seq(0)
        assert all(usage.live == 0 for usage in cache.usage().groups)
        history = begun()
    feed(cache, history, (0, 1))


@SHARED
def test_no_verb_changes_the_frozen_prefix_and_says_so(make):
    cache, history = make_behind(make, (None, 30)), begun(2)
    feed(cache, history, (0, 6))
    before = snapshot(cache)
    for verb, args, said in (
        (cache.seq_rm, (0, 4), "seq_rm of sequence 0 at 4"),
        (cache.seq_rm, (0, N - 1), f"seq_rm of sequence 0 at {N - 1}"),
        (cache.seq_rm, (0, 0, 3), "seq_rm of sequence 0 at 0"),
        (cache.seq_rm, (0, N - 1, N + 1), f"seq_rm of sequence 0 at {N - 1}"),
        (cache.seq_cp, (0, 1, 0, 1), "seq_cp of sequence 0 at 1"),
        (cache.keep_point, (0, N - 1), f"keep_point of sequence 0 at {N - 1}"),
    ):
        with pytest.raises(RewindError) as info:
            verb(*args)
        assert str(info.value) == (
            f"{said}: its first 10 tokens are frozen and shared with other caches; it resumes "
            f"from 0, where it starts again behind them, or from 10 on"
        )
        assert snapshot(cache) == before
    cache.keep_point(0, 0)
    cache.keep_point(0, N)
    cache.seq_cp(0, 1, 0, N)
    assert not cache.has_seq(1), "the prefix alone is no sequence"
    cache.seq_cp(0, 1, 0, N + 1)
    assert cache.seq_len(1) == N + 1
    assert cache.seq_rm(0, N, N + 2) == N + 6
    del history[0][N : N + 2]
    assert [(table >= 0).sum() for table in cache.seq_table(0)] == [4, 4]


def test_one_history_is_rewound_to_the_frozen_prefix_and_no_further():
    cache, history = make_behind(SimulatedContiguous, (None, 30)), begun()
    assert cache.length == N == cache.resumable_from()
    feed(cache, history, (0, 6))
    with pytest.raises(RewindError) as info:
        cache.rewind(N - 1)
    assert str(info.value) == (
        "rewind to 9: the first 10 tokens are frozen and shared with other caches; ask for 10 to 16"
    )
    assert cache.rewind(N) == N == cache.length
    history = begun()
    feed(cache, history, (0, CELLS - 6))
    assert cache.can_extend(6) and not cache.can_extend(7)
    with pytest.raises(CacheFullError, match=f"step needs 7 cells, 6 free of {CELLS}; rewind"):
        cache.plan(0, 7, None)
    feed(cache, history, (0, 5))
    assert cache.can_extend(), "by one"
    feed(cache, history, (0, 1))
    assert not cache.can_extend()


def test_a_windows_rows_are_its_own_once_it_has_passed_the_frozen_prefix():
    cache, history = make_behind(SimulatedSeq, (4,)), begun()
    for n in (2, 70, 1):
        feed(cache, history, (0, n))
    cache.begin_step([(0, 1)])
    plan = cache.plan(0, 1, None)
    assert all(run.start < FROZEN for read in plan.reads for run in read.runs)


# What is frozen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
def test_of_a_window_the_last_cells_alone_are_frozen(make):
    cache = make(config_of(WINDOWS, capacity=CELLS))
    for start, n in ((0, 13), (13, 7)):
        if make is not SimulatedContiguous:
            cache.begin_step([(0, n)])
        cache.forward(list(range(start, start + n)))
    for length, asked in ((20, None), (19, 19)):
        n, cells = cache.rows_to_freeze(0, asked)
        assert n == length
        for layer, rows in zip((0, 1, 2, 3), cells, strict=True):
            first = cache.groups[layer].first_seen(length)
            assert cache.stored[layer][np.asarray(rows)].tolist() == list(range(first, length))


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_not_a_caches_own_or_is_nothing_is_not_frozen(make):
    said = "freeze_prefix of 16 tokens of sequence 0: "
    cache, history = make_behind(make), begun()
    feed(cache, history, (0, 6))
    with pytest.raises(RewindError, match=said):
        cache.rows_to_freeze(0, None)
    cache = make(config_of())
    if make is not SimulatedContiguous:
        cache.begin_step([(0, 4)])
    cache.forward([1, 2, 3, 4])
    with pytest.raises(RewindError, match="freeze_prefix of 0 tokens of sequence 0: "):
        cache.rows_to_freeze(0, 0)
    if make is SimulatedContiguous:
        with pytest.raises(RewindError, match="freeze_prefix of 4 tokens of sequence 1: "):
            cache.rows_to_freeze(1, None)
        with pytest.raises(RewindError, match="freeze_prefix to 5: the cache holds 4 tokens"):
            cache.rows_to_freeze(0, 5)
    else:
        cache.seq_rm(0, 1, 2)
        with pytest.raises(RewindError, match=r"freeze a history .* without holes"):
            cache.rows_to_freeze(0, None)
