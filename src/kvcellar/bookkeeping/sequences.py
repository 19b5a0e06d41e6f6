"""Many sequences over shared cells: the verbs of the cache's face.

Sequences fork without copying, are cut back, and let go of cells that no query sees any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from kvcellar.bookkeeping.begin import (
    begin_stretches,
    check_range,
    check_seq_id,
    check_stretches,
    stretches_of,
)
from kvcellar.bookkeeping.layouts.frozen import cells_to_freeze
from kvcellar.bookkeeping.layouts.rows import appends_of
from kvcellar.bookkeeping.tables import Tables
from kvcellar.checks import whole
from kvcellar.errors import (
    RewindError,
    SequenceConflictError,
    UnknownSequenceError,
)
from kvcellar.types import IntArray


class Sequences(Tables):
    """Many sequences over shared cells: positions to cells, for every layer group.

    ``begin_step`` says whose tokens the next forward brings and claims their cells; the sequences'
    lengths grow when every layer has written. A sequence exists while it holds at least one token,
    or has a step under way. With blocks of several cells, what fits depends on who grows, and a
    step, ``seq_cp`` or ``seq_map`` may copy a partial block.
    """

    def expect(self, seq_id: int, n_tokens: int) -> None:
        """Say how long a sequence will be: its cells then lie in fewer runs. A hint, no promise.

        It is forgotten with the sequence. Groups with a window keep but a part of it and are not
        told.

        Raises:
            UnknownSequenceError: ``seq_id`` is negative.
        """
        seq_id, n_tokens = check_seq_id(seq_id), whole(n_tokens, "n_tokens")
        for layout in self.layouts:
            if layout.window is None:
                layout.pool.expect(seq_id, n_tokens)

    # Admission and steps -----------------------------------------------------------------------

    def can_extend(self, n: int = 1) -> bool:
        """Return true if ``n`` more tokens fit for any one sequence, besides proposed nodes.

        Token cells serve any sequences; with larger blocks each may need one of its own: ask
        ``can_begin_step`` for a batch of several. With a memory budget: in steps of at most
        ``STEP_TOKENS``, where a window lets go of its past in between.
        """
        return self.room.can_extend(whole(n, "n"), self.steps.drafts.promised())

    @property
    def n_free(self) -> int:
        """The most tokens that fit for any one sequence, whether it is there or new."""
        return self.room.n_free(self.steps.drafts.promised())

    def can_begin_step(self, stretches: Sequence[tuple[int, int]]) -> bool:
        """Return true if ``begin_step`` with these stretches would find its cells.

        Raises:
            StepError, UnknownSequenceError: as ``begin_step`` does.
        """
        appends = appends_of(stretches_of(self.steps, check_stretches(stretches)))
        return self.room.fits({**self.steps.drafts.promised(appends), **appends})

    def begin_step(self, stretches: Sequence[tuple[int, int]]) -> list[int]:
        """Say whose tokens the next forward brings, and claim their cells. All or nothing.

        Args:
            stretches: (seq_id, n_tokens) of each, in the order of the flat batch. A sequence goes
                on at its end, in several stretches too; an id that is not there yet starts one at
                position 0. Nodes that were proposed come in one stretch.

        Returns:
            The position of every token.

        Raises:
            CacheFullError: too few cells are free in some layer group; nothing was claimed.
            StepError: no token, what is no stretch, or other tokens than a sequence proposed;
                nothing was claimed.
            UnknownSequenceError: an id that is no whole number, or negative; nothing was claimed.
        """
        return begin_stretches(self.room, self.steps, stretches)

    # Resuming ----------------------------------------------------------------------------------

    def resume_at(self, seq_id: int, length: int) -> int:
        """Return the greatest length up to ``length`` that the sequence can go on from exactly.

        It is what all layer groups can give, at least 0; what follows is to be computed again.
        """
        length = whole(length, "length", RewindError, least=0)
        return self.steps.resume_at(seq_id, min(length, self.seq_len(seq_id)))

    def resumable_from(self, seq_id: int) -> int:
        """Return the length from which on the sequence can go on wherever it is cut back to."""
        length = self.seq_len(seq_id)
        if self.slots is not None:
            return length
        return max(self.steps.origin, *(layout.low(seq_id) for layout in self.layouts))

    def can_resume(self, seq_id: int, length: int) -> bool:
        """Return true if the sequence could be cut back to ``length`` tokens and go on exactly."""
        length = whole(length, "length", RewindError)
        if not 0 <= length <= self.seq_len(seq_id):
            return False
        return self.steps.resume_at(seq_id, length) == length

    def keep_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length`` until the sequence is cut back below it.

        A group with all of its history keeps it anyway; one with a window keeps a window before
        the point, besides the one at the end; states keep a slot, see ``drop_point``.

        Raises:
            UnknownSequenceError: no such sequence.
            RewindError: the sequence cannot resume there any more; nothing was changed.
        """
        length = whole(length, "length", RewindError)
        self.steps.settle()
        self.check_resume(seq_id, length, "keep_point")
        for keeper in self.steps.keepers:
            keeper.keep_point(seq_id, length)

    def drop_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length`` no longer; a no-op where it is no point.

        Raises:
            UnknownSequenceError: no such sequence.
        """
        length = whole(length, "length", RewindError)
        self.steps.settle()
        self.seq_len(seq_id)
        for keeper in self.steps.keepers:
            keeper.drop_point(seq_id, length)

    def check_resume(self, seq_id: int, length: int, verb: str) -> None:
        """Make sure that a sequence can be cut back to ``length`` tokens and go on exactly.

        Raises:
            RewindError: it cannot; ``verb`` names who asks.
        """
        if 0 < length < self.steps.origin:
            self._refuse_frozen(seq_id, length, verb)
        if not self.can_resume(seq_id, length):
            near = self.resume_at(seq_id, length) if length > 0 else 0
            raise RewindError(
                f"{verb} of sequence {seq_id} at {length}: {self.steps.narrow} has let go of what "
                f"was before; it resumes from {near} or from {self.resumable_from(seq_id)} to "
                f"{self.seq_len(seq_id)}; {self.steps.keeps_more}"
            )

    def _refuse_frozen(self, seq_id: int, position: int, verb: str) -> NoReturn:
        """Raise RewindError: a verb would change a history within its frozen prefix."""
        raise RewindError(
            f"{verb} of sequence {seq_id} at {position}: its first {self.steps.origin} tokens "
            f"are frozen and shared with other caches; it resumes from 0, where it starts "
            f"again behind them, or from {self.resumable_from(seq_id)} on"
        )

    # Sequences ---------------------------------------------------------------------------------

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """Let ``dst`` share what ``src`` holds at positions ``[p0, p1)``: tokens, never nodes.

        Bytes are copied only to join two parts of one block.

        Raises:
            UnknownSequenceError: ``src`` holds no tokens, or ``dst`` is negative; nothing was
                changed.
            RewindError: ``dst`` could not go on from ``p1``: a window has moved on, or no states
                are held there, or they are of tokens before ``p0`` that ``dst`` does not share;
                nothing was changed.
            SequenceConflictError: ``dst`` holds other tokens there; nothing was changed.
            CacheFullError: no block is free to join parts in; nothing was changed.
            StepError: ``dst`` has proposed nodes; nothing was changed.
        """
        src, dst = check_seq_id(src), check_seq_id(dst)
        p0, p1 = check_range(p0, p1)
        self.steps.settle()
        if src != dst:
            self._check_no_tree(dst)
        length = self.seq_len(src)
        stop = length if p1 is None else min(p1, length)
        p0 = max(0, p0)
        if stop <= p0 or src == dst:
            return
        self.check_resume(src, stop, "seq_cp")
        if stop <= self.steps.origin or not self._has_tokens(src, p0, stop):
            return
        parts = [layout.pool.shareable(src, dst, p0, stop) for layout in self.layouts]
        if self.slots is not None:
            self._check_same_start(src, dst, p0)
        self._join(dst, parts)
        for group, (layout, part) in enumerate(zip(self.layouts, parts, strict=True)):
            self.steps.move(group, layout.share(src, dst, p0, stop, part))
        if self.steps.lengths.get(dst, 0) < stop:
            if self.slots is not None:
                self.slots.share(src, dst, stop)
            self.steps.lengths[dst] = stop

    def _check_same_start(self, src: int, dst: int, p0: int) -> None:
        """Make sure that states of ``src`` are states of ``dst``, which shares it from ``p0`` on.

        Raises:
            RewindError: ``dst`` does not begin as ``src`` does.
        """
        length = self.steps.lengths.get(dst, 0)
        full = [layout.pool for layout in self.layouts if layout.window is None][:1]
        try:
            lacks = any(pool.shareable(src, dst, 0, p0) for pool in full)
        except SequenceConflictError:
            lacks = True
        if lacks or length < p0 or (length and not full):
            raise RewindError(
                f"seq_cp from position {p0} of sequence {src} to {dst}, which holds {length} "
                f"tokens: states of recurrent layers are of all tokens before, and these are not "
                f"known to be the same; share from position 0 with a sequence that holds nothing"
            )

    def _has_tokens(self, seq_id: int, p0: int = 0, p1: int | None = None) -> bool:
        """Return true if anything is left of a sequence's history at ``[p0, p1)``.

        A full group knows. Where every group has a window, what a window let go of counts.
        """
        asked = [layout for layout in self.layouts if layout.window is None][:1] or self.layouts
        return any(layout.has_tokens(seq_id, p0, p1) for layout in asked)

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int | None = None) -> int:
        """Drop positions ``[p0, p1)``; a cell is freed when its last owner lets go.

        To the end (``p1`` None) it cuts the history back to ``p0`` tokens, or further to where all
        layer groups can go on from exactly: see ``resume_at``. A range that ends before leaves a
        hole that is simply not attended. Dropping the whole sequence drops its tree too.

        Returns:
            The length that the sequence has now: the position that its next token gets. Below
            ``p0`` what follows is to be computed again.

        Raises:
            UnknownSequenceError: no such sequence; nothing was changed.
            RewindError: a part of the frozen prefix is dropped, or a hole is made under states of
                recurrent layers; nothing was changed.
            StepError: a part is dropped under a tree; commit it (or commit([])) first.
        """
        seq_id = whole(seq_id, "seq_id", UnknownSequenceError)
        p0, p1 = check_range(p0, p1)
        self.steps.settle()
        lengths = self.steps.lengths
        if self.steps.drafts.of(seq_id) is not None:
            if p0 > 0 or (p1 is not None and p1 < lengths.get(seq_id, 0)):
                self._check_no_tree(seq_id, "before a part of its history is dropped")
            self._drop_tree(seq_id)
            if seq_id not in lengths:
                return self.steps.origin
        length, p0 = self.seq_len(seq_id), max(0, p0)
        if p1 is None or p1 >= length:
            if p0 < length:
                self._cut_back(seq_id, p0, length)
        elif p0 < p1:
            self._cut_hole(seq_id, p0, p1)
        return lengths.get(seq_id, self.steps.origin)

    def _cut_back(self, seq_id: int, p0: int, length: int) -> None:
        """Cut a history back to ``p0`` tokens, or to where it can go on from before."""
        origin = self.steps.origin
        if 0 < p0 < origin:
            self._refuse_frozen(seq_id, p0, "seq_rm")
        at = self.steps.resume_at(seq_id, p0)
        at = 0 if at == origin else at  # nothing of its own is left
        for keeper in self.steps.keepers:
            keeper.cut(seq_id, at, length)
        if self._has_tokens(seq_id):
            self.steps.lengths[seq_id] = at
        else:
            self._forget(seq_id)

    def _cut_hole(self, seq_id: int, p0: int, p1: int) -> None:
        """Take positions from the middle of a history."""
        if p0 < min(p1, self.steps.origin):
            self._refuse_frozen(seq_id, p0, "seq_rm")
        if self.slots is not None:
            raise RewindError(
                f"seq_rm of positions [{p0}, {p1}) of sequence {seq_id}: states of recurrent "
                f"layers are of all tokens and take no holes; cut the history back to {p0} "
                f"(p1=None) and compute the rest again"
            )
        for layout in self.layouts:
            layout.cut(seq_id, p0, p1)
        if not self._has_tokens(seq_id):
            self._forget(seq_id)

    def _forget(self, seq_id: int) -> None:
        """Forget a sequence that holds nothing any more."""
        del self.steps.lengths[seq_id]
        for layout in self.layouts:
            layout.forget(seq_id)

    def seq_keep(self, seq_id: int) -> None:
        """Keep this sequence, with its tree, and drop every other one.

        Raises:
            UnknownSequenceError: no such sequence; nothing was changed.
        """
        self.steps.settle()
        self.seq_len(seq_id)
        for other in dict.fromkeys((*self.steps.drafts.seq_ids(), *self.seq_ids())):
            if other != seq_id:
                self.seq_rm(other)

    def _drop_tree(self, seq_id: int) -> None:
        """Drop all nodes that hang off a sequence."""
        tree = self.steps.drafts.of(seq_id)
        if tree is not None:
            for layout in self.layouts:
                layout.nodes_to_tokens(seq_id, tree.base, ())
            if self.slots is not None:
                self.slots.nodes_to_tokens(seq_id, tree.base, ())
            self.steps.drafts.drop(seq_id)

    def rows_to_freeze(self, seq_id: int, length: int | None) -> tuple[int, list[IntArray]]:
        """Return how many first tokens of a sequence to freeze, and their cells per layer group.

        A window's last ones alone. Errors as in ``freeze_prefix``.
        """
        self.steps.settle()
        n = self.seq_len(seq_id) if length is None else whole(length, "length", RewindError)
        self.check_resume(seq_id, n, "freeze_prefix")
        return n, cells_to_freeze(seq_id, self.seq_table(seq_id, n), self.config.params.groups)

    # Slots -------------------------------------------------------------------------------------

    def n_missing_slots(self, n: int) -> int:
        """Return how many slots are missing so that a step could write ``n``; 0 or less: none.

        Those that a memory budget would grant are not missing, and none is without recurrent
        layers.
        """
        if self.slots is None:
            return 0
        return self.room.n_missing_slots(n, self.steps.drafts.promised())

    def shared_slots(self) -> list[int]:
        """Return the slots of states that have several owners: one that lets go frees none."""
        self.steps.settle()
        return [] if self.slots is None else self.slots.shared()
