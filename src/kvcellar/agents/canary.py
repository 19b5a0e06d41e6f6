"""Does what came out of the store fit this model? A few rows are computed again and compared.

Checksums prove that bytes are what was written. They cannot prove that what was written was right,
or that the model that reads it is the one that wrote it: a row that the model itself computes from
the rows before it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcellar.engine import Restore
from kvcellar.models import Runner
from kvcellar.store import BoundaryState, GroupRows, Loaded, RowLayout, Side
from kvcellar.store.precision import as_floats
from kvcellar.types import IntArray, LayerGroup

MAX_ROWS = 8
"""Rows that are computed again, in one forward."""

_TOLERANCES = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1, "int8": 0.15, "int4": 0.5}
"""How far a row may be from what is computed, as a share of its length, by how it is stored. The
same row computed in a batch of another shape differs by rounding alone; rows of another model, or
of another token, differ by more than their length."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Restored rows beside those that were computed again.

    Attributes:
        n_checked: rows that were computed again; 0 where none could be.
        bad: addresses of the blocks and boundary states whose rows are wrong, and why.
    """

    n_checked: int
    bad: dict[bytes, str]


def check_restored(
    restore: Restore,
    runner: Runner,
    layout: RowLayout,
    blocks: Sequence[Loaded],
    window: BoundaryState | None,
    stop: int,
) -> Finding:
    """Compute up to ``MAX_ROWS`` of the restored rows again and compare. Only between steps.

    Args:
        restore: whose rows are written, and not published yet.
        runner: the model.
        layout: of the rows.
        blocks: what the full-history groups were restored from, in order.
        window: what the groups with a window or chunk were restored from.
        stop: one past the last position that was restored.
    """
    positions = _positions(restore, layout, blocks, window, stop)
    computed = restore.compute_again(runner, positions) if positions else None
    if computed is None:
        return Finding(0, {})
    is_exact = all(block.is_exact for block in blocks) and (window is None or window.is_exact)
    bad: dict[bytes, str] = {}
    for index, group in enumerate(layout.groups):
        cells = restore.tables[index][positions]
        there = np.flatnonzero(cells >= 0)
        if not there.size:
            continue
        stored = restore.read([cells[there] if i == index else _NONE for i in range(len(computed))])
        had, got = (
            as_floats(GroupRows(*(Side(*side) for side in rows[index])), group, layout.kv)
            for rows in (stored, computed)
        )
        for name, dtype, a, b in zip("KV", (layout.kv.k, layout.kv.v), had, got, strict=True):
            limit = max(_TOLERANCES[dtype.name], 0.0 if is_exact else _TOLERANCES["int8"])
            for row, error in zip(there, _errors(a, b[:, :, there]), strict=True):
                if not error <= limit:
                    position = positions[row]
                    bad[_address(position, group, blocks, window)] = (
                        f"{name} of position {position} is {error:.2f} of its length away from "
                        f"what this model computes; up to {limit:g} is rounding"
                    )
    return Finding(len(positions), bad)


_NONE: IntArray = np.empty(0, dtype=np.int64)


def _positions(
    restore: Restore,
    layout: RowLayout,
    blocks: Sequence[Loaded],
    window: BoundaryState | None,
    stop: int,
) -> list[int]:
    """Choose the positions to look at: the ends of blocks, evenly, and the last of all."""
    size = restore.block_size
    ends = [block.stop for block in blocks] if layout.full_groups else [stop]
    wanted = {max(restore.first, (end - 1) // size * size) for end in (*ends, stop)}
    if restore.first == 0:
        wanted.add(0)  # it stands on nothing, so it can be computed behind any window
    found = sorted(p for p in wanted if p < stop and restore.can_compute_again(p))
    if len(found) <= MAX_ROWS:
        return found
    picked = np.linspace(0, len(found) - 1, MAX_ROWS).round().astype(int)
    return [found[i] for i in picked]


def _errors(had: np.ndarray, got: np.ndarray) -> list[float]:
    """Return each row's largest distance in any layer, as a share of its length there."""
    distance = np.sqrt(((had - got).astype(np.float64) ** 2).sum((1, 3)))
    length = np.sqrt((got.astype(np.float64) ** 2).sum((1, 3)))
    worst: list[float] = (distance / np.maximum(length, 1e-6)).max(0).tolist()
    return worst


def _address(
    position: int, group: LayerGroup, blocks: Sequence[Loaded], window: BoundaryState | None
) -> bytes:
    """Return the address of the block or boundary state that a row came from."""
    if not group.is_full:
        assert window is not None, "rows of a group that lets go come from a boundary state"
        return window.address
    return next(block.address for block in blocks if block.start <= position < block.stop)
