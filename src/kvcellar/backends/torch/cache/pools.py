"""Bytes: one layer's K and V, head-major, grown by doubling, written in place.

Float and quantised rows differ in their codec alone; where they lie is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.backends.torch.cache import kernel, memory
from kvcellar.backends.torch.cache.codecs import (
    FLOAT_DTYPES,
    Codec,
    FloatCodec,
    Parts,
    Stored,
    make_codec,
)
from kvcellar.cache import grown_size
from kvcellar.cache_config import CacheConfig
from kvcellar.kernel import attend
from kvcellar.kv_dtype import KvDtype, SideDtype
from kvcellar.types import LayerGroup


class PoolSide:
    """``[1, n_kv_heads, cells, dim]``: the K or the V side of a pool, as parts of a codec.

    Head-major, so that one head's history is contiguous; the leading 1 is attention's batch.
    """

    def __init__(self, n_heads: int, codec: Codec) -> None:
        """Create a side without cells; the device is that of the first rows that come."""
        self.n_heads = n_heads
        self.codec = codec
        self.parts: Parts = tuple(
            torch.empty((1, n_heads, 0, width), dtype=dtype) for dtype, width in codec.widths
        )
        self.n_cells = 0
        """Cells that are allocated."""

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(part.nbytes for part in self.parts)

    def grow(self, n_cells: int, device: torch.device) -> None:
        """Allocate ``n_cells`` and keep what is there."""
        self.parts, self.n_cells = self.grown(n_cells, device), n_cells

    def grown(self, n_cells: int, device: torch.device) -> Parts:
        """Return parts of ``n_cells`` with a copy of what is there; nothing is changed."""
        with torch.inference_mode(False):  # pools outlive any inference_mode block
            grown = []
            for old in self.parts:
                shape = (1, self.n_heads, n_cells, old.shape[3])
                new = memory.empty(shape, old.dtype, device)
                new[:, :, : self.n_cells] = old
                grown.append(new)
        return tuple(grown)

    def write_run(self, start: int, rows: Tensor) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in cells ``[start, start + T)``."""
        for part, stored in zip(self.parts, self.codec.encode(rows), strict=True):
            part.narrow(2, start, stored.shape[2]).copy_(stored)

    def scatter_rows(self, cells: Tensor, rows: Tensor) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in ``cells [T]``."""
        self.put(cells, self.codec.encode(rows))

    def put(self, cells: Tensor, stored: Parts) -> None:
        """Store what ``take`` gave in ``cells [T]``."""
        for part, rows in zip(self.parts, stored, strict=True):
            part.index_copy_(2, cells, rows)

    def take(self, cells: Tensor) -> Parts:
        """Copies of parts ``[1, n_kv_heads, len(cells), ...]``, as they are stored."""
        return tuple(part.index_select(2, cells) for part in self.parts)

    def move(self, base: int, src_cells: Tensor) -> None:
        """Copy ``src_cells [n]`` to cells ``[base, base + n)``; all are read before any write."""
        for part, rows in zip(self.parts, self.take(src_cells), strict=True):
            part.narrow(2, base, src_cells.shape[0]).copy_(rows)

    def read(self, start: int, length: int) -> Stored:
        """Return ``[1, n_kv_heads, length, dim]``; no copy."""
        return self.codec.view(tuple(part.narrow(2, start, length) for part in self.parts))


class FloatSide(PoolSide):
    """A side of one float part: the same, without a detour through the codec."""

    def write_run(self, start: int, rows: Tensor) -> None:
        """Write rows in place; see :class:`PoolSide`."""
        self.parts[0].narrow(2, start, rows.shape[2]).copy_(rows)

    def read(self, start: int, length: int) -> Tensor:
        """Return rows; see :class:`PoolSide`."""
        return self.parts[0].narrow(2, start, length)


def is_joined(group: LayerGroup, kv: KvDtype) -> bool:
    """Return true if a cell's latent and its rotary row lie one behind the other.

    So the CPU kernel reads both as one K row, and V as a part of it. It takes one storage type.
    """
    is_alike = group.is_latent and kv.k == kv.v and group.v_head_dim % 2 == 0
    if not is_alike or not kv.k.is_quantised:
        return is_alike
    return kv.k.group_of(group.head_dim) == kv.v.group_of(group.v_head_dim)


def grown_jointly(
    k: Parts, v: Parts, axis: int, n: int, device: torch.device
) -> tuple[Parts, Parts]:
    """Return parts of K and V with ``n`` along an axis, in which each K row lies behind its V row.

    They are views of one tensor, and hold what the parts given did.
    """
    both: list[tuple[Tensor, Tensor]] = []
    for of_k, of_v in zip(k, v, strict=True):
        shape = [*of_v.shape[:-1], of_v.shape[-1] + of_k.shape[-1]]
        shape[axis] = n
        new = memory.empty(tuple(shape), of_v.dtype, device)
        parts = new[..., of_v.shape[-1] :], new[..., : of_v.shape[-1]]
        for part, old in zip(parts, (of_k, of_v), strict=True):
            part.narrow(axis, 0, old.shape[axis]).copy_(old)
        both.append(parts)
    return tuple(part for part, _ in both), tuple(part for _, part in both)


def make_side(n_heads: int, side: SideDtype, dim: int) -> PoolSide:
    """Create a side without cells."""
    codec = make_codec(side, dim)
    return (FloatSide if isinstance(codec, FloatCodec) else PoolSide)(n_heads, codec)


class Placed(NamedTuple):
    """Tensors of a layer's K and V.

    Attributes:
        k: parts ``[1, n_kv_heads, cells, ...]``, or ``[n_blocks, n_kv_heads, block_size, ...]``.
        v: the same of V.
        codecs: of both.
        block_size: cells of a block; 0 for parts of the first shape.
    """

    k: Parts
    v: Parts
    codecs: tuple[Codec, Codec]
    block_size: int


class Pool:
    """One layer's K and V bytes. Knows cells, no sequences.

    Every write is in place: ``data_ptr`` changes in ``ensure`` alone.
    """

    def __init__(self, group: LayerGroup, config: CacheConfig) -> None:
        """Create a pool without cells."""
        self._config = config
        self.k = make_side(group.n_kv_heads, config.kv.k, group.head_dim)
        self.v = make_side(group.n_kv_heads, config.kv.v, group.v_head_dim)
        self.is_joined = is_joined(group, config.kv)
        """True if rows of V and K lie one behind the other; see :func:`is_joined`."""
        self.dtype = float_dtype(config.kv)
        """The float type that both sides store; None where there is none."""
        self._for_kernel: attend.Pool | None = None

    @property
    def n_cells(self) -> int:
        """Cells that are allocated: while they are as many, the bytes lie where they lie."""
        return self.k.n_cells

    @property
    def device(self) -> torch.device | None:
        """Device of the bytes; None before the first."""
        return self.k.parts[0].device if self.k.n_cells else None

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return self.k.size_bytes + self.v.size_bytes

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``: doubles from ``min_chunk``, never past ``capacity``.

        Whatever it raises, the pool is as it was.
        """
        have = self.k.n_cells
        if n_cells > have:
            size = grown_size(n_cells, have, self._config.pool_chunk, self._config.capacity)
            if self.is_joined:
                with torch.inference_mode(False):  # pools outlive any inference_mode block
                    parts = grown_jointly(self.k.parts, self.v.parts, 2, size, device)
            else:
                parts = self.k.grown(size, device), self.v.grown(size, device)
            self.k.parts, self.v.parts = parts  # both, or where memory has run out neither
            self.k.n_cells = self.v.n_cells = size
            self._for_kernel = None

    def for_kernel(self, exact: attend.Pool | None = None) -> attend.Pool:
        """Describe the pool to the CPU kernel, until it grows; ``exact`` is always the same."""
        if self._for_kernel is None:
            codecs = self.k.codec, self.v.codec
            parts = self.k.parts, self.v.parts
            self._for_kernel = kernel.make_pool(*parts, codecs, exact, is_joined=self.is_joined)
        return self._for_kernel

    def placed(self) -> Placed:
        """Return where the bytes lie, until the pool grows."""
        return Placed(self.k.parts, self.v.parts, (self.k.codec, self.v.codec), 0)

    def write_run(self, start: int, k: Tensor, v: Tensor) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in cells ``[start, start + T)``."""
        self.k.write_run(start, k)
        self.v.write_run(start, v)

    def scatter_rows(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in ``cells [T]`` (int64, on the pool's device)."""
        self.k.scatter_rows(cells, k)
        self.v.scatter_rows(cells, v)

    def put(self, cells: Tensor, k: Parts, v: Parts) -> None:
        """Store what ``take`` gave, in as many ``cells``."""
        self.k.put(cells, k)
        self.v.put(cells, v)

    def take(self, cells: Tensor) -> tuple[Parts, Parts]:
        """Copies of K's and V's parts of some cells, as they are stored."""
        return self.k.take(cells), self.v.take(cells)

    def gather_into(self, base: int, src_cells: Tensor) -> None:
        """Copy ``src_cells [n]`` to cells ``[base, base + n)``; all are read before any write."""
        self.k.move(base, src_cells)
        self.v.move(base, src_cells)

    def read(self, start: int, length: int) -> tuple[Stored, Stored]:
        """Views ``[1, n_kv_heads, length, dim]`` of K and V; no copy."""
        return self.k.read(start, length), self.v.read(start, length)

    def gather(self, cells: Tensor) -> tuple[Stored, Stored]:
        """Copies ``[1, n_kv_heads, len(cells), dim]`` of K and V."""
        k, v = self.take(cells)
        return self.k.codec.view(k), self.v.codec.view(v)


def float_dtype(kv: KvDtype) -> torch.dtype | None:
    """Return the float type that K and V both have; None where they differ or are quantised."""
    return FLOAT_DTYPES.get(kv.k.name) if kv.k.name == kv.v.name else None


class GroupBlocks:
    """All layers' K and V of a group, block-first: what one block holds lies together in memory.

    Every part of ``k`` and ``v`` is ``[n_blocks, n_layers, n_kv_heads, block_size, ...]``. Every
    write is in place: ``data_ptr`` changes in ``ensure`` alone.
    """

    def __init__(self, group: LayerGroup, config: CacheConfig) -> None:
        """Create the blocks of a group without any; the device is that of the first rows."""
        self.dtype = float_dtype(config.kv)
        self.is_joined = is_joined(group, config.kv)
        self.block_size = config.block_size
        self.n_layers = len(group.layers)
        self.codecs = (
            make_codec(config.kv.k, group.head_dim),
            make_codec(config.kv.v, group.v_head_dim),
        )
        self.device: torch.device | None = None
        self._shape = (self.n_layers, group.n_kv_heads, config.block_size)
        self._min_chunk = config.pool_chunk
        self._max_blocks = config.capacity // config.block_size
        self.k, self.v = (
            tuple(torch.empty((0, *self._shape, n), dtype=dtype) for dtype, n in codec.widths)
            for codec in self.codecs
        )

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``: doubles from ``min_chunk``, never past the capacity."""
        size = self.block_size
        have = self.k[0].shape[0]
        if n_cells <= have * size:
            return
        cells = grown_size(n_cells, have * size, self._min_chunk, self._max_blocks * size)
        self.device = device
        n_blocks = -(-cells // size)
        if self.is_joined:
            with torch.inference_mode(False):  # blocks outlive any inference_mode block
                self.k, self.v = grown_jointly(self.k, self.v, 0, n_blocks, device)
        else:
            self.k, self.v = (self._grown(parts, n_blocks, device) for parts in (self.k, self.v))

    def _grown(self, parts: Parts, n_blocks: int, device: torch.device) -> Parts:
        grown = []
        with torch.inference_mode(False):  # blocks outlive any inference_mode block
            for old in parts:
                shape = (n_blocks, *self._shape, old.shape[-1])
                new = memory.empty(shape, old.dtype, device)
                new[: old.shape[0]] = old
                grown.append(new)
        return tuple(grown)


class BlockFirstPool:
    """One layer's part of some blocks, with the methods and the shapes of :class:`Pool`.

    Writes are in place. A read is a view only where it stays inside one block, else a copy.
    """

    def __init__(self, blocks: GroupBlocks, index: int) -> None:
        """Create the part of the group's layer ``index``; the blocks are shared with the others."""
        self._blocks = blocks
        self._index = index
        self.is_joined = blocks.is_joined
        self.dtype = blocks.dtype
        self._for_kernel: tuple[int, attend.Pool] | None = None

    @property
    def n_cells(self) -> int:
        """Cells that are allocated; see :class:`Pool`."""
        return self._blocks.k[0].shape[0] * self._blocks.block_size

    @property
    def device(self) -> torch.device | None:
        """Device of the bytes; None before the first."""
        return self._blocks.device

    @property
    def size_bytes(self) -> int:
        """The layer's share of the bytes that are allocated."""
        parts = (*self._blocks.k, *self._blocks.v)
        return sum(part.nbytes for part in parts) // self._blocks.n_layers

    def ensure(self, n_cells: int, device: torch.device) -> None:
        """Hold at least ``n_cells``, in every layer of the group."""
        self._blocks.ensure(n_cells, device)

    def for_kernel(self, exact: attend.Pool | None = None) -> attend.Pool:
        """Describe the pool to the CPU kernel; growth in any layer of the group moves the bytes."""
        n_blocks = self._blocks.k[0].shape[0]
        if self._for_kernel is None or self._for_kernel[0] != n_blocks:
            made = kernel.make_paged_pool(
                *self._layer(), self._blocks.codecs, exact, is_joined=self.is_joined
            )
            self._for_kernel = n_blocks, made
        return self._for_kernel[1]

    def placed(self) -> Placed:
        """Return where the layer's bytes lie, until the blocks grow."""
        return Placed(*self._layer(), self._blocks.codecs, self._blocks.block_size)

    def write_run(self, start: int, k: Tensor, v: Tensor) -> None:
        """Write consecutive cells, block by block; see :class:`Pool`."""
        for parts, stored in zip(self._layer(), self._encode(k, v), strict=True):
            self._write(start, parts, stored)

    def scatter_rows(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Write cells anywhere; see :class:`Pool`."""
        self.put(cells, *self._encode(k, v))

    def put(self, cells: Tensor, k: Parts, v: Parts) -> None:
        """Put stored rows; see :class:`Pool`."""
        blocks, inside = self._places(cells)
        for parts, stored in zip(self._layer(), (k, v), strict=True):
            for part, rows in zip(parts, stored, strict=True):
                part.transpose(0, 1)[:, blocks, inside] = rows[0]

    def take(self, cells: Tensor) -> tuple[Parts, Parts]:
        """Take stored rows; see :class:`Pool`."""
        blocks, inside = self._places(cells)
        k, v = (
            tuple(part.transpose(0, 1)[:, blocks, inside].unsqueeze(0) for part in parts)
            for parts in self._layer()
        )
        return k, v

    def gather_into(self, base: int, src_cells: Tensor) -> None:
        """Copy cells together; see :class:`Pool`."""
        for parts, stored in zip(self._layer(), self.take(src_cells), strict=True):
            self._write(base, parts, stored)

    def read(self, start: int, length: int) -> tuple[Stored, Stored]:
        """Return ``[1, n_kv_heads, length, dim]`` of K and V; a copy where it leaves one block."""
        first, inside = divmod(start, self._blocks.block_size)
        last = (start + max(1, length) - 1) // self._blocks.block_size
        k, v = (
            tuple(_heads_first(part[first : last + 1]).narrow(2, inside, length) for part in parts)
            for parts in self._layer()
        )
        return self._view(k, v)

    def gather(self, cells: Tensor) -> tuple[Stored, Stored]:
        """Gather cells; see :class:`Pool`."""
        return self._view(*self.take(cells))

    def _encode(self, k: Tensor, v: Tensor) -> tuple[Parts, Parts]:
        k_codec, v_codec = self._blocks.codecs
        return k_codec.encode(k), v_codec.encode(v)

    def _view(self, k: Parts, v: Parts) -> tuple[Stored, Stored]:
        k_codec, v_codec = self._blocks.codecs
        return k_codec.view(k), v_codec.view(v)

    def _layer(self) -> tuple[Parts, Parts]:
        """Return the parts of K and V, each ``[n_blocks, n_kv_heads, block_size, ...]``: views."""
        k, v = (
            tuple(part[:, self._index] for part in parts)
            for parts in (self._blocks.k, self._blocks.v)
        )
        return k, v

    def _write(self, start: int, parts: Parts, stored: Parts) -> None:
        """Store ``[1, n_kv_heads, T, ...]`` in cells from ``start`` on, block by block."""
        size, n = self._blocks.block_size, stored[0].shape[2]
        at = 0
        while at < n:
            block, inside = divmod(start + at, size)
            length = min(size - inside, n - at)
            for part, rows in zip(parts, stored, strict=True):
                part[block].narrow(1, inside, length).copy_(rows[0].narrow(1, at, length))
            at += length

    def _places(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        size = self._blocks.block_size
        return torch.div(cells, size, rounding_mode="floor"), torch.remainder(cells, size)


def _heads_first(blocks: Tensor) -> Tensor:
    """Turn ``[n, n_kv_heads, block_size, dim]`` to ``[1, n_kv_heads, n * block_size, dim]``."""
    n, n_heads, size, dim = blocks.shape
    return blocks.transpose(0, 1).reshape(1, n_heads, n * size, dim)
