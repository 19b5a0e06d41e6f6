"""Reads of tokens that see each other both ways, as the rows of a picture do in some models.

All of them are in one step, so their cells are among those that it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvcellar.types import (
    AttendKind,
    AttendSpec,
    IntArray,
    StepPlan,
    cells_of,
    clip_runs,
    join_runs,
    runs_of,
)


def seen_both_ways(plan: StepPlan, whole: Sequence[tuple[int, int]]) -> StepPlan:
    """Return a plan in which some tokens see those of their own behind them too.

    How far they see back does not change: of a picture that is longer than a window, rows see all
    that are behind them, and those before them that the window has.

    Args:
        plan: of a step, in which a token sees what is before it.
        whole: ``(first, stop)`` of tokens of one sequence in the batch, ascending.
    """
    written = plan.write_cells
    reads = [part for read in plan.reads for part in _parts(read, whole, written)]
    return replace(plan, reads=tuple(reads))


def _parts(
    read: AttendSpec, whole: Sequence[tuple[int, int]], written: IntArray
) -> Iterator[AttendSpec]:
    """Yield a read, cut where its tokens begin or end to see both ways."""
    at, stop = read.q_start, read.q_start + read.q_len
    for first, last in whole:
        low, high = max(first, at), min(last, stop)
        if low >= high:
            continue
        if at < low:
            yield _part(read, at, low)
        yield _both_ways(_part(read, low, high), last, written)
        at = high
    if at < stop:
        yield read if at == read.q_start else _part(read, at, stop)


def _part(read: AttendSpec, start: int, stop: int) -> AttendSpec:
    """Return what some of a read's tokens read of it."""
    first, n = start - read.q_start, stop - start
    if read.kind is AttendKind.EXPLICIT:
        assert read.mask is not None
        mask = read.mask[first : first + n]
        return AttendSpec(start, n, read.runs, AttendKind.EXPLICIT, mask)
    n_cells = read.read_len - read.q_len + first + n
    kind = AttendKind.CAUSAL if n > 1 else AttendKind.NONE
    return AttendSpec(start, n, join_runs(clip_runs(read.runs, 0, n_cells)), kind)


def _both_ways(part: AttendSpec, stop: int, written: IntArray) -> AttendSpec:
    """Return a part of a read whose tokens see those behind them too.

    Args:
        part: these tokens, which see as much of what is before them as they do.
        stop: one past the last token that they see.
        written: ``[T]`` cells of the step's tokens.
    """
    cells = cells_of(part.runs)
    behind = written[part.q_start : stop]
    missing = behind[~np.isin(behind, cells)]
    runs = join_runs((*part.runs, *runs_of(missing)))
    if part.mask is None:
        return AttendSpec(part.q_start, part.q_len, runs, AttendKind.NONE)
    mask = np.ones((part.q_len, len(cells) + len(missing)), np.bool_)
    mask[:, len(cells) - part.mask.shape[1] : len(cells)] = part.mask
    at = {int(cell): column for column, cell in enumerate(cells)}
    for number, cell in enumerate(behind.tolist()):
        if cell in at:
            mask[:number, at[cell]] = True
    return AttendSpec(part.q_start, part.q_len, runs, AttendKind.EXPLICIT, mask)
