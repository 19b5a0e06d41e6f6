"""Settings of rows that are sampled, as few flat arrays: what a step transfers to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcellar.models.kept_logits import RowSampling
from kvcellar.types import IntArray

_ALIGNED = 8


class Adjustments(NamedTuple):
    """Changes of logits ``[R, vocab]`` before they are sampled. Places are flat in them.

    Attributes:
        held: places ``[H]``, and the ``repetition`` penalty of each.
        sampled: places ``[S]``, and what is taken off each, ``often`` first and then ``once``.
        biased: places ``[B]``, and the ``bias`` of each.
        guided: rows ``[G]``, whose ``bits`` ``[G, ceil(vocab / 8)]`` say what may come.
        standing: which of these have a token that stands for what may not come, ``[E]``; their
            ``end_ids``, and their ``scales``: temperatures, 0 where the likeliest is taken.
        barred: places ``[N]``, and the row of each, ``barred_rows``.
    """

    held: Tensor
    repetition: Tensor
    sampled: Tensor
    often: Tensor
    once: Tensor
    biased: Tensor
    bias: Tensor
    guided: Tensor
    bits: Tensor
    standing: Tensor
    end_ids: Tensor
    scales: Tensor
    barred: Tensor
    barred_rows: Tensor


class Draws(NamedTuple):
    """Settings of the rows that are drawn.

    Attributes:
        rows: ``[D]``; their ``temperatures``, the ``lowest`` scaled logits that ``min_p`` leaves,
            and the random ``numbers``.
        cut_k: which of these have a ``top_k``, ``[K]``; it is counted from 0.
        cut_p: which have a ``top_p``, ``[P]``.
    """

    rows: Tensor
    temperatures: Tensor
    lowest: Tensor
    numbers: Tensor
    cut_k: Tensor
    top_k: Tensor
    cut_p: Tensor
    top_p: Tensor


class Settings(NamedTuple):
    """Settings of some rows on the device.

    Attributes:
        rows: which of the logits; None: all, in their order.
        scored: rows of these whose log probabilities are wanted, likewise the others; None: none.
        adjustments: None where nothing is done.
        draws: None where the likeliest tokens are taken.
    """

    rows: Tensor | None
    scored: Tensor | None
    adjustments: Adjustments | None
    draws: Draws | None


def sent(asked: Sequence[RowSampling], shape: Sequence[int], device: torch.device) -> Settings:
    """Put the settings of some rows on a device, in one transfer, or in none.

    Args:
        asked: of each row.
        shape: of the logits.
        device: where they are.
    """
    n_rows, n_vocab = shape
    rows = [ask.row for ask in asked]
    parts: list[list[NDArray[Any]]] = [
        [] if rows == list(range(n_rows)) else [np.array(rows, np.int64)],
        [_where(asked, is_scored)] if any(map(is_scored, asked)) else [],
        _adjustments(asked, n_vocab) if any(map(_is_adjusted, asked)) else [],
        _draws(asked, n_vocab) if any(map(_is_drawn, asked)) else [],
    ]
    there = iter(_transferred([array for part in parts for array in part], device))
    of_rows, scored, adjustments, draws = [list(islice(there, len(part))) for part in parts]
    return Settings(
        of_rows[0] if of_rows else None,
        scored[0] if scored else None,
        Adjustments(*adjustments) if adjustments else None,
        Draws(*draws) if draws else None,
    )


def is_scored(ask: RowSampling) -> bool:
    """Return true if log probabilities of a row are wanted."""
    return ask.logprobs is not None


def is_plain(ask: RowSampling) -> bool:
    """Return true if a row's likeliest token is taken, and nothing else is asked of it."""
    return not (is_scored(ask) or _is_drawn(ask) or _is_adjusted(ask))


def _is_drawn(ask: RowSampling) -> bool:
    return ask.draw is not None


def _is_adjusted(ask: RowSampling) -> bool:
    lists = ask.held, ask.sampled, ask.bias_ids, ask.barred
    return ask.allowed is not None or any(map(len, lists))


def _adjustments(asked: Sequence[RowSampling], n_vocab: int) -> list[NDArray[Any]]:
    """Return the arrays of ``Adjustments``, in their order."""
    firsts = [row * n_vocab for row in range(len(asked))]
    guided = _where(asked, lambda ask: ask.allowed is not None)
    masks = [ask.allowed for ask in asked if ask.allowed is not None]
    bits = [np.packbits(mask, bitorder="little") for mask in masks]
    ends = [asked[row] for row in guided if asked[row].end_id is not None]
    scales = [0.0 if ask.draw is None else ask.temperature for ask in ends]

    def each(
        value: Callable[[RowSampling], float], ids: Callable[[RowSampling], IntArray]
    ) -> NDArray[np.float32]:
        values = np.array([value(ask) for ask in asked], np.float32)
        return values.repeat([len(ids(ask)) for ask in asked])

    def places(ids: Callable[[RowSampling], IntArray]) -> IntArray:
        return np.concatenate([ids(ask) + first for ask, first in zip(asked, firsts, strict=True)])

    times = np.concatenate([ask.times for ask in asked])
    return [
        places(lambda ask: ask.held),
        each(lambda ask: ask.repetition_penalty, lambda ask: ask.held),
        places(lambda ask: ask.sampled),
        times * each(lambda ask: ask.frequency_penalty, lambda ask: ask.sampled),
        each(lambda ask: ask.presence_penalty, lambda ask: ask.sampled),
        places(lambda ask: ask.bias_ids),
        np.concatenate([ask.bias for ask in asked]),
        guided,
        np.stack(bits) if bits else np.empty((0, -(-n_vocab // 8)), np.uint8),
        _where([asked[row] for row in guided], lambda ask: ask.end_id is not None),
        np.array([ask.end_id for ask in ends], np.int64),
        np.array(scales, np.float64),
        places(lambda ask: ask.barred),
        np.arange(len(asked)).repeat([len(ask.barred) for ask in asked]),
    ]


def _draws(asked: Sequence[RowSampling], n_vocab: int) -> list[NDArray[Any]]:
    """Return the arrays of ``Draws``, in their order."""
    drawn = list(filter(_is_drawn, asked))
    lowest = [np.log(ask.min_p) if ask.min_p > 0.0 else -np.inf for ask in drawn]
    cut_k = _where(drawn, lambda ask: 0 < ask.top_k < n_vocab)
    cut_p = _where(drawn, lambda ask: ask.top_p < 1.0)
    return [
        _where(asked, _is_drawn),
        np.array([ask.temperature for ask in drawn], np.float32),
        np.array(lowest, np.float32),
        np.array([ask.draw for ask in drawn], np.float64),
        cut_k,
        np.array([drawn[row].top_k - 1 for row in cut_k], np.int64),
        cut_p,
        np.array([drawn[row].top_p for row in cut_p], np.float64),
    ]


def _where(asked: Sequence[RowSampling], holds: Callable[[RowSampling], bool]) -> IntArray:
    return np.array([i for i, ask in enumerate(asked) if holds(ask)], np.int64)


def _transferred(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device together, each aligned; return them there, in their shapes."""
    if not arrays:
        return []
    sizes = [-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays]
    here = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    starts = np.cumsum([0, *sizes[:-1]])
    buffer = here.numpy()
    for array, start in zip(arrays, starts, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1)
        buffer[start : start + array.nbytes] = flat.view(np.uint8)
    there = here.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_TORCH[array.dtype.char]).view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=True)
    ]


_TORCH = {
    np.dtype(np.int64).char: torch.int64,
    np.dtype(np.float64).char: torch.float64,
    np.dtype(np.float32).char: torch.float32,
    np.dtype(np.uint8).char: torch.uint8,
}
