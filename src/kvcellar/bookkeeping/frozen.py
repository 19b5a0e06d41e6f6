"""Frozen prefixes: which cells a history is frozen from, and where its rows are read afterwards."""

from __future__ import annotations

from collections.abc import Callable

from kvcellar.bookkeeping.spans import Span
from kvcellar.types import FROZEN, CacheConfig

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


def first_needed(length: int, window: int | None) -> int:
    """Return the first of ``length`` positions that a token behind them may see."""
    return 0 if window is None else max(0, length - (window - 1))
