"""One layer's K and V bytes in NumPy arrays, and how a float becomes bytes.

NumPy has no bfloat16: those pools hold the upper 16 bits of a float32 as uint16, rounded to
nearest, ties to even, which is what a cast in torch stores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.cache import grown_size
from kvcellar.types import CacheConfig, IntArray, LayerGroup

FloatArray = NDArray[np.floating[Any]]

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""kv_dtype -> dtype of the array that stores it."""


def to_bfloat16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to bfloat16: its 16 bits, same shape. NaN stays NaN, too large becomes infinite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    to_even = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    rounded = ((bits + to_even) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The exact float32 values of bfloat16 bits, same shape."""
    return np.ascontiguousarray(bits.astype(np.uint32) << 16).view(np.float32)


def encoded(values: FloatArray, kv_dtype: str) -> NDArray[Any]:
    """Values as they are stored, same shape."""
    if kv_dtype == "bfloat16":
        return to_bfloat16_bits(values)
    return values.astype(STORAGE[kv_dtype])


def decoded(stored: NDArray[Any], kv_dtype: str) -> FloatArray:
    """What is stored, in float64: exact values, copied, same shape."""
    values = from_bfloat16_bits(stored) if kv_dtype == "bfloat16" else stored
    return values.astype(np.float64)


class Pool:
    """K and V of one layer, head-major. Knows cells, no sequences.

    ``k`` is ``[n_kv_heads, n_cells, head_dim]`` and ``v`` is ``[n_kv_heads, n_cells, v_head_dim]``,
    both of the storage dtype. Growth keeps every byte and every cell's index.
    """

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        *,
        capacity: int,
        kv_dtype: str = "float32",
        min_chunk: int = 512,
    ) -> None:
        """An empty pool that holds no cells yet.

        Args:
            n_kv_heads: KV heads of the layer.
            head_dim: length of a K row.
            v_head_dim: length of a V row.
            capacity: the most cells it may hold.
            kv_dtype: how K and V are stored, a key of :data:`STORAGE`.
            min_chunk: cells that are allocated at first.
        """
        self.capacity = capacity
        self.kv_dtype = kv_dtype
        self.min_chunk = min_chunk
        self.k: NDArray[Any] = np.zeros((n_kv_heads, 0, head_dim), STORAGE[kv_dtype])
        self.v: NDArray[Any] = np.zeros((n_kv_heads, 0, v_head_dim), STORAGE[kv_dtype])

    @property
    def n_cells(self) -> int:
        """Cells that are allocated."""
        return int(self.k.shape[1])

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated for K and V."""
        return int(self.k.nbytes + self.v.nbytes)

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells`` cells; doubles, never past ``capacity``, never shrinks."""
        assert n_cells <= self.capacity, f"{n_cells} cells asked of a pool of {self.capacity}"
        if n_cells > self.n_cells:
            size = grown_size(n_cells, self.n_cells, self.min_chunk, self.capacity)
            self.k = _grown(self.k, size)
            self.v = _grown(self.v, size)

    def write_run(self, start: int, k: FloatArray, v: FloatArray) -> None:
        """Store tokens in the cells from ``start`` on.

        Args:
            start: first cell; the pool must hold all of them (``ensure``).
            k: ``[n_kv_heads, n_tok, head_dim]``.
            v: ``[n_kv_heads, n_tok, v_head_dim]``.
        """
        self.scatter_rows(np.arange(start, start + k.shape[1]), k, v)

    def scatter_rows(self, cells: IntArray, k: FloatArray, v: FloatArray) -> None:
        """Store token i in ``cells[i]``; shapes as in ``write_run``."""
        self.k[:, cells] = encoded(k, self.kv_dtype)
        self.v[:, cells] = encoded(v, self.kv_dtype)

    def gather_into(self, base: int, src_cells: IntArray) -> None:
        """Copy ``src_cells``, in their order, to ``[base, base + len(src_cells))``.

        Sources may lie inside the target: all are read before any is written.
        """
        stop = base + len(src_cells)
        self.k[:, base:stop] = self.k[:, src_cells].copy()
        self.v[:, base:stop] = self.v[:, src_cells].copy()

    def read(self, start: int, length: int) -> tuple[FloatArray, FloatArray]:
        """K ``[n_kv_heads, length, head_dim]`` and V of a run, in float64: exact values, copied."""
        stop = start + length
        assert stop <= self.n_cells, f"cells up to {stop} are read, {self.n_cells} are held"
        k, v = self.k[:, start:stop], self.v[:, start:stop]
        return decoded(k, self.kv_dtype), decoded(v, self.kv_dtype)


def _grown(old: NDArray[Any], n_cells: int) -> NDArray[Any]:
    """``old`` with room for more cells; new cells are 0."""
    new = np.zeros((old.shape[0], n_cells, old.shape[2]), old.dtype)
    new[:, : old.shape[1]] = old
    return new


class Pages:
    """K and V of all layers of a group, page-first: what one block holds lies together.

    ``k`` is ``[n_blocks, n_layers, n_kv_heads, block_size, head_dim]`` and ``v`` likewise with
    ``v_head_dim``, both of the storage dtype. Growth keeps every byte and every block's index.
    """

    def __init__(self, group: LayerGroup, config: CacheConfig) -> None:
        """No blocks yet."""
        self.kv_dtype = config.kv_dtype
        self.block_size = config.block_size
        self.min_chunk = config.pool_chunk
        self.max_blocks = config.capacity // config.block_size
        shape = (0, len(group.layers), group.n_kv_heads, config.block_size)
        self.k: NDArray[Any] = np.zeros((*shape, group.head_dim), STORAGE[config.kv_dtype])
        self.v: NDArray[Any] = np.zeros((*shape, group.v_head_dim), STORAGE[config.kv_dtype])

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells``; doubles, never past the capacity, never shrinks."""
        size, capacity = self.block_size, self.max_blocks * self.block_size
        assert n_cells <= capacity, f"{n_cells} cells asked of pages for {capacity}"
        have = self.k.shape[0]
        if n_cells > have * size:
            n_blocks = -(-grown_size(n_cells, have * size, self.min_chunk, capacity) // size)
            for name in ("k", "v"):
                old = getattr(self, name)
                new = np.zeros((n_blocks, *old.shape[1:]), old.dtype)
                new[:have] = old
                setattr(self, name, new)


class PageFirstPool:
    """One layer's part of some pages, with the methods and the shapes of :class:`Pool`."""

    def __init__(self, pages: Pages, index: int) -> None:
        """The part of the group's layer ``index``; the pages are shared with the others."""
        self.pages = pages
        self.index = index

    @property
    def n_cells(self) -> int:
        """Cells that are allocated."""
        return int(self.pages.k.shape[0]) * self.pages.block_size

    @property
    def size_bytes(self) -> int:
        """The layer's share of the bytes that are allocated."""
        n_layers = int(self.pages.k.shape[1])
        return (self.pages.k.nbytes + self.pages.v.nbytes) // n_layers

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells`` cells, in every layer of the group."""
        self.pages.ensure(n_cells)

    def write_run(self, start: int, k: FloatArray, v: FloatArray) -> None:
        """As in :class:`Pool`."""
        self.scatter_rows(np.arange(start, start + k.shape[1]), k, v)

    def scatter_rows(self, cells: IntArray, k: FloatArray, v: FloatArray) -> None:
        """As in :class:`Pool`."""
        for i, cell in enumerate(cells):
            block, at = divmod(int(cell), self.pages.block_size)
            self.pages.k[block, self.index, :, at] = encoded(k[:, i], self.pages.kv_dtype)
            self.pages.v[block, self.index, :, at] = encoded(v[:, i], self.pages.kv_dtype)

    def gather_into(self, base: int, src_cells: IntArray) -> None:
        """As in :class:`Pool`."""
        stored = [self._rows(part, src_cells) for part in (self.pages.k, self.pages.v)]
        for part, rows in zip((self.pages.k, self.pages.v), stored, strict=True):
            for i in range(len(src_cells)):
                block, at = divmod(base + i, self.pages.block_size)
                part[block, self.index, :, at] = rows[:, i]

    def read(self, start: int, length: int) -> tuple[FloatArray, FloatArray]:
        """As in :class:`Pool`."""
        assert start + length <= self.n_cells, f"{start + length} cells, {self.n_cells} are held"
        cells = np.arange(start, start + length)
        dtype = self.pages.kv_dtype
        k, v = (self._rows(part, cells) for part in (self.pages.k, self.pages.v))
        return decoded(k, dtype), decoded(v, dtype)

    def _rows(self, part: NDArray[Any], cells: IntArray) -> NDArray[Any]:
        """``[n_kv_heads, len(cells), dim]``, copied, as they are stored."""
        blocks, at = np.divmod(cells, self.pages.block_size)
        return part[blocks, self.index, :, at].transpose(1, 0, 2)
