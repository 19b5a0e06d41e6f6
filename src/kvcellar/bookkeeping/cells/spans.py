"""Spans, consecutive positions of a sequence in consecutive cells, and functions over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvcellar.types import IntArray, Run


class Span(NamedTuple):
    """Positions ``[pos, pos + length)`` live in cells ``[cell, cell + length)``."""

    pos: int
    cell: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.pos + self.length

    def clip(self, p0: int, p1: int) -> Span:
        """Return the part inside ``[p0, p1)``; its length may be 0 or less."""
        lo, hi = max(self.pos, p0), min(self.stop, p1)
        return Span(lo, self.cell + lo - self.pos, hi - lo)


def spans_of(table: IntArray) -> list[Span]:
    """Return the fewest spans of a table of cells by position, -1 for none."""
    held = np.flatnonzero(table >= 0)
    if not held.size:
        return []
    cells = table[held]
    cuts = np.flatnonzero((np.diff(held) != 1) | (np.diff(cells) != 1)) + 1
    starts = [0, *cuts.tolist()]
    stops = [*starts[1:], held.size]
    return [Span(int(held[a]), int(cells[a]), b - a) for a, b in zip(starts, stops, strict=True)]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Join neighbours that continue each other in both positions and cells."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].stop == span.pos and out[-1].cell + out[-1].length == span.cell:
            out[-1] = Span(out[-1].pos, out[-1].cell, out[-1].length + span.length)
        else:
            out.append(span)
    return out


def without(spans: Iterable[Span], p0: int, p1: int) -> list[Span]:
    """Return what is left of some spans outside of positions ``[p0, p1)``."""
    out: list[Span] = []
    for span in spans:
        if span.pos < p0:
            out.append(span.clip(span.pos, p0))
        if span.stop > p1:
            out.append(span.clip(p1, span.stop))
    return out


def as_runs(spans: list[Span]) -> tuple[Run, ...]:
    """Return the cells of some spans, in their order, as the fewest runs."""
    if len(spans) == 1:
        return (Run(spans[0].cell, spans[0].length),)
    out: list[Run] = []
    start = stop = -1
    for span in spans:  # every step, for every sequence: without a Run per span
        cell = span.cell
        if cell != stop:
            if stop > start:
                out.append(Run(start, stop - start))
            start = stop = cell
        stop += span.length
    if stop > start:
        out.append(Run(start, stop - start))
    return tuple(out)


def positions_of(spans: list[Span]) -> IntArray:
    """Return the positions of some spans, in their order."""
    if not spans:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(s.pos, s.stop, dtype=np.int64) for s in spans])
