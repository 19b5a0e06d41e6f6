"""Pools' rows as NumPy arrays in the canonical order, and back: what leaves the cache and returns.

Per layer group K and V are tuples of arrays ``[n_layers, n_kv_heads, n, width]``: one array of a
float side (bfloat16 as its bits in uint16), or the packed numbers as bytes, the scales and the
biases of a quantised one. Any backend's rows are these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.mlx.pools import Pool, Rows
from kvcellar.errors import ShapeError
from kvcellar.kv_dtype import KvDtype, SideDtype
from kvcellar.types import IntArray, LayerGroup, runs_of

SideArrays = tuple[NDArray[Any], ...]
GroupParts = tuple[SideArrays, SideArrays]
"""K and V of some tokens in the layers of one group."""

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def read(pools: Sequence[Pool], cells: IntArray, group: LayerGroup, kv: KvDtype) -> GroupParts:
    """Copies of the rows of ``cells [n]`` in the group's layers."""
    k = _empty(len(pools), group.n_kv_heads, len(cells), kv.k, group.head_dim)
    v = _empty(len(pools), group.n_kv_heads, len(cells), kv.v, group.v_head_dim)
    if len(cells):
        index = mx.array(cells)
        for i, pool in enumerate(pools):
            for arrays, parts in zip((k, v), pool.take(index), strict=True):
                for array, part in zip(arrays, parts, strict=True):
                    array[i] = _bits(part[0]).view(array.dtype)
    return k, v


def write(pools: Sequence[Pool], cells: IntArray, given: GroupParts) -> None:
    """Store rows in ``cells [n]``, evaluated: a run as a slice.

    Raises:
        ShapeError: not as many rows as cells; nothing was written.
    """
    n_rows = given[0][0].shape[2]
    if n_rows != len(cells):
        raise ShapeError(f"got {n_rows} rows for {len(cells)} cells; give one row per cell")
    runs = runs_of(cells)
    highest = int(cells.max()) + 1
    for i, pool in enumerate(pools):
        pool.ensure(highest)
        for side, arrays in zip((pool.k, pool.v), given, strict=True):
            rows = [_array(array[i], side, at)[None] for at, array in enumerate(arrays)]
            if len(runs) == 1:
                side.put_run(runs[0].start, rows)
            else:
                side.put(mx.array(cells), rows)
        mx.eval(pool.parts)


def _bits(part: mx.array) -> NDArray[Any]:
    """An array as NumPy knows it: bfloat16 as uint16, which NumPy has no type for."""
    return np.asarray(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part)


def _array(array: NDArray[Any], side: Rows, at: int) -> mx.array:
    """A part ``[n_kv_heads, n, ...]`` of a side from its canonical bytes; a copy."""
    stored = side.parts[at].dtype
    rows = mx.array(np.ascontiguousarray(array))
    return rows if rows.dtype == stored else rows.view(stored)


def _empty(n_layers: int, n_heads: int, n: int, side: SideDtype, dim: int) -> SideArrays:
    shape = (n_layers, n_heads, n)
    if not side.is_quantised:
        return (np.empty((*shape, dim), _NUMPY[side.name]),)
    n_groups = side.n_groups(dim)
    return (
        np.empty((*shape, side.packed_bytes(dim)), np.uint8),
        np.empty((*shape, n_groups), np.float16),
        np.empty((*shape, n_groups), np.float16),
    )
