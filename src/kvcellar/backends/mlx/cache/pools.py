"""Bytes: one layer's K and V, head-major, grown by doubling, written in place.

An MLX array never changes; a write makes a new one. It takes over the bytes of the old one, if
nobody else holds that when the write is evaluated (a *donation*). So a part is held here and
nowhere else: it is written by ``part[...] = rows``, which puts the new array in the place of the
old one, and a view that a forward reads is gone when the forward has been evaluated. Who keeps what
``read`` gave makes the next write copy the pool.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from kvcellar.backends.mlx.cache.codecs import Codec, Parts, Stored, make_codec
from kvcellar.bookkeeping.cells.exact import BASE
from kvcellar.cache import grown_size
from kvcellar.cache_config import FROZEN, CacheConfig
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES, SideDtype
from kvcellar.types import LayerGroup


class PoolSide:
    """``[1, n_kv_heads, cells, dim]``: the K or the V side of a pool, as parts of a codec.

    Head-major, so that one head's history is contiguous; the leading 1 is attention's batch.
    """

    def __init__(self, n_heads: int, side: SideDtype, dim: int) -> None:
        """Create a side without cells."""
        self.n_heads = n_heads
        self.codec: Codec = make_codec(side, dim)
        self.parts: Parts = [
            mx.zeros((1, n_heads, 0, width), dtype=dtype) for dtype, width in self.codec.widths
        ]
        self.n_cells = 0
        """Cells that are allocated."""

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(part.nbytes for part in self.parts)

    def grow(self, n_cells: int) -> None:
        """Allocate ``n_cells`` and keep what is there."""
        for at, old in enumerate(self.parts):
            new = mx.zeros((1, self.n_heads, n_cells, old.shape[3]), dtype=old.dtype)
            if self.n_cells:
                new[:, :, : self.n_cells] = old
            self.parts[at] = new
        self.n_cells = n_cells

    def write_run(self, start: int, rows: mx.array) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in cells ``[start, start + T)``."""
        self.put_run(start, self.codec.encode(rows))

    def scatter_rows(self, cells: mx.array, rows: mx.array) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in ``cells [T]``."""
        self.put(cells, self.codec.encode(rows))

    def put_run(self, start: int, stored: Parts) -> None:
        """Store what ``take`` gave in cells from ``start`` on."""
        for part, rows in zip(self.parts, stored, strict=True):
            part[:, :, start : start + rows.shape[2]] = rows

    def put(self, cells: mx.array, stored: Parts) -> None:
        """Store what ``take`` gave in ``cells [T]``."""
        for part, rows in zip(self.parts, stored, strict=True):
            part[:, :, cells] = rows

    def take(self, cells: mx.array) -> Parts:
        """Copies of parts ``[1, n_kv_heads, len(cells), ...]``, as they are stored."""
        return [mx.take(part, cells, axis=2) for part in self.parts]

    def read(self, start: int, length: int) -> Stored:
        """Return ``[1, n_kv_heads, length, dim]``; no copy."""
        return self.codec.view([part[:, :, start : start + length] for part in self.parts])


class FloatSide(PoolSide):
    """A side of one float part: the same, without a detour through the codec."""

    def write_run(self, start: int, rows: mx.array) -> None:
        """Write rows in place; see :class:`PoolSide`."""
        self.parts[0][:, :, start : start + rows.shape[2]] = rows

    def read(self, start: int, length: int) -> mx.array:
        """Return rows; see :class:`PoolSide`."""
        return self.parts[0][:, :, start : start + length]


def make_side(n_heads: int, side: SideDtype, dim: int) -> PoolSide:
    """Create a side without cells."""
    return (FloatSide if side.name in FLOAT_KV_DTYPES else PoolSide)(n_heads, side, dim)


class Pool:
    """One layer's K and V bytes. Knows cells, no sequences."""

    def __init__(self, group: LayerGroup, config: CacheConfig) -> None:
        """Create a pool without cells."""
        self._config = config
        self.k = make_side(group.n_kv_heads, config.kv.k, group.head_dim)
        self.v = make_side(group.n_kv_heads, config.kv.v, group.v_head_dim)
        self.is_float = not config.kv.is_quantised
        """True if both sides are stored as floats."""

    @property
    def parts(self) -> Parts:
        """All arrays of both sides."""
        return [*self.k.parts, *self.v.parts]

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return self.k.size_bytes + self.v.size_bytes

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells``: doubles from ``min_chunk``, never past ``capacity``."""
        have = self.k.n_cells
        if n_cells > have:
            size = grown_size(n_cells, have, self._config.pool_chunk, self._config.capacity)
            self.k.grow(size)
            self.v.grow(size)

    def write_run(self, start: int, k: mx.array, v: mx.array) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in cells ``[start, start + T)``."""
        self.k.write_run(start, k)
        self.v.write_run(start, v)

    def scatter_rows(self, cells: mx.array, k: mx.array, v: mx.array) -> None:
        """Store rows ``[1, n_kv_heads, T, dim]`` in ``cells [T]``."""
        self.k.scatter_rows(cells, k)
        self.v.scatter_rows(cells, v)

    def put(self, cells: mx.array, k: Parts, v: Parts) -> None:
        """Store what ``take`` gave, in as many ``cells``."""
        self.k.put(cells, k)
        self.v.put(cells, v)

    def take(self, cells: mx.array) -> tuple[Parts, Parts]:
        """Copies of K's and V's parts of some cells, as they are stored."""
        return self.k.take(cells), self.v.take(cells)

    def copy(self, src: mx.array, dst: mx.array) -> None:
        """Copy cells to as many others; all are read before any is written."""
        rows = self.take(src)
        mx.eval(rows)  # a write in the same evaluation could find its pool still being read
        self.put(dst, *rows)

    def read(self, start: int, length: int) -> tuple[Stored, Stored]:
        """Return ``[1, n_kv_heads, length, dim]`` of K and V; no copy."""
        return self.k.read(start, length), self.v.read(start, length)

    def gather(self, cells: mx.array) -> tuple[Stored, Stored]:
        """Copies ``[1, n_kv_heads, len(cells), dim]`` of K and V."""
        k, v = self.take(cells)
        return self.k.codec.view(k), self.v.codec.view(v)


class ExactPool(Pool):
    """A quantised pool with float32 cells from ``BASE`` on: see ``bookkeeping.cells.exact``."""

    def __init__(self, group: LayerGroup, config: CacheConfig, n_exact: int) -> None:
        """Create a pool with ``n_exact`` exact cells beside; none are allocated yet."""
        super().__init__(group, config)
        self.exact = Pool(
            group,
            replace(config, kv_dtype="float32", capacity=n_exact, min_chunk=n_exact, budget=None),
        )
        self._n_exact = n_exact

    @property
    def parts(self) -> Parts:
        """All arrays of both pools."""
        return [*super().parts, *self.exact.parts]

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated for both."""
        return super().size_bytes + self.exact.size_bytes

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells``, and all exact ones."""
        super().ensure(n_cells)
        self.exact.ensure(self._n_exact)

    def read(self, start: int, length: int) -> tuple[Stored, Stored]:
        """Return rows of one kind of cells; see :class:`Pool`."""
        if start >= BASE:
            return self.exact.read(start - BASE, length)
        return super().read(start, length)


class PrefixedPool(Pool):
    """A pool beside which a frozen prefix is read, from the index ``FROZEN`` on."""

    def __init__(self, group: LayerGroup, config: CacheConfig, frozen: object) -> None:
        """Create an empty pool beside one layer of the prefix.

        Raises:
            ConfigError: another backend has frozen it.
        """
        super().__init__(group, config)
        if not isinstance(frozen, Pool):
            raise ConfigError(
                "the prefix was frozen in a cache of another backend; freeze it in one of mlx"
            )
        self._frozen = frozen

    def read(self, start: int, length: int) -> tuple[Stored, Stored]:
        """Return views of one kind of cells; see :class:`Pool`."""
        if start >= FROZEN:
            return self._frozen.read(start - FROZEN, length)
        return super().read(start, length)


def frozen_rows(pool: Pool, cells: mx.array, group: LayerGroup, config: CacheConfig) -> Pool:
    """Copy a layer's rows of some cells into a pool that nobody writes to."""
    frozen = Pool(group, replace(config, prefix=None, budget=None))
    k, v = pool.take(cells)
    for side, parts in ((frozen.k, k), (frozen.v, v)):
        side.parts, side.n_cells = list(parts), cells.size
    mx.eval(frozen.parts)
    return frozen
