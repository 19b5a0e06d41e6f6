"""Sequences as tables of cells: for a prefix index, and for what moves bytes out and in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from kvcellar.bookkeeping.admission import Room
from kvcellar.bookkeeping.begin import check_seq_id, refuse
from kvcellar.bookkeeping.cells.compaction import Compacted, compact
from kvcellar.bookkeeping.cells.growth import Growth
from kvcellar.bookkeeping.cells.spans import Span, spans_of
from kvcellar.bookkeeping.face import StepFace
from kvcellar.bookkeeping.layouts.drafts import Drafts
from kvcellar.bookkeeping.layouts.layout import Bytes, Demand, NoBytes
from kvcellar.bookkeeping.layouts.reads import ReadsOf, reads_of
from kvcellar.bookkeeping.layouts.rows import check_tables, lacks_of, make_rows
from kvcellar.bookkeeping.layouts.slots import make_slots
from kvcellar.bookkeeping.steps import Positions, Steps
from kvcellar.cache_config import CacheConfig
from kvcellar.checks import whole
from kvcellar.errors import PositionError, SequenceConflictError, StepError, UnknownSequenceError
from kvcellar.types import MOST_CELLS, IntArray, runs_of


class Tables(StepFace):
    """The sequences of a cache, and per layer group the cell of each of their positions.

    Where layers are recurrent, slots of states come behind the cells, as one more group. Owners
    that are no sequences, such as a prefix index, hold cells and slots by the same tables.
    """

    def __init__(
        self,
        config: CacheConfig,
        pools: Bytes | None = None,
        *,
        block_size: int = 1,
        reads: ReadsOf = reads_of,
        unasked: Callable[[Room, Steps, str, int, Positions], None] = refuse,
    ) -> None:
        """Create a cache without sequences.

        Args:
            config: capacity, layer groups, budget.
            pools: the bytes; None for bookkeeping that stands alone.
            block_size: cells that are taken and freed together; 1: token cells.
            reads: what the queries of a stretch read.
            unasked: begins the step of a forward without ``begin_step``, or refuses it.

        Raises:
            ConfigError: the capacity holds no block, or the budget no token.
        """
        budget = config.budget
        growth = None if budget is None else Growth(config, budget, block_size=block_size)
        lengths: dict[int, int] = {}
        drafts = Drafts()
        self.layouts = make_rows(config, lengths, growth, block_size, reads)
        self.slots = make_slots(config, lengths, drafts)
        behind = () if self.slots is None else (self.slots,)
        self.room = Room(config, (*self.layouts, *behind), lengths, growth)
        super().__init__(
            Steps(
                config,
                self.layouts,
                lengths,
                NoBytes() if pools is None else pools,
                growth=growth,
                unasked=partial(unasked, self.room),
                slots=self.slots,
                drafts=drafts,
            )
        )

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence may have: whole blocks, or what a budget holds."""
        return self.room.capacity

    @property
    def block_size(self) -> int:
        """Cells that are taken and freed together. A prefix index shares whole blocks."""
        return self.layouts[0].pool.block_size

    # Sequences ---------------------------------------------------------------------------------

    def has_seq(self, seq_id: int) -> bool:
        """Return true if the sequence holds any tokens."""
        return whole(seq_id, "seq_id", UnknownSequenceError) in self.steps.lengths

    def seq_ids(self) -> list[int]:
        """Return the sequences that hold tokens, in the order they came."""
        return list(self.steps.lengths)

    def seq_len(self, seq_id: int) -> int:
        """Return the length of the sequence's history: the position that its next token gets.

        Raises:
            UnknownSequenceError: no such sequence.
        """
        seq_id = whole(seq_id, "seq_id", UnknownSequenceError)
        try:
            return self.steps.lengths[seq_id]
        except KeyError:
            there = self.seq_ids()
            shown = ", ".join(map(str, there[:8])) + (", ..." if len(there) > 8 else "")
            raise UnknownSequenceError(
                f"sequence {seq_id} holds no tokens here; there are: {shown or 'none'}"
            ) from None

    def _check_no_tree(self, seq_id: int, when: str = "before it gets other tokens") -> None:
        """Refuse a verb that would change the history under a tree.

        Raises:
            StepError: the sequence has one.
        """
        tree = self.steps.drafts.of(seq_id)
        if tree is not None:
            raise StepError(
                f"sequence {seq_id} has {tree.n_nodes} proposed nodes; commit them, or "
                f"commit([]) to drop them, {when}"
            )

    def _join(self, seq_id: int, parts: Sequence[list[Span]]) -> None:
        """Have room for the copies that join parts of blocks, given per layer group."""
        pairs = zip(self.layouts, parts, strict=True)
        demands = [layout.demand_to_join(seq_id, part) for layout, part in pairs]
        none = [] if self.slots is None else [Demand(0, self.slots.n_free)]
        self.room.join(seq_id, demands + none)

    # Cells for a prefix index, and for what moves bytes out and in ----------------------------

    def seq_table(self, seq_id: int, length: int | None = None) -> tuple[IntArray, ...]:
        """Return per layer group the cell of each position ``[length]``, -1 where it has none.

        Where layers are recurrent the slots of their states come last, as one more group: at
        position n - 1 the slot of the states after n tokens.

        Raises:
            UnknownSequenceError: no such sequence.
        """
        seq_id = whole(seq_id, "seq_id", UnknownSequenceError)
        n_held = self.steps.lengths.get(seq_id, 0)
        n = self.seq_len(seq_id) if length is None else length
        n = whole(n, "length", PositionError, least=0, most=MOST_CELLS)
        behind = () if self.slots is None else (self.slots,)
        tables = (one.table(seq_id, min(n, n_held)) for one in (*self.layouts, *behind))
        more = max(0, n - n_held)
        return tuple(np.pad(t, (0, more), constant_values=-1) if more else t for t in tables)

    def seq_map(self, seq_id: int, tables: Sequence[IntArray]) -> None:
        """Start a sequence on cells that are taken already; they get one more owner.

        Bytes are copied only to join two parts of one block. Of slots of states it takes the last.

        Args:
            seq_id: it must hold no tokens.
            tables: as ``seq_table`` gives them, all of one length.

        Raises:
            UnknownSequenceError: ``seq_id`` is negative; nothing was changed.
            SequenceConflictError: the sequence holds tokens already; nothing was changed.
            RewindError: a table lacks what its group's window needs to go on, or the states at the
                end; nothing was changed.
            CacheFullError: no block is free to join parts in; nothing was changed.
        """
        seq_id, tables = check_seq_id(seq_id), self._checked(tables)
        self.steps.settle()
        lacks = self._lacks("seq_map", seq_id, tables)
        parts = [spans_of(table) for table in tables[: len(self.layouts)]]
        self._join(seq_id, parts)
        for group, (layout, part) in enumerate(zip(self.layouts, parts, strict=True)):
            self.steps.move(group, layout.pool.share(seq_id, part))
        if self.slots is not None:
            self.slots.start(seq_id, tables[-1])
        self._start(seq_id, len(tables[0]), lacks)

    def seq_claim(self, seq_id: int, tables: Sequence[IntArray]) -> tuple[IntArray, ...]:
        """Start a sequence on new cells, wherever ``tables`` has a cell; for bytes that come back.

        Slots of states before the last become points, until ``drop_point``.

        Returns:
            The tables with the new cells.

        Raises:
            CacheFullError: too few cells are free; nothing was changed.
            Others: as ``seq_map``.
        """
        seq_id, tables = check_seq_id(seq_id), self._checked(tables)
        self.steps.settle()
        lacks = self._lacks("seq_claim", seq_id, tables)
        promised = self.steps.drafts.promised()
        behind = () if self.slots is None else (self.slots,)
        pairs = list(zip((*self.layouts, *behind), tables, strict=True))
        self.room.take(
            "seq_claim", lambda: [layout.demand_of(table, promised) for layout, table in pairs]
        )
        for layout, table in pairs:
            layout.claim_table(seq_id, table)
        self._start(seq_id, len(tables[0]), lacks)
        return self.seq_table(seq_id, len(tables[0]))

    def _checked(self, tables: Sequence[IntArray]) -> list[IntArray]:
        """Return tables as arrays; raise PositionError unless they are such as of this cache."""
        most = [layout.pool.capacity for layout in self.layouts]
        return check_tables(most + ([] if self.slots is None else [self.slots.n_slots]), tables)

    def _lacks(self, verb: str, seq_id: int, tables: Sequence[IntArray]) -> list[int]:
        """Return what each window lacks of a sequence that could begin with these tables.

        Raises:
            SequenceConflictError, StepError: the sequence holds tokens, or nodes, already.
            RewindError: a window lacks what the next token sees, or states are missing.
        """
        self._check_no_tree(seq_id)
        lengths = self.steps.lengths
        if seq_id in lengths:
            raise SequenceConflictError(
                f"sequence {seq_id} holds {lengths[seq_id]} tokens already; seq_rm it first"
            )
        who = f"{verb} of {len(tables[0])} tokens for sequence {seq_id}"
        if self.slots is not None:
            self.slots.check_start(tables[-1], who)
        return lacks_of(self.layouts, tables[: len(self.layouts)], who)

    def _start(self, seq_id: int, length: int, lacks: Sequence[int]) -> None:
        """Begin a sequence of ``length`` tokens of which windows lack the first so far."""
        if length:
            self.steps.lengths[seq_id] = length
            for layout, stop in zip(self.layouts, lacks, strict=True):
                layout.start(seq_id, stop)

    def retain_cells(self, cells: Sequence[IntArray]) -> None:
        """Add an owner that is no sequence to these cells, given per layer group; -1 is none.

        Slots of states come last, as in ``seq_table``.
        """
        rows, slots = self._rows_and_slots(cells)
        for layout, part in zip(self.layouts, rows, strict=True):
            layout.pool.retain(runs_of(part[part >= 0]))
        if self.slots is not None:
            self.slots.retain(slots)

    def _rows_and_slots(self, cells: Sequence[IntArray]) -> tuple[Sequence[IntArray], list[int]]:
        """Return what is given per layer group, and the slots that come behind."""
        if self.slots is None:
            return cells, []
        return cells[:-1], cells[-1][cells[-1] >= 0].tolist()

    def release_cells(self, cells: Sequence[IntArray]) -> None:
        """Drop an owner that is no sequence; a cell is freed when its last owner lets go."""
        self.steps.settle()
        rows, slots = self._rows_and_slots(cells)
        for layout, part in zip(self.layouts, rows, strict=True):
            layout.pool.release(runs_of(part[part >= 0]))
        if self.slots is not None:
            self.slots.release(slots)

    def compact(self, histories: Iterable[Sequence[IntArray]], max_cells: int) -> Compacted:
        """Copy together what lies in crumbs, as far as there is a free run for it. Between steps.

        Sequences know afterwards where their tokens are. Other owners of cells (``retain_cells``)
        have to be told by the caller, before the next verb: see ``relocated``.

        Args:
            histories: what is to lie together, the most important first: per layer group the cells
                of consecutive positions, -1 for none, as ``seq_table`` gives them. Slots of states
                stay where they are.
            max_cells: about how many to copy at most, all layer groups together.
        """
        self.steps.settle()
        rows = (self._rows_and_slots(tables)[0] for tables in histories)
        done = compact([one.pool for one in self.layouts], rows, max_cells, self.steps.move)
        return done if self.slots is None else done._replace(moved=(*done.moved, None))

    def seq_usage(self, seq_id: int) -> tuple[int, int]:
        """Return (cells, shared cells) that the sequence holds, over all layer groups."""
        length, pools = self.seq_len(seq_id), [layout.pool for layout in self.layouts]
        cells = sum(span.length for pool in pools for span in pool.spans(seq_id, 0, length))
        return cells, sum(pool.n_shared(seq_id, length) for pool in pools)

    def check(self, held: Sequence[Sequence[int]] | None = None) -> None:
        """Assert the invariants of every layer group, and that lengths fit them.

        Args:
            held: per layer group, the cells that ``retain_cells`` gave an owner, once per owner;
                slots last.
        """
        known = {*self.seq_ids(), *self.steps.drafts.seq_ids(), *self.steps.open_seq_ids()}
        for index, layout in enumerate(self.layouts):
            layout.check(held[index] if held else ())
            strangers = set(layout.pool.seq_ids()) - known
            assert not strangers, f"sequences {strangers} own cells and have no length"
        if self.slots is not None:
            self.slots.check(held[-1] if held else ())
            strangers = set(self.slots.seq_ids()) - known
            assert not strangers, f"sequences {strangers} own slots and have no length"
        self.room.check()
