"""A transformers model and a session: the runner of the torch backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvcellar.cache import Cache
from kvcellar.errors import PromptError, StepError
from kvcellar.models.runner import FloatArray
from kvcellar.registry import CacheSession, use_cache
from kvcellar.types import IntArray, ModelCacheParams


class TorchRunner:
    """One model bound to one session; a :class:`~kvcellar.models.runner.Runner`.

    It holds nothing of its own: many runners may share one model, also from several threads, as
    long as each session is used by one thread at a time.
    """

    def __init__(
        self,
        model: Any,
        params: ModelCacheParams,
        vocab_size: int,
        session: CacheSession[Any],
    ) -> None:
        """Bind; use :meth:`kvcellar.models.LoadedModel.bind`, which checks that they fit."""
        self.params = params
        self.vocab_size = vocab_size
        self._model = model
        self._session = session
        self._device: torch.device = model.device

    def forward(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
    ) -> FloatArray:
        """See :meth:`kvcellar.models.runner.Runner.forward`."""
        cache: Cache = self._session.cache
        if not cache.is_step_open:
            cache.end_step()  # from here on cancel_step can only mean this forward's step
        try:
            ids, at, keep = self._checked(token_ids, positions, rows)
            with use_cache(cache), torch.inference_mode():
                logits = self._model(
                    input_ids=ids, position_ids=at, use_cache=False, logits_to_keep=keep
                ).logits[0]
                out: FloatArray = logits.float().cpu().numpy()
        except BaseException:
            cache.cancel_step()
            raise
        return out

    def _checked(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None,
    ) -> tuple[torch.Tensor, torch.Tensor, int | torch.Tensor]:
        """Input tensors ``[1, T]`` twice, and what transformers calls ``logits_to_keep``."""
        ids = np.asarray(token_ids)
        n_tokens = ids.size
        if ids.ndim != 1 or not n_tokens:
            raise PromptError(
                f"a forward takes one flat batch of at least one token, got token_ids of shape "
                f"{list(ids.shape)}"
            )
        low, high = (ids[0], ids[0]) if n_tokens == 1 else (ids.min(), ids.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise PromptError(
                f"token id {bad} is not in the model's vocabulary, 0 to {self.vocab_size - 1}; "
                f"encode the text with the model's own tokenizer"
            )
        if ids.dtype.kind not in "iu":
            raise PromptError(f"token ids are whole numbers, got an array of {ids.dtype}")
        at = np.asarray(positions)
        if at.shape != ids.shape:
            raise StepError(
                f"a forward takes one position per token; got {n_tokens} tokens and positions of "
                f"shape {list(at.shape)}"
            )
        keep: int | torch.Tensor = 1
        if rows is not None and not (len(rows) == 1 and rows[0] == n_tokens - 1):
            wanted = np.asarray(rows, dtype=np.int64)
            if wanted.ndim != 1 or (wanted.size and (wanted.min() < 0 or wanted.max() >= n_tokens)):
                raise StepError(
                    f"rows are indices of the batch's tokens, 0 to {n_tokens - 1}; got "
                    f"{wanted.tolist()}"
                )
            keep = self._tensor(wanted)
        return self._tensor(ids[None]), self._tensor(at[None]), keep

    def _tensor(self, values: Any) -> torch.Tensor:
        # A copy, which may be written to; ten times faster than torch.tensor.
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self._device)
