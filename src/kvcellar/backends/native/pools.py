"""K and V of layers in NumPy arrays, where the CPU kernel reads and writes them.

A cell's rows lie in arrays ``[n_blocks, n_layers, n_kv_heads, block_size, width]``: all cells of a
layer in one block that grows, so that a head's history is contiguous, or the cells of a block
together for all layers of a group. A float side is one such array (bfloat16 as its bits in uint16);
a quantised one is two, the packed numbers, and a scale and a bias for each group of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.host_rows import GroupParts, SideArrays, check_rows, empty_rows
from kvcellar.backends.reference.state_pools import StatePools
from kvcellar.bookkeeping.cells.exact import ExactCells, exact_cells
from kvcellar.cache import grown_size
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import ConfigError
from kvcellar.kernel import attend
from kvcellar.kv_dtype import KvDtype, SideDtype
from kvcellar.types import IntArray, LayerGroup, runs_of

Parts = tuple[NDArray[Any], ...]
"""One side's rows, K's or V's: arrays that share all axes but the last."""

_FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True)
class SideForm:
    """Form in which rows of one side, K or V, are stored.

    Attributes:
        dtype: the kernel's name of the storage type.
        dim: numbers of a row.
        widths: type and last axis of each array.
        group_size: numbers that share a scale and a bias; 0: they have none.
    """

    dtype: str
    dim: int
    widths: tuple[tuple[Any, int], ...]
    group_size: int

    @classmethod
    def of(cls, side: SideDtype, dim: int) -> SideForm:
        """Describe rows of ``dim`` numbers in a storage type.

        Raises:
            ConfigError: the kernel does not read it.
        """
        if side.is_quantised:
            widths = (np.uint8, side.packed_bytes(dim)), (np.float16, 2 * side.n_groups(dim))
            return cls(f"int{side.bits}", dim, widths, side.group_of(dim))
        if side.name not in _FLOATS:
            raise ConfigError(
                f"K and V in {side.name} are not read by the CPU kernel, which the native backend "
                f"attends with; choose int8, or the backend torch"
            )
        return cls(side.name, dim, ((_FLOATS[side.name], dim),), 0)

    def described(self, parts: Parts, dim: int, *, has_blocks: bool) -> attend.Side:
        """Describe arrays ``[n_blocks, n_kv_heads, block_size, width]`` to the kernel.

        Args:
            parts: the arrays.
            dim: numbers of a row as the kernel reads it.
            has_blocks: false where there is one block for all cells.
        """
        at = [int(array.ctypes.data) for array in parts]
        (blocks, heads, cells), *beside = [array.strides[:3] for array in parts]
        if not beside:
            return attend.Side(
                attend.Dtype[self.dtype], dim, at[0], heads, cells, blocks if has_blocks else 0
            )
        affine_blocks, affine_heads, affine_cells = beside[0]
        return attend.Side(
            attend.Dtype[self.dtype],
            dim,
            at[0],
            heads,
            cells,
            blocks if has_blocks else 0,
            at[1],
            affine_heads,
            affine_cells,
            affine_blocks if has_blocks else 0,
            self.group_size,
        )


def forms_of(group: LayerGroup, kv: KvDtype) -> tuple[SideForm, SideForm]:
    """Return the forms in which rows of K and of V of some layers are stored.

    Raises:
        ConfigError: the kernel does not read them, or not for latent rows.
    """
    k, v = SideForm.of(kv.k, group.head_dim), SideForm.of(kv.v, group.v_head_dim)
    is_alike = (k.dtype, k.group_size) == (v.dtype, v.group_size)
    if group.is_latent and not (is_alike and v.dim % 2 == 0):
        raise ConfigError(
            f"latent rows of {v.dim} and {k.dim} numbers would be stored each in its own way, "
            f"{v.dtype} in groups of {v.group_size} and {k.dtype} of {k.group_size}; the native "
            f"backend reads them as one, so choose the same type and group size for K and V, such "
            f"as int8:g32, or the backend torch"
        )
    return k, v


class CellArrays:
    """The K and V of some layers of a group, grown by doubling; writes are in place.

    Addresses change in ``ensure`` alone. Rows of latent layers lie one behind the other, each V row
    before its K row, so that the kernel reads both as one K row.
    """

    def __init__(
        self,
        group: LayerGroup,
        config: CacheConfig,
        n_layers: int,
        block_size: int = 0,
        n_frozen: int = 0,
    ) -> None:
        """Create arrays without cells.

        Args:
            group: the layers' shape.
            config: capacity and storage types.
            n_layers: layers whose cells lie together.
            block_size: cells of a block; 0: one block for all cells.
            n_frozen: cells for rows of a frozen prefix, before those of the capacity.

        Raises:
            ConfigError: the kernel does not read the storage types, or not for latent rows.
        """
        self.forms = forms_of(group, config.kv)
        self.block_size = block_size
        self.n_cells = 0
        """Cells that are allocated."""
        self.is_joined = group.is_latent
        self.most_cells = n_frozen + config.capacity
        """Cells that are held at most, but for the rest of a last block."""
        self._chunk = config.pool_chunk
        self._shape = n_layers, group.n_kv_heads
        self.k, self.v = self._empty(0)
        self._described: list[attend.Pool | None] = [None] * n_layers

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(array.nbytes for array in (*self.k, *self.v))

    def _empty(self, n_cells: int) -> tuple[Parts, Parts]:
        """Allocate arrays of any values for so many cells."""
        size = self.block_size or n_cells
        shape = (n_cells // size if size else 1, *self._shape, size)
        k, v = self.forms
        if not self.is_joined:
            made = [
                tuple(np.empty((*shape, n), dtype) for dtype, n in form.widths) for form in (k, v)
            ]
            return made[0], made[1]
        of_k, of_v = [], []
        for (dtype, n_k), (_, n_v) in zip(k.widths, v.widths, strict=True):
            both = np.empty((*shape, n_v + n_k), dtype)
            of_v.append(both[..., :n_v])
            of_k.append(both[..., n_v:])
        return tuple(of_k), tuple(of_v)

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells``, never past the capacity; rows that are there stay.

        Whatever it raises, the arrays are as they were.
        """
        have = self.n_cells
        if n_cells <= have:
            return
        wanted = grown_size(n_cells, have, self._chunk, self.most_cells)
        if self.block_size:
            wanted = -(-wanted // self.block_size) * self.block_size
        k, v = self._empty(wanted)
        for new, old in zip((*k, *v), (*self.k, *self.v), strict=True):
            if self.block_size:
                new[: old.shape[0]] = old
            else:
                new[:, :, :, :have] = old
        self.k, self.v, self.n_cells = k, v, wanted
        self._described = [None] * self._shape[0]

    def for_kernel(self, layer: int, exact: attend.Pool | None = None) -> attend.Pool:
        """Describe one layer to the kernel, until the arrays grow; ``exact`` is always the same."""
        found = self._described[layer]
        if found is None:
            (of_k, of_v), (k, v) = self.forms, self._of(layer)
            has_blocks = bool(self.block_size)
            v_side = of_v.described(v, of_v.dim, has_blocks=has_blocks)
            if self.is_joined:
                k_side = of_v.described(v, of_v.dim + of_k.dim, has_blocks=has_blocks)
            else:
                k_side = of_k.described(k, of_k.dim, has_blocks=has_blocks)
            heads = self._shape[1]
            found = attend.Pool(heads, self.n_cells, k_side, v_side, self.block_size, exact)
            self._described[layer] = found
        return found

    def _of(self, layer: int) -> tuple[Parts, Parts]:
        """Return views ``[n_blocks, n_kv_heads, block_size, width]`` of one layer's K and V."""
        return tuple(a[:, layer] for a in self.k), tuple(a[:, layer] for a in self.v)

    def take(self, layer: int, cells: IntArray) -> tuple[Parts, Parts]:
        """Copy the rows of some cells, as they are stored: arrays ``[n_kv_heads, n, width]``."""
        blocks, inside = self._places(cells)
        k, v = (
            tuple(array[blocks, :, inside].transpose(1, 0, 2) for array in parts)
            for parts in self._of(layer)
        )
        return k, v

    def put(self, layer: int, cells: IntArray, k: Parts, v: Parts) -> None:
        """Store what ``take`` gave in as many cells."""
        blocks, inside = self._places(cells)
        for parts, given in zip(self._of(layer), (k, v), strict=True):
            for array, rows in zip(parts, given, strict=True):
                array[blocks, :, inside] = rows.transpose(1, 0, 2)

    def _places(self, cells: IntArray) -> tuple[IntArray, IntArray]:
        if self.block_size:
            blocks, inside = np.divmod(cells, self.block_size)
            return blocks, inside
        return np.zeros_like(cells), cells

    def read_into(self, layer: int, cells: IntArray, k: Parts, v: Parts) -> None:
        """Copy rows of some cells to arrays ``[n_kv_heads, n, width]``, split as canonical ones."""
        if self.block_size:
            for given, stored in zip((k, v), self.take(layer, cells), strict=True):
                for array, rows in zip(given, _split(stored), strict=True):
                    array[...] = rows
            return
        for given, parts in zip((k, v), self._of(layer), strict=True):
            at = 0
            views = [view[0] for view in _split(parts)]
            for run in runs_of(cells):
                for array, view in zip(given, views, strict=True):
                    array[:, at : at + run.length] = view[:, run.start : run.stop]
                at += run.length

    def write_from(self, layer: int, cells: IntArray, k: SideArrays, v: SideArrays) -> None:
        """Store canonical arrays ``[n_kv_heads, n, width]`` in as many cells."""
        if self.block_size:
            self.put(layer, cells, _joined(k), _joined(v))
            return
        for given, parts in zip((k, v), self._of(layer), strict=True):
            at = 0
            views = [view[0] for view in _split(parts)]
            for run in runs_of(cells):
                for array, view in zip(given, views, strict=True):
                    view[:, run.start : run.stop] = array[:, at : at + run.length]
                at += run.length


def _split(parts: Parts) -> Iterator[NDArray[Any]]:
    """Yield the arrays of a side as rows leave a cache: scales and biases apart."""
    yield parts[0]
    if len(parts) == 2:
        yield parts[1][..., 0::2]
        yield parts[1][..., 1::2]


def _joined(arrays: SideArrays) -> Parts:
    """Return a side's arrays as they are stored, of those that came from outside."""
    if len(arrays) == 1:
        return arrays
    affine = np.stack([arrays[1], arrays[2]], axis=-1).reshape(*arrays[1].shape[:-1], -1)
    return arrays[0], affine


class FrozenRows:
    """One layer's rows of a frozen prefix, as they are stored; nobody writes to them."""

    def __init__(self, k: Parts, v: Parts) -> None:
        """Take arrays ``[n_kv_heads, n, width]``."""
        self.k, self.v = k, v
        self.n_cells = int(k[0].shape[1])

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(array.nbytes for array in (*self.k, *self.v))


class LayerRows:
    """One layer's K and V: its part of some arrays, and exact cells beside where there are any."""

    def __init__(
        self, arrays: CellArrays, index: int, frozen: FrozenRows | None, exact: CellArrays | None
    ) -> None:
        """Take arrays, which other layers may share.

        Args:
            arrays: of this layer and others.
            index: which of their layers it is.
            frozen: rows of a prefix, which take the first cells.
            exact: cells in float32, of this layer alone.
        """
        self.arrays, self.exact = arrays, exact
        self._index, self._frozen = index, frozen
        self.n_frozen = 0 if frozen is None else frozen.n_cells
        """Cells that a frozen prefix takes, before the cache's own."""

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated; of arrays that layers share, this one's part."""
        beside = 0 if self.exact is None else self.exact.size_bytes
        n_layers = int(self.arrays.k[0].shape[1])
        return self.arrays.size_bytes // n_layers + beside

    def ensure(self, n_cells: int) -> None:
        """Hold at least ``n_cells`` of the cache's own."""
        is_first = not self.arrays.n_cells
        self.arrays.ensure(n_cells + self.n_frozen)
        if self.exact is not None:
            self.exact.ensure(self.exact.most_cells)
        if is_first and self._frozen is not None:
            cells = np.arange(self.n_frozen, dtype=np.int64)
            self.arrays.put(self._index, cells, self._frozen.k, self._frozen.v)

    def for_kernel(self) -> attend.Pool:
        """Describe the layer to the kernel, until it grows."""
        exact = None if self.exact is None else self.exact.for_kernel(0)
        return self.arrays.for_kernel(self._index, exact)

    def move(self, base: int, src: IntArray) -> None:
        """Copy cells ``src`` to those from ``base`` on; all are read before any is written."""
        base, src = base + self.n_frozen, src + self.n_frozen
        if self.arrays.is_joined:  # the kernel would move K with V, then V
            cells = np.arange(base, base + len(src), dtype=np.int64)
            self.arrays.put(self._index, cells, *self.arrays.take(self._index, src))
        else:
            self.for_kernel().move_cells(base, src)

    def move_exact(self, src: IntArray, dst: IntArray) -> None:
        """Copy exact cells to others; all are read before any is written."""
        assert self.exact is not None, "the storage type has exact cells"
        self.exact.put(0, dst, *self.exact.take(0, src))

    def read_into(self, cells: IntArray, k: Parts, v: Parts) -> None:
        """Copy rows of some cells to canonical arrays ``[n_kv_heads, n, width]``."""
        self.arrays.read_into(self._index, cells + self.n_frozen, k, v)

    def write_from(self, cells: IntArray, k: SideArrays, v: SideArrays) -> None:
        """Store canonical arrays ``[n_kv_heads, n, width]`` in as many cells."""
        self.arrays.write_from(self._index, cells + self.n_frozen, k, v)

    def frozen(self, cells: IntArray) -> FrozenRows:
        """Copy the rows of some cells."""
        return FrozenRows(*self.arrays.take(self._index, cells + self.n_frozen))


class NativePools:
    """The bytes of every layer: the port that the bookkeeping moves cells by."""

    def __init__(self, config: CacheConfig, *, in_blocks: bool = False) -> None:
        """Create pools without cells.

        Args:
            config: groups, capacity, storage types.
            in_blocks: cells come in blocks, which ``config.layout`` says how to lay out.

        Raises:
            ConfigError: the kernel does not read the storage types, or the prefix was frozen in a
                cache of another backend.
        """
        self.config, self.groups = config, config.params.groups
        self.exact: list[ExactCells | None] = [exact_cells(g, config.kv) for g in self.groups]
        block_size = config.block_size if in_blocks and config.layout == "block_first" else 0
        found: dict[int, LayerRows] = {}
        for group, exact in zip(self.groups, self.exact, strict=True):
            frozen = [_frozen_of(config, layer) for layer in group.layers]
            n_frozen = frozen[0].n_cells if frozen[0] is not None else 0
            n_together = len(group.layers) if block_size else 1
            for i, layer in enumerate(group.layers):
                if i % n_together == 0:
                    arrays = CellArrays(group, config, n_together, block_size, n_frozen)
                beside = None
                if exact is not None:
                    n = exact.n_cells
                    floats = replace(
                        config, kv_dtype="float32", capacity=n, min_chunk=n, budget=None
                    )
                    beside = CellArrays(group, floats, 1)
                found[layer] = LayerRows(arrays, i % n_together, frozen[i], beside)
        self._stored = list(found.values())
        self.of_layer = [found[source] for source in config.params.sources]
        state = config.params.state
        self.states = None if state is None else StatePools(state, config)

    @property
    def size_bytes(self) -> int:
        """Bytes that the pools have allocated."""
        of_states = 0 if self.states is None else self.states.size_bytes
        return of_states + sum(rows.size_bytes for rows in self._stored)

    def move_cells(self, group: int, base: int, src_cells: IntArray) -> None:
        """Copy ``src_cells`` to ``[base, base + len)`` in every layer of the group."""
        exact = self.exact[group]
        copies = None if exact is None else exact.move(base, src_cells)
        for layer in self.groups[group].layers:
            rows = self.of_layer[layer]
            rows.ensure(base + len(src_cells))
            rows.move(base, src_cells)
            if copies is not None:
                rows.move_exact(*copies)

    def frozen_rows(self, layer: int, group: LayerGroup, cells: IntArray) -> FrozenRows:
        """Copy a layer's rows of some cells, for a frozen prefix."""
        return self.of_layer[layer].frozen(cells)

    def read_rows(self, group: LayerGroup, cells: IntArray) -> GroupParts:
        """Return copies of the rows of ``cells [n]`` in the group's layers."""
        k, v = empty_rows(group, len(cells), self.config.kv)
        for i, layer in enumerate(group.layers if len(cells) else ()):
            of_layer = (tuple(array[i] for array in side) for side in (k, v))
            self.of_layer[layer].read_into(cells, *of_layer)
        return k, v

    def write_rows(self, group: LayerGroup, cells: IntArray, given: GroupParts) -> None:
        """Store rows in ``cells [n]`` of the group's layers.

        Raises:
            ShapeError: not as many rows as cells; nothing was written.
        """
        check_rows(cells, given)
        for i, layer in enumerate(group.layers):
            rows = self.of_layer[layer]
            rows.ensure(int(cells.max()) + 1)
            rows.write_from(cells, *(tuple(array[i] for array in side) for side in given))


def _frozen_of(config: CacheConfig, layer: int) -> FrozenRows | None:
    """Return what a layer has of a frozen prefix.

    Raises:
        ConfigError: it was frozen in a cache of another backend.
    """
    if config.prefix is None:
        return None
    frozen = config.prefix.layers[layer]
    if not isinstance(frozen, FrozenRows):
        raise ConfigError(
            "the prefix was frozen in a cache of another backend; freeze it in one of native"
        )
    return frozen
