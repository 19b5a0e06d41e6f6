"""Settings of rows that are sampled, as few flat arrays: what a step transfers to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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
    """Settings of some rows on the device: ``rows`` of the logits, and which are ``scored``."""

    rows: Tensor
    scored: Tensor
    adjustments: Adjustments
    draws: Draws


def sent(asked: Sequence[RowSampling], n_vocab: int, device: torch.device) -> Settings:
    """Put the settings of some rows on a device, in one transfer."""
    rows = np.array([ask.row for ask in asked])
    scored = _where(asked, lambda ask: ask.logprobs is not None)
    adjustments = _adjustments(asked, n_vocab)
    arrays = _transferred([rows, scored, *adjustments, *_draws(asked, n_vocab)], device)
    stop = 2 + len(adjustments)
    return Settings(arrays[0], arrays[1], Adjustments(*arrays[2:stop]), Draws(*arrays[stop:]))


def _adjustments(asked: Sequence[RowSampling], n_vocab: int) -> list[NDArray[np.generic]]:
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


def _draws(asked: Sequence[RowSampling], n_vocab: int) -> list[NDArray[np.generic]]:
    """Return the arrays of ``Draws``, in their order."""
    drawn = [ask for ask in asked if ask.draw is not None]
    lowest = [np.log(ask.min_p) if ask.min_p > 0.0 else -np.inf for ask in drawn]
    cut_k = _where(drawn, lambda ask: 0 < ask.top_k < n_vocab)
    cut_p = _where(drawn, lambda ask: ask.top_p < 1.0)
    return [
        _where(asked, lambda ask: ask.draw is not None),
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


def _transferred(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device together, each aligned; return them there, in their shapes."""
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
