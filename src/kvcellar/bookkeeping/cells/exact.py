"""Cells of a quantised pool that are also kept in full precision: both ends of every history.

Beside the quantised cells a pool has a few *exact* ones. A token that is near an end of a history
when it is written goes to both; a read takes the exact copy while the token is still near an end of
*that* history. Exact cells have indices from ``BASE`` on, so a plan says where to read by its
runs, as always, and neither masks nor kinds of reads change.

When all exact cells are taken, those that no read has wanted for longest are given to others; their
tokens are then read quantised. Nothing is ever lost: the quantised copy is always there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvcellar.kv_dtype import KvDtype, parse_kv_dtype
from kvcellar.types import (
    AttendSpec,
    IntArray,
    LayerGroup,
    Run,
    StepPlan,
    Write,
    cells_of,
    clip_runs,
    join_runs,
    runs_of,
)

BASE = 1 << 40
"""Index of the first exact cell, past any other."""

N_SEQUENCES = 8
"""Histories whose ends can be exact at a time."""


class ExactCells:
    """The exact copies of one layer group. Integers only.

    Invariants (asserted by ``check``):
      - a cell has at most one exact copy, and an exact cell is the copy of at most one cell;
      - an exact copy holds what was last written to its cell, wherever that has moved since.
    """

    def __init__(self, first: int, last: int) -> None:
        """Create the exact cells of a group, all free.

        Args:
            first: tokens at the start of a history to keep; 0 for a window or chunk.
            last: tokens at its end.
        """
        self.first = first
        self.last = last
        self.n_cells = N_SEQUENCES * (first + last)
        """Exact cells: what a pool must hold of them."""
        self._copy_of = np.full(0, -1, dtype=np.int64)  # by cell
        self._cell_of = np.full(self.n_cells, -1, dtype=np.int64)  # by exact cell
        self._wanted_at = np.zeros(self.n_cells, dtype=np.int64)
        self._clock = 0
        self._last: tuple[StepPlan, tuple[StepPlan, tuple[Write, ...]]] | None = None

    def rewrite(self, plan: StepPlan) -> tuple[StepPlan, tuple[Write, ...]]:
        """Return a plan that reads exact copies where it can, and what to write to exact cells.

        Args:
            plan: of a step that is about to be written; asked again for the same plan, as by the
                next layer, the answer is the same.

        Returns:
            The same writes with reads of the same lengths; and writes to exact cells, counted from
            0 and not from ``BASE``, which do not cover all tokens.
        """
        if self._last is not None and self._last[0] is plan:
            return self._last[1]
        self._clock += 1
        self._grow(plan.n_cells)
        written = plan.write_cells
        self.drop(written)
        ends = [_ends(read, self.first, self.last) for read in plan.reads]
        wanted = np.unique(np.concatenate([cells for pair in ends for cells in pair]))
        copies = self._copy_of[wanted]
        self._wanted_at[copies[copies >= 0]] = self._clock
        at = np.flatnonzero(np.isin(written, wanted))
        taken = self._take(len(at))
        at = at[len(at) - len(taken) :]  # where there are too few, the last tokens get them
        self._copy_of[written[at]] = taken
        self._cell_of[taken] = written[at]
        reads = tuple(
            self._exact_read(read, *pair) for read, pair in zip(plan.reads, ends, strict=True)
        )
        own = StepPlan(plan.n_tokens, plan.writes, reads, plan.n_cells), _writes(at, taken)
        self._last = plan, own
        return own

    def drop(self, cells: IntArray) -> None:
        """Forget the copies of cells that are written with other tokens."""
        self._grow(int(cells.max(initial=-1)) + 1)
        copies = self._copy_of[cells]
        self._cell_of[copies[copies >= 0]] = -1
        self._copy_of[cells] = -1

    def runs(self, cells: IntArray) -> list[Run]:
        """Return where to read these cells: their exact copies where there are any."""
        self._grow(int(cells.max(initial=-1)) + 1)
        copies = self._copy_of[cells]
        return runs_of(np.where(copies >= 0, copies + BASE, cells))

    def move(self, base: int, src_cells: IntArray) -> tuple[IntArray, IntArray]:
        """Cells are copied to ``[base, base + n)``, and with them their exact copies.

        Returns:
            Exact cells to copy, and as many to copy them to; all are read before any is written.
        """
        target = np.arange(base, base + len(src_cells), dtype=np.int64)
        self._grow(int(max(target.max(initial=-1), src_cells.max(initial=-1))) + 1)
        copies = self._copy_of[src_cells]
        self.drop(target)
        at = np.flatnonzero(copies >= 0)
        taken = self._take(len(at))
        at = at[len(at) - len(taken) :]
        self._copy_of[target[at]] = taken
        self._cell_of[taken] = target[at]
        return copies[at], taken

    def check(self) -> None:
        """Assert the invariants that integers can show."""
        cells = np.flatnonzero(self._copy_of >= 0)
        assert (self._cell_of[self._copy_of[cells]] == cells).all(), "a copy belongs to its cell"
        assert (self._cell_of >= 0).sum() == len(cells), "and to no other"

    def _grow(self, n_cells: int) -> None:
        have = len(self._copy_of)
        if n_cells > have:
            more = np.full(max(n_cells - have, have), -1, dtype=np.int64)
            self._copy_of = np.concatenate([self._copy_of, more])

    def _take(self, n: int) -> IntArray:
        """Up to ``n`` exact cells: free ones first, then those not wanted for longest."""
        if not n:
            return np.empty(0, dtype=np.int64)
        age = np.where(self._cell_of < 0, -1, self._wanted_at)
        order = np.argsort(age, kind="stable")[:n]
        taken = order[age[order] < self._clock]
        old = self._cell_of[taken]
        self._copy_of[old[old >= 0]] = -1
        self._wanted_at[taken] = self._clock
        return taken

    def _exact_read(self, read: AttendSpec, head: IntArray, tail: IntArray) -> AttendSpec:
        middle = clip_runs(read.runs, len(head), read.read_len - len(tail))
        runs = join_runs([*self.runs(head), *middle, *self.runs(tail)])
        return AttendSpec(read.q_start, read.q_len, runs, read.kind, read.mask)


def layer_plan(
    plan: StepPlan, exact: ExactCells | None, *, stores: bool = True
) -> tuple[StepPlan, tuple[Write, ...]]:
    """Return what a layer does of its group's plan, and what it writes to exact cells.

    Args:
        plan: of the layer's group.
        exact: exact cells of that group; None where it has none.
        stores: false where the layer attends over the rows of another one: then it writes nothing.
    """
    own, exact_writes = (plan, ()) if exact is None else exact.rewrite(plan)
    return (own, exact_writes) if stores else (replace(own, writes=()), ())


def exact_cells(group: LayerGroup, kv: KvDtype) -> ExactCells | None:
    """Return the exact copies that a layer group has; None where it has none."""
    first = kv.exact_first if group.is_full else 0
    return ExactCells(first, kv.exact_last) if first or kv.exact_last else None


def exact_bytes(groups: Iterable[LayerGroup], kv: KvDtype) -> int:
    """Return the bytes of all exact cells of these layer groups, which pools take at once."""
    made = ((group, exact_cells(group, kv)) for group in groups)
    return sum(g.cell_bytes(parse_kv_dtype("float32")) * e.n_cells for g, e in made if e)


def _ends(read: AttendSpec, first: int, last: int) -> tuple[IntArray, IntArray]:
    """Return the first and the last cells of a read; a cell is in one of them."""
    length = read.read_len
    n_tail = min(last, length)
    n_head = min(first, length - n_tail)
    head = cells_of(clip_runs(read.runs, 0, n_head))
    return head, cells_of(clip_runs(read.runs, length - n_tail, length))


def _writes(tokens: IntArray, cells: IntArray) -> tuple[Write, ...]:
    """Tokens to cells, one for one, in the fewest stretches."""
    out: list[Write] = []
    for token, cell in zip(tokens.tolist(), cells.tolist(), strict=True):
        if out:
            q_start, run = out[-1]
            if token == q_start + run.length and cell == run.stop:
                out[-1] = Write(q_start, Run(run.start, run.length + 1))
                continue
        out.append(Write(token, Run(cell, 1)))
    return tuple(out)
