"""Lists of cells that queries see: a plan's reads, and apart from them what several reads share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcellar.bookkeeping.layouts.reads import band
from kvcellar.sight import Sight
from kvcellar.types import AttendKind, AttendSpec, BoolArray, Run, StepPlan, clip_runs, join_runs

LEAST_SHARED = 64
"""Cells that are worth a list of their own: a tile of them."""

ALL, CAUSAL, BAND, MASK = range(4)
"""Ways in which the queries of a list see its last cells: whole; each those up to its own; of
those, the last ``window``; by a mask."""


@dataclass(frozen=True, slots=True)
class CellList:
    """Cells in runs, and the queries that see them.

    Attributes:
        tokens: stretches ``(first query, how many)`` of the flat batch.
        runs: the cells.
        n_free: so many cells at the start are seen by all queries. Of a band: the cells before
            the first query's own.
        kind: how the others are seen.
        window: of a band.
        mask: ``[tokens, cells - n_free]`` of a mask.
    """

    tokens: tuple[tuple[int, int], ...]
    runs: tuple[Run, ...]
    n_free: int
    kind: int
    window: int = 0
    mask: BoolArray | None = None

    @property
    def n_tokens(self) -> int:
        """Queries."""
        return sum(n for _, n in self.tokens)

    @property
    def n_cells(self) -> int:
        """Cells, seen by some query or all."""
        return sum(run.length for run in self.runs)


def idle_lists(first: int, stop: int) -> list[CellList]:
    """Return a list without cells for each query that only pads a batch: its result is zeros."""
    return [CellList(((token, 1),), (), 0, ALL) for token in range(first, stop)]


def lists_of(plan: StepPlan, sight: Sight) -> list[CellList]:
    """Return the lists of a plan: shared cells first, then what is left of each read.

    Every query sees what it sees in its read, in one or more lists.
    """
    n_free = [_free(read) for read in plan.reads]
    shared = _shared_runs(plan.reads, n_free) if len(plan.reads) > 1 else []
    found = []
    for members, runs in shared:
        tokens = tuple((plan.reads[i].q_start, plan.reads[i].q_len) for i in members)
        joined = join_runs(sorted(runs))
        found.append(CellList(tokens, joined, sum(run.length for run in joined), ALL))
    for i, read in enumerate(plan.reads):
        taken = sorted(run for members, runs in shared if i in members for run in runs)
        own = _own_list(read, n_free[i], taken, sight)
        if own.runs:
            found.append(own)
    return found


def _free(read: AttendSpec) -> int:
    """Return how many cells at the start of a read all its queries see."""
    if read.kind is AttendKind.CAUSAL:
        return read.read_len - read.q_len
    if read.kind is AttendKind.EXPLICIT:
        assert read.mask is not None
        return read.read_len - int(read.mask.shape[1])
    return read.read_len


def _own_list(read: AttendSpec, n_free: int, taken: Sequence[Run], sight: Sight) -> CellList:
    """Return a read without the runs that are in other lists, which all its queries see."""
    head = [part for run in clip_runs(read.runs, 0, n_free) for part in _without(run, taken)]
    tail = clip_runs(read.runs, n_free, read.read_len)
    runs, n_left = join_runs([*head, *tail]), sum(run.length for run in head)
    tokens = ((read.q_start, read.q_len),)
    if read.kind is AttendKind.CAUSAL and read.q_len > 1:
        return CellList(tokens, runs, n_left, CAUSAL)
    if read.kind is not AttendKind.EXPLICIT:
        return CellList(tokens, runs, n_left + sum(run.length for run in tail), ALL)
    assert read.mask is not None
    before = read.mask.shape[1] - read.q_len
    if sight.window is not None and n_free == 0 and read.mask is band(read.q_len, before, sight):
        return CellList(tokens, runs, before, BAND, sight.window)
    return CellList(tokens, runs, n_left, MASK, 0, read.mask)


def _without(run: Run, taken: Sequence[Run]) -> list[Run]:
    """Return what is left of a run without some others, which ascend."""
    left, at = [], run.start
    for other in taken:
        if other.stop <= at or other.start >= run.stop:
            continue
        if other.start > at:
            left.append(Run(at, other.start - at))
        at = min(other.stop, run.stop)
    if at < run.stop:
        left.append(Run(at, run.stop - at))
    return left


def _shared_runs(
    reads: Sequence[AttendSpec], n_free: Sequence[int]
) -> list[tuple[tuple[int, ...], list[Run]]]:
    """Return sets of reads and the runs that exactly they see whole, where those are worth it.

    One sweep over the bounds of all runs. A read that names a cell twice leaves all as it is.
    """
    opened: dict[int, list[int]] = {}
    closed: dict[int, list[int]] = {}
    for i, read in enumerate(reads):
        for run in clip_runs(read.runs, 0, n_free[i]):
            opened.setdefault(run.start, []).append(i)
            closed.setdefault(run.stop, []).append(i)
    found: dict[tuple[int, ...], list[Run]] = {}
    live: set[int] = set()
    before = 0
    for at in sorted(opened.keys() | closed.keys()):
        if len(live) > 1:
            found.setdefault(tuple(sorted(live)), []).append(Run(before, at - before))
        live.difference_update(closed.get(at, ()))
        begun = opened.get(at, ())
        if not live.isdisjoint(begun) or len(set(begun)) < len(begun):
            return []
        live.update(begun)
        before = at
    return [
        (members, runs)
        for members, runs in found.items()
        if sum(run.length for run in runs) >= LEAST_SHARED
    ]
