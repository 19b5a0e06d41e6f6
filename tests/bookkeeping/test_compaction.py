"""Compaction: which scattered cells are copied together, how many, and who is told of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.bookkeeping.cells.compaction import compact, crumbs, nothing_moved, relocated
from kvcellar.bookkeeping.cells.pool import MIN_RUN, BlockPool
from tests.bookkeeping.held import seq_cells


@pytest.mark.parametrize(
    "lengths, stretches",
    [
        ([5], []),
        ([5, 3], [(0, 8)]),
        ([5, 3, MIN_RUN], [(0, 8)]),
        ([MIN_RUN, 5, 3], [(MIN_RUN, MIN_RUN + 8)]),
        ([5, MIN_RUN, 3], []),
        ([5, MIN_RUN - 1, 3], [(0, MIN_RUN + 7)]),
        ([2, 2, MIN_RUN, 3, MIN_RUN, 1, 1, 1], [(0, 4), (2 * MIN_RUN + 7, 2 * MIN_RUN + 10)]),
        ([], []),
    ],
)
def test_crumbs_are_short_runs_that_follow_each_other(lengths, stretches):
    cells = [np.arange(n) + 1000 * i for i, n in enumerate(lengths)]
    assert crumbs(np.concatenate([np.empty(0, int), *cells])) == stretches


def in_crumbs() -> tuple[BlockPool, list[np.ndarray]]:
    """A pool with two sequences of 40 cells, each in 21 runs, and their tables."""
    pool = BlockPool(400, min_run=1)
    for seq in (0, 1):
        pool.claim(seq, 0, 60)
    for seq in (0, 1):
        for p in range(1, 60, 3):
            pool.seq_rm(seq, p, p + 1)
    tables = []
    for seq in (0, 1):
        table = np.full(60, -1)
        for span in pool.spans(seq):
            table[span.pos : span.stop] = np.arange(span.cell, span.cell + span.length)
        tables.append(table)
    return pool, tables


@pytest.mark.parametrize(
    "max_cells, n_cells, is_done",
    [(1, 40, False), (79, 40, False), (80, 80, True), (999, 80, True)],
)
def test_histories_are_gathered_in_their_order_as_far_as_is_asked(max_cells, n_cells, is_done):
    pool, tables = in_crumbs()
    names = np.arange(pool.capacity)
    before = [names[seq_cells(pool, seq)].tolist() for seq in (0, 1)]
    n_free = pool.n_free

    def move_bytes(group, moves):
        assert group == 0
        for base, src in moves:
            names[base : base + len(src)] = names[src]

    done = compact([pool], [[table] for table in tables], max_cells, move_bytes)
    assert (done.n_cells, done.is_done, pool.n_free) == (n_cells, is_done, n_free)
    pool.check()
    assert [names[seq_cells(pool, seq)].tolist() for seq in (0, 1)] == before
    assert [len(pool.runs(seq)) for seq in (0, 1)] == [1, 1 if is_done else 21]
    assert done.moved[0].size == 401 and done.moved[0][-1] == -1
    for seq, table in enumerate(tables):
        (now,) = relocated([table], done.moved)
        assert now[table >= 0].tolist() == seq_cells(pool, seq)
        assert (now[table < 0] == -1).all()
    again = compact([pool], [[table] for table in relocated([tables[0]], done.moved)], 999, None)
    assert (again.n_cells, again.is_done, again.moved) == (0, True, (None,))


def test_who_shares_a_history_finds_it_gathered_already():
    pool, (table, _) = in_crumbs()
    pool.share(2, pool.spans(0))
    done = compact([pool], [[table], [table[:50]], [table]], 999, lambda group, moves: None)
    assert done.n_cells == 40
    pool.check()
    assert seq_cells(pool, 2) == seq_cells(pool, 0) and len(pool.runs(0)) == 1


def test_of_several_groups_each_is_told_where_its_own_cells_went():
    pool, (table, _) = in_crumbs()
    whole = BlockPool(400)
    whole.claim(0, 0, 60)
    done = compact([whole, pool], [[np.arange(60), table]], 999, lambda group, moves: None)
    assert done.moved[0] is None and done.n_cells == 40
    assert nothing_moved(3).tolist() == [0, 1, 2, -1]
    now = relocated([np.arange(60), table], done.moved)
    assert now[0].tolist() == list(range(60)) and now[1][table >= 0].tolist() == seq_cells(pool, 0)
