"""The pool of cells that many sequences share: which cell is taken, at which position, by whom.

A sequence is a short list of spans, each mapping consecutive positions to consecutive cells, so a
fork copies a few tuples and bumps a few slices of reference counts, whatever its length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcellar.bookkeeping.free_runs import FreeRuns
from kvcellar.bookkeeping.spans import Span, merged
from kvcellar.errors import CacheFullError, PositionError, SequenceConflictError
from kvcellar.types import IntArray, Run, join_runs, runs_of

MIN_RUN = 64
"""Cells that a new run prefers to find free, and leaves free behind another sequence's tail."""

MAX_GAP = 2048
"""Most cells that a new run leaves free behind another sequence's tail, however long that is."""


class CellMove(NamedTuple):
    """Bytes to copy: those of ``src_cells [n]``, in order, to cells ``[base, base + n)``."""

    base: int
    src_cells: IntArray


class CellPool:
    """Which cells are taken, at which position, by which sequences. No tensors.

    Cells keep their index for as long as they are taken. New cells continue a sequence's last run
    while they can; a new run starts at the lowest free cells that have room, with a gap behind
    every other sequence's tail so that each can grow in place.

    Invariants (asserted by ``check``):
      - ``pos[i] == -1`` exactly when ``refs[i] == 0``: free means unowned;
      - ``refs[i]`` is the number of owners: sequences, plus holders that called ``retain``;
      - a sequence owns at most one cell per position, and its spans are sorted and disjoint;
      - no cell is taken that was not granted.
    """

    def __init__(
        self,
        capacity: int,
        *,
        min_run: int = MIN_RUN,
        reuse_first: bool = False,
        n_granted: int | None = None,
    ) -> None:
        """An empty pool.

        Args:
            capacity: cells in the pool.
            min_run: see :data:`MIN_RUN`.
            reuse_first: go back to a hole of ``min_run`` cells before touching a cell that was
                never used; keeps the pools of a sliding window small.
            n_granted: cells that may be taken until ``grant`` says more; None: all.
        """
        self.capacity = capacity
        self._n_granted = capacity if n_granted is None else n_granted
        self.pos: NDArray[np.int32] = np.full(capacity, -1, dtype=np.int32)
        self.refs: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self._free = FreeRuns(self._n_granted)
        self._spans: dict[int, list[Span]] = {}
        self._expected: dict[int, int] = {}
        self._min_run = min_run
        self._reuse_first = reuse_first
        self._grows_in_place = not reuse_first

    # What is there -----------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Cells that nobody owns."""
        return self._free.n_free

    @property
    def n_taken(self) -> int:
        """Cells that cannot be claimed, though granted."""
        return self._n_granted - self.n_free

    @property
    def n_cells(self) -> int:
        """One past the highest taken cell: what a read window or a pool has to cover."""
        return self._free.n_used

    def grant(self, n_cells: int) -> None:
        """Cells ``[0, n_cells)`` may be taken from now on; never fewer than before."""
        assert self._n_granted <= n_cells <= self.capacity, "a grant is not taken back"
        self._n_granted = n_cells
        self._free.extend(n_cells)

    def seq_ids(self) -> list[int]:
        """Sequences that own at least one cell, in the order they came."""
        return list(self._spans)

    def spans(self, seq_id: int, p0: int = 0, p1: int | None = None) -> list[Span]:
        """The spans of a sequence inside positions ``[p0, p1)``, ascending; [] for none."""
        spans = self._spans.get(seq_id)
        if not spans:
            return []
        stop = spans[-1].stop if p1 is None else p1
        first = bisect_right(spans, p0, key=_span_pos) - 1 if p0 > spans[0].pos else 0
        last = len(spans) if stop >= spans[-1].stop else bisect_left(spans, stop, key=_span_pos)
        out = spans[first:last]
        if out and out[0].pos < p0:
            head = out[0].clip(p0, stop)
            out[:1] = [head] if head.length > 0 else []
        if out and out[-1].stop > stop:
            out[-1] = out[-1].clip(p0, stop)
        return out

    def runs(self, seq_id: int, p0: int = 0, p1: int | None = None) -> tuple[Run, ...]:
        """The cells of positions ``[p0, p1)`` in position order, as runs."""
        return join_runs(Run(s.cell, s.length) for s in self.spans(seq_id, p0, p1))

    def seq_cells(self, seq_id: int) -> list[int]:
        """The cells of a sequence in position order."""
        return [c for s in self.spans(seq_id) for c in range(s.cell, s.cell + s.length)]

    def seq_positions(self, seq_id: int, p0: int = 0, p1: int | None = None) -> list[int]:
        """The positions that a sequence holds inside ``[p0, p1)``, ascending."""
        return [p for s in self.spans(seq_id, p0, p1) for p in range(s.pos, s.stop)]

    def retained_from(self, seq_id: int, stop: int | None = None) -> int:
        """The lowest position from which the sequence has no hole up to ``stop``, or its end."""
        spans = self.spans(seq_id, 0, stop)
        low = stop if stop is not None else spans[-1].stop if spans else 0
        for span in reversed(spans):
            if span.stop != low:
                break
            low = span.pos
        return low

    def n_shared(self, seq_id: int) -> int:
        """How many of a sequence's cells have another owner too."""
        return sum(
            int(np.count_nonzero(self.refs[s.cell : s.cell + s.length] > 1))
            for s in self.spans(seq_id)
        )

    # Claiming ----------------------------------------------------------------------------------

    def claim(self, seq_id: int, first_pos: int, length: int) -> list[Run]:
        """Take ``length`` cells for positions ``[first_pos, first_pos + length)``. All or nothing.

        Raises:
            CacheFullError: too few cells are free; nothing was changed.
            PositionError: the sequence already holds ``first_pos`` or later; nothing was changed.
        """
        spans = self._spans.get(seq_id, [])
        if spans and first_pos < spans[-1].stop:
            raise PositionError(
                f"sequence {seq_id} holds positions up to {spans[-1].stop - 1}; asked to claim "
                f"{first_pos}; remove the tail with seq_rm first"
            )
        if spans and length and self._grows_in_place:  # most claims: one more token
            last = spans[-1]
            start = last.cell + last.length
            if last.stop == first_pos and self._free.room_at(start) >= length:
                self._free.take(start, length)
                stop = start + length
                self.refs[start:stop] = 1
                self.pos[start:stop] = np.arange(first_pos, first_pos + length)
                spans[-1] = Span(last.pos, last.cell, last.length + length)
                return [Run(start, length)]
        runs = self._claim_runs(seq_id, first_pos, length)
        self._adopt(seq_id, first_pos, runs)
        return runs

    def expect(self, seq_id: int, length: int | None) -> None:
        """Say how long a sequence will be, so that its cells find one run and are left room.

        A hint, until another one for this id; None takes it back.
        """
        if length is None:
            self._expected.pop(seq_id, None)
        else:
            self._expected[seq_id] = length

    def _claim_runs(self, seq_id: int, first_pos: int, length: int) -> list[Run]:
        """Take the cells of a claim that continues a sequence; all or CacheFullError."""
        spans = self._spans.get(seq_id)
        after = spans[-1].cell + spans[-1].length if spans else None
        wanted = self._expected.get(seq_id, 0) - first_pos
        return self.take(length, after=after, wanted=wanted)

    def take(self, length: int, *, after: int | None = None, wanted: int = 0) -> list[Run]:
        """Take cells with one owner that is no sequence (yet); their position is unset (0).

        Args:
            length: how many.
            after: continue here if these cells are free: one past the owner's last cell.
            wanted: how many the owner will take in the end, as far as it knows.

        Raises:
            CacheFullError: too few cells are free; nothing was changed.
        """
        if length > self.n_free:
            raise CacheFullError(
                f"step needs {length} cells, {self.n_free} free of {self.capacity}; "
                f"release a sequence or raise capacity"
            )
        runs = self._take_free(length, after, wanted)
        for run in runs:
            self.refs[run.start : run.stop] = 1
            self.pos[run.start : run.stop] = 0
        return runs

    def _take_free(self, length: int, after: int | None, wanted: int = 0) -> list[Run]:
        """Take runs of so many; in the unit of the free runs, and so many are free."""
        runs: list[Run] = []
        while length:
            start, room = self._find(max(length, wanted), after)
            run = Run(start, min(room, length))
            self._free.take(run.start, run.length)
            runs.append(run)
            length -= run.length
            wanted -= run.length
            after = run.stop
        return list(join_runs(runs))

    def _find(self, length: int, after: int | None) -> tuple[int, int]:
        """Where the next run goes: (start, room), room >= 1; in the unit of the free runs.

        Args:
            length: cells that it should have room for.
            after: go on here, if there is any room.
        """
        here = self._free.room_at(after) if after is not None else 0
        if here and not (self._reuse_first and after is not None and after >= self._free.n_used):
            assert after is not None
            return after, here
        gaps = self._gaps()
        wanted = max(length, self._min_run)
        best: tuple[int, int] | None = None
        for start, stop in self._free:
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
        assert best is not None, "the caller has made sure that a cell is free"
        return best

    def _gaps(self) -> dict[int, int]:
        """Where each sequence's tail ends, and how much it wants to have free from there on."""
        return {
            s[-1].cell + s[-1].length: min(max(self._min_run, self._n_to_grow(i, s)), MAX_GAP)
            for i, s in self._spans.items()
        }

    def _n_to_grow(self, seq_id: int, spans: list[Span]) -> int:
        """Cells that a sequence is expected to need besides, or else half of its length."""
        stop, expected = spans[-1].stop, self._expected.get(seq_id)
        return (stop - spans[0].pos) // 2 if expected is None else expected - stop

    def adopt(self, seq_id: int, first_pos: int, runs: Iterable[Run]) -> None:
        """Give cells taken with ``take`` to a sequence, at positions from ``first_pos`` on.

        The owner that took them lets go: the reference counts do not change.
        """
        spans = self._spans.get(seq_id, [])
        assert not spans or first_pos >= spans[-1].stop, "adopted positions follow the sequence"
        self._adopt(seq_id, first_pos, runs)

    def _adopt(self, seq_id: int, first_pos: int, runs: Iterable[Run]) -> None:
        spans = self._spans.setdefault(seq_id, [])
        for run in runs:
            self.pos[run.start : run.stop] = np.arange(
                first_pos, first_pos + run.length, dtype=np.int32
            )
            if (
                spans
                and spans[-1].stop == first_pos
                and spans[-1].cell + spans[-1].length == run.start
            ):
                last = spans[-1]
                spans[-1] = Span(last.pos, last.cell, last.length + run.length)
            else:
                spans.append(Span(first_pos, run.start, run.length))
            first_pos += run.length
        if not spans:
            del self._spans[seq_id]

    def retain(self, runs: Iterable[Run]) -> None:
        """Add one owner to taken cells; the owner is not a sequence (a prefix index, say)."""
        for run in runs:
            refs = self.refs[run.start : run.stop]
            assert (refs > 0).all(), f"cells [{run.start}, {run.stop}) are not all taken"
            refs += 1

    def release(self, runs: Iterable[Run]) -> None:
        """Drop one owner of these cells; a cell is freed when its last owner lets go."""
        for run in runs:
            refs = self.refs[run.start : run.stop]
            refs -= 1
            assert (refs >= 0).all(), f"cells [{run.start}, {run.stop}) are released twice"
            gone = np.flatnonzero(refs == 0)
            if not gone.size:
                continue
            cuts = np.flatnonzero(np.diff(gone) > 1) + 1
            for part in np.split(gone, cuts) if cuts.size else (gone,):
                start, length = run.start + int(part[0]), int(part.size)
                self.pos[start : start + length] = -1
                self._free.give(start, length)

    # Sequences ---------------------------------------------------------------------------------

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> list[CellMove]:
        """Let ``dst`` own the cells of ``src`` at positions ``[p0, p1)`` too.

        Returns:
            As ``share`` does.

        Raises:
            SequenceConflictError: ``dst`` owns another cell at one of them; nothing was changed.
        """
        return self.share(dst, self.shareable(src, dst, p0, p1))

    def shareable(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> list[Span]:
        """What ``seq_cp`` would let ``dst`` own; changes nothing.

        Raises:
            SequenceConflictError: ``dst`` owns another cell at one of these positions.
        """
        parts = self.spans(src, p0, p1)
        mine = self._spans.get(dst, [])
        return [new for part in parts for new in self._not_owned(part, dst, mine)]

    def share(self, seq_id: int, parts: list[Span]) -> list[CellMove]:
        """Let a sequence own taken cells too, at positions where it has none.

        Returns:
            What the caller has to copy for it, in order: nothing, where each cell stands alone.
        """
        self.retain(Run(s.cell, s.length) for s in parts)
        self._insert(seq_id, parts)
        return []

    def _insert(self, seq_id: int, parts: list[Span]) -> None:
        """Add spans to a sequence's, at positions where it has none."""
        if not parts:
            return
        mine = self._spans.get(seq_id, [])
        if mine:
            parts = merged(sorted([*mine, *parts]))
        self._spans[seq_id] = parts

    def _not_owned(self, part: Span, dst: int, mine: list[Span]) -> list[Span]:
        """What of ``part`` the sequence does not own yet."""
        missing: list[Span] = []
        lo = part.pos
        for span in mine:
            both = span.clip(part.pos, part.stop)
            if both.length <= 0:
                continue
            if not self._is_same(both, part.clip(both.pos, both.stop)):
                raise SequenceConflictError(
                    f"sequence {dst} already owns other cells at positions "
                    f"[{both.pos}, {both.stop}); seq_rm them first"
                )
            if both.pos > lo:
                missing.append(part.clip(lo, both.pos))
            lo = both.stop
        if lo < part.stop:
            missing.append(part.clip(lo, part.stop))
        return missing

    def _is_same(self, mine: Span, theirs: Span) -> bool:
        """Whether two spans of the same positions hold the same tokens: here, the same cells."""
        return mine.cell == theirs.cell

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int | None = None) -> None:
        """Let go of positions ``[p0, p1)``; a cell is freed when its last owner lets go."""
        gone = self.spans(seq_id, p0, p1)
        if not gone:
            return
        spans = self._spans[seq_id]
        lo, hi = gone[0].pos, gone[-1].stop
        left = [part for s in spans if (part := s.clip(0, lo)).length > 0]
        right = [part for s in spans if (part := s.clip(hi, s.stop)).length > 0]
        if left or right:
            self._spans[seq_id] = left + right
        else:
            del self._spans[seq_id]
        self.release(Run(s.cell, s.length) for s in gone)

    def clear(self) -> None:
        """Free every cell, whoever owns it."""
        self.pos.fill(-1)
        self.refs.fill(0)
        self._free = FreeRuns(self._n_granted)
        self._spans.clear()
        self._expected.clear()

    # Crumbs ------------------------------------------------------------------------------------

    def place_for(self, cells: IntArray) -> CellMove | None:
        """Where cells could lie together: what to copy, before ``gather``. Changes nothing.

        Where no free run holds all of them, as many whole runs from the first on as it holds.

        Args:
            cells: ``[n]`` taken ones, in the order that they are to lie in.

        Returns:
            None where it would not leave fewer runs.
        """
        if not self.n_free:
            return None
        runs = runs_of(cells)
        start, room = self._find(len(cells), None)
        if room < len(cells):
            start, stop = max(self._free, key=lambda free: free[1] - free[0])
            room = stop - start
        n_runs = n = 0
        while n_runs < len(runs) and n + runs[n_runs].length <= room:
            n += runs[n_runs].length
            n_runs += 1
        return CellMove(start, cells[:n]) if n_runs > 1 else None

    def gather(self, move: CellMove) -> None:
        """All owners of these cells own the copies instead, and the cells are free.

        The sequences do not know yet: when all is gathered, ``relocate`` tells them. Owners that
        are no sequences have to be told by the caller.
        """
        src, stop = move.src_cells, move.base + len(move.src_cells)
        self._free.take(move.base, len(src))
        self.refs[move.base : stop] = self.refs[src]
        self.pos[move.base : stop] = self.pos[src]
        self.refs[src], self.pos[src] = 0, -1
        for run in runs_of(src):
            self._free.give(run.start, run.length)

    def relocate(self, new_cells: IntArray) -> None:
        """Every sequence has its tokens in other cells: ``new_cells[c]`` instead of ``c``."""
        for seq_id, spans in self._spans.items():
            moved = [
                Span(span.pos + at, run.start, run.length)
                for span in spans
                for at, run in _at(runs_of(new_cells[span.cell : span.cell + span.length]))
            ]
            self._spans[seq_id] = merged(moved)

    # Proof -------------------------------------------------------------------------------------

    def check(self, held: Sequence[int] = ()) -> None:
        """Assert the invariants.

        Args:
            held: cells owned by holders that are not sequences, once per holder.
        """
        refs = np.zeros(self.capacity, dtype=np.int32)
        for spans in self._spans.values():
            assert spans, "a sequence without cells is not kept"
            for before, after in pairwise(spans):
                assert before.stop <= after.pos, f"spans overlap: {before} {after}"
            for s in spans:
                refs[s.cell : s.cell + s.length] += 1
                want = np.arange(s.pos, s.stop, dtype=np.int32)
                assert np.array_equal(self.pos[s.cell : s.cell + s.length], want)
        np.add.at(refs, np.asarray(held, dtype=np.int64), 1)
        assert np.array_equal(refs, self.refs), "refs are not the number of owners"
        assert np.array_equal(self.pos == -1, self.refs == 0), "free means unowned"
        self._check_free()

    def _check_free(self) -> None:
        free = [c for a, b in self._free for c in range(a, b)]
        assert free == np.flatnonzero(self.refs[: self._n_granted] == 0).tolist(), (
            "free runs are the unowned cells"
        )
        assert not self.refs[self._n_granted :].any(), "cells are taken that were not granted"
        assert self.n_free == len(free)


def _span_pos(span: Span) -> int:
    return span.pos


def _at(runs: Iterable[Run]) -> Iterator[tuple[int, Run]]:
    """Runs, each with the number of cells before it."""
    at = 0
    for run in runs:
        yield at, run
        at += run.length
