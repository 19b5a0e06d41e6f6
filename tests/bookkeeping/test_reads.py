"""Reads and masks against the visibility rule, written out in loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.bookkeeping.cells.spans import Span
from kvcellar.bookkeeping.layouts.drafts import DraftTree
from kvcellar.bookkeeping.layouts.layout import Stretch
from kvcellar.bookkeeping.layouts.reads import TILE, band, causal_reads, whole_reads
from kvcellar.errors import ProposalError
from kvcellar.sight import FULL, Sight
from kvcellar.types import AttendKind, Run
from tests.bookkeeping.byte_simulator import (
    check_causal_masks,
    first_seen,
    seen_by,
    sight_of,
    visible,
)

WINDOW = st.none() | st.integers(1, 12) | st.builds(Sight, chunk=st.integers(1, 12))


@given(
    queries=st.lists(st.integers(0, 20), max_size=8),
    keys=st.lists(st.integers(0, 20), max_size=8),
    window=WINDOW,
)
def test_a_query_sees_a_key_at_or_before_its_position_and_inside_its_window(queries, keys, window):
    sight = sight_of(window)
    mask = sight.see(np.array(queries, dtype=int), np.array(keys, dtype=int))
    assert mask.shape == (len(queries), len(keys)) and mask.dtype == np.bool_
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            assert mask[i, j] == (first_seen(window, query) <= key <= query)


@given(window=WINDOW, pos=st.integers(0, 60), stop=st.integers(0, 60))
def test_a_sight_says_what_a_query_sees_first_and_who_is_clear_of_what_is_gone(window, pos, stop):
    sight = sight_of(window)
    low = first_seen(window, pos)
    assert sight.first_seen(pos) == low
    assert sight.n_before(np.array([pos])).tolist() == [pos - low]
    assert sight.is_full == (window is None)
    at = sight.resume_at(pos, stop)
    assert at in (pos, 0) or isinstance(window, Sight)
    lacking = set(range(stop))
    for n in range(at + 1, pos + 1):
        assert lacking & set(range(first_seen(window, n), n))
    assert not lacking & set(range(first_seen(window, at), at))
    if window is None:
        return
    assert pos - low <= sight.most_before
    clear = sight.first_clear_of(stop)
    assert all(first_seen(window, p) >= stop for p in range(clear, clear + 30))
    assert clear == 0 or first_seen(window, clear - 1) < stop


@given(n=st.integers(1, 20), before=st.integers(0, 20), window=st.integers(1, 12))
def test_the_band_is_the_position_mask_of_queries_that_follow_their_keys(n, before, window):
    keys, sight = np.arange(before + n), Sight(window)
    assert np.array_equal(band(n, before, sight), sight.see(keys[before:], keys))


def test_the_shared_band_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        band(4, 3, Sight(4))[0, 0] = False


@given(
    first=st.one_of(st.integers(0, 30), st.integers(200, 900)),
    n=st.sampled_from([1, 2, 3, 64, 65, 300, 600]),
    window=st.sampled_from(
        [None, 1, 2, 5, 63, 64, 65, 300, *(Sight(chunk=c) for c in (1, 2, 5, 64, 300))]
    ),
    holes=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 80)), max_size=3),
    cuts=st.sets(st.integers(1, 1500), max_size=3),
)
def test_every_query_of_a_chunk_sees_its_history_and_no_mask_is_larger_than_a_tile(
    first, n, window, holes, cuts
):
    """Cells are handed out in scrambled spans, cut at ``cuts``; history before has holes."""
    gone = {p for start, length in holes for p in range(start, start + length) if p < first}
    pieces = np.split(np.arange(first + n), sorted(cut for cut in cuts if cut < first + n))
    cell_of, at = {}, 0
    for piece in reversed(pieces):
        cell_of |= {int(p): at + i for i, p in enumerate(piece)}
        at += len(piece)

    def spans_of(p0, p1):
        spans = []
        for p in range(max(0, p0), p1):
            if p in gone:
                continue
            last = spans[-1] if spans else None
            if last and last.stop == p and last.cell + last.length == cell_of[p]:
                spans[-1] = Span(last.pos, last.cell, last.length + 1)
            else:
                spans.append(Span(p, cell_of[p], 1))
        return spans

    stored = np.full(first + n, -1)
    for p, cell in cell_of.items():
        stored[cell] = 10_000 + p
    history = {p: 10_000 + p for p in range(first + n) if p not in gone}
    reads = causal_reads(7, first, n, sight_of(window), spans_of)
    check_causal_masks(reads, window)
    assert [r.q_start for r in reads] == [
        7 + sum(r.q_len for r in reads[:i]) for i in range(len(reads))
    ]
    seen = [row for read in reads for row in seen_by(read, stored)]
    assert seen == [visible(history, p, window) for p in range(first, first + n)]


def test_full_history_needs_no_mask():
    def one_run(p0, p1):
        return [Span(p0, p0, p1 - p0)]

    (prefill,) = causal_reads(0, 0, 8192, FULL, one_run)
    (decode,) = causal_reads(0, 8192, 1, FULL, one_run)
    assert (prefill.kind, prefill.runs) == (AttendKind.CAUSAL, (Run(0, 8192),))
    assert (decode.kind, decode.runs) == (AttendKind.NONE, (Run(0, 8193),))


def test_a_window_that_still_covers_all_of_the_history_needs_no_mask():
    (read,) = causal_reads(0, 0, 100, Sight(100), lambda p0, p1: [Span(p0, p0, p1 - p0)])
    assert read.kind is AttendKind.CAUSAL


def test_one_token_behind_a_window_reads_the_window_and_needs_no_mask():
    (read,) = causal_reads(0, 500, 1, Sight(100), lambda p0, p1: [Span(p0, p0, p1 - p0)])
    assert (read.kind, read.runs) == (AttendKind.NONE, (Run(401, 100),))


def test_a_windowed_prefill_of_32k_tokens_has_masks_of_a_tile_only():
    window = 1024
    reads = causal_reads(0, 0, 32_768, Sight(window), lambda p0, p1: [Span(p0, p0, p1 - p0)])
    assert len(reads) == 32_768 // TILE
    check_causal_masks(reads, window)
    assert len({id(read.mask) for read in reads[4:]}) == 1, "equal tiles share one mask"


@pytest.mark.parametrize("window, tile", [(5, 64), (64, 64), (100, 100), (1000, TILE)])
def test_a_tile_is_as_long_as_its_window_but_not_very_short_and_not_long(window, tile):
    reads = causal_reads(2, 0, 2100, Sight(window), lambda p0, p1: [Span(p0, p0, p1 - p0)])
    assert [read.q_start for read in reads] == list(range(2, 2102, tile))
    assert [read.q_len for read in reads[:-1]] == [tile] * (len(reads) - 1)


def test_who_attends_by_his_own_mask_gets_one_read_of_all_that_is_seen():
    def one_run(p0, p1):
        return [Span(p0, 100 + p0, p1 - p0)]

    for sight, run in (
        (FULL, Run(100, 25)),
        (Sight(8), Run(113, 12)),
        (Sight(chunk=6), Run(118, 7)),
    ):
        (read,) = whole_reads(Stretch(0, 3, 5, 20), sight, one_run)
        assert (read.q_start, read.q_len, read.runs, read.kind, read.mask) == (
            *(3, 5, (run,), AttendKind.NONE, None),
        )


def test_a_prefill_across_chunks_is_one_causal_read_for_each():
    def one_run(p0, p1):
        return [Span(p0, p0, p1 - p0)]

    reads = causal_reads(0, 6, 12, Sight(chunk=8), one_run)
    assert [(r.kind, r.q_start, r.q_len, r.runs) for r in reads] == [
        (AttendKind.CAUSAL, 0, 2, (Run(0, 8),)),
        (AttendKind.CAUSAL, 2, 8, (Run(8, 8),)),
        (AttendKind.CAUSAL, 10, 2, (Run(16, 2),)),
    ]
    (read,) = causal_reads(0, 16, 1, Sight(chunk=8), one_run)
    assert (read.kind, read.runs) == (AttendKind.NONE, (Run(16, 1),))


# Draft trees --------------------------------------------------------------------------------------


@st.composite
def frontiers(draw):
    """Frontiers of valid parents."""
    n_nodes, out = 0, []
    for size in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        out.append([draw(st.integers(-1, n_nodes + i - 1)) for i in range(size)])
        n_nodes += size
    return out


@given(frontiers=frontiers(), base=st.integers(0, 9))
def test_a_node_sees_itself_and_its_ancestors_and_no_one_else(frontiers, base):
    tree, parents = DraftTree(base), []
    for frontier in frontiers:
        tree.propose(frontier)
        parents += frontier
        mask = tree.ancestor_mask()
        assert mask.shape == (len(frontier), len(parents)) == (tree.frontier_size, tree.n_nodes)
        first = len(parents) - len(frontier)
        for node in range(first, len(parents)):
            lineage, above = set(), node
            while above >= 0:
                lineage.add(above)
                above = parents[above]
            assert set(np.flatnonzero(mask[node - first]).tolist()) == lineage
            assert tree.frontier_positions()[node - first] == base + len(lineage) - 1


@given(frontiers=frontiers(), data=st.data())
def test_commit_takes_every_chain_from_a_root_and_nothing_else(frontiers, data):
    tree, parents = DraftTree(5), []
    for frontier in frontiers:
        tree.propose(frontier)
        parents += frontier
    tree.n_forwarded = len(parents)
    chain = data.draw(st.lists(st.integers(-1, len(parents)), max_size=4))
    is_chain = all(0 <= node < len(parents) for node in chain) and all(
        parents[node] == above for node, above in zip(chain, [-1, *chain], strict=False)
    )
    if is_chain:
        assert tree.commit_rows(chain) == chain
    else:
        with pytest.raises(ProposalError):
            tree.commit_rows(chain)
    assert (tree.base, tree.parents) == (5, parents)
