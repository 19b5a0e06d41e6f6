"""Pools' rows as canonical arrays, and back: see :mod:`kvcellar.backends.host_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.host_rows import GroupParts, check_rows, empty_rows
from kvcellar.backends.mlx.cache.pools import Pool, PoolSide
from kvcellar.kv_dtype import KvDtype
from kvcellar.types import IntArray, LayerGroup, runs_of


def read(pools: Sequence[Pool], cells: IntArray, group: LayerGroup, kv: KvDtype) -> GroupParts:
    """Copies of the rows of ``cells [n]`` in the group's layers."""
    k, v = empty_rows(group, len(cells), kv)
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
    check_rows(cells, given)
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
    """Return an array as NumPy knows it: bfloat16, which NumPy has no type for, as uint16."""
    return np.asarray(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part)


def _array(array: NDArray[Any], side: PoolSide, at: int) -> mx.array:
    """Copy a part ``[n_kv_heads, n, ...]`` of a side from its canonical bytes."""
    stored = side.parts[at].dtype
    rows = mx.array(np.ascontiguousarray(array))
    return rows if rows.dtype == stored else rows.view(stored)
