"""Bytes: one layer's K and V, head-major, grown by doubling, written in place."""

from __future__ import annotations

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
        self.data: Tensor | None = None

    @property
    def n_cells(self) -> int:
        """Cells that are allocated."""
        return 0 if self.data is None else self.data.shape[2]

    def grow(self, n_cells: int, device: torch.device) -> None:
        """Allocate ``n_cells`` and keep what is there."""
        with torch.inference_mode(False):  # pools outlive any inference_mode block
            shape = (1, self.n_heads, n_cells, self.dim)
            data = torch.empty(shape, dtype=self.dtype, device=device)
            if self.data is not None:
                data[:, :, : self.n_cells] = self.data
        self.data = data


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
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(0 if r.data is None else r.data.nbytes for r in (self.k, self.v))

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``: doubles from ``min_chunk``, never past ``capacity``."""
        have = self.k.n_cells
        if n_cells > have:
            size = grown_size(n_cells, have, self._config.min_chunk, self._config.capacity)
            self.k.grow(size, device)
            self.v.grow(size, device)

    def write_run(self, start: int, k: Tensor, v: Tensor) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in cells ``[start, start + T)``."""
        n = k.shape[2]
        _data(self.k).narrow(2, start, n).copy_(k)
        _data(self.v).narrow(2, start, n).copy_(v)

    def scatter_rows(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in ``cells [T]`` (int64, on the pool's device)."""
        _data(self.k).index_copy_(2, cells, k.to(self.k.dtype))
        _data(self.v).index_copy_(2, cells, v.to(self.v.dtype))

    def gather_into(self, base: int, src_cells: Tensor) -> None:
        """Copy ``src_cells [n]`` to cells ``[base, base + n)``; all are read before any write."""
        for rows in (self.k, self.v):
            data = _data(rows)
            data.narrow(2, base, src_cells.shape[0]).copy_(data.index_select(2, src_cells))

    def read(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Views ``[1, n_kv_heads, length, dim]`` of K and V; no copy."""
        return _data(self.k).narrow(2, start, length), _data(self.v).narrow(2, start, length)

    def gather(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Copies ``[1, n_kv_heads, len(cells), dim]`` of K and V."""
        return _data(self.k).index_select(2, cells), _data(self.v).index_select(2, cells)


def _data(rows: Rows) -> Tensor:
    assert rows.data is not None, "ensure comes before the first read or write"
    return rows.data
