"""The cells that many sequences share, taken and freed by blocks of ``block_size`` cells.

Position p lives in a cell c with ``c % block_size == p % block_size``. With blocks of one cell each
cell stands alone: these are token cells. What they never need is a copy: where blocks are larger, a
sequence that appends to a partial block which somebody else holds too first gets its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvcellar.bookkeeping.cells.free_runs import FreeRuns, find_room, take_runs
from kvcellar.bookkeeping.cells.holdings import Holdings, Refs
from kvcellar.bookkeeping.cells.spans import Span
from kvcellar.errors import CacheFullError, PositionError
from kvcellar.types import IntArray, Run, join_runs, runs_of

MIN_RUN = 64
"""Cells that a new run prefers to find free, and leaves free behind another sequence's tail."""

MAX_GAP = 2048
"""Most cells that a new run leaves free behind another sequence's tail, however long that is."""

Appends = Mapping[int, tuple[int, int]]
"""Sequence -> (first position, number of tokens) that it gets."""


class CellMove(NamedTuple):
    """Bytes to copy: those of ``src_cells [n]``, in order, to cells ``[base, base + n)``."""

    base: int
    src_cells: IntArray


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


class BlockPool(Holdings):
    """Blocks of cells: which are taken, by which sequences, and where the next ones go. No tensors.

    Cells keep their index for as long as they are taken; a block is taken for as long as any of its
    cells has an owner. New blocks follow a sequence's last one while they can; a new run starts at
    the lowest free blocks that have room, with a gap behind every other sequence's tail so that
    each can grow in place. Where a block has several cells, tokens are numbered when their cells
    are claimed and copies keep the number, so that two sequences with copies of one token do not
    disagree about it.

    Invariants (asserted by ``check``), besides those of :class:`Holdings`:
      - position p lives in a cell c with ``c % block_size == p % block_size``;
      - a sequence has one block for the positions ``[i * block_size, (i + 1) * block_size)``;
      - a block is free exactly when none of its cells has an owner;
      - no block is taken that was not granted.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int = 1,
        *,
        min_run: int = MIN_RUN,
        reuse_first: bool = False,
        n_granted: int | None = None,
    ) -> None:
        """Create an empty pool.

        Args:
            capacity: the most cells; those that fill no block are left out.
            block_size: cells per block.
            min_run: see :data:`MIN_RUN`.
            reuse_first: go back to a hole of ``min_run`` cells before touching a cell that was
                never used; keeps the pools of a sliding window small.
            n_granted: cells, in whole blocks, that may be taken until ``grant`` says more; None:
                all.
        """
        super().__init__(capacity, block_size)
        granted = self.n_blocks if n_granted is None else n_granted // block_size
        self._free = FreeRuns(granted)  # of blocks
        self._expected: dict[int, int] = {}
        self.min_blocks = -(-min_run // block_size)
        """Blocks that a new run prefers to find free."""
        self.reuse_first = reuse_first
        self._token: IntArray = np.full(self.capacity if block_size > 1 else 0, -1, dtype=np.int64)
        self._n_tokens = 0

    # What is there -----------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Cells of the blocks that nobody holds; the rest of a partial block is not among them."""
        return self._free.n_free * self.block_size

    @property
    def n_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._free.n_free

    @property
    def n_taken(self) -> int:
        """Cells that cannot be claimed, though granted."""
        return (self._free.size - self._free.n_free) * self.block_size

    @property
    def n_cells(self) -> int:
        """One past the last cell of the highest taken block: what pools of bytes have to cover."""
        return self._free.n_used * self.block_size

    # Admission ---------------------------------------------------------------------------------

    def grant(self, n_cells: int) -> None:
        """Let cells ``[0, n_cells)`` be taken: whole blocks, never fewer than before."""
        n_blocks = n_cells // self.block_size
        assert self._free.size <= n_blocks <= self.n_blocks, "a grant is not taken back"
        self._free.extend(n_blocks)

    def most_blocks(self, appends: Appends) -> int:
        """Return a bound of ``n_blocks_needed``, at a glance; exact for token cells."""
        size = self.block_size
        if size == 1:
            return sum(n_tokens for _, n_tokens in appends.values())
        return sum(-(-n_tokens // size) + 1 for _, n_tokens in appends.values() if n_tokens)

    def n_blocks_needed(self, appends: Appends, refs: Refs | None = None) -> int:
        """Return the blocks that sequences need together to grow, copies of shared ones included.

        Of those that hold one partial block and all append to it, the last keeps it, unless
        somebody else holds it too.

        Args:
            appends: who gets how many tokens, each from the end of its history on.
            refs: owners by cell to go by, instead of those of this moment.
        """
        size = self.block_size
        if size == 1:
            return self.most_blocks(appends)
        needed = 0
        parts: dict[int, list[int]] = {}  # block -> how many of its cells each of them holds
        for seq_id, (first_pos, n_tokens) in appends.items():
            if not n_tokens:
                continue
            needed += -(-(first_pos + n_tokens) // size) - first_pos // size
            mine = self._own_part(seq_id, first_pos)
            if mine:
                needed -= 1
                n_mine = sum(span.length for span in mine)
                parts.setdefault(mine[0].cell // size, []).append(n_mine)
        for block, held in parts.items():
            needed += len(held) - (self._n_owners(block, refs) == sum(held))
        return needed

    def n_free_with(self, refs: Refs) -> int:
        """Return the blocks that would be free, were these the owners by cell."""
        taken = refs if self.block_size == 1 else refs.reshape(-1, self.block_size).any(axis=1)
        return self._free.size - int(np.count_nonzero(taken))

    # Claiming ----------------------------------------------------------------------------------

    def expect(self, seq_id: int, length: int | None) -> None:
        """Note how long a sequence will be, so that its cells find one run and are left room.

        It is a hint, until another one for this id; None takes it back.
        """
        if length is None:
            self._expected.pop(seq_id, None)
        else:
            self._expected[seq_id] = length

    def claim(self, seq_id: int, first_pos: int, length: int) -> list[Run]:
        """Take cells for positions ``[first_pos, first_pos + length)``. All or nothing.

        A partial block that the sequence goes on in must be its own: see ``unshare``.

        Raises:
            CacheFullError: too few blocks are free; nothing was changed.
            PositionError: the sequence already holds ``first_pos`` or later; nothing was changed.
        """
        spans = self._spans.get(seq_id)
        if spans:
            last = spans[-1]
            if first_pos < last.stop:
                raise PositionError(
                    f"sequence {seq_id} holds positions up to {last.stop - 1}; asked to claim "
                    f"{first_pos}; remove the tail with seq_rm first"
                )
            start = last.cell + last.length
            if first_pos == last.stop and length and self._take_behind(start, length):
                run = Run(start, length)  # most claims: one more token
                self._own(run)
                spans[-1] = Span(last.pos, last.cell, last.length + length)
                return [run]
        runs = self._claim_runs(seq_id, first_pos, length)
        for run in runs:
            self._own(run)
            self._append(seq_id, Span(first_pos, run.start, run.length))
            first_pos += run.length
        return runs

    def _take_behind(self, start: int, length: int) -> bool:
        """Take the cells that follow a sequence's last one, in place; false: others are better."""
        size = self.block_size
        n_blocks = -(-(length - -start % size) // size)  # beyond the rest of its block
        if n_blocks <= 0:
            return True
        block, free = -(-start // size), self._free
        if free.room_at(block) < n_blocks or (self.reuse_first and block >= free.n_used):
            return False
        free.take(block, n_blocks)
        return True

    def _own(self, run: Run) -> None:
        """Give new cells their owner, and where it matters their tokens numbers."""
        refs = self.refs[run.start : run.stop]
        if self.block_size > 1:
            assert not refs.any(), "a partial block has one owner"
            numbers = np.arange(self._n_tokens, self._n_tokens + run.length)
            self._token[run.start : run.stop] = numbers
            self._n_tokens += run.length
        refs[:] = 1

    def _claim_runs(self, seq_id: int, first_pos: int, length: int) -> list[Run]:
        """Return the rest of the sequence's partial block, then new blocks, which are taken."""
        size = self.block_size
        inside = first_pos % size
        runs: list[Run] = []
        after = None
        spans = self._spans.get(seq_id)
        if spans:
            after = (spans[-1].cell + spans[-1].length - 1) // size + 1
            if inside and length and (spans[-1].stop - 1) // size == first_pos // size:
                runs.append(Run((after - 1) * size + inside, min(length, size - inside)))
                inside = 0
        left = length - sum(run.length for run in runs)
        n_blocks = -(-(left + inside) // size) if left else 0
        if n_blocks > self._free.n_free:
            raise CacheFullError(
                f"step needs {self.in_words(n_blocks)}, {self._free.n_free} free of "
                f"{self.n_blocks}; release a sequence or raise capacity"
            )
        wanted = (self._expected.get(seq_id, 0) - first_pos) // size
        for blocks in take_runs(self._free, self, n_blocks, after, wanted):
            start = blocks.start * size + inside
            runs.append(Run(start, min(left, blocks.stop * size - start)))
            left, inside = left - runs[-1].length, 0
        return list(join_runs(runs))

    def in_words(self, n_blocks: int) -> str:
        """Return a number of blocks as messages say it."""
        if self.block_size == 1:
            return f"{n_blocks} cells"
        return f"{n_blocks} block{'' if n_blocks == 1 else 's'} of {self.block_size} cells"

    def gaps(self) -> dict[int, int]:
        """Return where each sequence's tail ends, and how many blocks it wants free from there."""
        size = self.block_size
        least, most = self.min_blocks, max(1, MAX_GAP // size)
        return {
            (s[-1].cell + s[-1].length - 1) // size + 1: min(
                max(least, self._n_to_grow(i, s) // size), most
            )
            for i, s in self._spans.items()
        }

    def _n_to_grow(self, seq_id: int, spans: list[Span]) -> int:
        """Return the cells that a sequence is expected to need yet, or else half of its length."""
        stop, expected = spans[-1].stop, self._expected.get(seq_id)
        return (stop - spans[0].pos) // 2 if expected is None else expected - stop

    # Letting go --------------------------------------------------------------------------------

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
            first, last = run.start // size, (run.stop - 1) // size
            if size > 1:
                blocks = self.refs[first * size : (last + 1) * size].reshape(-1, size)
                gone = np.flatnonzero(~blocks.any(axis=1))
            for free in runs_of(first + gone):
                self._free.give(free.start, free.length)

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int | None = None) -> None:
        """Take positions ``[p0, p1)`` from a sequence."""
        gone = self._cut(seq_id, p0, p1)
        self.release(Run(s.cell, s.length) for s in gone)

    def clear(self) -> None:
        """Free every cell, whoever owns it."""
        self.refs.fill(0)
        self._free = FreeRuns(self._free.size)
        self._spans.clear()
        self._expected.clear()

    # Sharing and copying -----------------------------------------------------------------------

    def shareable(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> list[Span]:
        """Return what of ``src`` at ``[p0, p1)`` could be shared with ``dst``; changes nothing.

        Raises:
            SequenceConflictError: ``dst`` holds another token at one of these positions.
        """
        return self.not_held(dst, self.spans(src, p0, p1), self._is_same)

    def _is_same(self, mine: Span, theirs: Span) -> bool:
        """Return true if two spans of the same positions hold the same tokens, be it in copies."""
        return mine.cell == theirs.cell or (
            self.block_size > 1
            and np.array_equal(
                self._token[mine.cell : mine.cell + mine.length],
                self._token[theirs.cell : theirs.cell + theirs.length],
            )
        )

    def n_joints(self, seq_id: int, parts: list[Span]) -> int:
        """Return the blocks that ``share`` would take to join parts of different blocks."""
        _, copied = self._joints(seq_id, parts)
        firsts = {span.pos - span.pos % self.block_size for span in copied}
        return sum(not self._is_own(self._own_part(seq_id, first)) for first in firsts)

    def share(self, seq_id: int, parts: list[Span]) -> list[CellMove]:
        """Let a sequence hold taken cells too, at positions where it has none.

        Where it has another block for some of these positions already, their bytes are copied to
        that one, or to a copy of it where it is not the sequence's own: ``n_joints`` blocks are
        free.

        Returns:
            What the caller has to copy, in order; nothing for token cells.
        """
        as_they_are, copied = self._joints(seq_id, parts)
        self.retain(Run(s.cell, s.length) for s in as_they_are)
        self._insert(seq_id, as_they_are)
        moves: list[CellMove] = []
        for span in copied:
            copy = self.unshare(seq_id, span.pos)
            if copy is not None:
                moves.append(copy.move)
            block = self._own_part(seq_id, span.pos)[0].cell // self.block_size
            run = Run(block * self.block_size + span.pos % self.block_size, span.length)
            self._own(run)
            source = np.arange(span.cell, span.cell + span.length, dtype=np.int64)
            self._token[run.start : run.stop] = self._token[source]
            self._insert(seq_id, [Span(span.pos, run.start, run.length)])
            moves.append(CellMove(run.start, source))
        return moves

    def _joints(self, seq_id: int, parts: list[Span]) -> tuple[list[Span], list[Span]]:
        """Part new spans into those that can be held where they are, and those to be copied.

        A span that meets another block of the sequence is copied. Only the ends of a span can:
        what lies between fills its blocks.
        """
        size = self.block_size
        if size == 1:
            return parts, []
        as_they_are: list[Span] = []
        copied: list[Span] = []
        blocks: dict[int, int] = {}  # first position -> block that the sequence is about to hold
        for part in parts:
            assert (part.cell - part.pos) % size == 0, "cells of other positions cannot be shared"
            first, last = part.pos - part.pos % size, (part.stop - 1) // size * size
            rest = part
            for at in dict.fromkeys((first, last)):
                piece = part.clip(at, at + size)
                block = piece.cell // size
                mine = self._own_part(seq_id, at)
                there = mine[0].cell // size if mine else blocks.setdefault(at, block)
                if there != block:
                    copied.append(piece)
                    is_first = at == first
                    rest = rest.clip(piece.stop, part.stop) if is_first else rest.clip(0, piece.pos)
            if rest.length > 0:
                as_they_are.append(rest)
        return as_they_are, copied

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
        (taken,) = take_runs(self._free, self, 1, None)
        start, stop = mine[0].cell, mine[-1].cell + mine[-1].length
        shift = (taken.start - src) * size
        self._token[start + shift : stop + shift] = self._token[start:stop]
        self._hold_instead(seq_id, mine, shift)
        move = CellMove(start + shift, np.arange(start, stop, dtype=np.int64))
        return BlockCopy(seq_id, pos - pos % size, src, taken.start, move)

    def take_back(self, copy: BlockCopy) -> None:
        """Undo ``unshare``: the old block again, whose other owners have kept it ever since."""
        mine = self._own_part(copy.seq_id, copy.first_pos)
        self._hold_instead(copy.seq_id, mine, (copy.src_block - copy.dst_block) * self.block_size)

    def _hold_instead(self, seq_id: int, part: list[Span], shift: int) -> None:
        """Have a sequence own other cells for some positions, ``shift`` cells further on."""
        for span in part:
            self.refs[span.cell + shift : span.cell + span.length + shift] += 1
        self._shift(seq_id, part, shift)
        self.release(Run(span.cell, span.length) for span in part)

    # Crumbs ------------------------------------------------------------------------------------

    def place_for(self, cells: IntArray) -> CellMove | None:
        """Return where cells could lie together: what to copy, before ``gather``.

        Where no free run holds all of them, as many whole runs from the first on as it holds.

        Args:
            cells: ``[n]`` taken ones, in the order that they are to lie in.

        Returns:
            None where it would not leave fewer runs, or where a cell has its place in a block.
        """
        if self.block_size > 1 or not self.n_free:
            return None
        runs = runs_of(cells)
        start, room = find_room(self._free, self, len(cells), None)
        if room < len(cells):
            start, stop = max(self._free, key=lambda free: free[1] - free[0])
            room = stop - start
        n_runs = n = 0
        while n_runs < len(runs) and n + runs[n_runs].length <= room:
            n += runs[n_runs].length
            n_runs += 1
        return CellMove(start, cells[:n]) if n_runs > 1 else None

    def gather(self, move: CellMove) -> None:
        """Have all owners of these cells own the copies instead, and free the cells.

        The sequences do not know yet: when all is gathered, ``relocate`` tells them. Owners that
        are no sequences have to be told by the caller.
        """
        src, stop = move.src_cells, move.base + len(move.src_cells)
        self._free.take(move.base, len(src))
        self.refs[move.base : stop] = self.refs[src]
        self.refs[src] = 0
        for run in runs_of(src):
            self._free.give(run.start, run.length)

    # Proof -------------------------------------------------------------------------------------

    def check(self, held: Sequence[int] = ()) -> None:
        """Assert the invariants; ``held`` as in ``check_owners``."""
        self.check_owners(held)
        size = self.block_size
        for seq_id, spans in self._spans.items():
            block_of: dict[int, int] = {}
            for span in spans:
                assert (span.cell - span.pos) % size == 0, f"{span} is not in its place"
                for pos in range(span.pos, span.stop) if size > 1 else ():
                    block = (span.cell + pos - span.pos) // size
                    assert block_of.setdefault(pos // size, block) == block, (
                        f"sequence {seq_id} has two blocks at position {pos}"
                    )
        taken = np.asarray(self.refs.reshape(self.n_blocks, size).any(axis=1))
        free = [b for start, stop in self._free for b in range(start, stop)]
        n_granted = self._free.size
        assert free == np.flatnonzero(~taken[:n_granted]).tolist(), (
            "free blocks are those without owners"
        )
        assert not taken[n_granted:].any(), "blocks are taken that were not granted"
        assert self._free.n_free == len(free)
