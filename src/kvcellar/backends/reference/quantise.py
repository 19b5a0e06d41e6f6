"""Affine quantisation in NumPy: the definition in :mod:`kvcellar.kv_dtype`, step by step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcellar.kv_dtype import rotated_block

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
    """Return the float32 numbers ``[..., dim]`` that quantised rows stand for."""
    q = _unpack(rows.packed, bits, dim).astype(np.float32)
    n_groups = rows.scales.shape[-1]
    grouped = q.reshape(*q.shape[:-1], n_groups, dim // n_groups)
    scales, biases = rows.scales.astype(np.float32), rows.biases.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return (grouped * scales[..., None] + biases[..., None]).reshape(q.shape)


def rotate(rows: NDArray[Any]) -> FloatArray:
    """Turn ``rows [..., dim]`` as ``kv_dtype`` defines it; doing it twice changes nothing."""
    dim = rows.shape[-1]
    out = rows.astype(np.float32)
    size = rotated_block(dim)
    half = 1
    while half < size:
        pairs = out.reshape(*rows.shape[:-1], -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([first + second, first - second], axis=-2).reshape(rows.shape)
        half *= 2
    return out * np.float32(1 / math.sqrt(size))


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
