"""Settings of rows that are sampled, as few flat arrays: what a step transfers to the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcellar.models.kept_logits import RowSampling
from kvcellar.types import IntArray

_ALIGNED = 8


class Settings(NamedTuple):
    """Settings of some rows on the device, as the kernels of ``draws`` read them.

    Attributes:
        ints, floats: int64 ``[R, 10]`` and float64 ``[R, 8]``, in the order that ``draws`` names.
        ids, values: tokens of all lists ``[n]``, and float32 what stands beside each of them.
        bits: uint8 ``[n_guides, ceil(vocab / 8)]``, which tokens may come.
        scored: rows whose log probabilities are wanted, ``[L]``; None: no row's.
        has_draws: true if any row is drawn.
        is_cut: true if any of those is cut by ``top_k``, ``top_p`` or ``min_p``.
    """

    ints: Tensor
    floats: Tensor
    ids: Tensor
    values: Tensor
    bits: Tensor
    scored: Tensor | None
    has_draws: bool
    is_cut: bool


def sent(asked: Sequence[RowSampling], n_vocab: int, device: torch.device) -> Settings:
    """Put the settings of some rows on a device, in one transfer.

    Args:
        asked: of each row.
        n_vocab: logits of a row.
        device: where they are.
    """
    ints, floats = np.empty((len(asked), 10), np.int64), np.empty((len(asked), 8), np.float64)
    ids: list[IntArray] = []
    values: list[NDArray[np.float32]] = []
    bits: list[NDArray[np.uint8]] = []
    n = 0
    for row, ask in enumerate(asked):
        settings, is_drawn, guide, end = ask.settings, ask.draw is not None, -1, -1
        if ask.allowed is not None:
            guide = len(bits)
            bits.append(np.packbits(ask.allowed, bitorder="little"))
            if ask.end_id is not None and ask.allowed[ask.end_id]:
                end = ask.end_id
        top_k = settings.top_k if settings.top_k < n_vocab else 0
        is_cut = is_drawn and (top_k > 0 or settings.top_p < 1.0 or settings.min_p > 0.0)
        lists = ask.held, ask.sampled, ask.bias_ids, ask.barred
        stops = n + np.cumsum([len(one) for one in lists])
        ints[row] = ask.row, top_k, guide, end, is_cut, n, *stops
        floats[row] = (
            settings.temperature,
            math.log(settings.min_p) if settings.min_p > 0.0 else -math.inf,
            settings.repetition_penalty,
            settings.frequency_penalty,
            settings.presence_penalty,
            -1.0 if ask.draw is None else ask.draw,
            settings.top_p,
            settings.temperature if is_drawn else 0.0,
        )
        if stops[-1] > n:
            n = int(stops[-1])
            ids += lists
            beside = _ones(ask.held), ask.times, ask.bias, _ones(ask.barred)
            values += beside
    scored = [row for row, ask in enumerate(asked) if ask.logprobs is not None]
    arrays: list[NDArray[Any]] = [
        ints,
        floats,
        np.concatenate(ids) if ids else np.zeros(1, np.int64),
        np.concatenate(values) if values else np.zeros(1, np.float32),
        np.stack(bits) if bits else np.zeros((1, 1), np.uint8),
        *([np.array(scored, np.int64)] if scored else []),
    ]
    of_ints, of_floats, of_ids, of_values, of_bits, *of_scored = _transferred(arrays, device)
    return Settings(
        of_ints,
        of_floats,
        of_ids,
        of_values,
        of_bits,
        of_scored[0] if scored else None,
        any(ask.draw is not None for ask in asked),
        bool(ints[:, 4].any()),
    )


def _ones(ids: IntArray) -> NDArray[np.float32]:
    return np.ones(len(ids), np.float32)


def is_plain(ask: RowSampling) -> bool:
    """Return true if a row's likeliest token is taken, and nothing else is asked of it."""
    lists = ask.held, ask.sampled, ask.bias_ids, ask.barred
    is_adjusted = ask.allowed is not None or any(map(len, lists))
    return ask.logprobs is None and ask.draw is None and not is_adjusted


def _transferred(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
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
