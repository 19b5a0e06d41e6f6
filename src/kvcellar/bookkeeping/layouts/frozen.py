"""Frozen prefixes: which cells a history is frozen from, and where its rows are read afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcellar.bookkeeping.cells.spans import Span
from kvcellar.cache_config import FROZEN, CacheConfig
from kvcellar.errors import RewindError
from kvcellar.types import IntArray, LayerGroup

FrozenSpans = Callable[[int, int], list[Span]]
"""(p0, p1) -> the span of those of positions [p0, p1) that lie in the frozen prefix, if any."""


def frozen_spans(config: CacheConfig, group: int) -> FrozenSpans | None:
    """Return where a layer group's frozen rows lie by position; None without a frozen prefix."""
    prefix = config.prefix
    if prefix is None:
        return None
    first, length = prefix.firsts[group], prefix.length

    def spans(p0: int, p1: int) -> list[Span]:
        low, stop = max(p0, first), min(p1, length)
        return [Span(low, FROZEN + low - first, stop - low)] if low < stop else []

    return spans


def cells_to_freeze(
    seq_id: int, tables: Sequence[IntArray], groups: Sequence[LayerGroup]
) -> list[IntArray]:
    """Return per layer group the cells that a frozen history needs; a window's last ones alone.

    Args:
        seq_id: whose history it is, for the message.
        tables: per layer group, the cell of each of its positions; -1 for none.
        groups: the layer groups.

    Raises:
        RewindError: it is empty, or some of those tokens have no cell.
    """
    found = [
        table[group.first_seen(len(table)) :] for table, group in zip(tables, groups, strict=True)
    ]
    if not len(tables[0]) or any((table < 0).any() for table in found):
        raise RewindError(
            f"freeze_prefix of {len(tables[0])} tokens of sequence {seq_id}: some of them are not "
            f"in this cache's own cells; freeze a history that was computed here, without holes"
        )
    return found
