"""Storage types of K and V: names, what a row costs, and the arithmetic of the quantised ones.

Quantisation is affine, per group of consecutive numbers of a row (along head_dim), to unsigned
integers: ``x ~ scale * q + bias``. Every backend computes it by the same float32 operations, so the
same rows give the same bytes everywhere, and a snapshot taken on one restores on any other::

    low, high = min(group), max(group)
    bias  = float16(low - |low| / 1024)               # at most low: nothing is cut off below
    scale = float16((high - bias) * (1025 / 1024) / (2**bits - 1))
    q     = clip(round_half_even((x - bias) * (1 / scale)), 0, 2**bits - 1)    # 0 if scale is 0

The error of a number is at most half a scale and what float16 cannot say of very small scales.
``packed`` holds int8 values as bytes, and int4 values two to a byte, the first in the low bits.

fp8 is a float type of 8 bits without scales, E4M3 of the Open Compute Project's specification:
rounded to nearest, ties to even; what is larger than the largest number becomes that, NaN stays so.

``STORED_TYPES`` describes each type once; stores and options follow from it, and of backends what
floats of a byte need. docs/add-a-kv-dtype.md says what does not.

A rotated K is multiplied by a Hadamard matrix first, in blocks of the largest power of two that
divides the row: pairs of numbers ``(a, b)`` at distance 1, 2, 4, ... become ``(a + b, a - b)``, and
the result is multiplied by the square root of one over the block's length. Twice is nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvcellar.errors import ConfigError

FLOAT_KV_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the float storage types in which models compute, too."""

GROUP_SIZES = (32, 64, 128)
"""Numbers that may share a scale and a bias."""

MOST_EXACT = 4096
"""Tokens at either end of a history that can stay in float32."""

AFFINE_BYTES = 4
"""A float16 scale and a float16 bias."""


@dataclass(frozen=True, slots=True)
class ByteFloat:
    """Describes a float type of 8 bits: a sign, an exponent, and a fraction in the low bits.

    The exponent's bias is the usual one, half of its range; 127 behind the sign is NaN.

    Attributes:
        n_fraction: bits of the fraction.
        most: the largest number; what is larger is stored as that.
        torch: its name in torch.
    """

    n_fraction: int
    most: float
    torch: str

    @property
    def bias(self) -> int:
        """Number that is added to an exponent before it is stored."""
        return (1 << (6 - self.n_fraction)) - 1


@dataclass(frozen=True, slots=True)
class StoredType:
    """Describes a type in which rows of K or V are stored.

    Attributes:
        bits: of one number.
        array: NumPy's type for its numbers, or for the bytes or bits that stand for them.
        file: safetensors' type for them.
        tolerance: how far a row may be from the same row computed again, as a share of its length:
            the same row computed in a batch of another shape differs by rounding alone; rows of
            another model, or of another token, differ by more than their length.
        group: numbers that prefer to share a scale and a bias; None of floats, which have none.
        digits: what stands for it in ``k<bits>v<bits>``; None: nothing does.
        byte_float: of a float type of 8 bits.
    """

    bits: int
    array: str
    file: str
    tolerance: float
    group: int | None = None
    digits: str | None = None
    byte_float: ByteFloat | None = None


STORED_TYPES: Mapping[str, StoredType] = {
    "float32": StoredType(32, "float32", "F32", 0.01, digits="32"),
    "bfloat16": StoredType(16, "uint16", "BF16", 0.1, digits="16"),
    "float16": StoredType(16, "float16", "F16", 0.1),
    "fp8": StoredType(8, "uint8", "F8_E4M3", 0.2, byte_float=ByteFloat(3, 448.0, "float8_e4m3fn")),
    "int8": StoredType(8, "uint8", "U8", 0.15, group=64, digits="8"),
    "int4": StoredType(4, "uint8", "U8", 0.5, group=32, digits="4"),
}
"""By name: how K and V are stored."""

KV_DTYPES = tuple(STORED_TYPES)
"""Names that say how K and V are both stored; ``k8v4`` and the like say each by itself."""

_SIDES = {one.digits: name for name, one in STORED_TYPES.items() if one.digits}
_ENDS = re.compile(r"(first|last)(\d{1,5})")
_PAIR = re.compile(r"k(\d+)v(\d+)")


@dataclass(frozen=True, slots=True)
class SideDtype:
    """Storage of the rows of one side, K or V.

    Attributes:
        name: one of ``KV_DTYPES``.
        group_size: numbers that share a scale and a bias; None: the preferred one that divides
            the row (64 for int8, 32 for int4), or the whole row where none does.
        is_rotated: rows are turned by a Hadamard matrix before they are quantised, which spreads
            outliers over the row; attention turns the queries too, and the logits are the same.
    """

    name: str
    group_size: int | None = None
    is_rotated: bool = False

    @property
    def bits(self) -> int:
        """Bits of one stored number."""
        return STORED_TYPES[self.name].bits

    @property
    def byte_float(self) -> ByteFloat | None:
        """Form of a float type of 8 bits; None of all others."""
        return STORED_TYPES[self.name].byte_float

    @property
    def is_quantised(self) -> bool:
        """True if rows are integers with scales and biases."""
        return STORED_TYPES[self.name].group is not None

    def group_of(self, dim: int) -> int:
        """Return the numbers per group of a row of ``dim``.

        Raises:
            ConfigError: the group size that was asked for does not divide the row.
        """
        if self.group_size is None:
            preferred = STORED_TYPES[self.name].group
            return next((g for g in (preferred, 32) if g and dim % g == 0), dim)
        if dim % self.group_size:
            fitting = [str(g) for g in GROUP_SIZES if dim % g == 0]
            raise ConfigError(
                f"groups of {self.group_size} do not divide a row of {dim} numbers; "
                + (f"choose {' or '.join(fitting)}, or " if fitting else "")
                + "leave the group size out and the row is divided as it can be"
            )
        return self.group_size

    def n_groups(self, dim: int) -> int:
        """Return the scales per row of ``dim`` numbers; 0 for the float types."""
        return dim // self.group_of(dim) if self.is_quantised else 0

    def packed_bytes(self, dim: int) -> int:
        """Return the bytes of the stored numbers of a row, without scales and biases."""
        return -(-dim * self.bits // 8)

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of a row of ``dim`` numbers: one token, one head, one layer."""
        return self.packed_bytes(dim) + AFFINE_BYTES * self.n_groups(dim)


@dataclass(frozen=True, slots=True)
class KvDtype:
    """Storage of K and V.

    Attributes:
        k: the K side.
        v: the V side.
        exact_first: so many tokens at the start of a history stay in float32 beside quantised
            ones (attention sinks), in layers that see all of it.
        exact_last: so many of the most recent tokens of a history do.
    """

    k: SideDtype
    v: SideDtype
    exact_first: int = 0
    exact_last: int = 0

    @property
    def is_quantised(self) -> bool:
        """True if K or V is quantised."""
        return self.k.is_quantised or self.v.is_quantised


def rotated_block(dim: int) -> int:
    """Return how many numbers of a row of ``dim`` are rotated together."""
    return dim & -dim


@lru_cache
def parse_kv_dtype(name: str) -> KvDtype:
    """Read ``int8``, ``k8v4``, ``int4:g64``, ``k4v8:rot`` and the like.

    The first word says the types: one of ``KV_DTYPES`` for both sides, or ``k<bits>v<bits>`` with
    4 (int4), 8 (int8), 16 (bfloat16) or 32 (float32) bits. ``:g32``, ``:g64``, ``:g128`` set the
    group size, ``:rot`` rotates a quantised K, ``:first4`` and ``:last64`` keep so many tokens of
    each history in float32.

    Raises:
        ConfigError: nothing that is known; the message says what is.
    """
    first, *options = name.split(":")
    pair = _PAIR.fullmatch(first)
    if pair and pair[1] in _SIDES and pair[2] in _SIDES:
        k, v = _SIDES[pair[1]], _SIDES[pair[2]]
    elif first in KV_DTYPES:
        k = v = first
    else:
        raise _unknown(name)
    group_size: int | None = None
    is_rotated = False
    exact: dict[str, int] = {}
    for option in options:
        ends = _ENDS.fullmatch(option)
        if option == "rot" and not is_rotated:
            is_rotated = True
        elif ends and ends[1] not in exact and 0 < int(ends[2]) <= MOST_EXACT:
            exact[ends[1]] = int(ends[2])
        elif group_size is None and option in {f"g{size}" for size in GROUP_SIZES}:
            group_size = int(option[1:])
        else:
            raise _unknown(name)
    sides = [SideDtype(side, group_size if STORED_TYPES[side].group else None) for side in (k, v)]
    if options and not any(side.is_quantised for side in sides):
        raise ConfigError(f"kv_dtype {name!r} is a float type, which has none of these options")
    if is_rotated:
        if not sides[0].is_quantised:
            raise ConfigError(f"kv_dtype {name!r} rotates K, which only a quantised K needs")
        sides[0] = SideDtype(k, sides[0].group_size, is_rotated=True)
    return KvDtype(sides[0], sides[1], exact.get("first", 0), exact.get("last", 0))


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"kv_dtype {name!r} is not known; choose one of {', '.join(KV_DTYPES)}, or K and V by "
        f"themselves as k<bits>v<bits> with 4, 8, 16 or 32 bits (k8v4), then :g32, :g64 or :g128 "
        f"for the group size, :rot to rotate K, and :first<n> and :last<n> to keep up to "
        f"{MOST_EXACT} tokens of each history in float32 (int4:g64:rot:first4:last64)"
    )
