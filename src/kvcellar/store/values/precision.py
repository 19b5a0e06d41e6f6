"""Rows in 8 bits where the pool has floats, and back: for tiers that trade exactness for room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.reference.byte_floats import from_bytes
from kvcellar.backends.reference.quantise import QuantisedRows, dequantise, quantise
from kvcellar.kv_dtype import KvDtype, SideDtype
from kvcellar.store.values.layout import Array, GroupRows, Side
from kvcellar.types import LayerGroup

EXACT, INT8 = "exact", "int8"
PRECISIONS = (EXACT, INT8)
"""How a tier holds float rows: as they are, or in 8 bits. Rows of few bits stay what they are."""


def stored_dtype(kv: KvDtype, precision: str) -> KvDtype:
    """Return the storage types of a tier with this precision."""
    if precision == EXACT:
        return kv
    k, v = (side if side.bits <= 8 else SideDtype("int8") for side in (kv.k, kv.v))
    return KvDtype(k, v)


def to_precision(rows: GroupRows, group: LayerGroup, have: KvDtype, want: KvDtype) -> GroupRows:
    """Convert rows of a pool's type to the type of a tier."""
    sides = zip(rows, (have.k, have.v), (want.k, want.v), _dims(group), strict=True)
    return GroupRows(*(_down(side, old, new, dim) for side, old, new, dim in sides))


def from_precision(rows: GroupRows, group: LayerGroup, have: KvDtype, want: KvDtype) -> GroupRows:
    """Convert rows of a tier's type to the type of a pool."""
    sides = zip(rows, (have.k, have.v), (want.k, want.v), _dims(group), strict=True)
    return GroupRows(*(_up(side, old, new, dim) for side, old, new, dim in sides))


def as_floats(rows: GroupRows, group: LayerGroup, have: KvDtype) -> tuple[Array, Array]:
    """Return the float32 numbers ``[n_layers, n_kv_heads, n_tok, dim]`` of K and of V."""
    single = SideDtype("float32")
    sides = zip(rows, (have.k, have.v), _dims(group), strict=True)
    k, v = (_up(side, old, single, dim).data for side, old, dim in sides)
    return k, v


def _dims(group: LayerGroup) -> tuple[int, int]:
    return group.head_dim, group.v_head_dim


def _down(side: Side, have: SideDtype, want: SideDtype, dim: int) -> Side:
    if have == want:
        return side
    return Side(*quantise(_floats(side, have), want.bits, want.group_of(dim)))


def _up(side: Side, have: SideDtype, want: SideDtype, dim: int) -> Side:
    if have == want:
        return side
    if not have.is_quantised:
        return Side(_floats(side, have).astype(want.name, copy=False))
    assert side.scales is not None and side.biases is not None
    floats = dequantise(QuantisedRows(side.data, side.scales, side.biases), have.bits, dim)
    if want.name == "bfloat16":
        return Side(_narrowed(floats))
    return Side(floats.astype(want.name, copy=False))


def _floats(side: Side, have: SideDtype) -> Array:
    """Return the numbers of a side that is not quantised."""
    if have.byte_float is not None:
        return from_bytes(side.data, have.byte_float)
    return _widened(side.data) if have.name == "bfloat16" else side.data


def _widened(bits: Array) -> NDArray[np.float32]:
    """Return the numbers whose bfloat16 bits are given."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrowed(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16, ties to even; the numbers are finite."""
    bits = floats.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)
