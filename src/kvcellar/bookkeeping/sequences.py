"""Many sequences over shared cells, one pool of cells per layer group.

Sequences fork without copying, are cut back, and let go of cells that a sliding window has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcellar.bookkeeping.cells import MAX_GAP, MIN_RUN, CellMove, CellPool
from kvcellar.bookkeeping.compaction import Compacted, crumbs, nothing_moved
from kvcellar.bookkeeping.reads import causal_reads
from kvcellar.bookkeeping.spans import Span, spans_of
from kvcellar.bookkeeping.step import OpenStep, StepBookkeeping
from kvcellar.checks import seen, whole, wholes
from kvcellar.errors import (
    CacheFullError,
    PositionError,
    RewindError,
    SequenceConflictError,
    StepError,
    UnknownSequenceError,
)
from kvcellar.types import (
    MOST_CELLS,
    AttendSpec,
    CacheConfig,
    GroupUsage,
    IntArray,
    Run,
    StepPlan,
    Write,
    runs_of,
)


@dataclass(slots=True)
class Stretch:
    """Consecutive tokens of the flat batch that belong to one sequence."""

    seq_id: int
    q_start: int
    n_tokens: int
    first_pos: int


@dataclass(slots=True)
class SeqStep:
    """What a step of this cache claimed, enough to complete it or to take it back."""

    stretches: list[Stretch]
    lengths: dict[int, int | None] = field(default_factory=dict)
    """Lengths before the step; None for a sequence that did not exist."""


class SeqBookkeeping(StepBookkeeping):
    """Which sequence holds which positions in which cells, for every layer group.

    ``begin_step`` says whose tokens the next forward brings and claims their cells; the sequences'
    lengths grow when every layer has written. A sequence exists while it holds at least one token,
    or has a step under way.
    """

    def __init__(self, config: CacheConfig) -> None:
        """An empty pool of cells per layer group."""
        super().__init__(config)
        self.pools = [
            CellPool(
                config.capacity if self._growth is None else self._growth.limits[index],
                reuse_first=group.window is not None,
                n_granted=None if self._growth is None else 0,
            )
            for index, group in enumerate(self.groups)
        ]
        self._length: dict[int, int] = {}
        self._let_go: list[dict[int, int]] = [{} for _ in self.groups]
        """Per layer group and sequence: one past the highest position that its window let go of."""
        self._step: SeqStep | None = None

    @property
    def block_size(self) -> int:
        """Cells that are taken and freed together: 1, each stands alone."""
        return 1

    def expect(self, seq_id: int, n_tokens: int) -> None:
        """Say how long a sequence will be: its cells then lie in fewer runs. A hint, no promise.

        It is forgotten with the sequence. Groups with a window keep but a part of it and are not
        told.

        Raises:
            UnknownSequenceError: ``seq_id`` is negative.
        """
        seq_id, n_tokens = check_seq_id(seq_id), whole(n_tokens, "n_tokens")
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.window is None:
                pool.expect(seq_id, n_tokens)

    # Admission and steps -----------------------------------------------------------------------

    def can_extend(self, n: int = 1) -> bool:
        """Whether ``n`` more tokens fit, over all sequences together.

        With a memory budget: in steps of at most ``STEP_TOKENS``, where a window lets go of its
        past in between.
        """
        return self._are_free(whole(n, "n"))

    def can_begin_step(self, seq_ids: Sequence[int] | IntArray) -> bool:
        """Whether ``begin_step`` with these tokens would find its cells, whosever they are.

        Raises:
            StepError: as ``begin_step`` does.
        """
        return self._fits(self._stretches(wholes(seq_ids, "seq_ids", UnknownSequenceError))[0])

    def _fits(self, stretches: list[Stretch]) -> bool:
        """Whether the step's cells are free in every group, or would be behind the windows."""
        n_cells = sum(stretch.n_tokens for stretch in stretches) + self._n_promised(stretches)
        if self._growth is not None:
            return self._growth.can_add(self._deficits([n_cells] * len(self.pools)))
        return self._are_free(n_cells)

    def _are_free(self, n_cells: int) -> bool:
        """Whether so many cells are free in every group, behind windows or to be granted too."""
        if self._growth is not None:
            return self._growth.can_add(self._deficits(self._growth.cells_for(n_cells)))
        return all(
            n_cells <= pool.n_free or n_cells <= pool.n_free + self._n_releasable(group)
            for group, pool in enumerate(self.pools)
        )

    def _deficits(self, n_cells: Sequence[int]) -> list[int]:
        """Cells that are missing per group, windows' past ones counted as free."""
        return [
            n - pool.n_free if n <= pool.n_free else n - pool.n_free - self._n_releasable(group)
            for group, (pool, n) in enumerate(zip(self.pools, n_cells, strict=True))
        ]

    def _grow(self, deficits: Sequence[int], n_cells: Sequence[int]) -> bool:
        """Have the missing cells granted, and some to place ``n_cells`` well; false: refused.

        Where sequences share a pool, each wants room behind it to grow in place.
        """
        assert self._growth is not None
        is_shared = len(self._length) > 1
        wishes = [
            max(0, n + min(pool.n_taken // 2, MAX_GAP) - pool.n_free - max(0, deficit))
            if is_shared
            else 0
            for n, pool, deficit in zip(n_cells, self.pools, deficits, strict=True)
        ]
        if not self._growth.add(deficits, wishes):
            return False
        for pool, size in zip(self.pools, self._growth.sizes, strict=True):
            pool.grant(size)
        return True

    def begin_step(
        self, seq_ids: Sequence[int] | IntArray, positions: Sequence[int] | IntArray | None = None
    ) -> list[int]:
        """Say whose tokens the next forward brings, and claim their cells. All or nothing.

        Args:
            seq_ids: one per token of the flat batch; tokens of one sequence in their order. An id
                that is not there yet starts a sequence at position 0.
            positions: one per token, to be checked; by default each sequence goes on at its end.

        Returns:
            The position of every token.

        Raises:
            CacheFullError: too few cells are free in some layer group; nothing was claimed.
            PositionError: positions that do not continue their sequence; nothing was claimed.
            UnknownSequenceError: an id that is no whole number, or negative; nothing was claimed.
        """
        ids = wholes(seq_ids, "seq_ids", UnknownSequenceError)
        given = None if positions is None else wholes(positions, "positions", PositionError)
        self._settle()
        if not ids:
            raise StepError("a step needs at least one token; begin_step got no seq_ids")
        check_seq_id(min(ids))
        stretches, asked = self._stretches(ids)
        if given is not None and given != asked:
            at = next(
                (i for i, (a, b) in enumerate(zip(given, asked, strict=False)) if a != b),
                min(len(given), len(asked)),
            )
            raise PositionError(
                f"begin_step got {len(given)} positions for {len(asked)} tokens; they differ "
                f"from what continues each sequence at token {at}: "
                f"given {given[at : at + 4]}, expected {asked[at : at + 4]}"
            )
        self._admit(stretches)
        self._step = SeqStep(stretches)
        for stretch in stretches:
            self._step.lengths.setdefault(stretch.seq_id, self._length.get(stretch.seq_id))
        plans = [self._group_plan(group, stretches, len(ids)) for group in range(len(self.groups))]
        self._open = OpenStep(asked, plans, self.n_layers)
        return asked

    def _stretches(self, ids: list[int]) -> tuple[list[Stretch], list[int]]:
        """Cut the flat batch by sequence and give every token its position."""
        stretches: list[Stretch] = []
        next_pos: dict[int, int] = {}
        start = 0
        for i in range(1, len(ids) + 1):
            if i < len(ids) and ids[i] == ids[start]:
                continue
            seq_id, n = ids[start], i - start
            first = next_pos.get(seq_id, self._length.get(seq_id, 0))
            stretches.append(Stretch(seq_id, start, n, first))
            next_pos[seq_id] = first + n
            start = i
        positions = [s.first_pos + i for s in stretches for i in range(s.n_tokens)]
        return stretches, positions

    def _admit(self, stretches: list[Stretch]) -> None:
        """Make sure that the step's cells are free in every group, or change nothing."""
        n_tokens = sum(stretch.n_tokens for stretch in stretches)
        self._need_free("step", [n_tokens] * len(self.groups), self._n_promised(stretches))

    def _n_promised(self, stretches: list[Stretch]) -> int:
        """Cells that a step has to leave free."""
        return 0

    def _need_free(self, who: str, n_cells: Sequence[int], n_promised: int) -> None:
        """Have so many cells free per group, besides promised ones; drop what windows passed."""
        if self._growth is not None:
            wanted = [n + n_promised for n in n_cells]
            deficits = self._deficits(wanted)
            if not self._grow(deficits, wanted):
                raise CacheFullError(
                    f"{who} needs {max(n_cells)} cells, {max(0, self.n_free)} free or to be had of "
                    f"{self.capacity}; release a sequence or {self.config.more_room}"
                )
        for group, (pool, n) in enumerate(zip(self.pools, n_cells, strict=True)):
            if n + n_promised <= pool.n_free:
                continue
            free = pool.n_free + self._n_releasable(group) - n_promised
            if n > free:
                raise CacheFullError(
                    f"{who} needs {n} cells, {max(0, free)} free of {self.capacity}; "
                    f"release a sequence or {self.config.more_room}"
                )
        for group, (pool, n) in enumerate(zip(self.pools, n_cells, strict=True)):
            if n + n_promised > pool.n_free:
                for seq_id in self._length:
                    self._release_window(group, seq_id, batch=1)

    def _n_pending(self) -> int:
        """Cells that are promised to tokens which are not in a step yet."""
        return 0

    def _move_all(self, group: int, moves: Iterable[CellMove]) -> None:
        for move in moves:
            self._move_cells(group, move.base, move.src_cells)

    def _group_plan(self, group: int, stretches: list[Stretch], n_tokens: int) -> StepPlan:
        pool = self.pools[group]
        writes: list[Write] = []
        for stretch in stretches:
            q = stretch.q_start
            for run in self._claim(group, stretch):
                writes.append(Write(q, run))
                q += run.length
        reads: list[AttendSpec] = []
        for stretch in stretches:
            reads.extend(self._reads(group, stretch))
        n_cells = self._n_held(group, pool.n_cells)
        return StepPlan(n_tokens, tuple(writes), tuple(reads), n_cells)

    def _claim(self, group: int, stretch: Stretch) -> list[Run]:
        return self.pools[group].claim(stretch.seq_id, stretch.first_pos, stretch.n_tokens)

    def _reads(self, group: int, stretch: Stretch) -> list[AttendSpec]:
        pool = self.pools[group]

        def spans(p0: int, p1: int) -> list[Span]:
            return pool.spans(stretch.seq_id, p0, p1)

        return causal_reads(
            stretch.q_start,
            stretch.first_pos,
            stretch.n_tokens,
            self.groups[group].window,
            spans,
        )

    def _implicit_step(
        self, layer: int, n_tokens: int, positions: Sequence[int] | IntArray | None
    ) -> OpenStep:
        if self.is_step_open:
            raise StepError(
                f"layer {layer} has had its turn in this step, which is still open; if its forward "
                f"raised, call cancel_step and begin_step again"
            )
        raise StepError(
            f"layer {layer} brings {n_tokens} tokens and no step is open for them; "
            f"call begin_step(seq_ids) before each forward"
        )

    def _complete(self, step: OpenStep) -> None:
        assert self._step is not None
        for stretch in self._step.stretches:
            self._length[stretch.seq_id] = stretch.first_pos + stretch.n_tokens

    def _undo(self, step: OpenStep) -> None:
        assert self._step is not None
        for seq_id, length in self._step.lengths.items():
            for pool in self.pools:
                pool.seq_rm(seq_id, length or 0)
            if length is None:
                self._length.pop(seq_id, None)
            else:
                self._length[seq_id] = length
        self._step = None

    def _accepted(self, step: OpenStep) -> None:
        assert self._step is not None
        for group in range(len(self.groups)):
            for seq_id in self._step.lengths:
                self._release_window(group, seq_id)
        self._step = None

    # Windows -----------------------------------------------------------------------------------

    def _window_floor(self, group: int, seq_id: int) -> int:
        """The lowest position that the group must keep for this sequence."""
        window = self.groups[group].window
        if window is None:
            return 0
        return max(0, self._length[seq_id] - (window - 1) - self.config.window_slack)

    def _release_window(self, group: int, seq_id: int, batch: int = MIN_RUN) -> None:
        """Let go of positions behind the window, once at least ``batch`` of them have left."""
        floor = self._window_floor(group, seq_id) if seq_id in self._length else 0
        if floor:
            spans = self.pools[group].spans(seq_id, 0, floor)
            if sum(span.length for span in spans) >= batch:
                self.pools[group].seq_rm(seq_id, 0, floor)
                let_go = self._let_go[group]
                let_go[seq_id] = max(let_go.get(seq_id, 0), spans[-1].stop)

    def _n_releasable(self, group: int) -> int:
        """Cells that only positions behind their owners' windows keep taken."""
        if self.groups[group].window is None:
            return 0
        pool = self.pools[group]
        refs = pool.refs.copy()
        for seq_id in self._length:
            for span in pool.spans(seq_id, 0, self._window_floor(group, seq_id)):
                refs[span.cell : span.cell + span.length] -= 1
        return int(np.count_nonzero((refs == 0) & (pool.refs > 0)))

    def resumable_from(self, seq_id: int) -> int:
        """The lowest length, other than 0, that the sequence can be cut back to and go on from."""
        self.seq_len(seq_id)
        low = 0
        for let_go, group in zip(self._let_go, self.groups, strict=True):
            if group.window is not None and seq_id in let_go:
                low = max(low, let_go[seq_id] + group.window - 1)
        return low

    def can_resume(self, seq_id: int, length: int) -> bool:
        """Whether the sequence could be cut back to ``length`` tokens and go on exactly."""
        length = whole(length, "length", RewindError)
        return 0 <= length <= self.seq_len(seq_id) and (
            length == 0 or length >= self.resumable_from(seq_id)
        )

    def _check_resume(self, seq_id: int, length: int, verb: str) -> None:
        if not self.can_resume(seq_id, length):
            raise RewindError(
                f"{verb} of sequence {seq_id} at {length}: a sliding window has let go of the "
                f"tokens before; it resumes from 0 or from {self.resumable_from(seq_id)} to "
                f"{self.seq_len(seq_id)}; raise window_slack ({self.config.window_slack}) to keep "
                f"more"
            )

    # Sequences ---------------------------------------------------------------------------------

    def has_seq(self, seq_id: int) -> bool:
        """Whether the sequence holds any tokens."""
        return whole(seq_id, "seq_id", UnknownSequenceError) in self._length

    def seq_ids(self) -> list[int]:
        """The sequences that hold tokens, in the order they came."""
        return list(self._length)

    def seq_len(self, seq_id: int) -> int:
        """Length of the sequence's history: the position that its next token gets.

        Raises:
            UnknownSequenceError: no such sequence.
        """
        try:
            return self._length[whole(seq_id, "seq_id", UnknownSequenceError)]
        except KeyError:
            raise UnknownSequenceError(self._unknown(seq_id)) from None

    def _unknown(self, seq_id: int) -> str:
        there = list(self._length)
        shown = ", ".join(map(str, there[:8])) + (", ..." if len(there) > 8 else "")
        return f"sequence {seq_id} holds no tokens here; there are: {shown or 'none'}"

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """Let ``dst`` share what ``src`` holds at positions ``[p0, p1)``. Moves no bytes.

        Raises:
            UnknownSequenceError: ``src`` holds no tokens, or ``dst`` is negative; nothing was
                changed.
            RewindError: ``dst`` could not go on from ``p1``: a window has moved on; nothing was
                changed.
            SequenceConflictError: ``dst`` holds other tokens there; nothing was changed.
        """
        src, dst = check_seq_id(src), check_seq_id(dst)
        p0, p1 = check_range(p0, p1)
        self._settle()
        length = self.seq_len(src)
        stop = length if p1 is None else min(p1, length)
        p0 = max(0, p0)
        if stop <= p0 or src == dst:
            return
        self._check_resume(src, stop, "seq_cp")
        if not self._has_tokens(src, p0, stop):
            return
        parts = [pool.shareable(src, dst, p0, stop) for pool in self.pools]
        for group, (pool, part) in enumerate(zip(self.pools, parts, strict=True)):
            self._move_all(group, pool.share(dst, part))
            self._share_let_go(group, src, dst, p0)
        self._length[dst] = max(self._length.get(dst, 0), stop)

    def _share_let_go(self, group: int, src: int, dst: int, p0: int) -> None:
        """After a copy from ``p0`` on: what neither sequence's window has left to ``dst``."""
        pool, let_go = self.pools[group], self._let_go[group]
        missing = [
            low
            for seq_id, first in ((src, p0), (dst, 0))
            if (low := pool.retained_from(dst, let_go.get(seq_id, 0))) > first
        ]
        if missing:
            let_go[dst] = max(missing)
        else:
            let_go.pop(dst, None)

    def _has_tokens(self, seq_id: int, p0: int = 0, p1: int | None = None) -> bool:
        """Whether anything is left of a sequence's history at ``[p0, p1)``.

        A full group knows. Where every group has a window, what a window let go of counts.
        """
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.window is None:
                return bool(pool.spans(seq_id, p0, p1))
        return any(pool.spans(seq_id, p0, p1) for pool in self.pools) or any(
            let_go.get(seq_id, 0) > p0 for let_go in self._let_go
        )

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int | None = None) -> None:
        """Drop positions ``[p0, p1)``; a cell is freed when its last owner lets go.

        To the end (``p1`` None) it cuts the history back to ``p0`` tokens, and the next token gets
        position ``p0``. A range that ends before leaves a hole that is simply not attended.

        Raises:
            UnknownSequenceError: no such sequence; nothing was changed.
            RewindError: a sliding window has let go of what the sequence needs to go on from
                ``p0``; nothing was changed.
        """
        seq_id = whole(seq_id, "seq_id", UnknownSequenceError)
        p0, p1 = check_range(p0, p1)
        self._settle()
        length = self.seq_len(seq_id)
        p0 = max(0, p0)
        to_end = p1 is None or p1 >= length
        if to_end and p0 >= length:
            return
        if to_end and p0:
            self._check_resume(seq_id, p0, "seq_rm")
        end = length if p1 is None or to_end else p1
        for pool, let_go in zip(self.pools, self._let_go, strict=True):
            pool.seq_rm(seq_id, p0, end)
            if p0 < let_go.get(seq_id, 0) <= end:
                let_go[seq_id] = p0
        if not self._has_tokens(seq_id):
            del self._length[seq_id]
            for pool, let_go in zip(self.pools, self._let_go, strict=True):
                pool.expect(seq_id, None)
                let_go.pop(seq_id, None)
        elif to_end:
            self._length[seq_id] = p0

    def seq_keep(self, seq_id: int) -> None:
        """Keep this sequence and drop every other one.

        Raises:
            UnknownSequenceError: no such sequence; nothing was changed.
        """
        self._settle()
        self.seq_len(seq_id)
        for other in self.seq_ids():
            if other != seq_id:
                self.seq_rm(other)

    def _clear(self) -> None:
        for pool in self.pools:
            pool.clear()
        self._length.clear()
        for let_go in self._let_go:
            let_go.clear()
        self._step = None

    # Cells for a prefix index, and for what moves bytes out and in ----------------------------

    @property
    def n_free(self) -> int:
        """Cells that steps could claim: the fewest of all layer groups; see ``can_extend``."""
        free = self._n_free_by_group()
        most = min(free) if self._growth is None else self._growth.most_tokens(free)
        return most - self._n_pending()

    def _n_free_by_group(self) -> list[int]:
        """Granted cells that a step could claim, whosever it is."""
        return [pool.n_free + self._n_releasable(group) for group, pool in enumerate(self.pools)]

    def seq_table(self, seq_id: int, length: int | None = None) -> tuple[IntArray, ...]:
        """Per layer group the cell of each position ``[length]``, -1 where the group has none.

        Raises:
            UnknownSequenceError: no such sequence.
        """
        seq_id = whole(seq_id, "seq_id", UnknownSequenceError)
        if length is None:
            n = self.seq_len(seq_id)
        else:
            n = whole(length, "length", PositionError, least=0, most=MOST_CELLS)
        tables = []
        for pool in self.pools:
            table = np.full(n, -1, dtype=np.int64)
            for span in pool.spans(seq_id, 0, n):
                table[span.pos : span.stop] = np.arange(span.cell, span.cell + span.length)
            tables.append(table)
        return tuple(tables)

    def seq_map(self, seq_id: int, tables: Sequence[IntArray]) -> None:
        """Start a sequence on cells that are taken already; they get one more owner.

        Args:
            seq_id: it must hold no tokens.
            tables: as ``seq_table`` gives them, all of one length.

        Raises:
            UnknownSequenceError: ``seq_id`` is negative; nothing was changed.
            SequenceConflictError: the sequence holds tokens already; nothing was changed.
            RewindError: a table lacks what its group's window needs to go on; nothing was changed.
        """
        seq_id, tables = check_seq_id(seq_id), self._check_tables(tables)
        self._settle()
        let_go = self._check_start("seq_map", seq_id, tables)
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            self._move_all(group, pool.share(seq_id, spans_of(table)))
        self._start(seq_id, len(tables[0]), let_go)

    def seq_claim(self, seq_id: int, tables: Sequence[IntArray]) -> tuple[IntArray, ...]:
        """Start a sequence on new cells, wherever ``tables`` has a cell; for bytes that come back.

        Returns:
            The tables with the new cells.

        Raises:
            UnknownSequenceError: ``seq_id`` is negative; nothing was changed.
            SequenceConflictError: the sequence holds tokens already; nothing was changed.
            RewindError: a table lacks what its group's window needs to go on; nothing was changed.
            CacheFullError: too few cells are free; nothing was changed.
        """
        seq_id, tables = check_seq_id(seq_id), self._check_tables(tables)
        self._settle()
        let_go = self._check_start("seq_claim", seq_id, tables)
        self._need_free("seq_claim", self._n_cells_of(tables), self._n_pending())
        for pool, table in zip(self.pools, tables, strict=True):
            for span in spans_of(np.where(table >= 0, np.arange(len(table)), -1)):
                pool.claim(seq_id, span.pos, span.length)
        self._start(seq_id, len(tables[0]), let_go)
        return self.seq_table(seq_id, len(tables[0]))

    def _n_cells_of(self, tables: Sequence[IntArray]) -> list[int]:
        """How many cells a sequence takes that begins with such tables, per layer group."""
        return [int(np.count_nonzero(table >= 0)) for table in tables]

    def _check_tables(self, tables: Sequence[IntArray]) -> list[IntArray]:
        """Return tables of cells, one per layer group.

        Raises:
            PositionError: there is another number of them, or they are no rows of whole numbers of
                one length, -1 or a cell of this cache.
        """
        try:
            found = [np.asarray(table) for table in tables]
        except (TypeError, ValueError):
            found = []
        is_well_formed = len(found) == len(self.groups) and all(
            table.ndim == 1
            and len(table) == len(found[0])
            and (table.dtype.kind in "iu" or not table.size)
            and (not table.size or (table.min() >= -1 and table.max() < self.config.capacity))
            for table in found
        )
        if not is_well_formed:
            raise PositionError(
                f"tables must be {len(self.groups)} rows of cells of one length, as seq_table "
                f"gives them, got {seen(tables)}"
            )
        return [table.astype(np.int64, copy=False) for table in found]

    def _check_start(self, verb: str, seq_id: int, tables: Sequence[IntArray]) -> list[int]:
        """Whether a sequence can begin with these tables; what their windows have let go of."""
        check_seq_id(seq_id)
        if seq_id in self._length:
            raise SequenceConflictError(
                f"sequence {seq_id} holds {self._length[seq_id]} tokens already; seq_rm it first"
            )
        length = len(tables[0])
        is_token = np.ones(length, dtype=np.bool_)  # what a full group lacks was removed: a hole
        for group, table in zip(self.groups, tables, strict=True):
            if group.window is None:
                is_token &= table >= 0
        let_go = [0] * len(self.groups)
        for index, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            missing = np.flatnonzero(is_token & (table < 0))
            if group.window is None or not missing.size:
                continue
            let_go[index] = int(missing[-1]) + 1
            if let_go[index] + group.window - 1 > length:
                raise RewindError(
                    f"{verb} of {length} tokens for sequence {seq_id}: a sliding window of "
                    f"{group.window} has let go of position {missing[-1]}, which the next token "
                    f"sees; begin with a history whose last {group.window - 1} tokens are held"
                )
        return let_go

    def _start(self, seq_id: int, length: int, let_go: Sequence[int]) -> None:
        """A sequence begins with ``length`` tokens of which windows have let go so far."""
        if not length:
            return
        self._length[seq_id] = length
        for marks, mark in zip(self._let_go, let_go, strict=True):
            if mark:
                marks[seq_id] = mark

    def retain_cells(self, cells: Sequence[IntArray]) -> None:
        """Add an owner that is no sequence to these cells, given per layer group; -1 is none."""
        for pool, part in zip(self.pools, cells, strict=True):
            pool.retain(runs_of(part[part >= 0]))

    def release_cells(self, cells: Sequence[IntArray]) -> None:
        """Drop an owner that is no sequence; a cell is freed when its last owner lets go."""
        self._settle()
        for pool, part in zip(self.pools, cells, strict=True):
            pool.release(runs_of(part[part >= 0]))

    def compact(self, histories: Iterable[Sequence[IntArray]], max_cells: int) -> Compacted:
        """Copy together what lies in crumbs, as far as there is a free run for it. Between steps.

        Sequences know afterwards where their tokens are. Other owners of cells (``retain_cells``)
        have to be told by the caller, before the next verb: see ``relocated``.

        Args:
            histories: what is to lie together, the most important first: per layer group the cells
                of consecutive positions, -1 for none, as ``seq_table`` gives them.
            max_cells: about how many to copy at most, all layer groups together.
        """
        self._settle()
        moved: list[IntArray | None] = [None] * len(self.pools)
        n_cells = 0
        is_done = True
        for tables in histories:
            for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
                held = table[table >= 0]
                now = moved[group]
                cells = held if now is None else now[held]
                for first, stop in crumbs(cells):
                    if n_cells and n_cells + stop - first > max_cells:
                        is_done = False
                        continue
                    move = pool.place_for(cells[first:stop])
                    if move is None:
                        continue
                    self._move_cells(group, move.base, move.src_cells)
                    pool.gather(move)
                    n = len(move.src_cells)
                    n_cells += n
                    if now is None:
                        now = moved[group] = nothing_moved(pool.capacity)
                    now[held[first : first + n]] = np.arange(move.base, move.base + n)
        for pool, now in zip(self.pools, moved, strict=True):
            if now is not None:
                pool.relocate(now)
        return Compacted(tuple(moved), n_cells, is_done)

    def seq_usage(self, seq_id: int) -> tuple[int, int]:
        """(cells, shared cells) that the sequence holds, over all layer groups."""
        self.seq_len(seq_id)
        cells = sum(span.length for pool in self.pools for span in pool.spans(seq_id))
        return cells, sum(pool.n_shared(seq_id) for pool in self.pools)

    def _group_usage(self, group: int) -> GroupUsage:
        pool = self.pools[group]
        live = pool.n_taken
        shared = int(np.count_nonzero(pool.refs > 1))
        return GroupUsage(self.groups[group].window, pool.capacity, live, shared, pool.n_cells)

    def check(self, held: Sequence[Sequence[int]] | None = None) -> None:
        """Assert the invariants of every layer group's pool, and that lengths fit them.

        Args:
            held: per layer group, the cells that ``retain_cells`` gave an owner, once per owner.
        """
        for index, pool in enumerate(self.pools):
            pool.check([*self._held(pool), *(held[index] if held else ())])
            for seq_id in pool.seq_ids():
                assert seq_id in self._length or (
                    self._step is not None and seq_id in self._step.lengths
                ), f"sequence {seq_id} owns cells and has no length"
        if self._growth is not None:
            self._growth.check()
        for group, let_go in zip(self.groups, self._let_go, strict=True):
            for seq_id, low in let_go.items():
                assert group.window is not None, "a full group lets go of nothing"
                assert 0 <= low <= self._length[seq_id], f"sequence {seq_id} let go of its future"

    def _held(self, pool: CellPool) -> Sequence[int]:
        """Cells of this pool with an owner that is no sequence."""
        return ()


def check_seq_id(seq_id: int) -> int:
    """Return an id that a sequence can have.

    Raises:
        UnknownSequenceError: it is negative, or no whole number.
    """
    seq_id = whole(seq_id, "seq_id", UnknownSequenceError)
    if seq_id < 0:
        raise UnknownSequenceError(f"seq_ids are 0 or more, got {seen(seq_id)}")
    return seq_id


def check_range(p0: int, p1: int | None) -> tuple[int, int | None]:
    """Return the ends of a range of positions; None is the end of the history.

    Raises:
        PositionError: one of them is no whole number.
    """
    first = whole(p0, "p0", PositionError)
    return first, None if p1 is None else whole(p1, "p1", PositionError)
