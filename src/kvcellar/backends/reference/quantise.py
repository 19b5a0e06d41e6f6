"""Affine quantisation in NumPy: the definition in :mod:`kvcellar.kv_dtype`, step by step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


class QuantisedRows(NamedTuple):
    """Rows as they are stored.

    Attributes:
        packed: ``[..., packed_bytes]`` uint8.
        scales: ``[..., n_groups]`` float16.
        biases: ``[..., n_groups]`` float16.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float16]
    biases: NDArray[np.float16]


def quantise(rows: NDArray[Any], bits: int, group_size: int) -> QuantisedRows:
    """Quantise ``rows [..., dim]``; ``group_size`` divides ``dim``, ``bits`` is 8 or 4."""
    one = np.float32
    shape = (*rows.shape[:-1], rows.shape[-1] // group_size, group_size)
    grouped = rows.astype(np.float32).reshape(shape)  # also where there are no rows
    low, high = grouped.min(-1), grouped.max(-1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        biases = (low - np.abs(low) * one(1 / 1024)).astype(np.float16)
        span = (high - biases.astype(np.float32)) * one(1025 / 1024)
        scales = (span * one(1 / (2**bits - 1))).astype(np.float16)
        steps = scales.astype(np.float32)
        inverse = np.where(steps > 0, one(1) / steps, one(0))
        q = np.rint((grouped - biases.astype(np.float32)[..., None]) * inverse[..., None])
        q = np.clip(np.nan_to_num(q, posinf=0.0), 0, 2**bits - 1).astype(np.uint8)
    return QuantisedRows(_pack(q.reshape(rows.shape), bits), scales, biases)


def dequantise(rows: QuantisedRows, bits: int, dim: int) -> FloatArray:
    """The float32 numbers ``[..., dim]`` that quantised rows stand for."""
    q = _unpack(rows.packed, bits, dim).astype(np.float32)
    n_groups = rows.scales.shape[-1]
    grouped = q.reshape(*q.shape[:-1], n_groups, dim // n_groups)
    scales, biases = rows.scales.astype(np.float32), rows.biases.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return (grouped * scales[..., None] + biases[..., None]).reshape(q.shape)


def hadamard(dim: int) -> FloatArray:
    """The matrix ``H [dim, dim]`` that turns a row ``x`` into ``x @ H``; its own inverse.

    Sylvester's Hadamard matrix, scaled; where ``dim`` is no power of two, one per block of the
    largest power of two that divides it.
    """
    size = dim & -dim
    block = np.ones((1, 1), np.float32)
    while block.shape[0] < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(dim // size, dtype=np.float32), block) / np.float32(np.sqrt(size))


def _pack(q: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return q
    packed = q[..., 0::2].copy()
    packed[..., : q.shape[-1] // 2] |= q[..., 1::2] << 4
    return packed


def _unpack(packed: NDArray[np.uint8], bits: int, dim: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    q: NDArray[np.uint8] = both.reshape(*packed.shape[:-1], -1)[..., :dim]
    return q
