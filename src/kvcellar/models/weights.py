"""Formats of the weights of linear layers, by name, and the bytes that each takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES

WEIGHTS = ("bf16", "int8", "int4")
"""Formats that the torch backend's linear layers read with the kernels of this package."""

FILE = "file"
"""Weights as a file has them: the blocks of GGUF, or what MLX, AWQ or GPTQ quantised."""

BETWEEN_BLOCKS, BESIDE_BLOCKS = "float32", "bfloat16"
"""Types that a model of a file's blocks computes in, and keeps K and V in, where none is asked for.

Inputs of its products are rounded to 8 bits in any case. In bfloat16 they would be twice, and a
step takes as long; K and V of twice the bytes gain nothing beside that. On a card inputs are not
rounded to 8 bits, and the model computes in ``BESIDE_BLOCKS``, which its tensor cores multiply.
"""

_MOST = 0.75
"""Share of a model's numbers from which on its file's blocks are the default."""

_CODED_BITS = 12
"""Bits of a bfloat16 weight that is written so that nothing is lost."""

PLAIN = "none"
"""Linear layers as torch has them, with weights in the model's own type."""

GROUP = 32
"""Inputs that are rounded together where they meet packed weights."""

SHARED = {8: 128, 4: 32}
"""By their bits, packed weights along the input that share a scale; int4 of experts alone."""

FITTED_INPUTS, _FITTED_BYTES = 256, 148
"""Inputs of a block of Q4_K, which int4 is; and what a block takes in memory."""

PACKINGS = {"int8": "int8/128", "int4": "int4/q4_k", FILE: "file/1"}
"""A name for each way of packing that gives other K and V, also where it was another before."""

BLOCK = 16
"""Outputs whose packed weights lie together; the last block is padded."""

CODED_INPUTS = 128
"""Weights of an output that lie together in 12 bits."""

CODED_SAMPLE = 64
"""Outputs whose weights say whether those of all fit into 12 bits."""

_FEW_ESCAPES = 512
"""One number in so many may not."""

_CODED_HEAD = 320

MOST_EXACT_BITS = 8
"""The last layer, from features to logits, and embeddings have at least so many bits."""


class Matrix(NamedTuple):
    """A parameter of a model that may be held as the kernel reads it.

    Attributes:
        n_out: outputs of the linear layer, or rows of the embedding.
        n_in: inputs, or numbers of a row.
        is_most_exact: true for the last layer, and for embeddings.
        is_rows: true for an embedding that no linear layer shares.
        n_experts: how many of these a mixture has; 0: it is none of a mixture's.
        block_bytes: what all of it takes as the blocks of its file; 0: it is in no such blocks.
    """

    n_out: int
    n_in: int
    is_most_exact: bool
    is_rows: bool
    n_experts: int = 0
    block_bytes: int = 0

    def held_bytes(self, weights: str, *, is_coded: bool, is_shipped: bool) -> int | None:
        """Return the bytes that the kernel holds; None where it keeps the model's own type.

        Args:
            weights: a name of ``WEIGHTS``, or ``file``.
            is_coded: true if bfloat16 weights are written in 12 bits here.
            is_shipped: true if the checkpoint has its experts in MXFP4.
        """
        n, shape = max(1, self.n_experts), (self.n_out, self.n_in)
        if is_shipped and self.n_experts:
            return n * shipped_bytes(*shape)
        if weights == FILE:
            return self.block_bytes or None
        if is_packed(weights):
            if not self.n_experts and is_fitted(weights, self.n_in, self.is_most_exact):
                return fitted_bytes(*shape)
            bits = bits_of(weights) if self.n_experts else MOST_EXACT_BITS
            return n * packed_bytes(*shape, bits) if can_pack(self.n_in) else None
        is_written = is_coded and can_code(self.n_in) and not self.is_rows
        return n * coded_bytes(*shape) if is_written else None


def parse_weights(weights: str | None, dtype: object) -> str | None:
    """Check a format: one of ``WEIGHTS``, ``file`` or ``none``; None where nothing is asked for.

    Raises:
        ConfigError: an unknown format, or one that contradicts the type that is asked for.
    """
    if weights is None or weights == PLAIN:
        return weights
    if weights not in (*WEIGHTS, FILE):
        raise ConfigError(
            f"weights {weights!r} are unknown to the torch backend; choose one of "
            f"{', '.join(WEIGHTS)}, {FILE} and {PLAIN}, or with the backend executorch 8da4w or "
            f"8da8w"
        )
    asked = None if dtype in (None, "auto") else str(dtype).removeprefix("torch.")
    if asked == "float16" or (weights == "bf16" and asked not in (None, "bfloat16")):
        fitting = "bfloat16" if weights == "bf16" else "bfloat16 or float32"
        raise ConfigError(f"weights {weights} go with dtype {fitting}, not {asked}; leave one out")
    return weights


def choose_weights(asked: str | None, dtype: str, *, has_kernel: bool = True) -> str | None:
    """Choose how linear layers hold weights of a type: a name of ``WEIGHTS``; None: as torch does.

    Where nothing is asked for, bfloat16 ones are read by a kernel wherever there is one: nothing
    is lost, and a step takes a fraction of the time. Others stay as they are, since it would round
    them.

    Args:
        asked: what ``parse_weights`` has checked.
        dtype: of the weights in memory, by name.
        has_kernel: whether a kernel reads weights where they are.
    """
    if asked == PLAIN:
        return None
    if asked is None and dtype == "bfloat16" and has_kernel:
        return "bf16"
    return asked


def wants_blocks(asked: str | None, dtype: object) -> bool:
    """Return true if a file's blocks are to stay: asked for by name, or nothing else is.

    Args:
        asked: what ``parse_weights`` has checked.
        dtype: type of the weights that is asked for.
    """
    return asked == FILE or (asked is None and dtype in (None, "auto"))


def are_blocks(sizes: Mapping[str, int], matrices: Mapping[str, Matrix]) -> bool:
    """Return true if most of a model is in blocks that the kernel multiplies as they are.

    Not of a file in 16 bits, which has as many numbers so: in bfloat16 these take 12 in memory.

    Args:
        sizes: numbers of every parameter, by name.
        matrices: those that the kernel may hold.
    """
    held = {name: one.block_bytes for name, one in matrices.items() if one.block_bytes}
    n_held = sum(sizes[name] for name in held)
    is_smaller = sum(held.values()) < n_held * _CODED_BITS // 8
    return n_held >= _MOST * sum(sizes.values()) and is_smaller


def own_kv_dtype(dtype: str, weights: str | None = None) -> str:
    """Return how K and V are stored where nothing else is asked for.

    Args:
        dtype: that the model computes in.
        weights: how its linear layers hold theirs.
    """
    if weights == FILE:
        return BESIDE_BLOCKS
    return dtype if dtype in FLOAT_KV_DTYPES else "float32"


def is_packed(weights: str | None) -> bool:
    """Return true if K and V become others than those of weights in the model's own type."""
    return weights in PACKINGS


def bits_of(weights: str) -> int:
    """Bits of one packed weight, without its share of a scale."""
    return int(weights.removeprefix("int"))


def is_fitted(weights: str, n_in: int, is_most_exact: bool) -> bool:
    """Return true if a layer's weights become blocks of Q4_K: those of int4 that come in blocks.

    int4 gives others 8 bits, as the last layer; only small models have such.
    """
    return weights == "int4" and not is_most_exact and n_in % FITTED_INPUTS == 0


def can_pack(n_in: int) -> bool:
    """Return true if a layer's inputs come in whole groups; others keep the model's own type."""
    return n_in % GROUP == 0


def can_code(n_in: int) -> bool:
    """Return true if bfloat16 weights of so many inputs can be written in 12 bits."""
    return n_in % CODED_INPUTS == 0


def are_mostly_coded(n_escapes: int, n_numbers: int) -> bool:
    """Return true if weights are read faster in 12 bits: nearly all of some of them fit.

    Args:
        n_escapes: numbers that did not fit.
        n_numbers: how many were coded; every so many rows, ``CODED_SAMPLE`` in all, say enough.
    """
    return n_escapes * _FEW_ESCAPES <= n_numbers


def coded_bytes(n_out: int, n_in: int) -> int:
    """Return the bytes of a layer's weights in 12 bits; each that does not fit takes 8 more."""
    return -(-n_out // BLOCK) * (_CODED_HEAD + BLOCK * n_in * 3 // 2)


def shipped_bytes(n_out: int, n_in: int) -> int:
    """Return the bytes of a layer's weights in MXFP4 and their exponents."""
    rows = -(-n_out // BLOCK) * BLOCK
    return rows * n_in // 2 + rows * n_in // GROUP


def packed_bytes(n_out: int, n_in: int, bits: int) -> int:
    """Return the bytes of a layer's weights and their float16 scales."""
    rows = -(-n_out // BLOCK) * BLOCK
    return rows * n_in * bits // 8 + rows * -(-n_in // SHARED[bits]) * 2


def fitted_bytes(n_out: int, n_in: int) -> int:
    """Return the bytes of a layer's weights as blocks of Q4_K in memory."""
    return -(-n_out // BLOCK) * BLOCK * (n_in // FITTED_INPUTS) * _FITTED_BYTES
