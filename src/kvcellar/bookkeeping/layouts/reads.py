"""From "these queries of one sequence" to the reads that serve them.

Full history needs no mask: one decode token sees all that is read, a prefill chunk is causal at
its tail. A sliding window over several queries needs a band; it is cut into tiles, so that a mask
never has more than ``TILE`` rows and no read is wider than the window and its tile. Queries of
several chunks are cut where chunks begin: each part is causal and needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kvcellar.bookkeeping.cells.spans import Span, as_runs, positions_of
from kvcellar.bookkeeping.layouts.drafts import DraftTree
from kvcellar.bookkeeping.layouts.layout import Stretch
from kvcellar.sight import Sight
from kvcellar.types import AttendKind, AttendSpec, BoolArray

TILE = 256
"""Most query tokens of one windowed read."""

SpansOf = Callable[[int, int], list[Span]]
"""(p0, p1) -> the spans of positions [p0, p1) of the sequence, ascending.

All that a read knows of where a history lies. A history that begins elsewhere, as with a frozen
prefix that several caches read, has its first positions in spans of other cells.
"""

ReadsOf = Callable[[Stretch, Sight, SpansOf], list[AttendSpec]]
"""(whose tokens, how much a query sees, where its history lies) -> the reads that serve them."""


def reads_of(stretch: Stretch, sight: Sight, spans_of: SpansOf) -> list[AttendSpec]:
    """Return the reads of new tokens or of a tree's frontier: what each query may see."""
    q_start, n_tokens = stretch.q_start, stretch.n_tokens
    if stretch.tree is not None:
        return [tree_read(q_start, stretch.tree, sight, spans_of)]
    return causal_reads(q_start, stretch.first_pos, n_tokens, sight, spans_of)


def whole_reads(stretch: Stretch, sight: Sight, spans_of: SpansOf) -> list[AttendSpec]:
    """Return one read of all that the queries see together, for whoever attends by his own mask."""
    low = sight.first_seen(stretch.first_pos)
    runs = as_runs(spans_of(low, stretch.first_pos + stretch.n_tokens))
    return [AttendSpec(stretch.q_start, stretch.n_tokens, runs, AttendKind.NONE)]


def causal_reads(
    q_start: int, first_pos: int, n_tokens: int, sight: Sight, spans_of: SpansOf
) -> list[AttendSpec]:
    """Return the reads of ``n_tokens`` new tokens at positions from ``first_pos`` on.

    Args:
        q_start: where they begin in the flat batch.
        first_pos: position of the first one; its own cell is among the spans already.
        n_tokens: how many, at consecutive positions.
        sight: how much of its history a query sees.
        spans_of: the sequence's cells by position.
    """
    end = first_pos + n_tokens
    low = sight.first_seen(first_pos)
    if low == sight.first_seen(end - 1):  # one token, or none that sees less than the first one
        kind = AttendKind.CAUSAL if n_tokens > 1 else AttendKind.NONE
        return [AttendSpec(q_start, n_tokens, as_runs(spans_of(low, end)), kind)]
    if sight.window is not None:
        return _banded_reads(q_start, first_pos, n_tokens, sight, spans_of)
    reads: list[AttendSpec] = []
    for start, stop in _pieces(first_pos, end, sight):
        reads += causal_reads(q_start + start - first_pos, start, stop - start, sight, spans_of)
    return reads


def _pieces(first_pos: int, end: int, sight: Sight) -> list[tuple[int, int]]:
    """Return positions ``[first_pos, end)`` cut where chunks begin."""
    assert sight.chunk is not None
    cuts = range(sight.first_seen(first_pos) + sight.chunk, end, sight.chunk)
    return list(pairwise([first_pos, *cuts, end]))


def _banded_reads(
    q_start: int, first_pos: int, n_tokens: int, sight: Sight, spans_of: SpansOf
) -> list[AttendSpec]:
    """Return the reads of several queries behind a window: a tile and a band at a time."""
    reads = []
    tile = min(TILE, max(sight.most_before + 1, 64))
    for offset in range(0, n_tokens, tile):
        n = min(tile, n_tokens - offset)
        p0 = first_pos + offset
        low = sight.first_seen(p0)
        spans = spans_of(low, p0 + n)
        if sum(s.length for s in spans) == p0 + n - low:
            mask = band(n, p0 - low, sight)
        else:
            mask = sight.see(np.arange(p0, p0 + n), positions_of(spans))
        reads.append(AttendSpec(q_start + offset, n, as_runs(spans), AttendKind.EXPLICIT, mask))
    return reads


def tree_read(q_start: int, tree: DraftTree, sight: Sight, spans_of: SpansOf) -> AttendSpec:
    """Return the read of a tree's last frontier, whose mask covers its nodes.

    The committed prefix is seen whole, but for what some of the queries do not see any more.
    """
    queries = np.asarray(tree.frontier_positions())
    low = sight.first_seen(int(queries.min()))
    prefix = spans_of(low, tree.base)
    nodes = spans_of(tree.base, tree.base + tree.n_nodes)
    mask = tree.ancestor_mask()
    if not sight.is_full:
        mask = mask & sight.see(queries, tree.base + np.asarray(tree.depths))
        if sight.first_seen(int(queries.max())) > low:
            hidden = sight.see(queries, positions_of(prefix))
            mask = np.concatenate([hidden, mask], axis=1)
    runs = as_runs([*prefix, *nodes])
    return AttendSpec(q_start, tree.frontier_size, runs, AttendKind.EXPLICIT, mask)


@lru_cache(maxsize=64)
def band(n_queries: int, n_before: int, sight: Sight) -> BoolArray:
    """Return the band mask of queries that follow ``n_before`` cells; shared, so read-only."""
    queries = np.arange(n_before, n_before + n_queries)
    mask = sight.see(queries, np.arange(n_before + n_queries))
    mask.flags.writeable = False
    return mask
