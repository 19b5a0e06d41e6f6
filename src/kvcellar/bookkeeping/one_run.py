"""The layout of one sequence in one run: the single-stream hot path.

Position p of a full group lives in cell p. A sliding-window group keeps its history in one run as
well: when the run has grown to twice what must be kept, its tail is moved to the front, which
costs about one cell's copy per token and keeps every read a plain slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcellar.bookkeeping.frozen import FrozenSpans
from kvcellar.bookkeeping.layout import Lengths, Stretch
from kvcellar.bookkeeping.pool import CellMove
from kvcellar.bookkeeping.reads import ReadsOf
from kvcellar.bookkeeping.spans import Span
from kvcellar.types import AttendKind, AttendSpec, GroupUsage, Run, StepPlan, Write


class OneRun:
    """Sequence 0 in one layer group: positions from ``base`` on, in cells from 0 on.

    A layout, see :class:`kvcellar.bookkeeping.layout.Layout`.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        window: int | None,
        slack: int,
        min_chunk: int,
        capacity: int,
        reads: ReadsOf,
        origin: int = 0,
        frozen: FrozenSpans | None = None,
    ) -> None:
        """Create the layout of an empty history.

        Args:
            lengths: the length of sequence 0; whoever has the layout keeps it.
            window: positions that a query sees; None: all.
            slack: positions to keep behind the window.
            min_chunk: cells that a window's run has at least, before it slides.
            capacity: the most tokens.
            reads: what the queries of a step read.
            origin: position of the first token that is not frozen.
            frozen: where the positions before it lie; None: there are none.
        """
        self.base = origin
        """Position of cell 0, the lowest that is held."""
        self.window = window
        self._lengths = lengths
        self._keep = 0 if window is None else window - 1 + slack
        self._longest = max(2 * self._keep, min_chunk)
        self._capacity = capacity
        self._reads = reads
        self._origin = origin
        self._frozen = frozen
        self._points: list[int] = []  # ascending

    def base_at(self, start: int) -> int:
        """Return the position of cell 0 in a step from ``start`` on: a long run slides."""
        if self.window is None or start - self.base < self._longest:
            return self.base
        low = start - self._keep
        if self._points:
            low = min(low, max(0, self._points[0] - (self.window - 1)))
        return max(self.base, low)

    def begin(
        self, stretches: Sequence[Stretch], n_tokens: int, n_held: int | None
    ) -> tuple[StepPlan, list[CellMove]]:
        """Plan the next tokens of the sequence; see ``Layout.begin``."""
        start = stretches[0].first_pos
        moves = self._slide(start)
        base, window, end = self.base, self.window, start + n_tokens
        writes = (Write(0, Run(start - base, n_tokens)),)
        n_cells = end - base if n_held is None else n_held
        if n_tokens == 1 and self._frozen is None:  # planned for every token: all queries see all
            low = 0 if window is None else max(0, end - window)
            read = AttendSpec(0, 1, (Run(low - base, end - low),), AttendKind.NONE)
            return StepPlan(1, writes, (read,), n_cells), moves
        reads = self._reads(stretches[0], window, self._spans)
        return StepPlan(n_tokens, writes, tuple(reads), n_cells), moves

    def _spans(self, p0: int, p1: int) -> list[Span]:
        """Return where positions ``[p0, p1)`` lie: frozen ones first."""
        if self._frozen is None:
            return [Span(p0, p0 - self.base, p1 - p0)]
        own = max(p0, self.base)
        mine = [Span(own, own - self.base, p1 - own)] if own < p1 else []
        return [*self._frozen(p0, p1), *mine]

    def _slide(self, start: int) -> list[CellMove]:
        """Move what must be kept to the front, once the run is twice as long."""
        base, new_base = self.base, self.base_at(start)
        self.base = new_base
        if new_base == base or start <= new_base:
            return []
        return [CellMove(0, np.arange(new_base - base, start - base, dtype=np.int64))]

    def undo(self, stretches: Sequence[Stretch]) -> None:
        """Do nothing: the length says what counts, and what slid stays in its place."""

    def accept(self, seq_ids: Iterable[int]) -> None:
        """Do nothing: a window slides when the next step begins."""

    def resume_at(self, seq_id: int, length: int) -> int:
        """Return ``length`` if what it needs is held, else 0."""
        return length if length >= self.low else 0

    @property
    def low(self) -> int:
        """The lowest length, other than 0, that the sequence can go on from."""
        has_slid = self.window is not None and self.base > self._origin
        return self.base + self.window - 1 if has_slid and self.window is not None else 0

    def keep_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length``, and all that follows: it is one run."""
        if length not in self._points:
            self._points.append(length)
            self._points.sort()

    def cut(self, seq_id: int, p0: int, p1: int) -> None:
        """Drop the tail from ``p0`` on."""
        self._points = [at for at in self._points if at <= p0]
        if p0 <= self._origin:
            self.base = self._origin

    def clear(self) -> None:
        """Forget the history."""
        self.cut(0, 0, 0)

    def usage(self) -> GroupUsage:
        """Return the cells taken."""
        live = self._lengths.get(0, self._origin) - self.base
        return GroupUsage(self.window, self._capacity, live, 0, live)
