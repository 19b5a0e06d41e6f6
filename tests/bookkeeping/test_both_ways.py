"""Reads of tokens that see each other both ways, against the visibility rule written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.bookkeeping.layouts.both_ways import seen_both_ways
from kvcellar.types import AttendKind
from tests.bookkeeping.byte_simulator import SimulatedTree, config_of, seen_by, visible


@given(
    window=st.sampled_from([None, 1, 3, 8, 70]),
    n_before=st.integers(0, 20),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    cuts=st.lists(st.lists(st.integers(0, 29), max_size=6), min_size=3, max_size=3),
)
def test_a_token_of_a_picture_sees_those_behind_it_in_the_picture_and_what_it_saw_before(
    window, n_before, lengths, cuts
):
    """Several sequences in one step, each with pictures between any two of its cuts."""
    cache = SimulatedTree(config_of((window,), capacity=400))
    history = {seq: [100 * seq + p for p in range(n_before)] for seq in range(len(lengths))}
    if n_before:
        cache.begin_step([(seq, n_before) for seq in history])
        cache.forward([token for tokens in history.values() for token in tokens])
    pictures, queries = [], []
    for seq, n in enumerate(lengths):
        start = len(queries)
        queries += [(seq, n_before + i) for i in range(n)]
        history[seq] += [100 * seq + n_before + i for i in range(n)]
        ends = sorted({cut for cut in cuts[seq] if cut <= n})
        pictures += [(start + a, start + b) for a, b in zip(ends[::2], ends[1::2], strict=False)]
    cache.begin_step(list(enumerate(lengths)))
    tokens = [history[seq][p] for seq, p in queries]
    plan = cache.plan(0, len(tokens), None)
    for write in plan.writes:
        cache.stored[0][write.run.start : write.run.stop] = tokens[
            write.q_start : write.q_start + write.run.length
        ]
    both = seen_both_ways(plan, pictures)
    assert [read.q_start for read in both.reads] == [
        sum(read.q_len for read in both.reads[:i]) for i in range(len(both.reads))
    ]
    seen = [row for read in both.reads for row in seen_by(read, cache.stored[0])]
    for query, (seq, p) in enumerate(queries):
        want = visible(dict(enumerate(history[seq])), p, window)
        for first, stop in pictures:
            want += tokens[query + 1 : stop] if first <= query < stop else []
        assert seen[query] == sorted(want)
    assert (both.writes, both.n_tokens, both.n_cells) == (plan.writes, plan.n_tokens, plan.n_cells)
    if not pictures:
        assert [read.kind for read in both.reads] == [read.kind for read in plan.reads]
    if window is None:
        assert all(read.kind is not AttendKind.EXPLICIT for read in both.reads), "without a mask"
