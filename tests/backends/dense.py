"""The oracle: token histories as plain lists, and attention with a dense mask over all of them.

It knows nothing of cells, runs, plans or kvcellar's bookkeeping. Every token carries its own K and
V for every layer; a fork copies a list, a rollback cuts one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SIGNIFICANT_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 with the values that ``dtype`` can hold, to nearest even (normal range only)."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    step = 2.0 ** SIGNIFICANT_BITS[dtype]
    return np.ldexp(np.rint(fraction * step) / step, exponent).astype(np.float32)


@dataclass(eq=False)
class Token:
    """One token of one history.

    ``k[layer]`` is ``[n_kv_heads, head_dim]``, ``v[layer]`` is ``[n_kv_heads, v_head_dim]``.
    """

    pos: int
    k: list[np.ndarray] = field(default_factory=list)
    v: list[np.ndarray] = field(default_factory=list)


@dataclass
class Tree:
    """Proposed tokens after a history: node i hangs off ``parents[i]``, -1 is the history's end."""

    parents: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    frontier: int = 0
    is_pending: bool = True

    def ancestors(self, node: int) -> set[int]:
        """The node itself and everything between it and the history."""
        above: set[int] = set()
        while node >= 0:
            above.add(node)
            node = self.parents[node]
        return above


def attend_dense(
    q: np.ndarray,
    keys: list[Token],
    mask: np.ndarray,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Attention of ``q [n_q_heads, n, head_dim]`` over all of ``keys``, in float64.

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
    k, v = (np.where(is_nan[:, None], 0.0, x) for x in (k, v))
    repeats = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, repeats, axis=0), np.repeat(v, repeats, axis=0)
    logits = np.einsum("hnd,hld->hnl", q.astype(np.float64), k) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logits = np.where(mask[None], logits, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*logits.shape[:2], 1))
        logits = np.concatenate([logits, extra], axis=2)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    out = np.einsum("hnl,hlv->hnv", weights[:, :, : len(keys)], v)
    out[:, mask[:, is_nan].any(axis=1)] = np.nan
    return out
