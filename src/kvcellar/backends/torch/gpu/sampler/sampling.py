"""Sampling of many rows of logits at once, on their device, by the kernels of ``draws``.

It does to all rows what ``kvcellar.engine.sampler.sampling`` does to one, with the same numbers, so
that the same draws choose the same tokens. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvcellar.backends.torch.gpu.attend.launch import is_interpreted, on_device
from kvcellar.backends.torch.gpu.sampler import draws
from kvcellar.backends.torch.gpu.sampler.settings import Settings

TILE = 2048
"""Logits of a program."""

LISTED = 256
"""Tokens of a list that a program looks at together."""

_LOW = (1 << 32) - 1


def sampled(logits: Tensor, settings: Settings, n_top: int) -> Tensor:
    """Choose a token for each of some rows; return all that is told of it, in one tensor.

    Args:
        logits: ``[rows, vocab]``, of any float type, which stay as they are.
        settings: of R of these rows.
        n_top: likeliest tokens that are told, at most ``vocab``.

    Returns:
        float64 ``[R, 2]``: the token or -1, and the highest logit; where log probabilities are
        wanted ``[R, 3 + 2 * n_top]``: then the token's, then tokens and log probabilities of the
        likeliest.
    """
    found = _chosen(logits, settings)
    if settings.scored is None:
        return found
    told = found.new_zeros((len(found), 3 + 2 * n_top))
    told[:, :2], at = found, settings.scored
    raw, token_ids = logits[settings.ints[at, 0]].float(), found[at, 0].long().clamp(min=0)
    told[at, 2:] = logprobs(raw, token_ids, n_top)
    return told


def likeliest(logits: Tensor, counts: Tensor) -> Tensor:
    """Return float64 ``[R, 2]``: each row's likeliest token, -1 where none is, and its logit.

    It is what ``sampled`` tells first of rows for which nothing is asked, in one launch.

    Args:
        logits: ``[R, vocab]``, of any float type, which stay as they are.
        counts: int32 ``[R]`` of zeros, which it leaves: of nobody who runs at the same time.
    """
    (n_rows, n_vocab), device = logits.shape, logits.device
    told = torch.empty((n_rows, 2), dtype=torch.float64, device=device)
    if not n_rows:
        return told
    tile, n_tiles = _tiles(n_vocab)
    parts = torch.empty((n_rows, n_tiles, 5), dtype=torch.float64, device=device)
    logits = _readable(logits)
    with on_device(device):
        draws.take_likeliest[(n_tiles, n_rows)](
            logits, parts, counts, told, n_vocab, n_tiles, logits.stride(0), tile,
            triton.next_power_of_2(n_tiles),
        )  # fmt: skip
    return told


def _readable(logits: Tensor) -> Tensor:
    """Return logits whose rows lie as kernels read them."""
    logits = logits.float() if is_interpreted() else logits
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _adjusted(logits: Tensor, n_rows: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return adjusted logits, and what is found of their tiles."""
    n_vocab, device = logits.shape[1], logits.device
    tile, n_tiles = _tiles(n_vocab)
    room = torch.empty((n_rows, n_vocab), dtype=torch.float32, device=device)
    parts = torch.empty((n_rows, n_tiles, 5), dtype=torch.float64, device=device)
    logits = _readable(logits)
    ints, floats, ids, values, bits = settings[:5]
    with on_device(device):
        draws.adjust_tiles[(n_tiles, n_rows)](
            logits, room, parts, ints, floats, ids, values, bits, n_vocab, n_tiles, bits.shape[1],
            logits.stride(0), tile, LISTED,
        )  # fmt: skip
    return room, parts


def _chosen(logits: Tensor, settings: Settings) -> Tensor:
    """Return float64 ``[R, 2]``: tokens, or -1, and the highest logits."""
    n_rows, n_vocab, device = len(settings.ints), logits.shape[1], logits.device
    told = torch.empty((n_rows, 2), dtype=torch.float64, device=device)
    if not n_rows:
        return told
    tile, n_tiles = _tiles(n_vocab)
    room, parts = _adjusted(logits, n_rows, settings)
    tiles = triton.next_power_of_2(n_tiles)
    ints, floats, ids = settings[:3]
    keys = masses = sums = parts
    with on_device(device):
        if settings.has_draws:
            n_sorted = n_rows if settings.is_cut else 1
            keys = torch.empty((n_sorted, n_tiles, tile), dtype=torch.int32, device=device)
            masses = torch.empty((n_sorted, n_tiles, tile), dtype=torch.float64, device=device)
            sums = torch.empty((n_rows, n_tiles), dtype=torch.float64, device=device)
            draws.weigh_tiles[(n_tiles, n_rows)](
                room, parts, keys, masses, sums, ints, floats, ids, n_vocab, n_tiles, tile, tiles
            )
        draws.choose_rows[(n_rows,)](
            room, parts, keys, masses, sums, told, ints, floats, ids, n_vocab, n_tiles,
            settings.has_draws, tile, tiles,
        )  # fmt: skip
    return told


def _tiles(n_vocab: int) -> tuple[int, int]:
    """Return the logits of a tile, and how many tiles a row has."""
    tile = min(TILE, triton.next_power_of_2(n_vocab))
    return tile, triton.cdiv(n_vocab, tile)


def scored(raw: Tensor, token_ids: Tensor, n_top: int) -> Tensor:
    """Return all that ``sampled`` tells, of tokens that were chosen elsewhere, ``[R]``."""
    found = torch.stack([token_ids.double(), raw.amax(1).double()], 1)
    return torch.cat([found, logprobs(raw, token_ids, n_top)], 1)


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
