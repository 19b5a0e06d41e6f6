"""Logits that stay on a GPU: what is sampled from them comes to main memory, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcellar.backends.torch.cache.shortage import within_memory
from kvcellar.backends.torch.gpu.choice import has_triton
from kvcellar.backends.torch.gpu.sampler.settings import is_plain, sent
from kvcellar.models.kept_logits import RowChoice, RowSampling
from kvcellar.types import IntArray

ON_CPU = False
"""Tests set it, where Triton interprets its kernels: a CPU is a GPU then."""

MOST_ROWS = 64
"""Rows that are sampled at a time: some 25 bytes a logit are needed meanwhile."""


def samples_on(device: torch.device) -> bool:
    """Return true if logits stay on a device and are sampled there: by Triton, with float64."""
    if device.type == "cpu":
        return ON_CPU
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return False
    return device.type in ("cuda", "xpu") and has_triton()


class DeviceLogits:
    """Logits ``[R, vocab]``: :class:`~kvcellar.models.kept_logits.KeptLogits`."""

    def __init__(self, logits: Tensor, likeliest: Tensor | None = None) -> None:
        """Keep logits, of any float type, that nobody else writes to.

        Args:
            logits: ``[R, vocab]``.
            likeliest: what ``sampling.likeliest`` says of them, where it was asked already.
        """
        self._logits, self._likeliest = logits, likeliest

    def score(self, first: int, token_ids: IntArray, n_top: int) -> list[RowChoice]:
        """See :meth:`kvcellar.models.kept_logits.KeptLogits.score`."""
        from kvcellar.backends.torch.gpu.sampler.sampling import scored  # it imports Triton

        n_top = min(n_top, self._logits.shape[1])
        with torch.inference_mode():
            ids = torch.from_numpy(np.array(token_ids, np.int64)).to(self._logits.device)
            rows = self._logits[first : first + len(ids)]
            parts = zip(rows.split(MOST_ROWS), ids.split(MOST_ROWS), strict=True)
            told = torch.cat([scored(raw.float(), part, n_top) for raw, part in parts])
            found = told.cpu().numpy()
        return [_choice(row, n_top) for row in found]

    def sample(self, asked: Sequence[RowSampling]) -> list[RowChoice]:
        """See :meth:`kvcellar.models.kept_logits.KeptLogits.sample`."""
        if not asked:
            return []
        if self._likeliest is not None and all(map(is_plain, asked)):
            found = self._likeliest.cpu().numpy()
            return [RowChoice(int(found[ask.row, 0]), float(found[ask.row, 1])) for ask in asked]
        n_vocab = self._logits.shape[1]
        n_top = min(n_vocab, max(ask.logprobs or 0 for ask in asked))
        parts = [asked[first : first + MOST_ROWS] for first in range(0, len(asked), MOST_ROWS)]
        told = within_memory(lambda: self._told(parts, n_top), self._logits.device)
        return [
            RowChoice(int(row[0]), float(row[1]))
            if ask.logprobs is None
            else _choice(row, n_top, ask.logprobs)
            for ask, row in zip(asked, told, strict=True)
        ]

    @torch.inference_mode()
    def _told(
        self, parts: Sequence[Sequence[RowSampling]], n_top: int
    ) -> list[NDArray[np.float64]]:
        from kvcellar.backends.torch.gpu.sampler.sampling import sampled  # it imports Triton

        device, n_vocab = self._logits.device, self._logits.shape[1]
        found = [sampled(self._logits, sent(part, n_vocab, device), n_top) for part in parts]
        return [row for told in found for row in told.cpu().numpy()]


def _choice(told: NDArray[np.float64], n_top: int, wanted: int | None = None) -> RowChoice:
    """Return what ``sampled`` tells of a row with ``n_top`` likeliest tokens, or fewer of them."""
    n = n_top if wanted is None else min(wanted, n_top)
    ids, values = told[3 : 3 + n].astype(int).tolist(), told[3 + n_top :][:n].tolist()
    top = tuple(zip(ids, values, strict=True))
    return RowChoice(int(told[0]), float(told[1]), float(told[2]), top)
