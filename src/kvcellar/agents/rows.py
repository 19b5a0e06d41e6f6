"""Between the cache's cells and the store's rows: tables of cells here, canonical arrays there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcellar.engine import HeldPrefix, Restore, RowCache, StateCache
from kvcellar.store import (
    BoundaryState,
    GroupRows,
    Loaded,
    RowLayout,
    Rows,
    Side,
    States,
    WindowRows,
)
from kvcellar.types import IntArray

_NONE: IntArray = np.empty(0, dtype=np.int64)


class CellRows:
    """The store's source of rows: what the cache holds of one history. Only between steps."""

    def __init__(self, cache: RowCache, layout: RowLayout, held: HeldPrefix) -> None:
        """Create a source of rows over the cells that ``held`` protects; it must outlive this."""
        self._cache = cache
        self._layout = layout
        self._held = held

    def read_rows(self, p0: int, p1: int) -> Rows:
        """Copy the K and V of positions ``[p0, p1)``, per full-history group."""
        full = self._layout.full_groups
        return self._read({index: self._held.tables[index][p0:p1] for index in full})

    def read_window(self, n: int) -> Sequence[WindowRows]:
        """Copy what groups with a window or chunk hold without a hole before position ``n``."""
        positions = {}
        for index in self._layout.window_groups:
            missing = np.flatnonzero(self._held.tables[index][:n] < 0)
            first = int(missing[-1]) + 1 if missing.size else 0
            positions[index] = np.arange(first, n, dtype=np.int64)
        rows = self._read({i: self._held.tables[i][at] for i, at in positions.items()})
        return [WindowRows(at, part) for at, part in zip(positions.values(), rows, strict=True)]

    def read_states(self, n: int) -> States:
        """Copy the states of recurrent layers after the first ``n`` tokens; () without any."""
        if self._layout.state is None:
            return ()
        assert isinstance(self._cache, StateCache), "a model with states has a cache for them"
        slots = self._held.tables[-1][n - 1 : n]
        layers = self._cache.read_states(slots)
        return tuple(tuple(state[0] for state in layer) for layer in layers)

    def _read(self, cells: dict[int, IntArray]) -> Rows:
        tables = [cells.get(index, _NONE) for index in range(len(self._layout.groups))]
        found = self._cache.read_rows(tables)
        return tuple(GroupRows(*(Side(*side) for side in found[index])) for index in cells)


def window_positions(layout: RowLayout, state: BoundaryState | None) -> list[IntArray | None]:
    """Return the positions that a boundary state brings, per layer group; None for full ones."""
    found: list[IntArray | None] = [None] * len(layout.groups)
    if state is not None:
        for index, window in zip(layout.window_groups, state.windows, strict=True):
            found[index] = window.positions
    return found


def write_loaded(restore: Restore, layout: RowLayout, loaded: Loaded) -> None:
    """Store a loaded block in the cells that are claimed for it."""
    cells = {i: restore.tables[i][loaded.start : loaded.stop] for i in layout.full_groups}
    _write(restore, layout, cells, dict(zip(layout.full_groups, loaded.rows, strict=True)))


def write_boundary(restore: Restore, layout: RowLayout, state: BoundaryState) -> None:
    """Store a loaded boundary state in the cells that are claimed for it."""
    windows = dict(zip(layout.window_groups, state.windows, strict=True))
    cells = {index: restore.tables[index][w.positions] for index, w in windows.items()}
    _write(restore, layout, cells, {index: window.rows for index, window in windows.items()})


def _write(
    restore: Restore, layout: RowLayout, cells: dict[int, IntArray], rows: dict[int, GroupRows]
) -> None:
    n_groups = len(layout.groups)
    given: list[Any] = [None] * n_groups
    for index, part in rows.items():
        given[index] = tuple(tuple(side.parts()) for side in part)
    restore.write([cells.get(index, _NONE) for index in range(n_groups)], given)
