"""Weights that files have in groups already: put where products take them, with nothing lost.

A weight is ``scale * (number - zero) + minimum``. Numbers have 4 bits, of IQ4 looked up in a table
of 16, or 8, which those of 5 and 6 bits get as well. Scales and minima are of 32 inputs of an
output, of Q6_K 16: float16, or the file's bytes and the float16 numbers that they count, which are
multiplied out in float32 exactly. MXFP4 keeps its exponents, and F16 and BF16 are numbers by
themselves. These are the blocks of GGUF files.
Affine weights, which other files have, are numbers of 4 or 8 bits as well, with float32 scales and
minima of as many inputs as the file says: a multiple of 32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.kernel import levels

if TYPE_CHECKING or levels.is_available():
    from kvcellar.kernel._native import (
        BlockType,
        affine_sizes,
        affine_weights,
        block_sizes,
        block_weights,
        fit_q4_k,
        place_affine,
        place_blocks,
    )

__all__ = [
    "INPUTS",
    "BlockType",
    "affine_sizes",
    "affine_weights",
    "block_sizes",
    "block_type",
    "block_weights",
    "fit_q4_k",
    "place_affine",
    "place_blocks",
]

INPUTS = {
    "Q4_0": 32,
    "Q4_1": 32,
    "Q5_0": 32,
    "Q5_1": 32,
    "Q8_0": 32,
    "Q4_K": 256,
    "Q5_K": 256,
    "Q6_K": 256,
    "IQ4_NL": 32,
    "IQ4_XS": 256,
    "MXFP4": 32,
    "F16": 1,
    "BF16": 1,
}
"""Types of blocks that are multiplied as they are, by the format's names: numbers of a block."""


def block_type(name: str) -> BlockType:
    """Return the kernel's number of a type by the format's name, one of ``INPUTS``."""
    return BlockType[name.lower()]
