"""Codecs: rows of K or V to tensors of bytes, and back.

A side of a pool is a tuple of *parts*: tensors that share all axes but the last. The float types
have one, those of 8 bits as bytes; the quantised ones have two, the packed numbers and their scales
and biases.
Addressing, growth and moves work on parts and never look inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.kv_dtype import ByteFloat, SideDtype, rotated_block

FLOAT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

Parts = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows as they are stored, read as ``[1, n_kv_heads, L, dim]``.

    Attributes:
        packed: ``[1, n_kv_heads, L, packed_bytes]`` uint8.
        affine: ``[1, n_kv_heads, L, 2 * n_groups]`` float16: a scale and a bias per group.
        dim: numbers of a row.
        bits: of one number, 8 or 4.
    """

    packed: Tensor
    affine: Tensor
    dim: int
    bits: int

    @property
    def shape(self) -> torch.Size:
        """That of the rows which are stored here."""
        return torch.Size((*self.packed.shape[:-1], self.dim))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored bytes; attention never computes in it."""
        return self.packed.dtype

    def narrow(self, dim: int, start: int, length: int) -> Quantised:
        """Return views of ``length`` rows along axis ``dim``, which is not the last."""
        packed = self.packed.narrow(dim, start, length)
        affine = self.affine.narrow(dim, start, length)
        return Quantised(packed, affine, self.dim, self.bits)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers ``[1, n_kv_heads, L, dim]``; rotated where the pool rotates."""
        return dequantise(self.packed, self.affine, self.bits, self.dim, dtype)


@dataclass(frozen=True, slots=True)
class ByteRows:
    """Rows of floats of 8 bits as they are stored, read as ``[1, n_kv_heads, L, dim]``.

    Attributes:
        stored: their bytes, uint8, of that shape.
        floats: torch's type for them.
    """

    stored: Tensor
    floats: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """That of the rows which are stored here."""
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored bytes; attention never computes in it."""
        return self.stored.dtype

    def narrow(self, dim: int, start: int, length: int) -> ByteRows:
        """Return views of ``length`` rows along axis ``dim``, which is not the last."""
        return ByteRows(self.stored.narrow(dim, start, length), self.floats)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers ``[1, n_kv_heads, L, dim]``, which all three float types hold."""
        return self.stored.view(self.floats).to(dtype)


Stored = Tensor | Quantised | ByteRows
"""Rows as attention gets them: ``shape``, ``dtype``, ``narrow`` and ``to`` work on all."""


class FloatCodec:
    """One part of a float type."""

    def __init__(self, dtype: torch.dtype, dim: int) -> None:
        """Create a codec for rows of ``dim`` numbers."""
        self.dim = dim
        self.dtype = dtype
        self.widths: tuple[tuple[torch.dtype, int], ...] = ((dtype, dim),)

    def encode(self, rows: Tensor) -> Parts:
        """Return the rows in the storage type."""
        return (rows.to(self.dtype),)

    def view(self, parts: Parts) -> Tensor:
        """Return the one part."""
        return parts[0]


class ByteFloatCodec:
    """One part: floats of 8 bits as bytes, which torch moves and copies on every device."""

    def __init__(self, form: ByteFloat, dim: int) -> None:
        """Create a codec for rows of ``dim`` numbers."""
        self.form = form
        self.floats: torch.dtype = getattr(torch, form.torch)
        self.dim = dim
        self.widths: tuple[tuple[torch.dtype, int], ...] = ((torch.uint8, dim),)

    def encode(self, rows: Tensor) -> Parts:
        """Round; what is too large becomes the largest, also where torch's cast makes it NaN."""
        bounded = rows.float().clamp(-self.form.most, self.form.most)
        return (bounded.to(self.floats).view(torch.uint8),)

    def view(self, parts: Parts) -> ByteRows:
        """Return the one part."""
        return ByteRows(parts[0], self.floats)


class AffineCodec:
    """Packed integers, scales and biases, as :mod:`kvcellar.kv_dtype` defines them."""

    def __init__(self, side: SideDtype, dim: int) -> None:
        """Create a codec for rows of ``dim`` numbers."""
        self.dim = dim
        self.bits = side.bits
        self.group_size = side.group_of(dim)
        n_groups = side.n_groups(dim)
        self.widths: tuple[tuple[torch.dtype, int], ...] = (
            (torch.uint8, side.packed_bytes(dim)),
            (torch.float16, 2 * n_groups),
        )

    def encode(self, rows: Tensor) -> Parts:
        """Quantise."""
        return quantise(rows.float(), self.bits, self.group_size)

    def view(self, parts: Parts) -> Quantised:
        """Both parts."""
        return Quantised(parts[0], parts[1], self.dim, self.bits)


Codec = FloatCodec | ByteFloatCodec | AffineCodec
"""Storage of the rows of one side, K or V; ``widths`` has the type and last axis of each part."""


def make_codec(side: SideDtype, dim: int) -> Codec:
    """Make the codec of a side for rows of ``dim`` numbers."""
    if side.is_quantised:
        return AffineCodec(side, dim)
    if side.byte_float is not None:
        return ByteFloatCodec(side.byte_float, dim)
    return FloatCodec(FLOAT_DTYPES[side.name], dim)


def quantise(rows: Tensor, bits: int, group_size: int) -> Parts:
    """Quantise ``rows [..., dim]`` in float32 to ``(packed, affine)``, as the reference backend."""
    n_most = 2**bits - 1
    grouped = rows.unflatten(-1, (-1, group_size))
    low, high = grouped.aminmax(dim=-1)
    biases = (low - low.abs() * (1 / 1024)).to(torch.float16)
    start = biases.float()
    scales = ((high - start) * (1025 / 1024) * (1 / n_most)).to(torch.float16)
    steps = scales.float()
    inverse = torch.where(steps > 0, steps.reciprocal(), 0.0)
    q = ((grouped - start.unsqueeze(-1)) * inverse.unsqueeze(-1)).round_().clamp_(0, n_most)
    packed = q.nan_to_num_(0.0).to(torch.uint8).flatten(-2)
    if bits == 4:
        dim = packed.shape[-1]
        low_bits = packed[..., 0::2].clone()
        low_bits[..., : dim // 2] |= packed[..., 1::2] << 4
        packed = low_bits
    return packed, torch.stack([scales, biases], dim=-1).flatten(-2)


def dequantise(packed: Tensor, affine: Tensor, bits: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers ``[..., dim]`` of what ``quantise`` gave, computed in float32."""
    if bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[..., :dim]
    pairs = affine.float().unflatten(-1, (-1, 2))
    grouped = packed.float().unflatten(-1, (pairs.shape[-2], -1))
    rows: Tensor = grouped.mul_(pairs[..., :1]).add_(pairs[..., 1:]).flatten(-2).to(dtype)
    return rows


def rotate_queries(q: Tensor, dim: int) -> Tensor:
    """Turn the last ``dim`` numbers of queries as K rows are; those before are latent ones."""
    turned, latent = rotate(q[..., -dim:]), q[..., :-dim]
    return torch.cat((latent, turned), dim=-1) if latent.shape[-1] else turned


def rotate(rows: Tensor) -> Tensor:
    """Turn ``rows [..., dim]`` as :mod:`kvcellar.kv_dtype` says: the reference's numbers."""
    dim = rows.shape[-1]
    size = rotated_block(dim)
    half = 1
    while half < size:
        first, second = rows.unflatten(-1, (-1, 2, half)).unbind(-2)
        rows = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    return rows * (1 / math.sqrt(size))
