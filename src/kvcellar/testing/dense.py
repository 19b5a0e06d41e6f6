"""The oracle: token histories as plain lists, and attention with a dense mask over all of them.

It knows nothing of cells, runs, plans or kvcellar's bookkeeping. Every token carries its own K and
V for every layer; a fork copies a list, a rollback cuts one.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SIGNIFICANT_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}
EIGHT_BITS = {"fp8": (3, -9, 448.0)}
"""Floats of 8 bits: bits behind the point, the least step as a power of 2, the largest number."""


def rounded(values: Array, dtype: str) -> Array:
    """Round float32 to values that ``dtype`` can hold, to nearest even (normal range only)."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    step = 2.0 ** SIGNIFICANT_BITS[dtype]
    return np.ldexp(np.rint(fraction * step) / step, exponent).astype(np.float32)


def stored(values: Array, kv_dtype: str, side: str) -> Array:
    """Return what a pool of ``kv_dtype`` gives back of K or V rows ``[..., dim]``, in float32.

    Written down from the definition, with none of kvcellar's arithmetic.
    """
    dim = values.shape[-1]
    if kv_dtype in EIGHT_BITS:
        return _of_eight_bits(values, *EIGHT_BITS[kv_dtype])
    bits, size = bits_and_group(kv_dtype, side, dim)
    if bits >= 16:
        name = {16: "bfloat16", 32: "float32"}[bits]
        return rounded(values, kv_dtype if kv_dtype in SIGNIFICANT_BITS else name)
    is_turned = side == "k" and "rot" in kv_dtype.split(":")
    rows = values.reshape(-1, dim)
    rows = turned(rows) if is_turned else rows
    out = _quantised(rows.reshape(-1, size), 2**bits - 1).reshape(rows.shape)
    out = out @ walsh(dim) if is_turned else out
    return out.reshape(values.shape).astype(np.float32)


def _of_eight_bits(values: Array, n_behind: int, least: int, most: float) -> Array:
    """Round to floats with so many bits behind the point, from steps of 2 to the ``least``."""
    _, exponent = np.frexp(values.astype(np.float64))
    step = 2.0 ** np.maximum(exponent - 1 - n_behind, least)
    out: Array = np.clip(np.rint(values / step) * step, -most, most).astype(np.float32)
    return out


def row_bytes(kv_dtype: str, side: str, dim: int) -> int:
    """Bytes of a row: its numbers, and a scale and a bias of 2 bytes each per group."""
    if kv_dtype in EIGHT_BITS:
        return dim
    bits, size = bits_and_group(kv_dtype, side, dim)
    return (dim * bits + 7) // 8 + (4 * (dim // size) if bits < 16 else 0)


def bits_and_group(kv_dtype: str, side: str, dim: int) -> tuple[int, int]:
    """Bits of a number, and numbers per group of a quantised row."""
    first, *options = kv_dtype.split(":")
    numbers = {"float32": "32", "bfloat16": "16", "float16": "16"}.get(first, first)
    bits = int(re.findall(r"\d+", numbers)[0 if side == "k" else -1])
    asked = [int(option[1:]) for option in options if option.startswith("g")]
    fitting = [g for g in ((64, 32) if bits == 8 else (32,)) if dim % g == 0]
    return bits, (asked or fitting or [dim])[0]


def _quantised(groups: Array, n_most: int) -> Array:
    """Quantise n groups ``[n, size]`` and return their values; a group with a NaN is all NaN."""
    f32 = np.float32
    numbers = groups.astype(f32)
    low, high = numbers.min(axis=1, keepdims=True), numbers.max(axis=1, keepdims=True)
    bias = (low - abs(low) * f32(2**-10)).astype(np.float16)
    span = (high - bias.astype(f32)) * f32(1 + 2**-10)
    scale = (span * f32(1 / n_most)).astype(np.float16)
    inverse = f32(1) / np.where(scale == 0, 1, scale).astype(f32)
    steps = np.clip(np.rint((numbers - bias.astype(f32)) * inverse), 0, n_most)
    values: Array = bias.astype(float) + scale.astype(float) * steps
    return values


@functools.cache
def walsh(dim: int) -> Array:
    """Return the matrix that rotates a row: signs by the parity of two indices' common bits."""
    size = dim & -dim
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    matrix: Array = np.kron(np.eye(dim // size), np.array(signs)) / np.sqrt(size)
    return matrix


def turned(rows: Array) -> Array:
    """Return ``rows @ walsh``, added up in the order that decides its float32 rounding."""
    dim = rows.shape[-1]
    out = rows.astype(np.float32)
    half = 1
    while half < dim & -dim:
        at = np.arange(dim)
        pair = out[:, at ^ half]
        out = np.where(at & half, pair - out, out + pair)
        half *= 2
    return out * np.float32(1 / np.sqrt(dim & -dim))


@dataclass(eq=False)
class Token:
    """One token of one history.

    ``k[layer]`` is ``[n_kv_heads, head_dim]``, ``v[layer]`` is ``[n_kv_heads, v_head_dim]``. Of a
    model with recurrent layers it has the states after it, ``states[layer]``.
    """

    pos: int
    k: list[Array] = field(default_factory=list)
    v: list[Array] = field(default_factory=list)
    states: list[list[Array]] = field(default_factory=list)


@dataclass
class Tree:
    """Proposed tokens after a history: node i hangs off ``parents[i]``, -1 is the history's end."""

    parents: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    frontier: int = 0
    is_pending: bool = True

    def ancestors(self, node: int) -> set[int]:
        """Return a node and all nodes between it and the history."""
        above: set[int] = set()
        while node >= 0:
            above.add(node)
            node = self.parents[node]
        return above


def attend_dense(
    q: Array,
    keys: list[Token],
    mask: Array,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    """Attention of ``q [n_q_heads, n, head_dim]`` over all of ``keys``, in float64.

    Queries that are longer than a K row attend over rows of V followed by K: latent ones.

    A query that sees a token of NaN gets NaN, one that does not is none the worse.

    Args:
        q: the queries.
        keys: every token that is there.
        mask: ``[n, len(keys)]``, true = attend.
        layer: whose K and V.
        scale: factor of the logits.
        softcap: see ``LayerGroup.softcap``.
        sinks: ``[n_q_heads]`` or None.

    Returns:
        ``[n_q_heads, n, v_head_dim]``.
    """
    k = np.stack([t.k[layer] for t in keys], axis=1).astype(np.float64)
    v = np.stack([t.v[layer] for t in keys], axis=1).astype(np.float64)
    is_nan = np.isnan(k).any(axis=(0, 2)) | np.isnan(v).any(axis=(0, 2))
    k[:, is_nan], v[:, is_nan] = 0.0, 0.0
    if q.shape[2] > k.shape[2]:
        k = np.concatenate([v, k], axis=2)
    repeats = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, repeats, axis=0), np.repeat(v, repeats, axis=0)
    logits = (q.astype(np.float64) @ k.swapaxes(1, 2)) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logits = np.where(mask[None], logits, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*logits.shape[:2], 1))
        logits = np.concatenate([logits, extra], axis=2)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    out: Array = weights[:, :, : len(keys)] @ v
    out[:, mask[:, is_nan].any(axis=1)] = np.nan
    return out
