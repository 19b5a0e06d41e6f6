"""Attention written out: one head, one query at a time, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.types import AttendKind, BoolArray

FloatArray = NDArray[np.floating[Any]]


def visible(kind: AttendKind, mask: BoolArray | None, q_len: int, read_len: int) -> BoolArray:
    """Return what :class:`AttendKind` means: ``[q_len, read_len]``, true where a query sees a cell.

    Args:
        kind: the kind of the read.
        mask: ``[q_len, n_masked]`` over the last ``n_masked`` cells, for EXPLICIT.
        q_len: query tokens.
        read_len: cells that are read.
    """
    if kind is AttendKind.NONE:
        return np.ones((q_len, read_len), dtype=np.bool_)
    if kind is AttendKind.CAUSAL:
        n_before = read_len - q_len
        return np.arange(read_len)[None, :] <= n_before + np.arange(q_len)[:, None]
    assert mask is not None, "an EXPLICIT read has a mask"
    seen = np.ones((q_len, read_len), dtype=np.bool_)
    seen[:, read_len - mask.shape[1] :] = mask
    return seen


def attend(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    seen: BoolArray,
    scale: float,
    softcap: float | None = None,
    sinks: FloatArray | None = None,
) -> NDArray[np.float64]:
    """Softmax attention of some queries over the cells that each one sees.

    Query head h uses KV head ``h // (n_q_heads // n_kv_heads)``. A sink is one more logit of its
    query head: it takes its share of the softmax and contributes no value.

    Args:
        q: ``[n_q_heads, q_len, head_dim]``.
        k: ``[n_kv_heads, read_len, head_dim]``.
        v: ``[n_kv_heads, read_len, v_head_dim]``.
        seen: ``[q_len, read_len]``, true = attend; every query sees at least one cell.
        scale: factor of the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None for no cap.
        sinks: ``[n_q_heads]`` logits, or None.

    Returns:
        ``[n_q_heads, q_len, v_head_dim]``.
    """
    n_q_heads, q_len, _ = q.shape
    group = n_q_heads // k.shape[0]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.empty((n_q_heads, q_len, v.shape[2]), dtype=np.float64)
    for head in range(n_q_heads):
        keys, values = k[head // group], v[head // group]
        for i in range(q_len):
            logits = (keys[seen[i]] @ q[head, i]) * scale
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            top = logits.max() if sinks is None else max(logits.max(), float(sinks[head]))
            weights = np.exp(logits - top)
            total = weights.sum()
            if sinks is not None:
                total += np.exp(float(sinks[head]) - top)
            out[head, i] = (weights / total) @ values[seen[i]]
    return out
