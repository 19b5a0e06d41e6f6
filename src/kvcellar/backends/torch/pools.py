"""Bytes: one layer's K and V, head-major, grown by doubling, written in place."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvcellar.cache import grown_size
from kvcellar.types import CacheConfig, LayerGroup

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Rows:
    """``[1, n_kv_heads, cells, dim]`` of one storage type: the K or the V side of a pool.

    Head-major, so that one head's history is contiguous; the leading 1 is attention's batch.
    """

    def __init__(self, n_heads: int, dim: int, dtype: torch.dtype) -> None:
        """No cells yet; the device is that of the first rows that come."""
        self.n_heads = n_heads
        self.dim = dim
        self.dtype = dtype
        self.data: Tensor = torch.empty((1, n_heads, 0, dim), dtype=dtype)
        self.n_cells = 0
        """Cells that are allocated."""

    def grow(self, n_cells: int, device: torch.device) -> None:
        """Allocate ``n_cells`` and keep what is there."""
        with torch.inference_mode(False):  # pools outlive any inference_mode block
            shape = (1, self.n_heads, n_cells, self.dim)
            data = torch.empty(shape, dtype=self.dtype, device=device)
            data[:, :, : self.n_cells] = self.data
        self.data, self.n_cells = data, n_cells


class Pool:
    """One layer's K and V bytes. Knows cells, no sequences.

    Every write is in place: ``data_ptr`` changes in ``ensure`` alone.
    """

    def __init__(self, group: LayerGroup, config: CacheConfig) -> None:
        """No cells yet."""
        dtype = KV_DTYPES[config.kv_dtype]
        self._config = config
        self.k = Rows(group.n_kv_heads, group.head_dim, dtype)
        self.v = Rows(group.n_kv_heads, group.v_head_dim, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """How K and V are stored."""
        return self.k.dtype

    @property
    def device(self) -> torch.device | None:
        """Where the bytes are; None before the first."""
        return self.k.data.device if self.k.n_cells else None

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return self.k.data.nbytes + self.v.data.nbytes

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``: doubles from ``min_chunk``, never past ``capacity``."""
        have = self.k.n_cells
        if n_cells > have:
            size = grown_size(n_cells, have, self._config.pool_chunk, self._config.capacity)
            self.k.grow(size, device)
            self.v.grow(size, device)

    def write_run(self, start: int, k: Tensor, v: Tensor) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in cells ``[start, start + T)``."""
        n = k.shape[2]
        self.k.data.narrow(2, start, n).copy_(k)
        self.v.data.narrow(2, start, n).copy_(v)

    def scatter_rows(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in ``cells [T]`` (int64, on the pool's device)."""
        self.k.data.index_copy_(2, cells, k.to(self.k.dtype))
        self.v.data.index_copy_(2, cells, v.to(self.v.dtype))

    def gather_into(self, base: int, src_cells: Tensor) -> None:
        """Copy ``src_cells [n]`` to cells ``[base, base + n)``; all are read before any write."""
        for rows in (self.k, self.v):
            data = rows.data
            data.narrow(2, base, src_cells.shape[0]).copy_(data.index_select(2, src_cells))

    def read(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Views ``[1, n_kv_heads, length, dim]`` of K and V; no copy."""
        return self.k.data.narrow(2, start, length), self.v.data.narrow(2, start, length)

    def gather(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Copies ``[1, n_kv_heads, len(cells), dim]`` of K and V."""
        return self.k.data.index_select(2, cells), self.v.data.index_select(2, cells)


class LayerPool(Protocol):
    """One layer's K and V bytes, however they lie: what :class:`Pool` does with the same shapes."""

    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102 - as in Pool, like all that follows

    @property
    def device(self) -> torch.device | None: ...  # noqa: D102

    @property
    def size_bytes(self) -> int: ...  # noqa: D102

    def ensure(self, n_cells: int, device: torch.device) -> None: ...  # noqa: D102

    def write_run(self, start: int, k: Tensor, v: Tensor) -> None: ...  # noqa: D102

    def scatter_rows(self, cells: Tensor, k: Tensor, v: Tensor) -> None: ...  # noqa: D102

    def gather_into(self, base: int, src_cells: Tensor) -> None: ...  # noqa: D102

    def read(self, start: int, length: int) -> tuple[Tensor, Tensor]: ...  # noqa: D102

    def gather(self, cells: Tensor) -> tuple[Tensor, Tensor]: ...  # noqa: D102


class Pages:
    """All layers' K and V of a group, page-first: what one block holds lies together in memory.

    ``k`` is ``[n_blocks, n_layers, n_kv_heads, block_size, head_dim]`` and ``v`` likewise with
    ``v_head_dim``. Every write is in place: ``data_ptr`` changes in ``ensure`` alone.
    """

    def __init__(self, group: LayerGroup, config: CacheConfig) -> None:
        """No blocks yet; the device is that of the first rows that come."""
        self.dtype = KV_DTYPES[config.kv_dtype]
        self.block_size = config.block_size
        self.n_layers = len(group.layers)
        self._group = group
        self._min_chunk = config.pool_chunk
        self._max_blocks = config.capacity // config.block_size
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``: doubles from ``min_chunk``, never past the capacity."""
        size = self.block_size
        have = 0 if self.k is None else self.k.shape[0]
        if n_cells <= have * size:
            return
        cells = grown_size(n_cells, have * size, self._min_chunk, self._max_blocks * size)
        n_blocks = -(-cells // size)
        self.k = self._grown(self.k, n_blocks, self._group.head_dim, device)
        self.v = self._grown(self.v, n_blocks, self._group.v_head_dim, device)

    def _grown(self, old: Tensor | None, n_blocks: int, dim: int, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # pages outlive any inference_mode block
            shape = (n_blocks, self.n_layers, self._group.n_kv_heads, self.block_size, dim)
            new = torch.empty(shape, dtype=self.dtype, device=device)
            if old is not None:
                new[: old.shape[0]] = old
        return new


class PageFirstPool:
    """One layer's part of some pages, with the methods and the shapes of :class:`Pool`.

    Writes are in place. A read is a view only where it stays inside one block, else a copy.
    """

    def __init__(self, pages: Pages, index: int) -> None:
        """The part of the group's layer ``index``; the pages are shared with the others."""
        self._pages = pages
        self._index = index

    @property
    def dtype(self) -> torch.dtype:
        """How K and V are stored."""
        return self._pages.dtype

    @property
    def device(self) -> torch.device | None:
        """Where the bytes are; None before the first."""
        return None if self._pages.k is None else self._pages.k.device

    @property
    def size_bytes(self) -> int:
        """The layer's share of the bytes that are allocated."""
        parts = (self._pages.k, self._pages.v)
        return sum(0 if part is None else part.nbytes // self._pages.n_layers for part in parts)

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``, in every layer of the group."""
        self._pages.ensure(n_cells, device)

    def write_run(self, start: int, k: Tensor, v: Tensor) -> None:
        """As in :class:`Pool`: block by block."""
        size, n = self._pages.block_size, k.shape[2]
        for layer, rows in zip(self._layer(), (k, v), strict=True):
            at = 0
            while at < n:
                block, inside = divmod(start + at, size)
                length = min(size - inside, n - at)
                layer[block].narrow(1, inside, length).copy_(rows[0].narrow(1, at, length))
                at += length

    def scatter_rows(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """As in :class:`Pool`."""
        blocks, inside = self._places(cells)
        for layer, rows in zip(self._layer(), (k, v), strict=True):
            layer.transpose(0, 1)[:, blocks, inside] = rows[0].to(layer.dtype)

    def gather_into(self, base: int, src_cells: Tensor) -> None:
        """As in :class:`Pool`."""
        self.write_run(base, *self.gather(src_cells))

    def read(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """``[1, n_kv_heads, length, dim]`` of K and V; a copy where it leaves one block."""
        first, inside = divmod(start, self._pages.block_size)
        last = (start + max(1, length) - 1) // self._pages.block_size
        k, v = (_heads_first(part[first : last + 1]) for part in self._layer())
        return k.narrow(2, inside, length), v.narrow(2, inside, length)

    def gather(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """As in :class:`Pool`."""
        blocks, inside = self._places(cells)
        k, v = (part.transpose(0, 1)[:, blocks, inside].unsqueeze(0) for part in self._layer())
        return k, v

    def _layer(self) -> tuple[Tensor, Tensor]:
        """``[n_blocks, n_kv_heads, block_size, dim]`` of K and V: views."""
        k, v = self._pages.k, self._pages.v
        assert k is not None and v is not None, "ensure comes before the first read or write"
        return k[:, self._index], v[:, self._index]

    def _places(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        size = self._pages.block_size
        return torch.div(cells, size, rounding_mode="floor"), torch.remainder(cells, size)


def _heads_first(blocks: Tensor) -> Tensor:
    """``[n, n_kv_heads, block_size, dim] -> [1, n_kv_heads, n * block_size, dim]``."""
    n, n_heads, size, dim = blocks.shape
    return blocks.transpose(0, 1).reshape(1, n_heads, n * size, dim)
