"""Rows that leave a cache and return, as NumPy arrays in the canonical order: one for all backends.

Per layer group K and V are tuples of arrays ``[n_layers, n_kv_heads, n, width]``: one array of a
float side (bfloat16 as its bits in uint16), or the packed numbers as bytes, the scales and the
biases of a quantised one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.errors import ShapeError
from kvcellar.kv_dtype import KvDtype, SideDtype
from kvcellar.types import IntArray, LayerGroup

SideArrays = tuple[NDArray[Any], ...]
GroupParts = tuple[SideArrays, SideArrays]
"""K and V of some tokens in the layers of one group."""

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def empty_rows(group: LayerGroup, n: int, kv: KvDtype) -> GroupParts:
    """Arrays for ``n`` rows of a group, to be filled."""
    return (
        _empty_side(group, n, kv.k, group.head_dim),
        _empty_side(group, n, kv.v, group.v_head_dim),
    )


def check_rows(cells: IntArray, given: GroupParts) -> None:
    """Refuse rows that are not one per cell.

    Raises:
        ShapeError: more of them, or fewer.
    """
    n_rows = given[0][0].shape[2]
    if n_rows != len(cells):
        raise ShapeError(f"got {n_rows} rows for {len(cells)} cells; give one row per cell")


def _empty_side(group: LayerGroup, n: int, side: SideDtype, dim: int) -> SideArrays:
    shape = (len(group.layers), group.n_kv_heads, n)
    if not side.is_quantised:
        return (np.empty((*shape, dim), _NUMPY[side.name]),)
    n_groups = side.n_groups(dim)
    return (
        np.empty((*shape, side.packed_bytes(dim)), np.uint8),
        np.empty((*shape, n_groups), np.float16),
        np.empty((*shape, n_groups), np.float16),
    )
