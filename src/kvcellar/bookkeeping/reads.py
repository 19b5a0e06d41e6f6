"""From "these queries of one sequence" to the reads that serve them.

Full history needs no mask: one decode token sees all that is read, a prefill chunk is causal at
its tail. A sliding window over several queries needs a band; it is cut into tiles, so that a mask
never has more than ``TILE`` rows and no read is wider than the window and its tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from kvcellar.bookkeeping.drafts import DraftTree
from kvcellar.bookkeeping.layout import Stretch
from kvcellar.bookkeeping.spans import Span, as_runs, positions_of
from kvcellar.types import AttendKind, AttendSpec, BoolArray, IntArray

TILE = 256
"""Most query tokens of one windowed read."""

SpansOf = Callable[[int, int], list[Span]]
"""(p0, p1) -> the spans of positions [p0, p1) of the sequence, ascending.

All that a read knows of where a history lies. A history that begins elsewhere, as with a frozen
prefix that several caches read, has its first positions in spans of other cells.
"""

ReadsOf = Callable[[Stretch, int | None, SpansOf], list[AttendSpec]]
"""(whose tokens, the group's window, where its history lies) -> the reads that serve them."""


def reads_of(stretch: Stretch, window: int | None, spans_of: SpansOf) -> list[AttendSpec]:
    """Return the reads of new tokens or of a tree's frontier: what each query may see."""
    q_start, n_tokens = stretch.q_start, stretch.n_tokens
    if stretch.tree is not None:
        return [tree_read(q_start, stretch.tree, window, spans_of)]
    return causal_reads(q_start, stretch.first_pos, n_tokens, window, spans_of)


def whole_reads(stretch: Stretch, window: int | None, spans_of: SpansOf) -> list[AttendSpec]:
    """Return one read of all that the queries see together, for whoever attends by his own mask."""
    low = 0 if window is None else max(0, stretch.first_pos - window + 1)
    runs = as_runs(spans_of(low, stretch.first_pos + stretch.n_tokens))
    return [AttendSpec(stretch.q_start, stretch.n_tokens, runs, AttendKind.NONE)]


def causal_reads(
    q_start: int, first_pos: int, n_tokens: int, window: int | None, spans_of: SpansOf
) -> list[AttendSpec]:
    """Return the reads of ``n_tokens`` new tokens at positions from ``first_pos`` on.

    Args:
        q_start: where they begin in the flat batch.
        first_pos: position of the first one; its own cell is among the spans already.
        n_tokens: how many, at consecutive positions.
        window: the layer group's window, None for all of the history.
        spans_of: the sequence's cells by position.
    """
    end = first_pos + n_tokens
    if window is None or (end <= window):
        kind = AttendKind.CAUSAL if n_tokens > 1 else AttendKind.NONE
        return [AttendSpec(q_start, n_tokens, as_runs(spans_of(0, end)), kind)]
    if n_tokens == 1:
        spans = spans_of(end - window, end)
        return [AttendSpec(q_start, 1, as_runs(spans), AttendKind.NONE)]
    reads = []
    tile = min(TILE, max(window, 64))
    for offset in range(0, n_tokens, tile):
        n = min(tile, n_tokens - offset)
        p0 = first_pos + offset
        low = max(0, p0 - window + 1)
        spans = spans_of(low, p0 + n)
        if sum(s.length for s in spans) == p0 + n - low:
            mask = _band(n, p0 - low, window)
        else:
            mask = position_mask(np.arange(p0, p0 + n), positions_of(spans), window)
        reads.append(AttendSpec(q_start + offset, n, as_runs(spans), AttendKind.EXPLICIT, mask))
    return reads


def tree_read(q_start: int, tree: DraftTree, window: int | None, spans_of: SpansOf) -> AttendSpec:
    """Return the read of a tree's last frontier, whose mask covers its nodes.

    The committed prefix is seen whole, but for what a window hides from some of the queries.
    """
    queries = np.asarray(tree.frontier_positions())
    low = 0 if window is None else max(0, int(queries.min()) - window + 1)
    prefix = spans_of(low, tree.base)
    nodes = spans_of(tree.base, tree.base + tree.n_nodes)
    mask = tree.ancestor_mask()
    if window is not None:
        mask = mask & position_mask(queries, tree.base + np.asarray(tree.depths), window)
        if int(queries.max()) - window + 1 > low:
            hidden = position_mask(queries, positions_of(prefix), window)
            mask = np.concatenate([hidden, mask], axis=1)
    runs = as_runs([*prefix, *nodes])
    return AttendSpec(q_start, tree.frontier_size, runs, AttendKind.EXPLICIT, mask)


def position_mask(queries: IntArray, keys: IntArray, window: int | None) -> BoolArray:
    """Return the visibility rule by position, ``[queries, keys]``, for cells of one sequence."""
    behind = queries[:, None] - keys[None, :]
    mask = behind >= 0
    return mask if window is None else mask & (behind < window)


@lru_cache(maxsize=64)
def _band(n_queries: int, n_before: int, window: int) -> BoolArray:
    """Return the band mask of queries that follow ``n_before`` cells; shared, so read-only."""
    queries = np.arange(n_before, n_before + n_queries)
    mask = position_mask(queries, np.arange(n_before + n_queries), window)
    mask.flags.writeable = False
    return mask
