"""Rows between a cache on a card and main memory: few copies and launches for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.backends.host_memory import empty_array
from kvcellar.backends.host_rows import GroupParts, SideArrays, check_rows, row_arrays
from kvcellar.backends.torch.cache.exact import LayerPool, PoolBeside
from kvcellar.backends.torch.cache.pools import BlockFirstPool, Placed, Pool
from kvcellar.backends.torch.gpu import rows
from kvcellar.backends.torch.gpu.side import SideStream
from kvcellar.kv_dtype import KvDtype
from kvcellar.types import IntArray, LayerGroup


class _Piece(NamedTuple):
    """Part of a side that is one array in main memory: which, and where in a pool's rows."""

    part: int
    step: int
    at: int


_FLOAT = (_Piece(0, 1, 0),)
_AFFINE = (_Piece(0, 1, 0), _Piece(1, 2, 0), _Piece(1, 2, 1))
"""Packed numbers, then scales and biases, which pools keep in turns."""


class RowTransfers:
    """Moves rows of the layers of groups between pools on a device and arrays.

    The device's work goes on meanwhile; what it is given afterwards finds the rows there.
    """

    def __init__(self, side: SideStream) -> None:
        """Copy beside a device's work by ``side``."""
        self._side = side
        self._tables: dict[int, tuple[tuple[int, ...], list[list[rows.Parts]]]] = {}

    def read(
        self, pools: Sequence[LayerPool], cells: IntArray, group: LayerGroup, kv: KvDtype
    ) -> GroupParts:
        """Return copies of the rows of ``cells [n]`` in a group's layers, when they are there."""
        found = row_arrays(group, len(cells), kv, empty_array)
        if not len(cells):
            return found
        places = self._places(pools, group)
        (where,) = self._side.sent([cells])
        staged = []
        for arrays, parts in zip(found, places, strict=True):
            for array, (part, step, at) in zip(arrays, _pieces(arrays), strict=True):
                kind = _kind(array.dtype.itemsize)
                one = torch.empty(array.shape, dtype=kind, device=where.device)
                rows.copy(parts[part], where, one, step=step, at=at, is_read=True)
                staged.append(one)
        self._side.fetch(staged, [array for arrays in found for array in arrays])
        return found

    def write(
        self,
        pools: Sequence[LayerPool],
        cells: IntArray,
        given: GroupParts,
        group: LayerGroup,
        device: torch.device,
    ) -> None:
        """Store rows in ``cells [n]``; they are on their way when it returns.

        Raises:
            ShapeError: not as many rows as cells; nothing was written.
        """
        check_rows(cells, given)
        if not len(cells):
            return
        highest = int(cells.max()) + 1
        for pool in pools:
            pool.ensure(highest, pool.device or device)
        places = self._places(pools, group)
        arrays = [array for side in given for array in side]
        where, *staged = self._side.sent([cells, *arrays])
        coming = iter(staged)
        for side, parts in zip(given, places, strict=True):
            for part, step, at in _pieces(side):
                rows.copy(parts[part], where, next(coming), step=step, at=at, is_read=False)

    def _places(self, pools: Sequence[LayerPool], group: LayerGroup) -> list[list[rows.Parts]]:
        """Return K's and V's parts in all layers, made anew where a pool has moved."""
        placed = [_own(pool).placed() for pool in pools]
        where = tuple(number for one in placed for number in _addresses(one))
        known = self._tables.get(group.layers[0])
        if known is None or known[0] != where:
            sides = [_parts([getattr(one, name) for one in placed], placed[0]) for name in "kv"]
            known = self._tables[group.layers[0]] = where, sides
        return known[1]


def _own(pool: LayerPool) -> Pool | BlockFirstPool:
    """Return the pool of a layer's own cells."""
    while isinstance(pool, PoolBeside):
        pool = pool.cells
    return pool


def _addresses(placed: Placed) -> Iterator[int]:
    """Yield by what a layer's pool is known until it grows."""
    for part in (*placed.k, *placed.v):
        yield part.data_ptr()
        yield part.stride(1)


def _parts(of_layers: Sequence[tuple[Tensor, ...]], placed: Placed) -> list[rows.Parts]:
    """Return what the kernel is told of the parts of one side."""
    found = []
    for at, first in enumerate(of_layers[0]):
        layers = [layer[at] for layer in of_layers]
        numbers = [(part.data_ptr(), part.stride(1)) for part in layers]
        with torch.inference_mode(False):  # it outlives any inference_mode block
            table = torch.tensor(numbers, dtype=torch.int64, device=first.device)
        found.append(
            rows.Parts(
                table,
                first.stride(2),
                first.stride(0),
                first.shape[1],
                first.element_size(),
                placed.block_size,
            )
        )
    return found


def _pieces(arrays: SideArrays) -> tuple[_Piece, ...]:
    return _FLOAT if len(arrays) == 1 else _AFFINE


def _kind(n_bytes: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[n_bytes]


def transfers_on(device: torch.device) -> RowTransfers:
    """Return what moves rows to and from a device."""
    return RowTransfers(SideStream(device))
