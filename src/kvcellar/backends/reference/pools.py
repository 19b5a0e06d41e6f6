"""One layer's K and V bytes in NumPy arrays, and how a float becomes bytes.

NumPy has no bfloat16: those pools hold the upper 16 bits of a float32 as uint16, rounded to
nearest, ties to even, which is what a cast in torch stores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.reference.byte_floats import from_bytes, to_bytes
from kvcellar.backends.reference.quantise import QuantisedRows, dequantise, quantise, rotate
from kvcellar.bookkeeping.cells.exact import BASE
from kvcellar.cache import grown_size
from kvcellar.cache_config import CacheConfig
from kvcellar.kv_dtype import STORED_TYPES, SideDtype, parse_kv_dtype
from kvcellar.types import IntArray, LayerGroup

FloatArray = NDArray[np.floating[Any]]
Parts = list[NDArray[Any]]
"""One side's bytes: one array of a float type, or packed numbers, scales and biases."""


def to_bfloat16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to bfloat16: its 16 bits, same shape. NaN stays NaN, too large becomes infinite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    to_even = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    rounded = ((bits + to_even) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the exact float32 values of bfloat16 bits, same shape."""
    return np.ascontiguousarray(bits.astype(np.uint32) << 16).view(np.float32)


class Codec:
    """Bytes of the rows of one side, K or V: arrays that share all axes but the last."""

    def __init__(self, side: SideDtype, dim: int) -> None:
        """Create a codec for rows of ``dim`` numbers."""
        self.side = side
        self.dim = dim

    def empty(self, shape: tuple[int, ...]) -> Parts:
        """Zeroed arrays for ``shape`` rows."""
        if not self.side.is_quantised:
            return [np.zeros((*shape, self.dim), STORED_TYPES[self.side.name].array)]
        n_groups = self.side.n_groups(self.dim)
        packed = np.zeros((*shape, self.side.packed_bytes(self.dim)), np.uint8)
        return [packed, *(np.zeros((*shape, n_groups), np.float16) for _ in range(2))]

    def encoded(self, rows: FloatArray) -> Parts:
        """Rows ``[..., dim]`` as they are stored."""
        if self.side.name == "bfloat16":
            return [to_bfloat16_bits(rows)]
        if self.side.byte_float is not None:
            return [to_bytes(rows, self.side.byte_float)]
        if not self.side.is_quantised:
            return [rows.astype(STORED_TYPES[self.side.name].array)]
        rows = rotate(rows) if self.side.is_rotated else rows
        return list(quantise(rows, self.side.bits, self.side.group_of(self.dim)))

    def decoded(self, parts: Parts) -> FloatArray:
        """Rows ``[..., dim]`` in float64: the exact values of what is stored, copied."""
        if self.side.name == "bfloat16":
            return from_bfloat16_bits(parts[0]).astype(np.float64)
        if self.side.byte_float is not None:
            return from_bytes(parts[0], self.side.byte_float).astype(np.float64)
        if not self.side.is_quantised:
            return parts[0].astype(np.float64)
        rows = dequantise(QuantisedRows(*parts), self.side.bits, self.dim)
        return (rotate(rows) if self.side.is_rotated else rows).astype(np.float64)


class Pool:
    """K and V of one layer, head-major. Knows cells, no sequences.

    Every part of ``k`` and ``v`` is ``[n_kv_heads, n_cells, ...]``. Growth keeps every byte and
    every cell's index.
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
        """Create a pool without cells.

        Args:
            n_kv_heads: KV heads of the layer.
            head_dim: length of a K row.
            v_head_dim: length of a V row.
            capacity: the most cells it may hold.
            kv_dtype: how K and V are stored.
            min_chunk: cells that are allocated at first.
        """
        kv = parse_kv_dtype(kv_dtype)
        self.capacity = capacity
        self.min_chunk = min_chunk
        self.codecs = Codec(kv.k, head_dim), Codec(kv.v, v_head_dim)
        self.k, self.v = (codec.empty((n_kv_heads, 0)) for codec in self.codecs)

    @property
    def n_cells(self) -> int:
        """Cells that are allocated."""
        return int(self.k[0].shape[1])

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated for K and V."""
        return int(sum(part.nbytes for part in (*self.k, *self.v)))

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells`` cells; doubles, never past ``capacity``, never shrinks."""
        assert n_cells <= self.capacity, f"{n_cells} cells asked of a pool of {self.capacity}"
        if n_cells > self.n_cells:
            size = grown_size(n_cells, self.n_cells, self.min_chunk, self.capacity)
            self.k = [_grown(part, size) for part in self.k]
            self.v = [_grown(part, size) for part in self.v]

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
        for parts, codec, rows in zip((self.k, self.v), self.codecs, (k, v), strict=True):
            for part, stored in zip(parts, codec.encoded(rows), strict=True):
                part[:, cells] = stored

    def gather_into(self, base: int, src_cells: IntArray) -> None:
        """Copy ``src_cells``, in their order, to ``[base, base + len(src_cells))``.

        Sources may lie inside the target: all are read before any is written.
        """
        for part in (*self.k, *self.v):
            part[:, base : base + len(src_cells)] = part[:, src_cells].copy()

    def read(self, start: int, length: int) -> tuple[FloatArray, FloatArray]:
        """K ``[n_kv_heads, length, head_dim]`` and V of a run, in float64: exact values, copied."""
        stop = start + length
        assert stop <= self.n_cells, f"cells up to {stop} are read, {self.n_cells} are held"
        k, v = ([part[:, start:stop] for part in parts] for parts in (self.k, self.v))
        return self.codecs[0].decoded(k), self.codecs[1].decoded(v)


def _grown(old: NDArray[Any], n_cells: int) -> NDArray[Any]:
    """Return ``old`` with room for more cells; new cells are 0."""
    new = np.zeros((old.shape[0], n_cells, old.shape[2]), old.dtype)
    new[:, : old.shape[1]] = old
    return new


class ExactPool:
    """A quantised pool with a few float32 cells beside it; see ``bookkeeping.cells.exact``."""

    def __init__(self, cells: Pool | BlockFirstPool, group: LayerGroup, n_exact: int) -> None:
        """Beside the pool ``cells``, ``n_exact`` exact cells."""
        self.cells = cells
        self.exact = Pool(
            group.n_kv_heads,
            group.head_dim,
            group.v_head_dim,
            capacity=n_exact,
            min_chunk=n_exact,
        )
        self.exact.ensure(n_exact)

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated for both."""
        return self.cells.size_bytes + self.exact.size_bytes

    def ensure(self, n_cells: int) -> None:
        """Hold at least so many cells; see :class:`Pool`."""
        self.cells.ensure(n_cells)

    def write_run(self, start: int, k: FloatArray, v: FloatArray) -> None:
        """Write consecutive cells; see :class:`Pool`."""
        self.cells.write_run(start, k, v)

    def scatter_rows(self, cells: IntArray, k: FloatArray, v: FloatArray) -> None:
        """Write cells anywhere; see :class:`Pool`."""
        self.cells.scatter_rows(cells, k, v)

    def gather_into(self, base: int, src_cells: IntArray) -> None:
        """Copy cells together, without the exact ones, which ``move_exact`` copies."""
        self.cells.gather_into(base, src_cells)

    def move_exact(self, src: IntArray, dst: IntArray) -> None:
        """Copy exact cells to others; all are read before any is written."""
        for part in (*self.exact.k, *self.exact.v):
            part[:, dst] = part[:, src].copy()

    def read(self, start: int, length: int) -> tuple[FloatArray, FloatArray]:
        """Return rows of one kind of cells; see :class:`Pool`."""
        if start >= BASE:
            return self.exact.read(start - BASE, length)
        return self.cells.read(start, length)


class FrozenRows:
    """One layer's K and V of a frozen prefix, in float64 with the stored values; read-only."""

    def __init__(self, k: FloatArray, v: FloatArray) -> None:
        """Take K ``[n_kv_heads, n, head_dim]`` and V."""
        self.k, self.v = k, v
        for part in (k, v):
            part.flags.writeable = False

    @property
    def size_bytes(self) -> int:
        """Bytes of both."""
        return int(self.k.nbytes + self.v.nbytes)

    def read(self, start: int, length: int) -> tuple[FloatArray, FloatArray]:
        """Return K and V of a run; see :class:`Pool`."""
        return self.k[:, start : start + length], self.v[:, start : start + length]


class GroupBlocks:
    """K and V of all layers of a group, block-first: what one block holds lies together.

    Every part of ``k`` and ``v`` is ``[n_blocks, n_layers, n_kv_heads, block_size, ...]``. Growth
    keeps every byte and every block's index.
    """

    def __init__(self, group: LayerGroup, config: CacheConfig) -> None:
        """Create the blocks of a group without any."""
        self.block_size = config.block_size
        self.min_chunk = config.pool_chunk
        self.max_blocks = config.capacity // config.block_size
        self.codecs = Codec(config.kv.k, group.head_dim), Codec(config.kv.v, group.v_head_dim)
        shape = (0, len(group.layers), group.n_kv_heads, config.block_size)
        self.k, self.v = (codec.empty(shape) for codec in self.codecs)

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells``; doubles, never past the capacity, never shrinks."""
        size, capacity = self.block_size, self.max_blocks * self.block_size
        assert n_cells <= capacity, f"{n_cells} cells asked of blocks for {capacity}"
        have = self.k[0].shape[0]
        if n_cells > have * size:
            n_blocks = -(-grown_size(n_cells, have * size, self.min_chunk, capacity) // size)
            for parts in (self.k, self.v):
                for i, old in enumerate(parts):
                    parts[i] = np.zeros((n_blocks, *old.shape[1:]), old.dtype)
                    parts[i][:have] = old


class BlockFirstPool:
    """One layer's part of some blocks, with the methods and the shapes of :class:`Pool`."""

    def __init__(self, blocks: GroupBlocks, index: int) -> None:
        """Create the part of the group's layer ``index``; the blocks are shared with the others."""
        self.blocks = blocks
        self.index = index

    @property
    def n_cells(self) -> int:
        """Cells that are allocated."""
        return int(self.blocks.k[0].shape[0]) * self.blocks.block_size

    @property
    def size_bytes(self) -> int:
        """The layer's share of the bytes that are allocated."""
        n_layers = int(self.blocks.k[0].shape[1])
        return int(sum(part.nbytes for part in (*self.blocks.k, *self.blocks.v))) // n_layers

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells`` cells, in every layer of the group."""
        self.blocks.ensure(n_cells)

    def write_run(self, start: int, k: FloatArray, v: FloatArray) -> None:
        """Write consecutive cells; see :class:`Pool`."""
        self.scatter_rows(np.arange(start, start + k.shape[1]), k, v)

    def scatter_rows(self, cells: IntArray, k: FloatArray, v: FloatArray) -> None:
        """Write cells anywhere; see :class:`Pool`."""
        sides = zip((self.blocks.k, self.blocks.v), self.blocks.codecs, (k, v), strict=True)
        for parts, codec, rows in sides:
            for part, stored in zip(parts, codec.encoded(rows), strict=True):
                self._put(part, cells, stored)

    def gather_into(self, base: int, src_cells: IntArray) -> None:
        """Copy cells together; see :class:`Pool`."""
        target = np.arange(base, base + len(src_cells))
        for part in (*self.blocks.k, *self.blocks.v):
            self._put(part, target, self._rows(part, src_cells))

    def read(self, start: int, length: int) -> tuple[FloatArray, FloatArray]:
        """Return rows; see :class:`Pool`."""
        assert start + length <= self.n_cells, f"{start + length} cells, {self.n_cells} are held"
        cells = np.arange(start, start + length)
        sides = zip((self.blocks.k, self.blocks.v), self.blocks.codecs, strict=True)
        k, v = (codec.decoded([self._rows(p, cells) for p in parts]) for parts, codec in sides)
        return k, v

    def _put(self, part: NDArray[Any], cells: IntArray, stored: NDArray[Any]) -> None:
        """Store ``[n_kv_heads, len(cells), ...]``, cell by cell."""
        for i, cell in enumerate(cells):
            block, at = divmod(int(cell), self.blocks.block_size)
            part[block, self.index, :, at] = stored[:, i]

    def _rows(self, part: NDArray[Any], cells: IntArray) -> NDArray[Any]:
        """Copy rows ``[n_kv_heads, len(cells), ...]``, as they are stored."""
        blocks, at = np.divmod(cells, self.blocks.block_size)
        return part[blocks, self.index, :, at].transpose(1, 0, 2)
