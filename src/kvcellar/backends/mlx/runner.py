"""A model of mlx-lm and a session: the runner of the MLX backend."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvcellar.backends.mlx.binding import (
    Forward,
    Running,
    hidden_size,
    layer_caches,
    wrap_first_norms,
)
from kvcellar.models.runner import FloatArray, checked_batch
from kvcellar.registry import CacheSession
from kvcellar.types import IntArray, ModelCacheParams


class MlxRunner:
    """One model bound to one session; a :class:`~kvcellar.models.runner.Runner`.

    Many runners may share one model, also from several threads, as long as each session is used by
    one thread at a time. All that a forward makes is evaluated when
    it returns, so the next one may come from another thread.
    """

    def __init__(
        self,
        model: Any,
        params: ModelCacheParams,
        vocab_size: int,
        session: CacheSession[Any],
        device: mx.Device | None = None,
        feature_layers: Sequence[int] = (),
    ) -> None:
        """Bind; use :meth:`kvcellar.models.LoadedModel.bind`, which checks that they fit."""
        self.params = params
        self.vocab_size = vocab_size
        self.max_tokens_per_step: int | None = None
        self._model = model
        self._session = session
        self._device = device
        self._forward = Forward()
        self._feature_layers = tuple(feature_layers)
        self.n_features = len(self._feature_layers) * hidden_size(model)
        wrap_first_norms(model, self._feature_layers)
        self._caches = layer_caches(model, session.cache, self._forward)

    def forward(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
    ) -> FloatArray:
        """See :meth:`kvcellar.models.runner.Runner.forward`."""
        return self._run(token_ids, positions, rows, ())[0]

    def forward_with_features(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """See :meth:`kvcellar.models.runner.FeatureRunner.forward_with_features`."""
        logits, features = self._run(token_ids, positions, rows, self._feature_layers)
        assert features is not None
        return logits, features

    def _run(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None,
        feature_layers: tuple[int, ...],
    ) -> tuple[FloatArray, FloatArray | None]:
        """Logits, and features where layers are wanted."""
        cache: Any = self._session.cache
        if not cache.is_step_open:
            cache.end_step()  # from here on cancel_step can only mean this forward's step
        features = None
        try:
            ids, at, wanted = checked_batch(token_ids, positions, rows, self.vocab_size)
            self._forward.begin(at, wanted)
            self._forward.wanted = feature_layers
            with self._on_device(), Running(self._forward):
                logits = self._model(mx.array(ids[None]), cache=self._caches)[0]
                if logits.dtype != mx.float32:
                    logits = logits.astype(mx.float32)
                if feature_layers:
                    inputs = [self._forward.inputs[layer][0] for layer in feature_layers]
                    features = mx.concatenate(inputs, axis=-1).astype(mx.float32)
                mx.eval(logits, cache.arrays, features)
            out: FloatArray = np.array(logits)
        except BaseException:
            cache.cancel_step()
            for layer in self._caches:
                layer.forget()
            with contextlib.suppress(Exception):
                mx.eval(cache.arrays)  # nothing of a failed forward stays to be evaluated later
            raise
        finally:
            self._forward.inputs.clear()
        return out, None if features is None else np.array(features)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._device is None else mx.stream(self._device)
