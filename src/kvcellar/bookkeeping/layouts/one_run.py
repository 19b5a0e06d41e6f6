"""The layout of one sequence in one run: the single-stream hot path.

Position p of a full group lives in cell p. A group with a window or a chunk keeps its in one run as
well: when the run has grown to twice what must be kept, its tail is moved to the front, which
costs about one cell's copy per token and keeps every read a plain slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcellar.bookkeeping.cells.pool import CellMove
from kvcellar.bookkeeping.cells.spans import Span
from kvcellar.bookkeeping.layouts.frozen import FrozenSpans
from kvcellar.bookkeeping.layouts.layout import Lengths, Stretch
from kvcellar.bookkeeping.layouts.reads import ReadsOf
from kvcellar.cache_config import GroupUsage
from kvcellar.sight import Sight
from kvcellar.types import AttendKind, AttendSpec, Run, StepPlan, Write


class OneRun:
    """Sequence 0 in one layer group: positions from ``base`` on, in cells from 0 on.

    A layout, see :class:`kvcellar.bookkeeping.layouts.layout.Layout`.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        sight: Sight,
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
            sight: how much of its history a query sees.
            slack: positions by which it can be cut back and go on.
            min_chunk: cells that the run of a window or chunk has at least, before it slides.
            capacity: the most tokens.
            reads: what the queries of a step read.
            origin: position of the first token that is not frozen.
            frozen: where the positions before it lie; None: there are none.
        """
        self.base = origin
        """Position of cell 0, the lowest that is held."""
        self.sight = sight
        self._lengths = lengths
        self._slack = slack
        self._longest = max(2 * (sight.most_before + slack), min_chunk)
        self._capacity = capacity
        self._reads = reads
        self._origin = origin
        self._frozen = frozen
        self._points: list[int] = []  # ascending

    def base_at(self, start: int) -> int:
        """Return the position of cell 0 in a step from ``start`` on: a long run slides."""
        if self.sight.is_full or start - self.base < self._longest:
            return self.base
        low = self.sight.first_seen(max(0, start - self._slack))
        if self._points:
            low = min(low, self.sight.first_seen(self._points[0]))
        return max(self.base, low)

    def begin(
        self, stretches: Sequence[Stretch], n_tokens: int, n_held: int | None
    ) -> tuple[StepPlan, list[CellMove]]:
        """Plan the next tokens of the sequence; see ``Layout.begin``."""
        start = stretches[0].first_pos
        moves = self._slide(start)
        base, end = self.base, start + n_tokens
        writes = (Write(0, Run(start - base, n_tokens)),)
        n_cells = end - base if n_held is None else n_held
        if n_tokens == 1 and self._frozen is None:  # planned for every token: all queries see all
            low = self.sight.first_seen(start)
            read = AttendSpec(0, 1, (Run(low - base, end - low),), AttendKind.NONE)
            return StepPlan(1, writes, (read,), n_cells), moves
        reads = self._reads(stretches[0], self.sight, self._spans)
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
        """Do nothing: a run slides when the next step begins."""

    def resume_at(self, seq_id: int, length: int) -> int:
        """Return the greatest length up to ``length`` whose next query sees what is held."""
        return self.sight.resume_at(length, self._lacks)

    @property
    def _lacks(self) -> int:
        return self.base if self.base > self._origin else 0

    @property
    def low(self) -> int:
        """The length from which on the sequence can go on wherever it is cut back to."""
        return self.sight.first_clear_of(self._lacks)

    def keep_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length``, and all that follows: it is one run."""
        if length not in self._points:
            self._points.append(length)
            self._points.sort()

    def drop_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length`` no longer than for any other length."""
        self._points = [at for at in self._points if at != length]

    def cut(self, seq_id: int, p0: int, p1: int) -> None:
        """Drop the tail from ``p0`` on."""
        self._points = [at for at in self._points if at <= p0]
        self.base = max(self._origin, min(self.base, p0))

    def clear(self) -> None:
        """Forget the history."""
        self.cut(0, 0, 0)

    def usage(self) -> GroupUsage:
        """Return the cells taken."""
        live = self._lengths.get(0, self._origin) - self.base
        return GroupUsage(self.sight.window, self._capacity, live, 0, live, self.sight.chunk)
