"""Pools' rows as canonical arrays, and back: see :mod:`kvcellar.backends.host_rows`.

The pools keep scales and biases interleaved; there they are apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcellar.backends.host_rows import GroupParts, SideArrays, check_rows
from kvcellar.backends.torch.cache.codecs import Parts
from kvcellar.backends.torch.cache.exact import LayerPool
from kvcellar.backends.torch.cache.pools import Pool
from kvcellar.types import IntArray, runs_of


def read(pools: Sequence[LayerPool], cells: IntArray, into: GroupParts) -> None:
    """Copy the rows of ``cells [n]`` in the group's layers to arrays."""
    if len(cells):
        for i, pool in enumerate(pools):
            for arrays, parts in zip(into, _taken(pool, cells), strict=True):
                for array, rows in zip((a[i] for a in arrays), _split(parts), strict=True):
                    array[...] = rows


def write(
    pools: Sequence[LayerPool], cells: IntArray, given: GroupParts, device: torch.device
) -> None:
    """Store rows in ``cells [n]``; a run on the CPU is copied once, straight to its place.

    Raises:
        ShapeError: not as many rows as cells; nothing was written.
    """
    check_rows(cells, given)
    runs = runs_of(cells)
    highest = int(cells.max()) + 1
    for i, pool in enumerate(pools):
        pool.ensure(highest, pool.device or device)
        sides = [tuple(array[i] for array in arrays) for arrays in given]
        if isinstance(pool, Pool) and device.type == "cpu":
            for side, arrays in zip((pool.k, pool.v), sides, strict=True):
                views = list(_split(side.parts))
                at = 0
                for run in runs:
                    stop = at + run.length
                    for view, array in zip(views, arrays, strict=True):
                        view[:, run.start : run.stop] = array[:, at:stop]
                    at = stop
        else:
            k, v = (_joined(arrays, pool, which) for which, arrays in enumerate(sides))
            where = torch.as_tensor(cells, device=device)
            pool.put(where, *(tuple(p.to(device) for p in parts) for parts in (k, v)))


def _taken(pool: LayerPool, cells: IntArray) -> tuple[Parts, Parts]:
    """K's and V's parts of some cells on the CPU; a view where they are one run there."""
    runs = runs_of(cells)
    device = pool.device
    if isinstance(pool, Pool) and len(runs) == 1 and device is not None and device.type == "cpu":
        start, length = runs[0]
        k, v = (
            tuple(part.narrow(2, start, length) for part in side.parts) for side in (pool.k, pool.v)
        )
        return k, v
    k, v = pool.take(torch.as_tensor(cells, device=device))
    return tuple(part.cpu() for part in k), tuple(part.cpu() for part in v)


def _split(parts: Parts) -> Iterator[NDArray[Any]]:
    """Views ``[n_kv_heads, n, width]`` of the arrays that a side's parts on the CPU hold."""
    first = _numpy(parts[0])[0]
    yield first
    if len(parts) == 2:
        affine = _numpy(parts[1])[0]
        yield affine[..., 0::2]
        yield affine[..., 1::2]


def _numpy(part: Tensor) -> NDArray[Any]:
    if part.dtype is torch.bfloat16:
        bits: NDArray[Any] = part.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: NDArray[Any] = part.numpy()
    return array


def _joined(arrays: SideArrays, pool: LayerPool, which: int) -> Parts:
    """Parts ``[1, n_kv_heads, n, ...]`` of a side from its arrays; copies."""
    first = torch.from_numpy(np.array(arrays[0]))[None]
    if len(arrays) == 1:
        stored = pool.take(torch.empty(0, dtype=torch.int64, device=pool.device))[which][0].dtype
        return (first.view(torch.bfloat16) if stored is torch.bfloat16 else first,)
    affine = np.stack([arrays[1], arrays[2]], axis=-1).reshape(*arrays[1].shape[:-1], -1)
    return first, torch.from_numpy(affine)[None]
