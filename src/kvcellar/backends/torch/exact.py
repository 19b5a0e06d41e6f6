"""A quantised pool with a few exact cells beside it: see :mod:`kvcellar.bookkeeping.exact`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcellar.backends.torch.codecs import Parts, Stored
from kvcellar.backends.torch.pools import LayerPool, Pool
from kvcellar.bookkeeping.exact import BASE
from kvcellar.kernel import attend
from kvcellar.types import CacheConfig, IntArray, LayerGroup, Write


class ExactPool:
    """A pool whose cells from ``BASE`` on are float32; otherwise as :class:`Pool`."""

    def __init__(self, cells: LayerPool, group: LayerGroup, config: CacheConfig, n: int) -> None:
        """Beside the pool ``cells``, ``n`` exact cells; none are allocated yet."""
        self.cells = cells
        self.exact = Pool(
            group, replace(config, kv_dtype="float32", capacity=n, min_chunk=n, budget=None)
        )
        self.dtype: torch.dtype | None = None
        self._n = n

    @property
    def device(self) -> torch.device | None:
        """Device of the bytes; None before the first."""
        return self.cells.device

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated for both."""
        return self.cells.size_bytes + self.exact.size_bytes

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``, and all exact ones."""
        self.cells.ensure(n_cells, device)
        self.exact.ensure(self._n, device)

    def for_kernel(self, exact: attend.Pool | None = None) -> attend.Pool:
        """Describe the pool to the kernel, with the exact cells beside; see :class:`Pool`."""
        assert exact is None, "there is one pool of exact cells"
        return self.cells.for_kernel(self.exact.for_kernel())

    def write_exact(self, writes: Sequence[Write], k: Tensor, v: Tensor) -> None:
        """Store some tokens ``[1, n_kv_heads, T, dim]`` in exact cells, counted from 0."""
        for q_start, run in writes:
            rows = (part.narrow(2, q_start, run.length) for part in (k, v))
            self.exact.write_run(run.start, *rows)

    def write_run(self, start: int, k: Tensor, v: Tensor) -> None:
        """Write consecutive cells; see :class:`Pool`."""
        self.cells.write_run(start, k, v)

    def scatter_rows(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Write cells anywhere; see :class:`Pool`."""
        self.cells.scatter_rows(cells, k, v)

    def put(self, cells: Tensor, k: Parts, v: Parts) -> None:
        """Put stored rows; see :class:`Pool`."""
        self.cells.put(cells, k, v)

    def take(self, cells: Tensor) -> tuple[Parts, Parts]:
        """Take stored rows; see :class:`Pool`."""
        return self.cells.take(cells)

    def gather_into(self, base: int, src_cells: Tensor) -> None:
        """Copy cells together, without the exact ones, which ``move_exact`` copies."""
        self.cells.gather_into(base, src_cells)

    def move_exact(self, src: IntArray, dst: IntArray) -> None:
        """Copy exact cells to others; all are read before any is written."""
        src_cells, dst_cells = (torch.as_tensor(c, device=self.device) for c in (src, dst))
        self.exact.put(dst_cells, *self.exact.take(src_cells))

    def read(self, start: int, length: int) -> tuple[Stored, Stored]:
        """Return rows of one kind of cells; see :class:`Pool`."""
        if start >= BASE:
            return self.exact.read(start - BASE, length)
        return self.cells.read(start, length)

    def gather(self, cells: Tensor) -> tuple[Stored, Stored]:
        """Gather cells; in float32 where exact ones are among them; see :class:`Pool`."""
        is_exact = cells >= BASE
        if not bool(is_exact.any()):
            return self.cells.gather(cells)
        if bool(is_exact.all()):
            return self.exact.gather(cells - BASE)
        of_cells = self.cells.gather(cells[~is_exact])
        of_exact = self.exact.gather(cells[is_exact] - BASE)
        k, v = (
            _merged(is_exact, a.to(torch.float32), b.to(torch.float32))
            for a, b in zip(of_cells, of_exact, strict=True)
        )
        return k, v


def _merged(is_exact: Tensor, of_cells: Tensor, of_exact: Tensor) -> Tensor:
    shape = (*of_cells.shape[:2], len(is_exact), of_cells.shape[3])
    rows = torch.empty(shape, dtype=of_cells.dtype, device=of_cells.device)
    rows[:, :, ~is_exact] = of_cells
    rows[:, :, is_exact] = of_exact
    return rows
