"""Rows that leave a cache and return, as NumPy arrays in the canonical order: one for all backends.

Per layer group K and V are tuples of arrays ``[n_layers, n_kv_heads, n, width]``: one array of a
float side (bfloat16 as its bits in uint16, fp8 as its bytes), or the packed numbers as bytes, the
scales and the biases of a quantised one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcellar.bookkeeping import Steps
from kvcellar.bookkeeping.exact import ExactCells
from kvcellar.errors import ShapeError
from kvcellar.kv_dtype import KvDtype, SideDtype
from kvcellar.types import IntArray, LayerGroup, ModelCacheParams

SideArrays = tuple[NDArray[Any], ...]
GroupParts = tuple[SideArrays, SideArrays]
"""K and V of some tokens in the layers of one group."""

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "fp8": np.uint8}


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
    """Arrays for ``n`` rows of a group, to be filled."""
    return row_arrays(group, n, kv, np.empty)


def row_arrays(
    group: LayerGroup, n: int, kv: KvDtype, empty: Callable[[tuple[int, ...], Any], NDArray[Any]]
) -> GroupParts:
    """Return arrays for ``n`` rows of a group that ``empty`` makes from shape and type."""
    return (
        _empty_side(group, n, kv.k, group.head_dim, empty),
        _empty_side(group, n, kv.v, group.v_head_dim, empty),
    )


def check_rows(cells: IntArray, given: GroupParts) -> None:
    """Refuse rows that are not one per cell.

    Raises:
        ShapeError: more of them, or fewer.
    """
    n_rows = given[0][0].shape[2]
    if n_rows != len(cells):
        raise ShapeError(f"got {n_rows} rows for {len(cells)} cells; give one row per cell")


def _empty_side(
    group: LayerGroup,
    n: int,
    side: SideDtype,
    dim: int,
    empty: Callable[[tuple[int, ...], Any], NDArray[Any]],
) -> SideArrays:
    shape = (len(group.layers), group.n_kv_heads, n)
    if not side.is_quantised:
        return (empty((*shape, dim), _NUMPY[side.name]),)
    n_groups = side.n_groups(dim)
    return (
        empty((*shape, side.packed_bytes(dim)), np.uint8),
        empty((*shape, n_groups), np.float16),
        empty((*shape, n_groups), np.float16),
    )
