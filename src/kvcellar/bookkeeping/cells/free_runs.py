"""The free blocks of a pool as runs, and where the next ones are taken."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Protocol

from kvcellar.types import Run, join_runs


class FreeRuns:
    """Free blocks as ascending, disjoint, never touching runs; a block may be one cell."""

    def __init__(self, n_cells: int) -> None:
        self._size = n_cells
        self._starts = [0] if n_cells else []
        self._stops = [n_cells] if n_cells else []
        self.n_free = n_cells

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def room_at(self, cell: int) -> int:
        """Return how many consecutive cells are free from ``cell`` on; 0 where it is taken."""
        i = bisect_right(self._starts, cell) - 1
        return max(0, self._stops[i] - cell) if i >= 0 else 0

    @property
    def high_water(self) -> int | None:
        """Start of the free run that ends last, or None where nothing is free."""
        return self._starts[-1] if self._starts else None

    @property
    def last_stop(self) -> int:
        """One past the highest free cell, 0 where nothing is free."""
        return self._stops[-1] if self._stops else 0

    @property
    def n_used(self) -> int:
        """One past the highest taken cell."""
        start = self.high_water
        return self._size if start is None or self.last_stop < self._size else start

    @property
    def size(self) -> int:
        """Cells in all, free and taken."""
        return self._size

    def extend(self, size: int) -> None:
        """Grow to ``size`` cells; the new ones are free."""
        start, self._size = self._size, size
        if size > start:
            self.give(start, size - start)

    def take(self, start: int, length: int) -> None:
        """Mark ``[start, start + length)`` as taken; all of it must be free."""
        i = bisect_right(self._starts, start) - 1
        lo, hi = self._starts[i], self._stops[i]
        stop = start + length
        assert lo <= start and stop <= hi, f"cells [{start}, {stop}) are not all free"
        self.n_free -= length
        if lo == start and hi == stop:
            del self._starts[i], self._stops[i]
        elif lo == start:
            self._starts[i] = stop
        elif hi == stop:
            self._stops[i] = start
        else:
            self._stops[i] = start
            self._starts.insert(i + 1, stop)
            self._stops.insert(i + 1, hi)

    def give(self, start: int, length: int) -> None:
        """Mark ``[start, start + length)`` as free again; none of it may be free already."""
        stop = start + length
        i = bisect_left(self._starts, start)
        joins_left = i > 0 and self._stops[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == stop
        assert i == 0 or self._stops[i - 1] <= start, f"cell {start} is free already"
        assert i == len(self._starts) or stop <= self._starts[i], f"cell {stop - 1} is free already"
        self.n_free += length
        if joins_left and joins_right:
            self._stops[i - 1] = self._stops[i]
            del self._starts[i], self._stops[i]
        elif joins_left:
            self._stops[i - 1] = stop
        elif joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._stops.insert(i, stop)


class Placement(Protocol):
    """Preferences for where new runs go; all numbers are of blocks."""

    min_blocks: int
    """What a new run prefers to find free."""
    reuse_first: bool
    """True: go back to a hole of ``min_blocks`` before touching what was never used."""

    def gaps(self) -> Mapping[int, int]:
        """Return where each tail ends, and how much to leave free there."""
        ...


def find_room(free: FreeRuns, how: Placement, n: int, after: int | None) -> tuple[int, int]:
    """Return where the next run goes: (start, room), room >= 1; something is free.

    Args:
        free: what there is.
        how: what is preferred.
        n: how many blocks it should have room for.
        after: go on here, if there is any room.
    """
    here = free.room_at(after) if after is not None else 0
    if here and not (how.reuse_first and after is not None and after >= free.n_used):
        assert after is not None
        return after, here
    gaps, wanted = how.gaps(), max(n, how.min_blocks)
    best: tuple[int, int] | None = None
    for start, stop in free:
        if start in gaps and start != after:
            start += min(gaps[start], (stop - start) // 2)
        room = stop - start
        if room >= wanted:
            return start, room
        if best is None or room > best[1]:
            best = (start, room)
    if here:
        assert after is not None
        return after, here
    assert best is not None, "the caller has made sure that a block is free"
    return best


def take_runs(
    free: FreeRuns, how: Placement, n: int, after: int | None, wanted: int = 0
) -> list[Run]:
    """Take ``n`` free blocks, in few runs; there are so many.

    Args:
        free: taken from.
        how: what is preferred.
        n: how many.
        after: go on here if these are free: one past the owner's last block.
        wanted: how many the owner will take in the end, as far as it knows.
    """
    runs: list[Run] = []
    while n:
        start, room = find_room(free, how, max(n, wanted), after)
        run = Run(start, min(room, n))
        free.take(run.start, run.length)
        runs.append(run)
        n -= run.length
        wanted -= run.length
        after = run.stop
    return list(join_runs(runs))
