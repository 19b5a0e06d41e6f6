"""Attention over segments: parts of the history, attended where they lie and merged.

A part that is read without a mask needs no order, so the history may lie in several runs: each
long run is attended as a view, and the partial results are merged by their log-sum-exp (the way of
FlashAttention's split, Dao et al. 2022). That serves chunked prefill without a mask over the
history, a fork's shared trunk without a copy, and attention sinks, which only rescale the result.

Query heads are never repeated over their KV head: the GQA group is folded into the query axis, or
K and V are expanded with stride 0.

Latent rows (MLA): a query that is longer than a K row is of a group with latent rows. Its logits
are the products of its first part with V and of its last part with K, added up; nothing joins them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from kvcellar.backends.torch.cache.codecs import Stored

FEW_ROWS = 16
"""Up to this many query rows per KV head, bf16 on a CPU is faster as two matmuls."""

FEW_NUMBERS = 32_768
"""Up to this many numbers per KV head, a bf16 matmul on a CPU may copy its operand (256 x 128)."""

CAST_TILE = 4096
"""Cells that are converted at a time, where storage and compute types differ."""

PLAIN_LOGITS = 1 << 24
"""Most logits (float32) that attention by matmuls holds at a time for what needs no mask."""


class Part(NamedTuple):
    """Some of the cells that a segment reads.

    Attributes:
        k: ``[1, n_kv_heads, L, head_dim]``, as it is stored; a view where it could be one.
        v: ``[1, n_kv_heads, L, v_head_dim]``.
        bias: ``[q_len, L]`` in the compute type, 0 = attend and -inf = not; None: all is seen.
        is_causal: the part is the queries' own tokens, in order: ``L == q_len``.
    """

    k: Stored
    v: Stored
    bias: Tensor | None = None
    is_causal: bool = False


class Tile(NamedTuple):
    """A part, or some of its cells, in the compute type; fields as in :class:`Part`."""

    k: Tensor
    v: Tensor
    bias: Tensor | None
    is_causal: bool


class Segment(NamedTuple):
    """Consecutive query tokens of one sequence and all that they read.

    Every query sees at least one cell of the last part.
    """

    q_start: int
    q_len: int
    parts: tuple[Part, ...]


def attend(
    q: Tensor,
    segments: Sequence[Segment],
    scale: float,
    out_dtype: torch.dtype,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend every segment.

    Args:
        q: ``[1, n_heads, T, head_dim]``; ``n_heads`` is a multiple of the KV heads. Of latent rows
            ``[1, n_heads, T, v_head_dim + head_dim]``.
        segments: cover the T query tokens once, in order; those that ``out`` lacks, where given.
        scale: factor on the logits.
        out_dtype: type of the result.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: ``[n_heads]``: one more logit per head in the denominator, without a value.
        out: where to put the result; a new tensor where it is not given.

    Returns:
        ``[1, n_heads, T, v_head_dim]``.
    """
    first = segments[0].parts[0]
    n_heads, n_tok, dim = q.shape[1:]
    n_kv_heads, v_dim = first.k.shape[1], first.v.shape[3]
    grouped = q.view(n_kv_heads, n_heads // n_kv_heads, n_tok, dim)
    if sinks is not None:
        sinks = sinks.float().view(n_kv_heads, -1, 1)
    if out is None and len(segments) == 1:
        whole = _attend_segment(grouped, segments[0].parts, scale, softcap, sinks)
        return whole.reshape(1, n_heads, n_tok, v_dim).to(out_dtype)
    if out is None:
        out = q.new_empty((1, n_heads, n_tok, v_dim), dtype=out_dtype)
    for segment in segments:
        at = slice(segment.q_start, segment.q_start + segment.q_len)
        part = _attend_segment(grouped[:, :, at], segment.parts, scale, softcap, sinks)
        out[:, :, at] = part.reshape(1, n_heads, segment.q_len, v_dim)
    return out


def attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend one query token that sees all of one run: the shortest way to the fused kernel.

    Args:
        q: ``[1, n_heads, 1, head_dim]``, of the type of k and v; longer by ``v_head_dim`` where
            rows are latent.
        k: ``[1, n_kv_heads, L, head_dim]``.
        v: ``[1, n_kv_heads, L, v_head_dim]``.
        scale: factor on the logits.
    """
    _, n_heads, _, dim = q.shape
    n_kv, v_dim = k.shape[1], v.shape[3]
    if q.is_cpu or dim != k.shape[3]:
        if v_dim != dim or (q.dtype == torch.bfloat16 and n_heads <= FEW_ROWS * n_kv):
            out = _few_rows(q.view(n_kv, n_heads // n_kv, 1, dim), k, v, scale)
        else:
            folded = q.view(1, n_kv, n_heads // n_kv, dim)
            out = F.scaled_dot_product_attention(folded, k, v, scale=scale)
        return out.view(1, n_heads, 1, v_dim)
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=n_heads > n_kv)


def _attend_segment(
    q: Tensor, parts: Sequence[Part], scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend ``q [Hkv, G, T, D] -> [Hkv, G, T, Dv]`` over all parts."""
    is_fused = softcap is None and _is_plain(q, parts[0])
    if len(parts) == 1 and sinks is None and is_fused and _is_stored_as(parts[0], q.dtype):
        return _attend_whole(q, parts[0], scale)
    most = q.shape[2] if _is_fused(q, parts[0], softcap) else _most_queries(q, parts)
    if most < q.shape[2]:
        stretches = (
            _attend_segment(q[:, :, start : start + most], cut, scale, softcap, sinks)
            for start, cut in _cut(parts, q.shape[2], most)
        )
        return torch.cat(tuple(stretches), dim=2)
    merged: tuple[Tensor, Tensor] | None = None
    for part in parts:
        for tile in _tiles(q, part, softcap):
            piece = _attend_part(q, tile, scale, softcap)
            merged = piece if merged is None else _merge(*merged, *piece)
    assert merged is not None, "a segment has parts"
    out, lse = merged
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks).unsqueeze(-1)
    return out.to(q.dtype)


def _is_plain(q: Tensor, part: Part | Tile) -> bool:
    """Return true if torch's fused kernels take rows of these lengths; latent ones none does."""
    dim, k_dim, v_dim = q.shape[3], part.k.shape[3], part.v.shape[3]
    return dim == v_dim == k_dim if q.is_cpu else dim == k_dim


def _most_queries(q: Tensor, parts: Sequence[Part]) -> int:
    """Return how many query tokens are attended by matmuls at a time, for ``PLAIN_LOGITS``."""
    n_heads = q.shape[0] * q.shape[1]
    most = max(1, PLAIN_LOGITS // (256 * n_heads))
    for part in parts:
        if part.is_causal:
            most = min(most, max(1, math.isqrt(PLAIN_LOGITS // n_heads)))
        elif part.bias is not None:
            most = min(most, max(1, PLAIN_LOGITS // (n_heads * part.k.shape[2])))
    return most


def _cut(parts: Sequence[Part], n_tok: int, most: int) -> Iterator[tuple[int, list[Part]]]:
    """Yield the first query and the parts of stretches of at most ``most`` of ``n_tok`` queries."""
    for start in range(0, n_tok, most):
        stop = min(start + most, n_tok)
        cut: list[Part] = []
        for part in parts:
            if part.bias is not None:
                cut.append(part._replace(bias=part.bias[start:stop]))
            elif part.is_causal:
                if start:
                    cut.append(Part(part.k.narrow(2, 0, start), part.v.narrow(2, 0, start)))
                k, v = (side.narrow(2, start, stop - start) for side in (part.k, part.v))
                cut.append(Part(k, v, None, True))
            else:
                cut.append(part)
        yield start, cut


def _is_stored_as(part: Part, dtype: torch.dtype) -> TypeGuard[Tile]:
    """Return true if both sides can be attended as they are."""
    return part.k.dtype == dtype and part.v.dtype == dtype


def _is_fused(q: Tensor, part: Part | Tile, softcap: float | None) -> bool:
    """Return true if torch's CPU kernel that also gives the log-sum-exp takes this."""
    return q.is_cpu and softcap is None and _is_plain(q, part)


def _tiles(q: Tensor, part: Part, softcap: float | None) -> Iterator[Tile]:
    """Yield a part in the compute type, in tiles that bound what is copied and held at a time."""
    length = part.k.shape[2]
    tile = length
    if part.bias is None and not part.is_causal:
        if not _is_stored_as(part, q.dtype):
            tile = min(tile, CAST_TILE)
        if not _is_fused(q, part, softcap):
            tile = min(tile, max(256, PLAIN_LOGITS // q.shape[:3].numel()))
    for start in range(0, length, tile):
        n = min(tile, length - start)
        k, v = part.k.narrow(2, start, n), part.v.narrow(2, start, n)
        yield Tile(k.to(q.dtype), v.to(q.dtype), part.bias, part.is_causal)


def _attend_whole(q: Tensor, part: Tile, scale: float) -> Tensor:
    """Attend one part and nothing else, by the fused kernel, without log-sum-exp."""
    n_kv, group, n_tok, dim = q.shape
    k, v = part.k, part.v
    if q.device.type != "cpu":
        out = F.scaled_dot_product_attention(
            q.reshape(1, n_kv * group, n_tok, dim),
            k,
            v,
            attn_mask=part.bias,
            is_causal=part.is_causal,
            scale=scale,
            enable_gqa=group > 1,
        )
        return out.view(n_kv, group, n_tok, v.shape[3])
    if part.bias is None and not part.is_causal:
        if q.dtype == torch.bfloat16 and group * n_tok <= FEW_ROWS:
            return _few_rows(q, k, v, scale)
        folded = q.reshape(1, n_kv, group * n_tok, dim)
        out = F.scaled_dot_product_attention(folded, k, v, scale=scale)
        return out.view(n_kv, group, n_tok, v.shape[3])
    return F.scaled_dot_product_attention(
        q,
        k[0, :, None].expand(-1, group, -1, -1),
        v[0, :, None].expand(-1, group, -1, -1),
        attn_mask=part.bias,
        is_causal=part.is_causal,
        scale=scale,
    )


def _few_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Two matmuls on the fold around a float32 softmax."""
    n_kv, group, n_tok, dim = q.shape
    logits = _logits(q.reshape(n_kv, group * n_tok, dim), k, v)
    weights = torch.softmax(logits.mul_(scale), dim=-1)
    return _matmul(weights.to(q.dtype), v[0]).view(n_kv, group, n_tok, v.shape[3])


def _logits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the products ``[n_kv, rows, L]`` of ``q [n_kv, rows, D]`` and K, in float32.

    Of latent rows: with V and K, as if each row were V's and then K's.
    """
    if q.shape[2] == k.shape[3]:
        return _matmul(q, k[0].transpose(1, 2)).float()
    latent, rest = q.split((v.shape[3], k.shape[3]), dim=2)
    logits = _matmul(latent, v[0].transpose(1, 2)).float()
    return logits.add_(_matmul(rest, k[0].transpose(1, 2)))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``a [n_kv, rows, x] @ b [n_kv, x, y]`` without a copy of a long ``b``.

    In bf16 and fp16 on a CPU a batched matmul copies an operand with gaps between its heads, and
    every view of a pool that is not full has them: 5 to 20 times slower from some thousand cells
    on. One head of it has no gaps, and is no batch.
    """
    if len(a) == 1:
        return torch.mm(a[0], b[0])[None]
    is_gapless = b.is_contiguous() or b.transpose(1, 2).is_contiguous()
    is_short = b.shape[1] * b.shape[2] <= FEW_NUMBERS
    if b.device.type != "cpu" or b.dtype == torch.float32 or is_gapless or is_short:
        return torch.matmul(a, b)
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    for head in range(a.shape[0]):
        torch.mm(a[head], b[head], out=out[head])
    return out


def _attend_part(
    q: Tensor, part: Tile, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend one part: ``(out [Hkv, G, T, Dv], log-sum-exp [Hkv, G, T] in float32)``."""
    n_kv, group, n_tok, dim = q.shape
    k, v = part.k, part.v
    if not _is_fused(q, part, softcap):
        return _attend_plainly(q, part, scale, softcap)
    if part.bias is None and not part.is_causal:
        if q.dtype == torch.bfloat16 and group * n_tok <= FEW_ROWS:
            return _attend_plainly(q, part, scale, softcap)
        folded = q.reshape(1, n_kv, group * n_tok, dim)
        out, lse = _flash(folded, k, v, 0.0, False, scale=scale)
        return out.view(n_kv, group, n_tok, dim), lse.view(n_kv, group, n_tok)
    out, lse = _flash(
        q,
        k[0, :, None].expand(-1, group, -1, -1),
        v[0, :, None].expand(-1, group, -1, -1),
        0.0,
        part.is_causal,
        attn_mask=part.bias,
        scale=scale,
    )
    return out, lse


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The CPU kernel behind ``scaled_dot_product_attention``, which gives the log-sum-exp too."""


def _attend_plainly(
    q: Tensor, part: Tile, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend one part by matmuls: on any device, with soft-capping, K and V of any lengths."""
    n_kv, group, n_tok, dim = q.shape
    logits = _logits(q.reshape(n_kv, group * n_tok, dim), part.k, part.v).mul_(scale)
    logits = logits.view(n_kv, group, n_tok, -1)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if part.bias is not None:
        logits = logits + part.bias
    elif part.is_causal:
        hidden = torch.ones(n_tok, n_tok, dtype=torch.bool, device=q.device).triu_(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).to(q.dtype)
    out = _matmul(weights.view(n_kv, group * n_tok, -1), part.v[0])
    return out.view(n_kv, group, n_tok, -1), lse


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial results as one, in float32."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).unsqueeze(-1)
    weight_b = torch.exp(lse_b - lse).unsqueeze(-1)
    return out_a * weight_a + out_b * weight_b, lse
