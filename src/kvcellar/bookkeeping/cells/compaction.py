"""Compaction: finds histories in short runs and gathers them into long ones. Integers only.

A sequence that grew while the pool was full has its tokens in many short runs, which cost every
step that reads them. When nothing else is to be done they are copied together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvcellar.bookkeeping.cells.pool import MIN_RUN, BlockPool, CellMove
from kvcellar.types import IntArray, runs_of

Relocation = tuple[IntArray | None, ...]
"""Per layer group the new cell of every old one, ``[capacity + 1]``, whose last is -1, so that no
cell stays none; None where nothing has moved."""


class Compacted(NamedTuple):
    """Result of gathering scattered cells.

    Attributes:
        moved: where everything is now.
        n_cells: how many cells were copied; 0: nothing has changed.
        is_done: whether nothing is left that could be gathered.
    """

    moved: Relocation
    n_cells: int
    is_done: bool


def relocated(tables: Sequence[IntArray], moved: Relocation) -> tuple[IntArray, ...]:
    """Return cells per layer group, -1 for none, as they are called now."""
    return tuple(
        cells if new is None else new[cells] for cells, new in zip(tables, moved, strict=True)
    )


def crumbs(cells: IntArray) -> list[tuple[int, int]]:
    """Return the stretches ``[first, stop)`` of a history where short runs follow each other.

    Args:
        cells: ``[n]`` in the order of their positions, without -1.
    """
    found: list[tuple[int, int]] = []
    first = at = n_short = 0
    for run in runs_of(cells):
        if run.length >= MIN_RUN:
            if n_short > 1:
                found.append((first, at))
            first, n_short = at + run.length, 0
        else:
            n_short += 1
        at += run.length
    if n_short > 1:
        found.append((first, at))
    return found


def nothing_moved(n_cells: int) -> IntArray:
    """Return every cell in its place, and none behind them."""
    return np.append(np.arange(n_cells, dtype=np.int64), -1)


def compact(
    pools: Sequence[BlockPool],
    histories: Iterable[Sequence[IntArray]],
    max_cells: int,
    move_bytes: Callable[[int, Sequence[CellMove]], None],
) -> Compacted:
    """Copy together what lies in crumbs; see ``Sequences.compact``.

    Args:
        pools: one per layer group.
        histories: what is to lie together, the most important first: per layer group the cells of
            consecutive positions, -1 for none.
        max_cells: about how many to copy at most, all layer groups together.
        move_bytes: copies the bytes of a layer group's cells.
    """
    moved: list[IntArray | None] = [None] * len(pools)
    n_cells = 0
    is_done = True
    for tables in histories:
        for group, (pool, table) in enumerate(zip(pools, tables, strict=True)):
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
                move_bytes(group, [move])
                pool.gather(move)
                n = len(move.src_cells)
                n_cells += n
                if now is None:
                    now = moved[group] = nothing_moved(pool.capacity)
                now[held[first : first + n]] = np.arange(move.base, move.base + n)
    for pool, now in zip(pools, moved, strict=True):
        if now is not None:
            pool.relocate(now)
    return Compacted(tuple(moved), n_cells, is_done)
