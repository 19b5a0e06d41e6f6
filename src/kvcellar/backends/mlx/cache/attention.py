"""Attention over segments: the parts of a history, attended where they lie.

A read of one part goes to MLX's fused attention. One of several parts would have to be copied into
one for that, which is worth it for many queries. For few, the *logits* of the parts are put side by
side instead, and K and V stay where they are: a fork's shared trunk, a run and the window's other
end, packed numbers and float ones. That needs no log-sum-exp, which MLX's attention does not give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from kvcellar.backends.mlx.cache.codecs import Quantised, Stored
from kvcellar.types import AttendKind

FEW_QUERIES = 8
"""Up to this many query tokens, several parts are attended where they lie."""

MOST_LOGITS = 1 << 24
"""Most logits (float32) that attention by matmuls holds at a time."""

Part = tuple[Stored, Stored]
"""K ``[1, n_kv_heads, L, head_dim]`` and V ``[1, n_kv_heads, L, v_head_dim]`` of some cells."""


class Segment(NamedTuple):
    """Consecutive query tokens of one sequence and all that they read.

    Attributes:
        q_start: index of the first query token in the flat batch.
        q_len: how many.
        parts: the cells that are read, in their order.
        kind: how the queries see them.
        mask: ``[q_len, n_masked]`` bool for EXPLICIT, over the last cells; else None.
    """

    q_start: int
    q_len: int
    parts: tuple[Part, ...]
    kind: AttendKind
    mask: mx.array | None


def attend(
    q: mx.array,
    segments: Sequence[Segment],
    scale: float,
    out_dtype: mx.Dtype,
    *,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend every segment.

    Args:
        q: ``[1, n_heads, T, head_dim]``; ``n_heads`` is a multiple of the KV heads. Of latent rows
            ``[1, n_heads, T, v_head_dim + head_dim]``.
        segments: cover the T query tokens once, in order.
        scale: factor on the logits.
        out_dtype: type of the result.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: ``[n_heads]``: one more logit per head in the denominator, without a value.

    Returns:
        ``[1, n_heads, T, v_head_dim]``.
    """
    sinks = None if sinks is None else sinks.astype(q.dtype)
    if len(segments) == 1:
        return _attend_segment(q, segments[0], scale, softcap, sinks).astype(out_dtype)
    outs = [
        _attend_segment(q[:, :, s.q_start : s.q_start + s.q_len], s, scale, softcap, sinks)
        for s in segments
    ]
    return mx.concatenate(outs, axis=2).astype(out_dtype)


def attend_run(
    q: mx.array,
    part: Part,
    mask: str | None,
    scale: float,
    out_dtype: mx.Dtype,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend all queries over one part of floats: the shortest way to MLX's attention.

    Args:
        q: ``[1, n_heads, T, head_dim]``.
        part: K and V.
        mask: ``causal``, or None: all is seen.
        scale: factor on the logits.
        out_dtype: type of the result.
        sinks: as in ``attend``.
    """
    k, v = part
    assert isinstance(k, mx.array) and isinstance(v, mx.array), "they are stored as floats"
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype:
        k, v = k.astype(dtype), v.astype(dtype)
    if sinks is not None and sinks.dtype != dtype:
        sinks = sinks.astype(dtype)
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    return out if dtype == out_dtype else out.astype(out_dtype)


def _attend_segment(
    q: mx.array, segment: Segment, scale: float, softcap: float | None, sinks: mx.array | None
) -> mx.array:
    parts = segment.parts
    is_latent = q.shape[3] != _dim(parts[0][0])
    is_whole = len(parts) == 1 and not any(isinstance(side, Quantised) for side in parts[0])
    if softcap is None and not is_latent and (is_whole or segment.q_len > FEW_QUERIES):
        k, v = (joined([part[side] for part in parts], q.dtype) for side in (0, 1))
        mask = _whole_mask(segment, k.shape[2])
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    rows = max(1, MOST_LOGITS // (q.shape[1] * sum(_length(k) for k, _ in parts)))
    outs = [
        _by_logits(q, segment, start, min(rows, segment.q_len - start), scale, softcap, sinks)
        for start in range(0, segment.q_len, rows)
    ]
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)


def _by_logits(
    q: mx.array,
    segment: Segment,
    start: int,
    n: int,
    scale: float,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """Queries ``[start, start + n)`` of a segment: logits part by part, one softmax in float32."""
    n_heads, dtype = q.shape[1], q.dtype
    n_kv_heads = _heads(segment.parts[0][0])
    group = n_heads // n_kv_heads
    queries = (q[:, :, start : start + n] * scale).reshape(1, n_kv_heads, group * n, -1)
    found = [_logits(queries, k, v) for k, v in segment.parts]
    logits = found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)
    n_cells = logits.shape[-1]
    logits = logits.reshape(1, n_kv_heads, group, n, n_cells)
    if softcap is not None:
        logits = mx.tanh(logits / softcap) * softcap
    mask = _tail_mask(segment)
    if mask is not None:
        mask, n_masked = mask[start : start + n], mask.shape[1]
        tail = mx.where(mask, logits[..., n_cells - n_masked :], -mx.inf)
        logits = mx.concatenate([logits[..., : n_cells - n_masked], tail], axis=-1)
    if sinks is not None:
        column = sinks.astype(mx.float32).reshape(1, n_kv_heads, group, 1, 1)
        column = mx.broadcast_to(column, (*logits.shape[:-1], 1))
        logits = mx.concatenate([logits, column], axis=-1)
    weights = mx.softmax(logits, axis=-1).reshape(1, n_kv_heads, group * n, -1)
    at, out = 0, None
    for _, v in segment.parts:
        stop = at + _length(v)
        share = weights[..., at:stop]
        piece = _times(share if isinstance(v, Quantised) else share.astype(dtype), v)
        out = piece if out is None else out + piece
        at = stop
    assert out is not None, "a segment has parts"
    return out.reshape(1, n_heads, n, -1)


def _logits(queries: mx.array, k: Stored, v: Stored) -> mx.array:
    """Multiply queries with K's rows; of latent rows, as if each were V's and then K's."""
    n = queries.shape[-1] - _dim(k)
    logits = _times(queries[..., n:], k, transpose=True).astype(mx.float32)
    return logits + _times(queries[..., :n], v, transpose=True) if n else logits


def _times(x: mx.array, rows: Stored, *, transpose: bool = False) -> mx.array:
    """Multiply ``x @ rows.T`` or ``x @ rows`` per head."""
    if isinstance(rows, Quantised):
        return rows.times(x, transpose=transpose)
    rows = rows.astype(x.dtype)
    return x @ (rows.swapaxes(-1, -2) if transpose else rows)


def joined(rows: Sequence[Stored], dtype: mx.Dtype) -> mx.array:
    """Join parts to one array of numbers; one part of that type is returned as it is stored."""
    arrays = [r.numbers(dtype) if isinstance(r, Quantised) else r.astype(dtype) for r in rows]
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2)


def _whole_mask(segment: Segment, n_cells: int) -> mx.array | str | None:
    """Return the mask as MLX's attention takes it: over all that is read."""
    if segment.kind is AttendKind.NONE:
        return None
    if segment.kind is AttendKind.CAUSAL:
        return "causal"
    assert segment.mask is not None
    n_before = n_cells - segment.mask.shape[1]
    if not n_before:
        return segment.mask
    seen = mx.ones((segment.q_len, n_before), dtype=mx.bool_)
    return mx.concatenate([seen, segment.mask], axis=1)


def _tail_mask(segment: Segment) -> mx.array | None:
    """Return the mask ``[q_len, n_masked]`` of the last cells; None where all is seen."""
    if segment.kind is AttendKind.CAUSAL:
        return mx.tri(segment.q_len, dtype=mx.bool_)
    return segment.mask


def _length(rows: Stored) -> int:
    return rows.length if isinstance(rows, Quantised) else int(rows.shape[2])


def _dim(rows: Stored) -> int:
    return rows.dim if isinstance(rows, Quantised) else int(rows.shape[3])


def _heads(rows: Stored) -> int:
    return int((rows.packed if isinstance(rows, Quantised) else rows).shape[1])
