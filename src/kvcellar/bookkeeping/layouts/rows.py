"""The layout of a group that keeps a row per token: blocks of cells, all or those still seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcellar.bookkeeping.cells.growth import Growth
from kvcellar.bookkeeping.cells.holdings import Refs
from kvcellar.bookkeeping.cells.pool import (
    MAX_GAP,
    MIN_RUN,
    Appends,
    BlockCopy,
    BlockPool,
    CellMove,
)
from kvcellar.bookkeeping.cells.spans import Span, spans_of
from kvcellar.bookkeeping.layouts.frozen import FrozenSpans, frozen_spans
from kvcellar.bookkeeping.layouts.layout import Demand, Lengths, Stretch
from kvcellar.bookkeeping.layouts.reads import ReadsOf, reads_of
from kvcellar.bookkeeping.layouts.window import Window
from kvcellar.cache_config import CacheConfig, GroupUsage
from kvcellar.checks import seen
from kvcellar.errors import ConfigError, PositionError, RewindError
from kvcellar.sight import FULL, Sight
from kvcellar.types import AttendSpec, BoolArray, IntArray, StepPlan, Write, cells_of


class Rows:
    """The cells of one layer group, by blocks, for many sequences.

    A layout, see :class:`kvcellar.bookkeeping.layouts.layout.SharedLayout`, with what tables need
    besides. Where queries see a window or a chunk, it lets go of whole blocks that every query has
    passed, some time after, and knows where sequences cannot resume any more.
    """

    def __init__(
        self,
        pool: BlockPool,
        lengths: Lengths,
        *,
        sight: Sight = FULL,
        slack: int = 0,
        reads: ReadsOf = reads_of,
        origin: int = 0,
        frozen: FrozenSpans | None = None,
    ) -> None:
        """Create the layout of no sequences.

        Args:
            pool: the group's cells, all free.
            lengths: the sequences' lengths; whoever has the layout keeps them.
            sight: how much of its history a query sees.
            slack: positions by which a sequence can be cut back and go on.
            reads: what the queries of a stretch read.
            origin: position of a sequence's first token of its own.
            frozen: where the positions before it lie; None: there are none.
        """
        self.pool = pool
        self.sight = sight
        self.window = None if sight.is_full else Window(sight, slack, pool.block_size, lengths)
        self._lengths = lengths
        self._reads = reads
        self._origin = origin
        self._frozen = frozen
        self._copies: list[BlockCopy] = []
        """Blocks that the last step copied, and how to take that back."""

    # A step ------------------------------------------------------------------------------------

    def begin(
        self, stretches: Sequence[Stretch], n_tokens: int, n_held: int | None
    ) -> tuple[StepPlan, list[CellMove]]:
        """Claim the step's cells and plan its reads; see :class:`Layout`."""
        pool = self.pool
        moves = self._make_own(stretches) if pool.block_size > 1 else []
        writes: list[Write] = []
        for stretch in stretches:
            q = stretch.q_start
            for run in pool.claim(stretch.seq_id, stretch.first_pos, stretch.n_tokens):
                writes.append(Write(q, run))
                q += run.length
        reads = [read for stretch in stretches for read in self._reads_of(stretch)]
        n_cells = pool.n_cells if n_held is None else n_held
        return StepPlan(n_tokens, tuple(writes), tuple(reads), n_cells), moves

    def _make_own(self, stretches: Sequence[Stretch]) -> list[CellMove]:
        """Copy the partial blocks that the step must not share.

        Of those that share a block and all append, the longest comes last and may keep it: it
        writes behind what the others had there, so that they can have it back.
        """
        moves = []
        for seq_id, (first_pos, _) in sorted(appends_of(stretches).items(), key=_first_pos):
            copy = self.pool.unshare(seq_id, first_pos)
            if copy is not None:
                self._copies.append(copy)
                moves.append(copy.move)
        return moves

    def _reads_of(self, stretch: Stretch) -> list[AttendSpec]:
        seq_id, spans, frozen = stretch.seq_id, self.pool.spans, self._frozen
        if frozen is None:
            return self._reads(stretch, self.sight, lambda p0, p1: spans(seq_id, p0, p1))
        return self._reads(
            stretch, self.sight, lambda p0, p1: [*frozen(p0, p1), *spans(seq_id, p0, p1)]
        )

    def undo(self, stretches: Sequence[Stretch]) -> None:
        """Free what ``begin`` claimed, and hold again what it copied."""
        for seq_id, (first_pos, _) in appends_of(stretches).items():
            self.pool.seq_rm(seq_id, first_pos)
        for copy in reversed(self._copies):
            self.pool.take_back(copy)
        self._copies.clear()

    def accept(self, seq_ids: Iterable[int]) -> None:
        """Keep the copies, and let go of what windows have passed, by runs."""
        self._copies.clear()
        if self.window is not None:
            for seq_id in seq_ids:
                self.let_go(seq_id)

    # Room --------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence may have: one per cell."""
        return self.pool.capacity

    @property
    def unit(self) -> int:
        """Cells that are taken at once: a block."""
        return self.pool.block_size

    def in_words(self, n_units: int) -> str:
        """Return a number of blocks as messages say it."""
        return self.pool.in_words(n_units)

    def n_to_place(self, demand: Demand) -> int:
        """Return the cells that leave room behind the sequences, so that they grow in place."""
        n_missing = max(0, demand.n_needed - demand.n_free)
        gap = min(self.pool.n_taken // 2, MAX_GAP)
        return max(0, demand.n_needed + gap - self.pool.n_free - n_missing)

    def grant(self, n_cells: int) -> None:
        """Have so many cells, which the memory budget has granted."""
        self.pool.grant(n_cells)

    def demand(self, appends: Appends) -> Demand:
        """Return what it takes to grow sequences; where there is plenty, a bound of it."""
        pool = self.pool
        size, n_free = pool.block_size, pool.n_free_blocks
        needed = pool.most_blocks(appends)
        if needed > n_free:
            needed = pool.n_blocks_needed(appends)
        if needed <= n_free or self.window is None:
            return Demand(needed * size, n_free * size)
        refs, n_free = self._behind_windows(self.window)
        return Demand(pool.n_blocks_needed(appends, refs) * size, n_free * size, True)

    def demand_of(self, table: IntArray, promised: Appends) -> Demand:
        """Return what it takes to begin a sequence with cells where ``table`` has some."""
        pool = self.pool
        size, n_free, must_let_go = pool.block_size, pool.n_free_blocks, False
        needed = len(np.unique(np.flatnonzero(table >= 0) // size))
        taken = pool.n_blocks_needed(promised)
        if needed + taken > n_free and self.window is not None:
            refs, n_free = self._behind_windows(self.window)
            taken, must_let_go = pool.n_blocks_needed(promised, refs), True
        return Demand(needed * size, (n_free - taken) * size, must_let_go)

    def demand_to_join(self, seq_id: int, part: list[Span]) -> Demand:
        """Return what it takes to copy parts of blocks together that a sequence is to hold."""
        return Demand(self.unit * self.pool.n_joints(seq_id, part), self.pool.n_free)

    def n_missing(self, n: int, promised: Appends) -> int:
        """Return the cells that are missing so that any one sequence could grow by ``n`` tokens.

        0 or less: it could, whether it is there or new, besides what is promised.
        """
        size = self.pool.block_size
        spare = size - 1  # the most that a copy of a shared block costs
        taken = self.pool.most_blocks(promised) * size
        if n + spare + taken <= self.pool.n_free:
            return 0
        if n <= self.n_fitting(promised):
            return 0
        return n - self.n_sure(promised)

    def n_sure(self, promised: Appends) -> int:
        """Return the tokens that any one sequence could get for certain; may be negative."""
        size = self.pool.block_size
        taken = self.pool.n_blocks_needed(promised) * size
        return self.n_free_later() - taken - (size - 1)

    def n_fitting(self, promised: Appends) -> int:
        """Return the most tokens that fit for any one sequence, whether it is there or new."""
        pool = self.pool
        if pool.block_size == 1:
            return self.n_free_later() - pool.most_blocks(promised)
        refs, n_free = (
            (pool.refs, pool.n_free_blocks)
            if self.window is None
            else self._behind_windows(self.window)
        )
        new = max((*self._lengths, *promised), default=-1) + 1
        there = {s: n for s, n in self._lengths.items() if s not in promised}
        return min(
            self._n_fitting(seq_id, length, promised, n_free, refs)
            for seq_id, length in {**there, new: self._origin}.items()
        )

    def _n_fitting(
        self, seq_id: int, length: int, promised: Appends, n_free: int, refs: Refs
    ) -> int:
        """Return the tokens that one sequence can grow by, into so many free blocks."""
        size = self.pool.block_size
        for_one = self.pool.n_blocks_needed({**promised, seq_id: (length, 1)}, refs)
        return size - length % size + (n_free - for_one) * size if for_one <= n_free else 0

    def n_free_later(self) -> int:
        """Return the free cells, with those that only positions behind windows keep taken."""
        if self.window is None:
            return self.pool.n_free
        return self._behind_windows(self.window)[1] * self.pool.block_size

    def _behind_windows(self, window: Window) -> tuple[Refs, int]:
        """Return owners by cell, and free blocks, once windows let go of what they have passed."""
        refs = self.pool.refs.copy()
        for seq_id in self._lengths:
            for span in self._passed(window, seq_id):
                refs[span.cell : span.cell + span.length] -= 1
        return refs, self.pool.n_free_with(refs)

    def let_go(self, seq_id: int, batch: int = MIN_RUN) -> None:
        """Let go of positions behind the window, once at least ``batch`` of them have left."""
        first = self.pool.first_pos(seq_id)
        if first is None or self.window is None or self.window.floor(seq_id) - first < batch:
            return
        spans = self._passed(self.window, seq_id)
        if spans and sum(span.length for span in spans) >= batch:
            for p0, p1 in self.window.passed(seq_id):
                self.pool.seq_rm(seq_id, p0, p1)
            mark = max(self.window.let_go(seq_id), spans[-1].stop)
            self.window.set_let_go(seq_id, mark)

    def _passed(self, window: Window, seq_id: int) -> list[Span]:
        """Return the spans of a sequence that no query sees any more."""
        ranges = window.passed(seq_id)
        return [span for p0, p1 in ranges for span in self.pool.spans(seq_id, p0, p1)]

    # Resuming ----------------------------------------------------------------------------------

    def resume_at(self, seq_id: int, length: int) -> int:
        """Return the greatest length up to ``length`` that the sequence can go on from exactly."""
        return length if self.window is None else self.window.resume_at(seq_id, length)

    def low(self, seq_id: int) -> int:
        """Return the length from which on a sequence can go on wherever it is cut back to."""
        return 0 if self.window is None else self.window.low(seq_id)

    def keep_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length``, which the sequence can resume at now."""
        if self.window is not None:
            self.window.keep_point(seq_id, length)

    def drop_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length`` no longer than for any other length."""
        if self.window is not None:
            self.window.drop_point(seq_id, length)

    # Sequences ---------------------------------------------------------------------------------

    def has_tokens(self, seq_id: int, p0: int, p1: int | None) -> bool:
        """Return true if there is anything at ``[p0, p1)``, or a window let go of it."""
        if self.pool.spans(seq_id, p0, p1):
            return True
        return self.window is not None and self.window.let_go(seq_id) > p0

    def cut(self, seq_id: int, p0: int, p1: int) -> None:
        """Take positions ``[p0, p1)`` from a sequence, whose length is still the old one."""
        self.pool.seq_rm(seq_id, p0, p1)
        if self.window is not None:
            self.window.cut(seq_id, p0, p1)

    def forget(self, seq_id: int) -> None:
        """Forget what is known of a sequence that holds nothing any more."""
        self.pool.expect(seq_id, None)
        if self.window is not None:
            self.window.forget(seq_id)

    def clear(self) -> None:
        """Forget every sequence, and every other owner of cells."""
        self.pool.clear()
        self._copies.clear()
        if self.window is not None:
            self.window.clear()

    def share(self, src: int, dst: int, p0: int, stop: int, parts: list[Span]) -> list[CellMove]:
        """Let ``dst`` hold ``parts`` of ``src``: what it lacks at positions ``[p0, stop)``.

        Returns:
            What has to be copied, in order.
        """
        moves = self.pool.share(dst, parts)
        if self.window is not None:
            missing = [
                low
                for seq_id, first in ((src, p0), (dst, 0))
                if (low := self._retained_from(self.window, seq_id, dst, stop)) > first
            ]
            self.window.set_let_go(dst, max(missing, default=0))
        return moves

    def _retained_from(self, window: Window, seq_id: int, dst: int, stop: int) -> int:
        """Return where ``dst`` begins to have all below what the window of ``seq_id`` left."""
        length = max(self._lengths.get(dst, 0), stop)
        low = self.pool.retained_from(dst, min(window.let_go(seq_id), length))
        return low if low > self._origin else 0

    def nodes_to_tokens(self, seq_id: int, base: int, rows: Sequence[int]) -> list[CellMove]:
        """Have the nodes ``rows`` of a tree follow ``base`` tokens, and free the other nodes.

        Returns:
            What has to be copied: sources never lie before their targets.
        """
        pool = self.pool
        cells = cells_of(pool.runs(seq_id, base))
        moves, at = [], 0
        for run in pool.runs(seq_id, base, base + len(rows)):
            src = cells[list(rows[at : at + run.length])]
            if not np.array_equal(src, cells[at : at + run.length]):
                moves.append(CellMove(run.start, src))
            at += run.length
        pool.seq_rm(seq_id, base + len(rows))
        return moves

    # Tables ------------------------------------------------------------------------------------

    def table(self, seq_id: int, length: int) -> IntArray:
        """Return the cell of each position ``[length]``, -1 where there is none."""
        table = np.full(length, -1, dtype=np.int64)
        for span in self.pool.spans(seq_id, 0, length):
            table[span.pos : span.stop] = np.arange(span.cell, span.cell + span.length)
        return table

    def lacks(self, table: IntArray, is_token: BoolArray, who: str) -> int:
        """Return one past the highest token that a history with this table lacks; 0 for none.

        Args:
            table: cells by position, -1 for none.
            is_token: ``[length]`` booleans; elsewhere is a hole.
            who: begins such a history, for the message.

        Raises:
            RewindError: the next token would see what is missing.
        """
        missing = np.flatnonzero(is_token & (table < 0))
        if self.sight.is_full or not missing.size:
            return 0
        first = self.sight.first_seen(len(table))
        if missing[-1] >= first:
            raise RewindError(
                f"{who}: {self.sight} has let go of position {missing[-1]}, which the next token "
                f"sees; begin with a history whose last {len(table) - first} tokens are held"
            )
        return int(missing[-1]) + 1

    def start(self, seq_id: int, lacks: int) -> None:
        """Note what a sequence lacks whose cells come from a table."""
        if self.window is not None:
            self.window.set_let_go(seq_id, lacks)

    def claim_table(self, seq_id: int, table: IntArray) -> None:
        """Take new cells for a sequence wherever ``table`` has one."""
        for span in spans_of(np.where(table >= 0, np.arange(len(table)), -1)):
            self.pool.claim(seq_id, span.pos, span.length)

    # What is there -----------------------------------------------------------------------------

    def usage(self) -> GroupUsage:
        """Return the cells taken and shared."""
        pool = self.pool
        shared = int(np.count_nonzero(pool.refs > 1))
        window, chunk = self.sight.window, self.sight.chunk
        return GroupUsage(window, pool.capacity, pool.n_taken, shared, pool.n_cells, chunk)

    def check(self, held: Sequence[int] = ()) -> None:
        """Assert the invariants; ``held`` are cells with an owner that is no sequence."""
        self.pool.check(held)
        if self.window is not None:
            self.window.check()


def appends_of(stretches: Iterable[Stretch]) -> dict[int, tuple[int, int]]:
    """Return what each sequence of a step gets, all of its stretches together."""
    appends: dict[int, tuple[int, int]] = {}
    for stretch in stretches:
        first_pos, n_tokens = appends.get(stretch.seq_id, (stretch.first_pos, 0))
        appends[stretch.seq_id] = (first_pos, n_tokens + stretch.n_tokens)
    return appends


def _first_pos(item: tuple[int, tuple[int, int]]) -> int:
    return item[1][0]


def check_tables(most: Sequence[int], tables: Sequence[IntArray]) -> list[IntArray]:
    """Return tables of cells, one per layer group, where there are ``most`` cells at most.

    Raises:
        PositionError: there is another number of them, or they are no rows of whole numbers of
            one length, -1 or a cell of this cache.
    """
    try:
        found = [np.asarray(table) for table in tables]
    except (TypeError, ValueError):
        found = []
    is_well_formed = len(found) == len(most) and all(
        table.ndim == 1
        and len(table) == len(found[0])
        and (table.dtype.kind in "iu" or not table.size)
        and (not table.size or (table.min() >= -1 and table.max() < n_cells))
        for table, n_cells in zip(found, most, strict=True)
    )
    if not is_well_formed:
        raise PositionError(
            f"tables must be {len(most)} rows of cells of one length, as seq_table "
            f"gives them, got {seen(tables)}"
        )
    return [table.astype(np.int64, copy=False) for table in found]


def lacks_of(layouts: Sequence[Rows], tables: Sequence[IntArray], who: str) -> list[int]:
    """Return what each window lacks of a history with these tables; see ``Rows.lacks``."""
    is_token = np.ones(
        len(tables[0]), dtype=np.bool_
    )  # what a full group lacks was removed: a hole
    for layout, table in zip(layouts, tables, strict=True):
        if layout.window is None:
            is_token &= table >= 0  # what a full group lacks was removed: a hole
    pairs = zip(layouts, tables, strict=True)
    return [layout.lacks(table, is_token, who) for layout, table in pairs]


def make_rows(
    config: CacheConfig,
    lengths: Lengths,
    growth: Growth | None,
    block_size: int,
    reads: ReadsOf,
) -> list[Rows]:
    """Create the layout of every layer group; arguments as in :class:`Rows`.

    Raises:
        ConfigError: the capacity holds no block.
    """
    if config.capacity < block_size:
        raise ConfigError(
            f"a capacity of {config.capacity} cells holds no block of {block_size}; "
            f"raise capacity or lower block_size"
        )
    return [
        Rows(
            BlockPool(
                config.capacity if growth is None else growth.limits[index],
                block_size,
                reuse_first=not group.is_full,
                n_granted=None if growth is None else 0,
            ),
            lengths,
            sight=group.sight,
            slack=config.window_slack,
            reads=reads,
            origin=config.origin,
            frozen=frozen_spans(config, index),
        )
        for index, group in enumerate(config.params.groups)
    ]
