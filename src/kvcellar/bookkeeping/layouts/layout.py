"""Protocols of the parts of a step: one layout per layer group, and a port to the bytes.

Nothing here assumes that a group keeps a row per token. A layout answers where a sequence can
resume, and keeps what is needed to resume somewhere; a group of rows answers with all positions, or
with those that its window has kept, a group that keeps a *state* with those of its snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvcellar.bookkeeping.cells.pool import Appends, CellMove
from kvcellar.bookkeeping.layouts.drafts import DraftTree
from kvcellar.cache_config import GroupUsage
from kvcellar.types import IntArray, StepPlan


@dataclass(slots=True)
class Stretch:
    """Consecutive tokens of the flat batch that belong to one sequence.

    Attributes:
        seq_id: whose.
        q_start: index of the first one in the flat batch.
        n_tokens: how many.
        first_pos: position of the first one; of a tree's nodes the place, see ``drafts``.
        tree: the tree whose last frontier they are; None for tokens.
    """

    seq_id: int
    q_start: int
    n_tokens: int
    first_pos: int
    tree: DraftTree | None = None


class Demand(NamedTuple):
    """Cells that a step needs of one layer group.

    Attributes:
        n_needed: cells that it takes; whole blocks.
        n_free: cells that it can have, those behind windows included where they are needed.
        must_let_go: these are needed, so windows have to let go of what they have passed.
    """

    n_needed: int
    n_free: int
    must_let_go: bool = False


class Keeper(Protocol):
    """A way for one layer group to keep the histories of sequences. Integers only.

    It is given the sequences' lengths when it is made, and reads them; it never changes them. A
    step begins in it by its ``begin``, which claims what the step writes and plans it.
    """

    def undo(self, stretches: Sequence[Stretch]) -> None:
        """Free what ``begin`` claimed for these, however much of it that was."""
        ...

    def accept(self, seq_ids: Iterable[int]) -> None:
        """Let go of what these sequences need no longer: their step can no longer be undone."""
        ...

    def resume_at(self, seq_id: int, length: int) -> int:
        """Return the greatest length up to ``length`` that the sequence can go on from exactly.

        0 is always one: from there everything is computed again.
        """
        ...

    def keep_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length`` until the sequence is cut back below it."""
        ...

    def drop_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length`` no longer; nothing where it is no point."""
        ...

    def cut(self, seq_id: int, p0: int, p1: int) -> None:
        """Take positions ``[p0, p1)`` from a sequence."""
        ...

    def clear(self) -> None:
        """Forget every sequence."""
        ...

    def usage(self) -> GroupUsage:
        """Return the cells taken and shared."""
        ...


class Layout(Keeper, Protocol):
    """The keeper of a group that has a row per token."""

    def begin(
        self, stretches: Sequence[Stretch], n_tokens: int, n_held: int | None
    ) -> tuple[StepPlan, list[CellMove]]:
        """Claim what a step writes and plan its reads.

        Args:
            stretches: whose tokens come; there is room for them.
            n_tokens: tokens of the flat batch.
            n_held: cells that pools of bytes have to hold; None: as many as are taken.

        Returns:
            The plan, and what has to be copied before the forward.
        """
        ...


class SharedLayout(Keeper, Protocol):
    """A keeper for many sequences: besides, it says what it takes to grow them.

    Its *cells* are what it takes and frees: a group of rows counts one per token, a group of states
    one per state, of which a sequence has a few however long it is.
    """

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence may have in it."""
        ...

    @property
    def unit(self) -> int:
        """Cells that are taken at once."""
        ...

    def demand(self, appends: Appends) -> Demand:
        """Return what it takes to grow sequences, all of them together."""
        ...

    def n_missing(self, n: int, promised: Appends) -> int:
        """Return the cells that are missing so that any one sequence could grow by ``n`` tokens.

        0 or less: it could, whether it is there or new, besides what is promised.
        """
        ...

    def n_fitting(self, promised: Appends) -> int:
        """Return the most tokens that fit for any one sequence, whether it is there or new."""
        ...

    def n_sure(self, promised: Appends) -> int:
        """Return the tokens that any one sequence could get for certain; may be negative."""
        ...

    def let_go(self, seq_id: int, batch: int) -> None:
        """Let go of what no query sees any more, once that is at least ``batch`` cells."""
        ...

    def n_to_place(self, demand: Demand) -> int:
        """Return the cells to ask a memory budget for besides, so that a demand's lie well."""
        ...

    def grant(self, n_cells: int) -> None:
        """Have so many cells, which the memory budget has granted."""
        ...

    def in_words(self, n_units: int) -> str:
        """Return a number of what is taken at once, as messages say it."""
        ...


class Bytes(Protocol):
    """Port to a backend: the pools of bytes behind the cells.

    Pools grow when a plan says that they must hold more cells (``StepPlan.n_cells``).
    """

    @property
    def size_bytes(self) -> int:
        """Bytes that the pools have allocated."""
        ...

    def move_cells(self, group: int, base: int, src_cells: IntArray) -> None:
        """Copy ``src_cells`` to ``[base, base + len)`` in every pool of the group.

        All are read before any is written.
        """
        ...


class NoBytes:
    """The bytes of bookkeeping that stands alone: none."""

    size_bytes = 0

    def move_cells(self, group: int, base: int, src_cells: IntArray) -> None:
        """Copy nothing."""


Lengths = Mapping[int, int]
"""Sequence -> tokens of its history: the position that its next token gets."""
