"""Codecs: rows of K or V to MLX arrays of bytes, and back.

A side of a pool is a list of *parts*: arrays that share all axes but the last. The float types have
one, fp8 as bytes; the quantised ones have three, as ``mx.quantize`` lays them out: the packed
numbers in words of 32 bits, the scales and the biases. The numbers in them are those of
:mod:`kvcellar.kv_dtype`, so their bytes are the same as on any other backend;
``mx.quantized_matmul`` reads them where they lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import GROUP_SIZES, SideDtype, rotated_block

FLOAT_DTYPES = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
}

Parts = list[mx.array]


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows as they are stored, read as ``[1, n_kv_heads, L, dim]``.

    Attributes:
        packed: ``[1, n_kv_heads, L, words]`` uint32, or bytes where MLX has no such group size.
        scales: ``[1, n_kv_heads, L, n_groups]`` float16.
        biases: as the scales.
        dim: numbers of a row.
        bits: of one number, 8 or 4.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array
    dim: int
    bits: int

    @property
    def length(self) -> int:
        """Rows per head."""
        return int(self.packed.shape[2])

    @property
    def group_size(self) -> int:
        """Numbers that share a scale and a bias."""
        return self.dim // int(self.scales.shape[-1])

    def numbers(self, dtype: mx.Dtype) -> mx.array:
        """Return ``[1, n_kv_heads, L, dim]`` by way of float32; rotated where the pool rotates."""
        scales, biases = self.scales.astype(mx.float32), self.biases.astype(mx.float32)
        if self.packed.dtype == mx.uint32:
            rows = mx.dequantize(
                self.packed, scales, biases, group_size=self.group_size, bits=self.bits
            )
            return rows.astype(dtype)
        packed = self.packed
        if self.bits == 4:
            packed = mx.stack([packed & 15, packed >> 4], axis=-1).flatten(-2)[..., : self.dim]
        grouped = mx.unflatten(packed.astype(mx.float32), -1, (-1, self.group_size))
        return (grouped * scales[..., None] + biases[..., None]).flatten(-2).astype(dtype)

    def times(self, x: mx.array, *, transpose: bool) -> mx.array:
        """Multiply ``x @ rows.T`` or ``x @ rows`` per head, in float32.

        Args:
            x: ``[1, n_kv_heads, n, dim]``, or ``[1, n_kv_heads, n, L]``.
            transpose: whether the rows are.
        """
        x = x.astype(mx.float32)
        if self.packed.dtype == mx.uint32:
            return mx.quantized_matmul(
                x,
                self.packed,
                self.scales,
                self.biases,
                transpose=transpose,
                group_size=self.group_size,
                bits=self.bits,
            )
        rows = self.numbers(mx.float32)
        return x @ (rows.swapaxes(-1, -2) if transpose else rows)


Stored = mx.array | Quantised
"""Rows as attention gets them."""


class FloatCodec:
    """One part of a float type."""

    def __init__(self, dtype: mx.Dtype, dim: int) -> None:
        """Create a codec for rows of ``dim`` numbers."""
        self.dim = dim
        self.dtype = dtype
        self.widths: tuple[tuple[mx.Dtype, int], ...] = ((dtype, dim),)

    def encode(self, rows: mx.array) -> Parts:
        """Return the rows in the storage type."""
        return [rows.astype(self.dtype)]

    def view(self, parts: Parts) -> mx.array:
        """Return the one part."""
        return parts[0]


class Fp8Codec:
    """One part: bytes of fp8, which is no type of MLX's arrays."""

    def __init__(self, dim: int) -> None:
        """Create a codec for rows of ``dim`` numbers."""
        self.dim = dim
        self.widths: tuple[tuple[mx.Dtype, int], ...] = ((mx.uint8, dim),)

    def encode(self, rows: mx.array) -> Parts:
        """Round; NaN, which ``mx.to_fp8`` makes the largest number, stays NaN."""
        return [mx.where(mx.isnan(rows), mx.array(0x7F, mx.uint8), mx.to_fp8(rows))]

    def view(self, parts: Parts) -> mx.array:
        """Return the numbers, which bfloat16 holds exactly."""
        return mx.from_fp8(parts[0], mx.bfloat16)


class AffineCodec:
    """Packed integers, scales and biases."""

    def __init__(self, side: SideDtype, dim: int) -> None:
        """Create a codec for rows of ``dim`` numbers."""
        self.dim = dim
        self.bits = side.bits
        self.group_size = side.group_of(dim)
        n_bytes, n_groups = side.packed_bytes(dim), side.n_groups(dim)
        self.is_native = self.group_size in GROUP_SIZES
        """True if MLX's own functions read it; other rows are bytes."""
        packed = (mx.uint32, n_bytes // 4) if self.is_native else (mx.uint8, n_bytes)
        self.widths: tuple[tuple[mx.Dtype, int], ...] = (
            packed,
            (mx.float16, n_groups),
            (mx.float16, n_groups),
        )

    def encode(self, rows: mx.array) -> Parts:
        """Quantise."""
        packed, scales, biases = quantise(rows, self.bits, self.group_size)
        return [packed.view(mx.uint32) if self.is_native else packed, scales, biases]

    def view(self, parts: Parts) -> Quantised:
        """Return all parts."""
        return Quantised(parts[0], parts[1], parts[2], self.dim, self.bits)


Codec = FloatCodec | Fp8Codec | AffineCodec
"""Storage of the rows of one side, K or V; ``widths`` has the type and last axis of each part."""


def make_codec(side: SideDtype, dim: int) -> Codec:
    """Make the codec of a side for rows of ``dim`` numbers."""
    if side.is_quantised:
        return AffineCodec(side, dim)
    if side.name == "fp8":
        return Fp8Codec(dim)
    if side.byte_float is not None:
        raise ConfigError(f"MLX stores no K and V in {side.name}; choose fp8, or another backend")
    return FloatCodec(FLOAT_DTYPES[side.name], dim)


def quantise(rows: mx.array, bits: int, group_size: int) -> Parts:
    """Quantise ``rows [..., dim]`` to packed bytes, scales and biases, as the reference backend."""
    n_most = 2**bits - 1
    grouped = mx.unflatten(rows.astype(mx.float32), -1, (-1, group_size))
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    biases = (low - mx.abs(low) * (1 / 1024)).astype(mx.float16)
    start = biases.astype(mx.float32)
    scales = ((high - start) * (1025 / 1024) * (1 / n_most)).astype(mx.float16)
    steps = scales.astype(mx.float32)
    inverse = mx.where(steps > 0, 1.0 / steps, 0.0)
    q = mx.clip(mx.round((grouped - start[..., None]) * inverse[..., None]), 0, n_most)
    packed = mx.where(mx.isnan(q), 0.0, q).astype(mx.uint8).flatten(-2)
    if bits == 4:
        low_bits, high_bits = packed[..., 0::2], packed[..., 1::2] << 4
        if packed.shape[-1] % 2:
            high_bits = mx.concatenate([high_bits, mx.zeros_like(low_bits[..., :1])], axis=-1)
        packed = low_bits | high_bits
    return [packed, scales, biases]


def rotate_queries(q: mx.array, dim: int) -> mx.array:
    """Turn the last ``dim`` numbers of queries as K rows are; those before are latent ones."""
    turned, latent = rotate(q[..., -dim:]), q[..., :-dim]
    return mx.concatenate([latent, turned], axis=-1) if latent.shape[-1] else turned


def rotate(rows: mx.array) -> mx.array:
    """Turn ``rows [..., dim]`` as :mod:`kvcellar.kv_dtype` says: the reference's numbers."""
    dim = rows.shape[-1]
    size = rotated_block(dim)
    rows = rows.astype(mx.float32)
    half = 1
    while half < size:
        pairs = mx.unflatten(rows, -1, (-1, 2, half))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        rows = mx.stack([first + second, first - second], axis=-2).flatten(-3)
        half *= 2
    return rows * (1 / math.sqrt(size))
