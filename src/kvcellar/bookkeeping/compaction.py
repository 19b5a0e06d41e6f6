"""What lies in crumbs, and where everything is once it was gathered. Integers only.

A sequence that grew while the pool was full has its tokens in many short runs, which cost every
step that reads them. When nothing else is to be done they are copied together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcellar.bookkeeping.cells import MIN_RUN
from kvcellar.types import IntArray, runs_of

Relocation = tuple[IntArray | None, ...]
"""Per layer group the new cell of every old one, ``[capacity + 1]``, whose last is -1, so that no
cell stays none; None where nothing has moved."""


class Compacted(NamedTuple):
    """What was gathered.

    Attributes:
        moved: where everything is now.
        n_cells: how many cells were copied; 0: nothing has changed.
        is_done: whether nothing is left that could be gathered.
    """

    moved: Relocation
    n_cells: int
    is_done: bool


def relocated(tables: Sequence[IntArray], moved: Relocation) -> tuple[IntArray, ...]:
    """Cells per layer group, -1 for none, as they are called now."""
    return tuple(
        cells if new is None else new[cells] for cells, new in zip(tables, moved, strict=True)
    )


def crumbs(cells: IntArray, min_run: int = MIN_RUN) -> list[tuple[int, int]]:
    """The stretches ``[first, stop)`` of a history where short runs follow each other.

    Args:
        cells: ``[n]`` in the order of their positions, without -1.
        min_run: shorter runs are short.
    """
    found: list[tuple[int, int]] = []
    first = at = n_short = 0
    for run in runs_of(cells):
        if run.length >= min_run:
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
    """Every cell in its place, and none behind them."""
    return np.append(np.arange(n_cells, dtype=np.int64), -1)
