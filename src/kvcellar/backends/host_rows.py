"""Rows that leave a cache and return, as NumPy arrays in the canonical order: one for all backends.

Per layer group K and V are tuples of arrays ``[n_layers, n_kv_heads, n, width]``: one array of a
float side (bfloat16 as its bits in uint16, floats of 8 bits as bytes), or the packed numbers as
bytes, the scales and the biases of a quantised one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.host_memory import Landing, empty_arrays
from kvcellar.bookkeeping import Steps
from kvcellar.bookkeeping.cells.exact import ExactCells
from kvcellar.errors import ShapeError
from kvcellar.kv_dtype import STORED_TYPES, KvDtype
from kvcellar.types import IntArray, LayerGroup, ModelCacheParams

SideArrays = tuple[NDArray[Any], ...]
GroupParts = tuple[SideArrays, SideArrays]
"""K and V of some tokens in the layers of one group."""


class LeavingRows(NamedTuple):
    """Rows that leave a cache.

    Attributes:
        rows: per layer group, as ``read_rows`` gives them; filled when they have arrived.
        landing: when that is, and where they lie.
    """

    rows: list[GroupParts]
    landing: Landing


class RowPools(Protocol):
    """The pools of all layers, as far as rows leave them and return."""

    groups: tuple[LayerGroup, ...]
    exact: list[ExactCells | None]

    def frozen_rows(self, layer: int, group: LayerGroup, cells: IntArray) -> Any:
        """Copy a layer's rows of some cells into a pool that nobody writes to."""
        ...

    def read_rows(self, group: LayerGroup, cells: IntArray) -> GroupParts:
        """Return copies of the rows of ``cells [n]`` in the group's layers."""
        ...

    def write_rows(self, group: LayerGroup, cells: IntArray, given: GroupParts) -> None:
        """Store rows in ``cells [n]``, which are not empty.

        Raises:
            ShapeError: not as many rows as cells; nothing was written.
        """
        ...


class RowMoves:
    """The verbs of a cache that move rows out and in."""

    steps: Steps
    pools: RowPools

    @property
    def rows_are_apart(self) -> bool:
        """True if rows lie in a memory of their own; main memory, as long as nobody says so."""
        return False

    def freeze_rows(self, cells: Sequence[IntArray]) -> list[Any]:
        """Copy the rows of some cells, given per layer group, for a frozen prefix: by layer."""
        found = {
            layer: self.pools.frozen_rows(layer, group, part)
            for group, part in zip(self.pools.groups, cells, strict=True)
            for layer in group.layers
        }
        return [found[source] for source in self.steps.config.params.sources]

    def read_rows(self, tables: Sequence[IntArray]) -> list[GroupParts]:
        """Return copies in host memory of the K and V of some cells, per layer group.

        Args:
            tables: per layer group, cells; none for a group that is not wanted.

        Returns:
            Per layer group the arrays of K and of V, each ``[n_layers, n_kv_heads, n, width]``.
        """
        pairs = zip(self.pools.groups, tables, strict=True)
        return [self.pools.read_rows(group, table) for group, table in pairs]

    def begin_read(self, tables: Sequence[IntArray]) -> LeavingRows:
        """Begin to copy the K and V of some cells, per layer group, to host memory.

        Arguments as of ``read_rows``. Steps may go on, and cells be given to others: what is copied
        is what they hold now.
        """
        return LeavingRows(self.read_rows(tables), Landing())

    def write_rows(self, tables: Sequence[IntArray], rows: Sequence[GroupParts]) -> None:
        """Put arrays as ``read_rows`` gives them in cells of the same order; they are copied."""
        pools = self.pools
        for group, exact, cells, given in zip(pools.groups, pools.exact, tables, rows, strict=True):
            if len(cells):
                if exact is not None:
                    exact.drop(cells)  # their rows were quantised before
                pools.write_rows(group, cells, given)


def slots_of(params: ModelCacheParams) -> tuple[int, ...]:
    """Return per layer where its plan is kept: at its group's index, behind all if it shares rows.

    The layers of a group that store rows have one plan, and those that share them one without
    writes.
    """
    pairs = enumerate(zip(params.group_of, params.sources, strict=True))
    return tuple(
        group if source == layer else group + len(params.groups) for layer, (group, source) in pairs
    )


def empty_rows(group: LayerGroup, n: int, kv: KvDtype) -> GroupParts:
    """Return arrays for ``n`` rows of a group, to be filled."""
    return _grouped([np.empty(*one) for one in _shapes(group, n, kv)], kv)


def landing_rows(
    groups: Sequence[LayerGroup], counts: Sequence[int], kv: KvDtype
) -> tuple[list[GroupParts], Any]:
    """Return arrays for so many rows of each group in one piece of main memory, and the piece."""
    shapes = [_shapes(group, n, kv) for group, n in zip(groups, counts, strict=True)]
    arrays, memory = empty_arrays([one for of_group in shapes for one in of_group])
    found, at = [], 0
    for of_group in shapes:
        found.append(_grouped(arrays[at : at + len(of_group)], kv))
        at += len(of_group)
    return found, memory


def check_rows(cells: IntArray, given: GroupParts) -> None:
    """Refuse rows that are not one per cell.

    Raises:
        ShapeError: more of them, or fewer.
    """
    n_rows = given[0][0].shape[2]
    if n_rows != len(cells):
        raise ShapeError(f"got {n_rows} rows for {len(cells)} cells; give one row per cell")


def _shapes(group: LayerGroup, n: int, kv: KvDtype) -> list[tuple[tuple[int, ...], Any]]:
    """Return shapes and types of K's arrays for ``n`` rows, and then of V's."""
    start = (len(group.layers), group.n_kv_heads, n)
    found: list[tuple[tuple[int, ...], Any]] = []
    for side, dim in ((kv.k, group.head_dim), (kv.v, group.v_head_dim)):
        if side.is_quantised:
            affine = (*start, side.n_groups(dim)), np.float16
            found += [((*start, side.packed_bytes(dim)), np.uint8), affine, affine]
        else:
            found.append(((*start, dim), np.dtype(STORED_TYPES[side.name].array)))
    return found


def _grouped(arrays: Sequence[NDArray[Any]], kv: KvDtype) -> GroupParts:
    """Return arrays of K and then V as two sides."""
    n_of_k = 3 if kv.k.is_quantised else 1
    return tuple(arrays[:n_of_k]), tuple(arrays[n_of_k:])
