"""Cells beside a pool's own: exact ones, and those of a frozen prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcellar.backends.torch.cache.codecs import Parts, Stored
from kvcellar.backends.torch.cache.pools import BlockFirstPool, Pool
from kvcellar.bookkeeping.cells.exact import BASE
from kvcellar.cache_config import FROZEN, CacheConfig
from kvcellar.errors import ConfigError
from kvcellar.kernel import attend
from kvcellar.types import IntArray, LayerGroup, Write


class PoolBeside:
    """A pool, and another one whose cells are read from an index of its own on.

    It is written as :class:`Pool` is, and never beside.
    """

    def __init__(self, cells: LayerPool, beside: Pool, base: int) -> None:
        """Put ``beside`` next to the pool ``cells``; its first cell has the index ``base``."""
        self.cells = cells
        self.beside = beside
        self.dtype: torch.dtype | None = cells.dtype if cells.dtype == beside.dtype else None
        self.is_joined: bool = cells.is_joined
        self._base = base

    @property
    def n_cells(self) -> int:
        """Cells that are allocated in both pools; see :class:`Pool`."""
        return self.cells.n_cells + self.beside.n_cells

    @property
    def device(self) -> torch.device | None:
        """Device of the bytes; None before the first."""
        return self.cells.device

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated for the pool itself."""
        return self.cells.size_bytes

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``."""
        self.cells.ensure(n_cells, device)

    def for_kernel(self, exact: attend.Pool | None = None) -> attend.Pool:
        """Return the pool as the CPU kernel sees it, until it grows."""
        return self.cells.for_kernel(exact)

    def write_run(self, start: int, k: Tensor, v: Tensor) -> None:
        """Store rows; see :class:`Pool`."""
        self.cells.write_run(start, k, v)

    def scatter_rows(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows; see :class:`Pool`."""
        self.cells.scatter_rows(cells, k, v)

    def put(self, cells: Tensor, k: Parts, v: Parts) -> None:
        """Store what ``take`` gave; see :class:`Pool`."""
        self.cells.put(cells, k, v)

    def take(self, cells: Tensor) -> tuple[Parts, Parts]:
        """Copy the parts of the pool's own cells; see :class:`Pool`."""
        return self.cells.take(cells)

    def gather_into(self, base: int, src_cells: Tensor) -> None:
        """Copy the pool's own cells; see :class:`Pool`."""
        self.cells.gather_into(base, src_cells)

    def read(self, start: int, length: int) -> tuple[Stored, Stored]:
        """Return views of a run; see :class:`Pool`."""
        if start >= self._base:
            return self.beside.read(start - self._base, length)
        return self.cells.read(start, length)

    def gather(self, cells: Tensor) -> tuple[Stored, Stored]:
        """Copy rows; in float32 where cells of both kinds are among them and types differ."""
        is_beside = cells >= self._base
        if not bool(is_beside.any()):
            return self.cells.gather(cells)
        if bool(is_beside.all()):
            return self.beside.gather(cells - self._base)
        of_cells = self.cells.gather(cells[~is_beside])
        of_beside = self.beside.gather(cells[is_beside] - self._base)
        dtype = torch.float32 if self.dtype is None else self.dtype
        k, v = (
            _merged(is_beside, a.to(dtype), b.to(dtype))
            for a, b in zip(of_cells, of_beside, strict=True)
        )
        return k, v


class ExactPool(PoolBeside):
    """A pool with float32 cells from ``BASE`` on: see :mod:`kvcellar.bookkeeping.cells.exact`."""

    def __init__(self, cells: LayerPool, group: LayerGroup, config: CacheConfig, n: int) -> None:
        """Put ``n`` exact cells beside the pool ``cells``; none are allocated yet."""
        self.exact = Pool(
            group, replace(config, kv_dtype="float32", capacity=n, min_chunk=n, budget=None)
        )
        super().__init__(cells, self.exact, BASE)
        self._n = n

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated for both."""
        return self.cells.size_bytes + self.exact.size_bytes

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``, and all exact ones."""
        self.cells.ensure(n_cells, device)
        self.exact.ensure(self._n, device)

    def for_kernel(self, exact: attend.Pool | None = None) -> attend.Pool:
        """Return the pool as the CPU kernel sees it, with the exact cells beside."""
        assert exact is None, "there is one pool of exact cells"
        return self.cells.for_kernel(self.exact.for_kernel())

    def write_exact(self, writes: Sequence[Write], k: Tensor, v: Tensor) -> None:
        """Store some tokens ``[1, n_kv_heads, T, dim]`` in exact cells, counted from 0."""
        for q_start, run in writes:
            rows = (part.narrow(2, q_start, run.length) for part in (k, v))
            self.exact.write_run(run.start, *rows)

    def move_exact(self, src: IntArray, dst: IntArray) -> None:
        """Copy exact cells to others; all are read before any is written."""
        src_cells, dst_cells = (torch.as_tensor(c, device=self.device) for c in (src, dst))
        self.exact.put(dst_cells, *self.exact.take(src_cells))


LayerPool = Pool | BlockFirstPool | PoolBeside
"""One layer's K and V bytes, however they lie: what :class:`Pool` does with the same shapes."""


def frozen_rows(pool: LayerPool, cells: IntArray, group: LayerGroup, config: CacheConfig) -> Pool:
    """Copy a layer's rows of some cells into a pool that nobody writes to."""
    frozen = Pool(group, replace(config, prefix=None, budget=None))
    k, v = pool.take(torch.as_tensor(cells, device=pool.device))
    for side, parts in ((frozen.k, k), (frozen.v, v)):
        side.parts, side.n_cells = parts, len(cells)
    return frozen


def beside_frozen(pool: LayerPool, layer: object) -> PoolBeside:
    """Put a layer of a frozen prefix next to a pool.

    Raises:
        ConfigError: another backend has frozen it.
    """
    if not isinstance(layer, Pool):
        raise ConfigError(
            "the prefix was frozen in a cache of another backend; freeze it in one of torch"
        )
    return PoolBeside(pool, layer, FROZEN)


def _merged(is_exact: Tensor, of_cells: Tensor, of_exact: Tensor) -> Tensor:
    shape = (*of_cells.shape[:2], len(is_exact), of_cells.shape[3])
    rows = torch.empty(shape, dtype=of_cells.dtype, device=of_cells.device)
    rows[:, :, ~is_exact] = of_cells
    rows[:, :, is_exact] = of_exact
    return rows
