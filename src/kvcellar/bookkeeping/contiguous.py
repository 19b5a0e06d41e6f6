"""One sequence, a length: the single-stream hot path.

Position p of a full group lives in cell p. A sliding-window group keeps its history in one run as
well: when the run has grown to twice what must be kept, its tail is moved to the front, which
costs about one cell's copy per token and keeps every read a plain slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.bookkeeping.growth import Growth
from kvcellar.bookkeeping.reads import causal_reads
from kvcellar.bookkeeping.spans import Span
from kvcellar.bookkeeping.step import OpenStep, StepBookkeeping
from kvcellar.checks import whole, wholes
from kvcellar.errors import CacheFullError, PositionError, RewindError, StepError
from kvcellar.types import (
    AttendKind,
    AttendSpec,
    CacheConfig,
    GroupUsage,
    IntArray,
    Run,
    StepPlan,
    Write,
)


class ContiguousBookkeeping(StepBookkeeping):
    """The length of one history, and where each layer group keeps it."""

    def __init__(self, config: CacheConfig) -> None:
        """An empty history."""
        super().__init__(config)
        self._length = 0
        self._base = [0] * len(self.groups)  # position of cell 0, the lowest that is held

    def _make_growth(self) -> Growth | None:
        if self.config.budget is None:
            return None
        return Growth(self.config, self.config.budget, has_one_run=True)

    @property
    def length(self) -> int:
        """Tokens in the history: the position that the next token gets."""
        return self._length

    def can_extend(self, n: int = 1) -> bool:
        """Whether ``n`` more tokens fit; with a memory budget, in steps of ``STEP_TOKENS``."""
        n = whole(n, "n")
        if self._growth is None or self._length + n > self.config.capacity:
            return self._length + n <= self.config.capacity
        deficits = self._deficits(self._length, n)
        most = zip(self._growth.cells_for(self._length + n), self._growth.sizes, strict=True)
        return self._growth.can_add(
            [
                min(deficit, cells - size)
                for deficit, (cells, size) in zip(deficits, most, strict=True)
            ]
        )

    def _deficits(self, start: int, n_tokens: int) -> list[int]:
        """Cells that a step needs beyond those that are granted, per layer group."""
        assert self._growth is not None
        return [
            start + n_tokens - self._base_at(index, start) - size
            for index, size in enumerate(self._growth.sizes)
        ]

    def resumable_from(self) -> int:
        """The lowest length, other than 0, that ``rewind`` can cut back to."""
        return max(
            (base + group.window - 1 if group.window is not None and base else 0)
            for group, base in zip(self.groups, self._base, strict=True)
        )

    def rewind(self, new_length: int) -> None:
        """Cut the history back to its first ``new_length`` tokens. Moves no bytes.

        Raises:
            RewindError: it would grow, or a sliding window has let go of what it needs to go on
                from there; nothing was changed.
        """
        new_length = whole(new_length, "new_length", RewindError)
        self._settle()
        if new_length < 0 or new_length > self._length:
            raise RewindError(
                f"rewind to {new_length}: the cache holds {self._length} tokens and rewinding "
                f"cannot grow; ask for 0 to {self._length}"
            )
        low = self.resumable_from()
        if 0 < new_length < low:
            raise RewindError(
                f"rewind to {new_length}: a sliding window has let go of the tokens before; this "
                f"history resumes from 0 or from {low} to {self._length}; raise window_slack "
                f"({self.config.window_slack}) to keep more"
            )
        if new_length == 0:
            self._clear()
        self._length = new_length

    def length_in(self, layer: int) -> int:
        """Tokens that the layer has been given: in a forward, layers come one by one."""
        step = self._open
        if step is None or step.is_complete:
            return self._length
        return step.positions[0] + (step.n_tokens if step.seen[layer] else 0)

    def held(self, layer: int) -> int:
        """How many of the last tokens the layer holds, those that it no longer attends included."""
        return self._length - self._base[self.group_of(layer)]

    def adopt(self, length: int, held: Sequence[int]) -> None:
        """Start a history whose bytes come from elsewhere: they are in the cells from 0 on.

        Args:
            length: tokens of the history.
            held: per layer group, how many of the last of them are there.

        Raises:
            RewindError: the cache is not empty, or a group would lack tokens that it attends;
                nothing was changed.
            CacheFullError: it does not fit; nothing was changed.
        """
        self._settle()
        if self._length:
            raise RewindError(
                f"a history of {length} tokens cannot start here: the cache holds {self._length}; "
                f"clear it first"
            )
        for group, n in zip(self.groups, held, strict=True):
            least = length if group.window is None else min(length, group.window - 1)
            if not least <= n <= length:
                raise RewindError(
                    f"a history of {length} tokens needs the last {least} in layers "
                    f"{group.layers}, and {n} are there; it cannot go on exactly"
                )
        if not self._has_room(0, length):
            raise CacheFullError(
                f"a history of {length} tokens, {self.capacity} cells; {self.config.more_room}"
            )
        self._length, self._base = length, [length - n for n in held]

    def _implicit_step(
        self, layer: int, n_tokens: int, positions: Sequence[int] | IntArray | None
    ) -> OpenStep:
        self._settle()
        start = self._length
        is_next = positions is not None and len(positions) == 1 and positions[0] == start
        if n_tokens == 1 and is_next and self._has_room(start, 1):
            plans = [self._decode_plan(group, start) for group in range(len(self.groups))]
            self._open = OpenStep((start,), plans, self.n_layers)
            return self._open
        if n_tokens < 1:
            raise StepError(f"a step needs at least one token; the forward brings {n_tokens}")
        expected = list(range(start, start + n_tokens))
        asked = expected if positions is None else wholes(positions, "positions", PositionError)
        if len(asked) != n_tokens:
            raise PositionError(
                f"the forward brings {n_tokens} tokens and {len(asked)} positions; give every "
                f"token one position"
            )
        if asked != expected:
            raise PositionError(
                f"this cache holds positions 0 to {start - 1} of one sequence, so the next tokens "
                f"are {start}, {start + 1}, ...; the forward brings {asked[:8]}"
                f"{' ...' if len(asked) > 8 else ''}; call rewind to go back"
                if start
                else f"this cache is empty, so its tokens start at position 0 and follow each "
                f"other; the forward brings {asked[:8]}{' ...' if len(asked) > 8 else ''}"
            )
        if not self._has_room(start, n_tokens):
            raise CacheFullError(
                f"step needs {n_tokens} cells, {max(0, self.capacity - start)} free of "
                f"{self.capacity}; rewind, clear, or {self.config.more_room}"
            )
        plans = [self._group_plan(group, start, n_tokens) for group in range(len(self.groups))]
        self._open = OpenStep(asked, plans, self.n_layers)
        return self._open

    def _has_room(self, start: int, n_tokens: int) -> bool:
        """Have cells for the step in every group; false, with nothing changed, without them."""
        if start + n_tokens > self.config.capacity:
            return False
        return self._growth is None or self._growth.add(self._deficits(start, n_tokens))

    def _decode_plan(self, index: int, start: int) -> StepPlan:
        """What ``_group_plan`` says of one token, in fewer words: it is made for every token."""
        window = self.groups[index].window
        self._slide(index, start)
        base = self._base[index]
        low = 0 if window is None else max(0, start + 1 - window)
        read = AttendSpec(0, 1, (Run(low - base, start + 1 - low),), AttendKind.NONE)
        n_cells = self._n_held(index, start + 1 - base)
        return StepPlan(1, (Write(0, Run(start - base, 1)),), (read,), n_cells)

    def _group_plan(self, index: int, start: int, n_tokens: int) -> StepPlan:
        window = self.groups[index].window
        self._slide(index, start)
        base = self._base[index]

        def spans_of(p0: int, p1: int) -> list[Span]:
            return [Span(p0, p0 - base, p1 - p0)]

        end = start + n_tokens
        reads = causal_reads(0, start, n_tokens, window, spans_of)
        writes = (Write(0, Run(start - base, n_tokens)),)
        return StepPlan(n_tokens, writes, tuple(reads), self._n_held(index, end - base))

    def _base_at(self, index: int, start: int) -> int:
        """The position of cell 0 in a step from ``start`` on: the run slides once it is long."""
        window, base = self.groups[index].window, self._base[index]
        if window is None:
            return base
        keep = window - 1 + self.config.window_slack
        return base if start - base < max(2 * keep, self.config.min_chunk) else start - keep

    def _slide(self, index: int, start: int) -> None:
        """Move what must be kept to the front, once the run is twice as long."""
        base, new_base = self._base[index], self._base_at(index, start)
        if new_base == base:
            return
        if start > new_base:
            src = np.arange(new_base - base, start - base, dtype=np.int64)
            self._move_cells(index, 0, src)
        self._base[index] = new_base

    def _complete(self, step: OpenStep) -> None:
        self._length = step.positions[-1] + 1

    def _undo(self, step: OpenStep) -> None:
        self._length = step.positions[0]

    def _clear(self) -> None:
        self._length = 0
        self._base = [0] * len(self.groups)

    def _group_usage(self, group: int) -> GroupUsage:
        live = self._length - self._base[group]
        return GroupUsage(self.groups[group].window, self.capacity, live, 0, live)
