"""Sampling of many rows of logits at once, by torch's operations on whichever device they are.

It does to all rows what ``kvcellar.engine.sampling`` does to one, in the same types and order, so
that the same draws choose the same tokens. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcellar.backends.torch.gpu.settings import Adjustments, Draws, Settings

_LOW = (1 << 32) - 1
_NEVER = -torch.inf


def sampled(raw: Tensor, settings: Settings, n_top: int, most_k: int) -> Tensor:
    """Choose a token for each row; return all that is told of it, in one tensor.

    Args:
        raw: float32 ``[R, vocab]``, which stays as it is.
        settings: of these rows.
        n_top: likeliest tokens that are told, at most ``vocab``.
        most_k: the highest ``top_k`` of these rows that cuts anything.

    Returns:
        float64 ``[R, 3 + 2 * n_top]``: the token or -1, the highest logit, the token's log
        probability where it is wanted, then tokens and log probabilities of the likeliest.
    """
    best, logits = raw.amax(1), raw
    if settings.adjustments is not None:
        logits = adjusted(raw, settings.adjustments)
    token_ids = logits.argmax(1)  # the first of equals
    highest = logits.gather(1, token_ids[:, None])[:, 0]
    if settings.draws is not None:
        rows = settings.draws.rows
        token_ids[rows] = drawn(logits[rows], settings.draws, most_k)
    told = raw.new_zeros((len(raw), 3 + 2 * n_top), dtype=torch.float64)
    told[:, 0], told[:, 1] = token_ids.masked_fill(highest == _NEVER, -1), best
    if settings.scored is not None:
        rows = settings.scored
        told[rows, 2:] = logprobs(raw[rows], token_ids[rows], n_top)
    return told


def likeliest(logits: Tensor) -> Tensor:
    """Return float64 ``[R, 2]``: each row's likeliest token, -1 where none is, and its logit.

    It is what ``sampled`` tells first of rows for which nothing is asked.
    """
    token_ids = logits.argmax(1)  # the first of equals
    best = logits.gather(1, token_ids[:, None])[:, 0].double()
    return torch.stack([token_ids.masked_fill(best == _NEVER, -1).double(), best], 1)


def scored(raw: Tensor, token_ids: Tensor, n_top: int) -> Tensor:
    """Return what ``sampled`` tells, of tokens that were chosen elsewhere, ``[R]``."""
    found = torch.stack([token_ids.double(), raw.amax(1).double()], 1)
    return torch.cat([found, logprobs(raw, token_ids, n_top)], 1)


def adjusted(raw: Tensor, by: Adjustments) -> Tensor:
    """Return a copy of logits with penalties, bias and guides."""
    logits = raw.clone()
    flat = logits.view(-1)
    if len(by.held):
        values = flat[by.held]
        flat[by.held] = torch.where(values > 0, values / by.repetition, values * by.repetition)
    if len(by.sampled):
        flat[by.sampled] = flat[by.sampled] - by.often - by.once
    if len(by.biased):
        flat[by.biased] = flat[by.biased] + by.bias
    if len(by.guided):
        logits[by.guided] = _guided(logits[by.guided], by)
    if len(by.barred):
        values = flat[by.barred]
        flat[by.barred] = _NEVER
        is_left = logits.amax(1).isfinite()[by.barred_rows]
        flat[by.barred] = torch.where(is_left, _NEVER, values)  # unless nothing else is allowed
    return logits


def _guided(logits: Tensor, by: Adjustments) -> Tensor:
    """Return the logits ``[G, vocab]`` of rows with guides, -inf where no token may come."""
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (by.bits[:, :, None] >> shifts) & 1
    is_barred = bits.flatten(1)[:, : logits.shape[1]] == 0
    if len(by.standing):
        logits[by.standing, by.end_ids] = _together(logits[by.standing], is_barred, by)
    return logits.masked_fill(is_barred, _NEVER)


def _together(logits: Tensor, is_barred: Tensor, by: Adjustments) -> Tensor:
    """Return the logits of tokens that stand for others: as likely chosen as all of them."""
    others = is_barred[by.standing].scatter(1, by.end_ids[:, None], True)
    values = logits.masked_fill(~others, _NEVER)
    best = values.amax(1)
    is_drawn = (by.scales > 0) & best.isfinite()
    scales = torch.where(is_drawn, by.scales, 1.0)
    weights = ((values.double() - best[:, None].double()) / scales[:, None]).exp()
    return torch.where(is_drawn, best + (scales * weights.sum(1).log()).float(), best)


def drawn(logits: Tensor, by: Draws, most_k: int) -> Tensor:
    """Sample every row by inverting its cumulative distribution, in order of token ids.

    Returns:
        int64 ``[D]``: the tokens; any number where none may come.
    """
    scaled = logits - logits.amax(1, keepdim=True)  # before the division, which may overflow
    scaled = scaled / by.temperatures[:, None]
    weights = scaled.exp()
    kept = (scaled >= _edges(scaled, by, most_k)[:, None]) & (weights > 0)
    cumulative = weights.masked_fill(~kept, 0.0).cumsum(1, dtype=torch.float64)
    is_above = cumulative > by.numbers[:, None] * cumulative[:, -1:]
    # Zeros need not leave a sum as it is where it is made in parts: only what is kept is chosen.
    n_vocab = scaled.shape[1]
    ids = torch.arange(n_vocab, device=scaled.device)
    first = torch.where(kept & is_above, ids, n_vocab).amin(1)
    last = torch.where(kept, ids, 0).amax(1)
    return torch.where(first < n_vocab, first, last)


def _edges(scaled: Tensor, by: Draws, most_k: int) -> Tensor:
    """Return the lowest scaled logit of each row that stays; the highest is 0."""
    edges = torch.full_like(by.lowest, _NEVER)
    if len(by.cut_k):
        highest = scaled[by.cut_k].topk(most_k).values
        edges[by.cut_k] = highest.gather(1, by.top_k[:, None])[:, 0]
    if len(by.cut_p):
        order = scaled[by.cut_p].sort(descending=True).values
        kept = (order >= edges[by.cut_p][:, None]) & (order.exp() > 0)
        cumulative = order.double().exp().masked_fill(~kept, 0.0).cumsum(1)
        at = (cumulative < by.top_p[:, None] * cumulative[:, -1:]).sum(1)
        at = at.minimum(kept.sum(1) - 1).clamp(min=0)
        edges[by.cut_p] = order.gather(1, at[:, None])[:, 0]
    return edges.maximum(by.lowest)


def logprobs(raw: Tensor, token_ids: Tensor, n_top: int) -> Tensor:
    """Return float64 ``[L, 1 + 2 * n_top]``: the model's own log probabilities, as ``sampled``."""
    shifted = raw.double() - raw.amax(1, keepdim=True).double()
    of_all = shifted.exp().sum(1, keepdim=True).log()
    told = [shifted.gather(1, token_ids[:, None]) - of_all]
    if n_top:
        top = _likeliest(raw, n_top)
        told += [top.double(), shifted.gather(1, top) - of_all]
    return torch.cat(told, 1)


def _likeliest(raw: Tensor, n: int) -> Tensor:
    """Return the ``n`` likeliest tokens of each row, the lowest id first of equals.

    topk promises no order of equals, so it is given numbers of which none are: a logit's bits,
    which as integers are in the order of floats, and below them the id from the end.
    """
    bits = (raw + 0.0).view(torch.int32)  # of -0.0 too, which is 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(raw.shape[1], device=raw.device)
    keys = (ordered << 32) + (_LOW - ids)
    return _LOW - (keys.topk(n).values & _LOW)
