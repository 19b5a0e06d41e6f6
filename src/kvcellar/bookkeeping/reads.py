"""From "these queries of one sequence" to the reads that serve them.

Full history needs no mask: one decode token sees all that is read, a prefill chunk is causal at
its tail. A sliding window over several queries needs a band; it is cut into tiles, so that a mask
never has more than ``TILE`` rows and no read is wider than the window and its tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from kvcellar.bookkeeping.spans import Span, as_runs, positions_of
from kvcellar.types import AttendKind, AttendSpec, BoolArray, IntArray

TILE = 256
"""Most query tokens of one windowed read."""

SpansOf = Callable[[int, int], list[Span]]
"""(p0, p1) -> the spans of positions [p0, p1) of the sequence, ascending."""


def causal_reads(
    q_start: int, first_pos: int, n_tokens: int, window: int | None, spans_of: SpansOf
) -> list[AttendSpec]:
    """The reads of ``n_tokens`` new tokens at positions from ``first_pos`` on.

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


def position_mask(queries: IntArray, keys: IntArray, window: int | None) -> BoolArray:
    """``[queries, keys]``: the visibility rule by position, for cells of one sequence."""
    behind = queries[:, None] - keys[None, :]
    mask = behind >= 0
    return mask if window is None else mask & (behind < window)


@lru_cache(maxsize=64)
def _band(n_queries: int, n_before: int, window: int) -> BoolArray:
    """The band mask of ``n_queries`` that follow ``n_before`` cells; shared, so read-only."""
    queries = np.arange(n_before, n_before + n_queries)
    mask = position_mask(queries, np.arange(n_before + n_queries), window)
    mask.flags.writeable = False
    return mask
