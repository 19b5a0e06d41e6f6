"""Linear layers: weights in 16, 12, 8 or 4 bits, and products with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.kernel import levels

if TYPE_CHECKING or levels.is_available():
    from kvcellar.kernel._native import LinearWeights, WeightFormat, code, pack, place_mxfp4

__all__ = [
    "LinearWeights",
    "WeightFormat",
    "code",
    "format_of",
    "multiplies_packed",
    "multiplies_pairs",
    "pack",
    "place_mxfp4",
    "reads_coded",
]

_FORMATS = {16: "bf16", 12: "coded", 8: "int8", 4: "int4"}


def format_of(bits: int) -> WeightFormat:
    """Return how weights of so many bits are written: 16, 12, 8 or 4."""
    return WeightFormat[_FORMATS[bits]]


def reads_coded() -> bool:
    """Return true if bfloat16 weights in 12 bits are read faster here than as they are."""
    return levels.is_available() and levels.level().name not in {"scalar", "neon"}


def multiplies_packed() -> bool:
    """Return true if many tokens meet packed weights faster here than torch multiplies bfloat16."""
    return levels.level().name in {"avx_vnni", "vnni", "bf16", "amx"}


def multiplies_pairs() -> bool:
    """Return true if coded weights meet bfloat16 inputs two at a time."""
    return levels.level().name == "bf16"
