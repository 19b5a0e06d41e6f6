"""Paged storage, the alternative to token cells behind the same verbs: a sequence is a block table.

Position p lives in cell ``table[p // block_size] * block_size + p % block_size``; cells are taken
and freed by whole blocks. What token cells never need is a copy: a sequence that appends to a
partial block which somebody else holds too first gets its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcellar.bookkeeping.cells import (
    MAX_GAP,
    MIN_RUN,
    CellMove,
    CellPool,
)
from kvcellar.bookkeeping.free_runs import FreeRuns
from kvcellar.bookkeeping.growth import Growth
from kvcellar.bookkeeping.sequences import (
    SeqBookkeeping,
    Stretch,
    check_range,
    check_seq_id,
)
from kvcellar.bookkeeping.spans import Span, merged, spans_of
from kvcellar.bookkeeping.step import OpenStep
from kvcellar.checks import whole
from kvcellar.errors import CacheFullError, ConfigError
from kvcellar.types import CacheConfig, IntArray, Run, StepPlan, join_runs, runs_of

Refs = NDArray[np.int32]

Appends = Mapping[int, tuple[int, int]]
"""Sequence -> (first position, number of tokens) that it gets."""


class BlockCopy(NamedTuple):
    """A sequence's own copy of a block that it held together with others.

    Attributes:
        seq_id: whose copy.
        first_pos: the position at the block's first cell.
        src_block: the block that it let go of.
        dst_block: its own.
        move: the bytes to copy.
    """

    seq_id: int
    first_pos: int
    src_block: int
    dst_block: int
    move: CellMove


class PagePool(CellPool):
    """Which cells are taken, where cells come in blocks and each position has its place in one.

    Owners are counted per cell, as in :class:`CellPool`; a block is taken for as long as any of its
    cells has an owner. New blocks follow a sequence's last one while they can, so that blocks make
    long runs. Tokens are numbered when their cells are claimed and copies keep the number, so that
    two sequences with copies of one token do not disagree about it.

    Invariants (asserted by ``check``), besides those of :class:`CellPool`:
      - position p lives in a cell c with ``c % block_size == p % block_size``;
      - a sequence has one block for the positions ``[i * block_size, (i + 1) * block_size)``.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int,
        *,
        min_run: int = MIN_RUN,
        reuse_first: bool = False,
        n_granted: int | None = None,
    ) -> None:
        """An empty pool.

        Args:
            capacity: the most cells; those that fill no block are left out.
            block_size: cells per block.
            min_run: as in :class:`CellPool`, in cells.
            reuse_first: as in :class:`CellPool`.
            n_granted: as in :class:`CellPool`; whole blocks.
        """
        self.block_size = block_size
        self.n_blocks = capacity // block_size
        n_cells = self.n_blocks * block_size
        min_blocks = -(-min_run // block_size)
        super().__init__(n_cells, min_run=min_blocks, reuse_first=reuse_first, n_granted=n_granted)
        self._free = FreeRuns(self._n_granted // block_size)
        self._grows_in_place = False  # the free runs are of blocks
        self._token: IntArray = np.full(n_cells, -1, dtype=np.int64)
        self._n_tokens = 0

    # What is there -----------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Cells of the blocks that nobody holds; the rest of a partial block is not among them."""
        return self._free.n_free * self.block_size

    @property
    def n_granted_blocks(self) -> int:
        """Blocks that may be taken."""
        return self._free.size

    @property
    def n_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._free.n_free

    @property
    def n_cells(self) -> int:
        """One past the last cell of the highest taken block."""
        return self._free.n_used * self.block_size

    def block_table(self, seq_id: int) -> list[int]:
        """The block of each ``block_size`` positions from 0 on, -1 where the sequence has none."""
        table: list[int] = []
        for span in self.spans(seq_id):
            first, last = span.pos // self.block_size, (span.stop - 1) // self.block_size
            table.extend([-1] * (first - len(table)))
            block = span.cell // self.block_size
            table.extend(range(block + len(table) - first, block + last - first + 1))
        return table

    def _own_part(self, seq_id: int, pos: int) -> list[Span]:
        """What the sequence holds of the block that ``pos`` lives in."""
        first = pos - pos % self.block_size
        return self.spans(seq_id, first, first + self.block_size)

    def _n_owned(self, block: int, refs: Refs | None = None) -> int:
        """Owners of a block's cells, summed over its cells."""
        first = block * self.block_size
        counts = self.refs if refs is None else refs
        return int(counts[first : first + self.block_size].sum())

    def _is_own(self, part: list[Span], refs: Refs | None = None) -> bool:
        """Whether the sequence whose part of a block this is holds that block alone."""
        if not part:
            return False
        block = part[0].cell // self.block_size
        return self._n_owned(block, refs) == sum(span.length for span in part)

    # Admission ---------------------------------------------------------------------------------

    def n_blocks_needed(self, appends: Appends, refs: Refs | None = None) -> int:
        """Blocks that these sequences need together to grow, copies of shared ones included.

        Of those that hold one partial block and all append to it, the last keeps it, unless
        somebody else holds it too.

        Args:
            appends: who gets how many tokens, each from the end of its history on.
            refs: owners by cell to go by, instead of those of this moment.
        """
        needed = 0
        parts: dict[int, list[int]] = {}  # block -> how many of its cells each of them holds
        for seq_id, (first_pos, n_tokens) in appends.items():
            needed += -(-(first_pos + n_tokens) // self.block_size) - first_pos // self.block_size
            mine = self._own_part(seq_id, first_pos)
            if mine:
                needed -= 1
                n_mine = sum(span.length for span in mine)
                parts.setdefault(mine[0].cell // self.block_size, []).append(n_mine)
        for block, held in parts.items():
            needed += len(held) - (self._n_owned(block, refs) == sum(held))
        return needed

    def n_fitting(self, seq_id: int, length: int, n_free_blocks: int, refs: Refs) -> int:
        """The most tokens that a sequence can grow by, into so many free blocks.

        Args:
            seq_id: the sequence.
            length: its length.
            n_free_blocks: blocks that it could have.
            refs: owners by cell.
        """
        room = n_free_blocks * self.block_size
        inside = length % self.block_size
        if not inside:
            return room
        if self._is_own(self._own_part(seq_id, length), refs):
            return room + self.block_size - inside
        return max(0, room - inside)

    def check_share(self, seq_id: int, parts: list[Span]) -> None:
        """Make sure that ``share`` finds the blocks that it needs.

        Raises:
            CacheFullError: too few are free; nothing was changed.
        """
        _, copied = self._joints(seq_id, parts)
        joints = {span.pos - span.pos % self.block_size for span in copied}
        needed = sum(not self._is_own(self._own_part(seq_id, first)) for first in joints)
        if needed > self._free.n_free:
            raise CacheFullError(
                f"sequence {seq_id} would hold parts of different blocks at the same block of its "
                f"table, which takes {needed} blocks to join, {self._free.n_free} free of "
                f"{self.n_blocks}; release a sequence or raise capacity"
            )

    # Claiming ----------------------------------------------------------------------------------

    def _claim_runs(self, seq_id: int, first_pos: int, length: int) -> list[Run]:
        """The rest of the sequence's partial block, which is its own, then new blocks."""
        if not length:
            return []
        size = self.block_size
        inside = first_pos % size
        runs: list[Run] = []
        after = None
        spans = self._spans.get(seq_id)
        if spans:
            last_cell = spans[-1].cell + spans[-1].length - 1
            after = last_cell // size + 1
            if inside and (spans[-1].stop - 1) // size == first_pos // size:
                start = (after - 1) * size + inside
                runs.append(Run(start, min(length, size - inside)))
                inside = 0
        left = length - sum(run.length for run in runs)
        n_blocks = -(-(left + inside) // size) if left else 0
        if n_blocks > self._free.n_free:
            raise CacheFullError(
                f"step needs {n_blocks} blocks of {size} cells, {self._free.n_free} free of "
                f"{self.n_blocks}; release a sequence or raise capacity"
            )
        wanted = (self._expected.get(seq_id, 0) - first_pos) // size
        for blocks in self._take_free(n_blocks, after, wanted):
            start = blocks.start * size + inside
            runs.append(Run(start, min(left, blocks.stop * size - start)))
            left -= runs[-1].length
            inside = 0
        for run in runs:
            assert not self.refs[run.start : run.stop].any(), "a partial block has one owner"
            self.refs[run.start : run.stop] = 1
            self._number(run)
        return list(join_runs(runs))

    def _number(self, run: Run) -> None:
        """Give new tokens their numbers."""
        self._token[run.start : run.stop] = np.arange(self._n_tokens, self._n_tokens + run.length)
        self._n_tokens += run.length

    def place_for(self, cells: IntArray) -> CellMove | None:
        """Nowhere: a cell's place in its block is that of its position."""
        return None

    def take(self, length: int, *, after: int | None = None, wanted: int = 0) -> list[Run]:
        """Not for pages: a cell without a position has no place in a block."""
        raise NotImplementedError("a page pool takes cells for positions: call claim")

    def _gaps(self) -> dict[int, int]:
        size = self.block_size
        gaps = {}
        for seq_id, spans in self._spans.items():
            tail = (spans[-1].cell + spans[-1].length - 1) // size + 1
            grown = self._n_to_grow(seq_id, spans) // size
            gaps[tail] = min(max(self._min_run, grown), max(1, MAX_GAP // size))
        return gaps

    def release(self, runs: Iterable[Run]) -> None:
        """Drop one owner of these cells; a block is freed when the last of its cells is."""
        size = self.block_size
        for run in runs:
            refs = self.refs[run.start : run.stop]
            refs -= 1
            assert (refs >= 0).all(), f"cells [{run.start}, {run.stop}) are released twice"
            gone = np.flatnonzero(refs == 0)
            if not gone.size:
                continue
            self.pos[run.start + gone] = -1
            first, last = run.start // size, (run.stop - 1) // size
            blocks = self.refs[first * size : (last + 1) * size].reshape(-1, size)
            for free in runs_of(first + np.flatnonzero(~blocks.any(axis=1))):
                self._free.give(free.start, free.length)

    # Sharing and copying -----------------------------------------------------------------------

    def unshare(self, seq_id: int, pos: int) -> BlockCopy | None:
        """Give a sequence its own copy of the block that ``pos`` lives in, where others hold it.

        The caller copies the bytes, before anybody writes to the old block. None: it needs none.

        Raises:
            CacheFullError: no block is free; nothing was changed.
        """
        mine = self._own_part(seq_id, pos)
        if not mine or self._is_own(mine):
            return None
        if not self._free.n_free:
            raise CacheFullError(
                f"sequence {seq_id} needs a copy of a block that it shares, 0 free of "
                f"{self.n_blocks}; release a sequence or raise capacity"
            )
        size = self.block_size
        src = mine[0].cell // size
        (taken,) = self._take_free(1, None)
        start, stop = mine[0].cell, mine[-1].cell + mine[-1].length
        shift = (taken.start - src) * size
        self._token[start + shift : stop + shift] = self._token[start:stop]
        for span in mine:
            cells = slice(span.cell + shift, span.cell + span.length + shift)
            self.refs[cells] = 1
            self.pos[cells] = np.arange(span.pos, span.stop, dtype=np.int32)
        self._move_part(seq_id, mine, shift)
        self.release(Run(span.cell, span.length) for span in mine)
        move = CellMove(start + shift, np.arange(start, stop, dtype=np.int64))
        return BlockCopy(seq_id, pos - pos % size, src, taken.start, move)

    def take_back(self, copy: BlockCopy) -> None:
        """Undo ``unshare``: the old block again, whose other owners have kept it ever since."""
        mine = self._own_part(copy.seq_id, copy.first_pos)
        shift = (copy.src_block - copy.dst_block) * self.block_size
        for span in mine:
            cells = slice(span.cell + shift, span.cell + span.length + shift)
            self.refs[cells] += 1
            self.pos[cells] = np.arange(span.pos, span.stop, dtype=np.int32)
        self._move_part(copy.seq_id, mine, shift)
        self.release(Run(span.cell, span.length) for span in mine)

    def _move_part(self, seq_id: int, part: list[Span], shift: int) -> None:
        """The sequence has these positions in other cells from now on; owners as they are."""
        spans = self._spans[seq_id]
        first, stop = part[0].pos, part[-1].stop
        left = [s for span in spans if (s := span.clip(0, first)).length > 0]
        right = [s for span in spans if (s := span.clip(stop, span.stop)).length > 0]
        moved = [Span(span.pos, span.cell + shift, span.length) for span in part]
        self._spans[seq_id] = merged([*left, *moved, *right])

    def _is_same(self, mine: Span, theirs: Span) -> bool:
        """The same tokens, be it in copies."""
        return mine.cell == theirs.cell or np.array_equal(
            self._token[mine.cell : mine.cell + mine.length],
            self._token[theirs.cell : theirs.cell + theirs.length],
        )

    def shareable(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> list[Span]:
        """As in :class:`CellPool`; two parts of one block that come from two have to be joined.

        Raises:
            SequenceConflictError: ``dst`` owns another token at one of these positions.
            CacheFullError: no block is free to join them in.
        """
        parts = super().shareable(src, dst, p0, p1)
        self.check_share(dst, parts)
        return parts

    def share(self, seq_id: int, parts: list[Span]) -> list[CellMove]:
        """Let a sequence hold taken cells too, at positions where it has none.

        Where it has another block for some of these positions already, their bytes are copied to
        that one, or to a copy of it where it is not the sequence's own.

        Returns:
            What the caller has to copy, in order.
        """
        as_they_are, copied = self._joints(seq_id, parts)
        super().share(seq_id, as_they_are)
        moves: list[CellMove] = []
        for span in copied:
            copy = self.unshare(seq_id, span.pos)
            if copy is not None:
                moves.append(copy.move)
            block = self._own_part(seq_id, span.pos)[0].cell // self.block_size
            run = Run(block * self.block_size + span.pos % self.block_size, span.length)
            assert not self.refs[run.start : run.stop].any(), "a joined block has one owner"
            self.refs[run.start : run.stop] = 1
            self.pos[run.start : run.stop] = np.arange(span.pos, span.stop, dtype=np.int32)
            source = slice(span.cell, span.cell + span.length)
            self._token[run.start : run.stop] = self._token[source]
            self._insert(seq_id, [Span(span.pos, run.start, run.length)])
            moves.append(CellMove(run.start, np.arange(source.start, source.stop, dtype=np.int64)))
        return moves

    def _joints(self, seq_id: int, parts: list[Span]) -> tuple[list[Span], list[Span]]:
        """Of new spans: what can be held where it is, and what meets another block of the sequence.

        Only the ends of a span can: what lies between fills its blocks.
        """
        size = self.block_size
        as_they_are: list[Span] = []
        copied: list[Span] = []
        blocks: dict[int, int] = {}  # first position -> block that the sequence is about to hold
        for part in parts:
            assert (part.cell - part.pos) % size == 0, "cells of other positions cannot be shared"
            first, last = part.pos - part.pos % size, (part.stop - 1) // size * size
            whole = part
            for at in dict.fromkeys((first, last)):
                piece = part.clip(at, at + size)
                block = piece.cell // size
                mine = self._own_part(seq_id, at)
                there = mine[0].cell // size if mine else blocks.setdefault(at, block)
                if there != block:
                    copied.append(piece)
                    whole = (
                        whole.clip(piece.stop, part.stop)
                        if at == first
                        else whole.clip(0, piece.pos)
                    )
            if whole.length > 0:
                as_they_are.append(whole)
        return as_they_are, copied

    def clear(self) -> None:
        """Free every block, whoever holds it."""
        super().clear()
        self._free = FreeRuns(self._n_granted // self.block_size)

    def grant(self, n_cells: int) -> None:
        """As in :class:`CellPool`; whole blocks."""
        assert self._n_granted <= n_cells <= self.capacity, "a grant is not taken back"
        self._n_granted = n_cells
        self._free.extend(n_cells // self.block_size)

    # Proof -------------------------------------------------------------------------------------

    def check(self, held: Sequence[int] = ()) -> None:
        """Assert the invariants; ``held`` as in :class:`CellPool`."""
        super().check(held)
        for seq_id, spans in self._spans.items():
            block_of: dict[int, int] = {}
            for span in spans:
                assert (span.cell - span.pos) % self.block_size == 0, f"{span} is not in its place"
                for pos in range(span.pos, span.stop):
                    block = (span.cell + pos - span.pos) // self.block_size
                    assert block_of.setdefault(pos // self.block_size, block) == block, (
                        f"sequence {seq_id} has two blocks at position {pos}"
                    )

    def _check_free(self) -> None:
        taken = np.asarray(self.refs.reshape(self.n_blocks, self.block_size).any(axis=1))
        free = [b for start, stop in self._free for b in range(start, stop)]
        n_granted = self._free.size
        assert free == np.flatnonzero(~taken[:n_granted]).tolist(), (
            "free blocks are those without owners"
        )
        assert not taken[n_granted:].any(), "blocks are taken that were not granted"


class PagedBookkeeping(SeqBookkeeping):
    """Many sequences over shared blocks: the verbs of :class:`SeqBookkeeping`.

    What differs for a caller: cells come by blocks, so what fits depends on who grows, and
    ``can_begin_step`` says it exactly; a step, ``seq_cp`` or ``seq_map`` may copy a partial block;
    a window lets go of whole blocks.
    """

    def __init__(self, config: CacheConfig) -> None:
        """An empty pool of blocks per layer group.

        Raises:
            ConfigError: the capacity holds no block.
        """
        if config.capacity < config.block_size:
            raise ConfigError(
                f"a capacity of {config.capacity} cells holds no block of {config.block_size}; "
                f"raise capacity or lower block_size"
            )
        super().__init__(config)
        self.pages = [
            PagePool(
                config.capacity if self._growth is None else self._growth.limits[index],
                config.block_size,
                reuse_first=group.window is not None,
                n_granted=None if self._growth is None else 0,
            )
            for index, group in enumerate(self.groups)
        ]
        self.pools = [*self.pages]
        self._copies: list[tuple[int, BlockCopy]] = []
        """Per copy that the last step made: its layer group, and how to take it back."""

    def _make_growth(self) -> Growth | None:
        if self.config.budget is None:
            return None
        return Growth(self.config, self.config.budget, block_size=self.config.block_size)

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence may have: whole blocks."""
        return self.pages[0].capacity if self._growth is None else self._growth.n_fitting

    @property
    def block_size(self) -> int:
        """Cells that are taken and freed together. A prefix index shares whole blocks."""
        return self.config.block_size

    # Admission and steps -----------------------------------------------------------------------

    def can_extend(self, n: int = 1) -> bool:
        """Whether ``n`` more tokens fit for any one sequence, whether it is there or new.

        For a batch of several, ask ``can_begin_step``: each may need a block of its own.
        """
        n = whole(n, "n")
        slack = self.block_size - 1
        is_there = [
            n + slack <= pool.n_free or n <= self._n_fitting(group)
            for group, pool in enumerate(self.pages)
        ]
        if self._growth is None:
            return all(is_there)
        wanted = zip(self._growth.cells_for(n), self._n_free_by_group(), is_there, strict=True)
        return self._growth.can_add([0 if there else n - have for n, have, there in wanted])

    @property
    def n_free(self) -> int:
        """The most tokens that fit for any one sequence, whether it is there or new."""
        there = min(self._n_fitting(group) for group in range(len(self.pages)))
        if self._growth is None:
            return there
        return max(there, self._growth.most_tokens(self._n_free_by_group()))

    def _n_free_by_group(self) -> list[int]:
        slack = self.block_size - 1  # the most that a copy of a shared block costs
        return [free - slack for free in super()._n_free_by_group()]

    def _n_fitting(self, group: int) -> int:
        pool = self.pages[group]
        refs, n_blocks = self._behind_windows(group)
        fitting = [pool.n_fitting(s, n, n_blocks, refs) for s, n in self._length.items()]
        return min([n_blocks * pool.block_size, *fitting])

    def _behind_windows(self, group: int) -> tuple[Refs, int]:
        """Owners by cell, and free blocks, once every window has let go of what it has passed."""
        pool = self.pages[group]
        if self.groups[group].window is None:
            return pool.refs, pool.n_free_blocks
        refs = pool.refs.copy()
        for seq_id in self._length:
            for span in pool.spans(seq_id, 0, self._window_floor(group, seq_id)):
                refs[span.cell : span.cell + span.length] -= 1
        taken = refs.reshape(pool.n_blocks, pool.block_size).any(axis=1)
        return refs, pool.n_granted_blocks - int(np.count_nonzero(taken))

    def _n_releasable(self, group: int) -> int:
        return self._behind_windows(group)[1] * self.block_size - self.pages[group].n_free

    def _window_floor(self, group: int, seq_id: int) -> int:
        """The lowest position that the group must keep, or one before it: where a block begins."""
        floor = super()._window_floor(group, seq_id)
        return floor - floor % self.block_size

    def _fits(self, stretches: list[Stretch]) -> bool:
        appends = _appends(stretches)
        demands = [self._demand(group, appends) for group in range(len(self.pages))]
        if self._growth is not None:
            return self._growth.can_add(self._missing(demands))
        return all(needed <= n_blocks for needed, n_blocks, _ in demands)

    def _missing(self, demands: Sequence[tuple[int, int, bool]]) -> list[int]:
        """Cells that a step needs beyond those it can have, per layer group."""
        return [(needed - n_blocks) * self.block_size for needed, n_blocks, _ in demands]

    def _admit(self, stretches: list[Stretch]) -> None:
        appends = _appends(stretches)
        demands = [self._demand(group, appends) for group in range(len(self.pages))]
        wanted = [needed * self.block_size for needed, _, _ in demands]
        has_grown = self._growth is not None and self._grow(self._missing(demands), wanted)
        for pool, (needed, n_blocks, _) in zip(self.pages, demands, strict=True):
            if needed > n_blocks and not has_grown:
                raise CacheFullError(
                    f"step needs {needed} blocks of {pool.block_size} cells, {n_blocks} free of "
                    f"{pool.n_blocks}; release a sequence or {self.config.more_room}"
                )
        for group, (_, _, must_let_go) in enumerate(demands):
            if must_let_go:
                for seq_id in self._length:
                    self._release_window(group, seq_id, batch=1)

    def _demand(self, group: int, appends: Appends) -> tuple[int, int, bool]:
        """(blocks that a step needs, blocks it can have, whether windows must let go for it).

        Where there is plenty, the first is a bound.
        """
        pool = self.pages[group]
        most = sum(-(-n_tokens // pool.block_size) + 1 for _, n_tokens in appends.values())
        if most <= pool.n_free_blocks:
            return most, pool.n_free_blocks, False
        needed = pool.n_blocks_needed(appends)
        if needed <= pool.n_free_blocks or self.groups[group].window is None:
            return needed, pool.n_free_blocks, False
        refs, n_blocks = self._behind_windows(group)
        return pool.n_blocks_needed(appends, refs), n_blocks, True

    def begin_step(
        self, seq_ids: Sequence[int] | IntArray, positions: Sequence[int] | IntArray | None = None
    ) -> list[int]:
        """As in :class:`SeqBookkeeping`; copies the partial blocks that the step must not share."""
        try:
            return super().begin_step(seq_ids, positions)
        except Exception:
            # A copy of bytes failed when cells were claimed already. Where the call itself was
            # wrong, the step before it still stands.
            if self._step is not None and self._open is None:
                self._undo(OpenStep([], [], 0))
            raise

    def _group_plan(self, group: int, stretches: list[Stretch], n_tokens: int) -> StepPlan:
        # Of those that share a block and all append, the longest comes last and may keep it: it
        # writes behind what the others had there, so that they can have it back.
        appends = _appends(stretches).items()
        for seq_id, (first_pos, _) in sorted(appends, key=lambda item: item[1][0]):
            copy = self.pages[group].unshare(seq_id, first_pos)
            if copy is not None:
                self._copies.append((group, copy))
                self._move_all(group, [copy.move])
        return super()._group_plan(group, stretches, n_tokens)

    def _undo(self, step: OpenStep) -> None:
        super()._undo(step)
        for group, copy in reversed(self._copies):
            self.pages[group].take_back(copy)
        self._copies.clear()

    def _accepted(self, step: OpenStep) -> None:
        super()._accepted(step)
        self._copies.clear()

    def _clear(self) -> None:
        super()._clear()
        self._copies.clear()

    # Sequences ---------------------------------------------------------------------------------

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """As in :class:`SeqBookkeeping`. Copies bytes only to join two parts of one block.

        Raises:
            CacheFullError: no block is free to join them in; nothing was changed.
        """
        src, dst = check_seq_id(src), check_seq_id(dst)
        p0, p1 = check_range(p0, p1)
        self._settle()
        if dst in self._length:
            self._have_blocks([2 * len(pool.spans(src, p0, p1)) for pool in self.pages])
        super().seq_cp(src, dst, p0, p1)

    def seq_map(self, seq_id: int, tables: Sequence[IntArray]) -> None:
        """As in :class:`SeqBookkeeping`. Copies bytes only to join two parts of one block.

        Raises:
            CacheFullError: no block is free to join them in; nothing was changed.
        """
        seq_id, tables = check_seq_id(seq_id), self._check_tables(tables)
        self._settle()
        self._check_start("seq_map", seq_id, tables)
        self._have_blocks([len(spans_of(table)) - 1 for table in tables])
        for pool, table in zip(self.pages, tables, strict=True):
            pool.check_share(seq_id, spans_of(table))
        super().seq_map(seq_id, tables)

    def _have_blocks(self, n_blocks: Sequence[int]) -> None:
        """Where a budget may grant them: have blocks to join parts of others in, if it does."""
        if self._growth is not None:
            cells = [max(0, n) * self.block_size for n in n_blocks]
            free = [pool.n_free for pool in self.pages]
            self._grow([n - have for n, have in zip(cells, free, strict=True)], cells)

    def _n_cells_of(self, tables: Sequence[IntArray]) -> list[int]:
        size = self.block_size
        return [size * len(np.unique(np.flatnonzero(table >= 0) // size)) for table in tables]


def _appends(stretches: Iterable[Stretch]) -> dict[int, tuple[int, int]]:
    """What each sequence of a step gets, all of its stretches together."""
    appends: dict[int, tuple[int, int]] = {}
    for stretch in stretches:
        first_pos, n_tokens = appends.get(stretch.seq_id, (stretch.first_pos, 0))
        appends[stretch.seq_id] = (first_pos, n_tokens + stretch.n_tokens)
    return appends
