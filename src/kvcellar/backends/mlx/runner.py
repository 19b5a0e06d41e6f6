"""A model of mlx-lm and a session: the runner of the MLX backend."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvcellar.backends.mlx.binding import Forward, Running, bind_features
from kvcellar.backends.mlx.learning import Learnt
from kvcellar.models.runner import BoundRunner, FloatArray
from kvcellar.registry import CacheSession
from kvcellar.types import IntArray


class MlxRunner(BoundRunner):
    """One model bound to one session; a :class:`~kvcellar.models.runner.Runner`.

    All that a forward makes is evaluated when it returns, so the next one may come from another
    thread.
    """

    def __init__(
        self,
        model: Any,
        learnt: Learnt,
        session: CacheSession[Any],
        device: mx.Device | None = None,
        feature_layers: Sequence[int] = (),
    ) -> None:
        """Bind a model that was learnt; None: to run on MLX's default device."""
        n_features = len(feature_layers) * learnt.hidden_size
        super().__init__(session, learnt.params, learnt.vocab_size, n_features)
        self._model = model
        self._device = device
        self._is_head_bound = learnt.is_head_bound
        self._shared = Forward(session.cache)
        self._feature_layers = tuple(feature_layers)
        bind_features(model, self._feature_layers)
        self._caches = learnt.layer_caches(self._shared)

    def _run(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        forward = self._shared
        forward.begin(at, rows)
        forward.wanted = self._feature_layers if has_features else ()
        try:
            with self._on_device(), Running(forward):
                logits = self._model(mx.array(ids[:, None]), cache=self._caches)
                logits = self._wanted(logits).astype(mx.float32)
                features = mx.zeros((0,))
                if has_features:
                    inputs = [forward.inputs[layer][:, 0] for layer in self._feature_layers]
                    features = mx.concatenate(inputs, axis=-1).astype(mx.float32)
                cache.settle(logits, features)
            return np.array(logits), np.array(features)
        finally:
            forward.inputs.clear()

    def _wanted(self, logits: mx.array) -> mx.array:
        """Return ``[R, vocab]`` of logits ``[R, 1, vocab]``, or of all tokens' where no head is."""
        rows = None if self._is_head_bound else self._shared.rows
        return logits[:, 0] if rows is None else mx.take(logits[:, 0], rows, axis=0)

    def _after_failure(self, cache: Any) -> None:
        self._shared.end()
        cache.forget()

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._device is None else mx.stream(self._device)
