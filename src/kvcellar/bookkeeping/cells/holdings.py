"""Holdings of sequences: positions in cells, and the number of owners of each cell.

A sequence is a short list of spans, each mapping consecutive positions to consecutive cells, so a
fork copies a few tuples and bumps a few slices of reference counts, whatever its length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvcellar.bookkeeping.cells.spans import Span, as_runs, merged, without
from kvcellar.errors import SequenceConflictError
from kvcellar.types import IntArray, Run, runs_of

Refs = NDArray[np.int32]
"""``[capacity]``: the owners of each cell."""

IsSame = Callable[[Span, Span], bool]
"""Whether two spans of the same positions hold the same tokens."""


class Holdings:
    """The spans of every sequence, and the number of owners of every cell.

    Invariants (asserted by ``check``):
      - ``refs[i]`` is the number of owners: sequences, plus holders that called ``retain``;
      - a sequence holds at most one cell per position, and its spans are sorted and disjoint.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        """Create holdings of cells that nobody owns.

        Args:
            capacity: the most cells; those that fill no block are left out.
            block_size: cells per block.
        """
        self.block_size = block_size
        self.n_blocks = capacity // block_size
        self.capacity = self.n_blocks * block_size
        self.refs: Refs = np.zeros(self.capacity, dtype=np.int32)
        self._spans: dict[int, list[Span]] = {}

    # What is there -----------------------------------------------------------------------------

    def seq_ids(self) -> list[int]:
        """Return the sequences that hold at least one cell, in the order they came."""
        return list(self._spans)

    def spans(self, seq_id: int, p0: int = 0, p1: int | None = None) -> list[Span]:
        """Return the spans of a sequence inside positions ``[p0, p1)``, ascending; [] for none."""
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

    def first_pos(self, seq_id: int) -> int | None:
        """Return the lowest position that a sequence holds, None where it holds none."""
        spans = self._spans.get(seq_id)
        return spans[0].pos if spans else None

    def runs(self, seq_id: int, p0: int = 0, p1: int | None = None) -> tuple[Run, ...]:
        """Return the cells of positions ``[p0, p1)`` in position order, as runs."""
        return as_runs(self.spans(seq_id, p0, p1))

    def retained_from(self, seq_id: int, stop: int | None = None) -> int:
        """Return where a sequence begins to have no hole up to ``stop``, or to its end."""
        spans = self.spans(seq_id, 0, stop)
        low = stop if stop is not None else spans[-1].stop if spans else 0
        for span in reversed(spans):
            if span.stop != low:
                break
            low = span.pos
        return low

    def n_shared(self, seq_id: int, stop: int | None = None) -> int:
        """Return how many of a sequence's cells below position ``stop`` have another owner too."""
        return sum(
            int(np.count_nonzero(self.refs[s.cell : s.cell + s.length] > 1))
            for s in self.spans(seq_id, 0, stop)
        )

    def not_held(self, seq_id: int, parts: Iterable[Span], is_same: IsSame) -> list[Span]:
        """Return what of some spans a sequence does not hold yet; changes nothing.

        Raises:
            SequenceConflictError: it holds another token at one of these positions.
        """
        mine = self._spans.get(seq_id, [])
        return [new for part in parts for new in _missing(seq_id, part, mine, is_same)]

    def _own_part(self, seq_id: int, pos: int) -> list[Span]:
        """Return what a sequence holds of the block that ``pos`` lives in."""
        first = pos - pos % self.block_size
        return self.spans(seq_id, first, first + self.block_size)

    def _n_owners(self, block: int, refs: Refs | None = None) -> int:
        """Return the owners of a block's cells, summed over its cells."""
        first = block * self.block_size
        counts = self.refs if refs is None else refs
        return int(counts[first : first + self.block_size].sum())

    def _is_own(self, part: list[Span]) -> bool:
        """Return true if the sequence whose part of a block this is holds that block alone."""
        n_mine = sum(span.length for span in part)
        return bool(part) and self._n_owners(part[0].cell // self.block_size) == n_mine

    # Owners ------------------------------------------------------------------------------------

    def retain(self, runs: Iterable[Run]) -> None:
        """Add one owner to taken cells; the owner is not a sequence (a prefix index, say)."""
        for run in runs:
            refs = self.refs[run.start : run.stop]
            assert (refs > 0).all(), f"cells [{run.start}, {run.stop}) are not all taken"
            refs += 1

    # Spans, whose owners are counted elsewhere ---------------------------------------------------

    def _insert(self, seq_id: int, parts: list[Span]) -> None:
        """Add spans to a sequence's, at positions where it has none."""
        if parts:
            mine = self._spans.get(seq_id)
            self._spans[seq_id] = merged(sorted([*mine, *parts])) if mine else parts

    def _append(self, seq_id: int, part: Span) -> None:
        """Add a span behind those of a sequence."""
        spans = self._spans.setdefault(seq_id, [])
        last = spans[-1] if spans else None
        if last and last.stop == part.pos and last.cell + last.length == part.cell:
            spans[-1] = Span(last.pos, last.cell, last.length + part.length)
        else:
            spans.append(part)

    def _cut(self, seq_id: int, p0: int, p1: int | None) -> list[Span]:
        """Take positions ``[p0, p1)`` from a sequence and return their spans."""
        gone = self.spans(seq_id, p0, p1)
        if gone:
            left = without(self._spans[seq_id], gone[0].pos, gone[-1].stop)
            if left:
                self._spans[seq_id] = left
            else:
                del self._spans[seq_id]
        return gone

    def _shift(self, seq_id: int, part: list[Span], n_cells: int) -> None:
        """Have a sequence hold some of its positions ``n_cells`` cells further on."""
        kept = without(self._spans[seq_id], part[0].pos, part[-1].stop)
        moved = [Span(span.pos, span.cell + n_cells, span.length) for span in part]
        self._spans[seq_id] = merged(sorted([*kept, *moved]))

    def relocate(self, new_cells: IntArray) -> None:
        """Have every sequence hold its tokens in ``new_cells[c]`` instead of cell ``c``."""
        for seq_id, spans in self._spans.items():
            moved = []
            for span in spans:
                pos = span.pos
                for run in runs_of(new_cells[span.cell : span.cell + span.length]):
                    moved.append(Span(pos, run.start, run.length))
                    pos += run.length
            self._spans[seq_id] = merged(moved)

    # Proof -------------------------------------------------------------------------------------

    def check_owners(self, held: Sequence[int] = ()) -> None:
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
                assert s.length > 0, f"{s} is empty"
                refs[s.cell : s.cell + s.length] += 1
        np.add.at(refs, np.asarray(held, dtype=np.int64), 1)
        assert np.array_equal(refs, self.refs), "refs are not the number of owners"


def _missing(seq_id: int, part: Span, mine: list[Span], is_same: IsSame) -> list[Span]:
    """Return what of ``part`` is not among a sequence's own spans."""
    missing: list[Span] = []
    lo = part.pos
    for span in mine:
        both = span.clip(part.pos, part.stop)
        if both.length <= 0:
            continue
        if not is_same(both, part.clip(both.pos, both.stop)):
            raise SequenceConflictError(
                f"sequence {seq_id} already owns other cells at positions "
                f"[{both.pos}, {both.stop}); seq_rm them first"
            )
        if both.pos > lo:
            missing.append(part.clip(lo, both.pos))
        lo = both.stop
    if lo < part.stop:
        missing.append(part.clip(lo, part.stop))
    return missing


def _span_pos(span: Span) -> int:
    return span.pos
