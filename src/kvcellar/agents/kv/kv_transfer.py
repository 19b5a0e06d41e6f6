"""Between the cache's cells and the store's rows: tables of cells here, canonical arrays there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcellar.backends.host_memory import Landing
from kvcellar.engine import HeldPrefix, Restore, RowCache
from kvcellar.engine.kv.restore import states_in
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
        self._landing = Landing()

    def landing(self) -> Landing:
        """Return when, and where, the rows that were read last are there."""
        return self._landing

    def read_rows(self, p0: int, p1: int) -> Rows:
        """Copy the K and V of positions ``[p0, p1)``, per full-history group."""
        full = self._layout.full_groups
        return self._read({index: self._held.tables[index][p0:p1] for index in full})

    def holds_boundary(self, n: int) -> bool:
        """Return true if windows and states are held from which the first ``n`` tokens go on."""
        if not 0 < n <= self._held.n_tokens:
            return False
        sights = self._cache.config.params.sights
        pairs = zip(sights, self._held.tables, strict=True)
        return all((table[sight.first_seen(n) : n] >= 0).all() for sight, table in pairs)

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
        return states_in(self._cache, int(self._held.tables[-1][n - 1]))

    def _read(self, cells: dict[int, IntArray]) -> Rows:
        tables = [cells.get(index, _NONE) for index in range(len(self._layout.groups))]
        found, self._landing = self._cache.begin_read(tables)
        return tuple(GroupRows(*(Side(*side) for side in found[index])) for index in cells)


def boundary_positions(
    layout: RowLayout, boundaries: Sequence[BoundaryState]
) -> list[IntArray | None]:
    """Return the positions that boundary states bring, per table of a sequence; None for full ones.

    Windows are those of the last one; of states each brings its own, at its last position.
    """
    found: list[IntArray | None] = [None] * len(layout.groups)
    for last in boundaries[-1:]:
        for index, window in zip(layout.window_groups, last.windows, strict=True):
            found[index] = window.positions
    if layout.state is not None:
        found.append(np.array([boundary.n_tokens - 1 for boundary in boundaries], dtype=np.int64))
    return found


def write_loaded(restore: Restore, layout: RowLayout, loaded: Loaded) -> None:
    """Store a loaded block in the cells that are claimed for it."""
    cells = {i: restore.tables[i][loaded.start : loaded.stop] for i in layout.full_groups}
    _write(restore, layout, cells, dict(zip(layout.full_groups, loaded.rows, strict=True)))


def write_boundaries(
    restore: Restore, layout: RowLayout, boundaries: Sequence[BoundaryState]
) -> None:
    """Store loaded boundary states in the cells and slots that are claimed for them."""
    for last in boundaries[-1:]:
        windows = dict(zip(layout.window_groups, last.windows, strict=True))
        cells = {index: restore.tables[index][w.positions] for index, w in windows.items()}
        _write(restore, layout, cells, {index: window.rows for index, window in windows.items()})
    if layout.state is not None:
        for boundary in boundaries:
            restore.write_states(boundary.n_tokens, boundary.states)


def _write(
    restore: Restore, layout: RowLayout, cells: dict[int, IntArray], rows: dict[int, GroupRows]
) -> None:
    n_groups = len(layout.groups)
    given: list[Any] = [None] * n_groups
    for index, part in rows.items():
        given[index] = tuple(tuple(side.parts()) for side in part)
    restore.write([cells.get(index, _NONE) for index in range(n_groups)], given)
