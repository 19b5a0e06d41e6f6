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
from kvcellar.models.runner import BoundRunner, FloatArray
from kvcellar.registry import CacheSession
from kvcellar.types import IntArray, ModelCacheParams


class MlxRunner(BoundRunner):
    """One model bound to one session; a :class:`~kvcellar.models.runner.Runner`.

    All that a forward makes is evaluated when it returns, so the next one may come from another
    thread.
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
        """Bind a wrapped model; None: to run on MLX's default device."""
        super().__init__(session, params, vocab_size, len(feature_layers) * hidden_size(model))
        self._model = model
        self._device = device
        self._shared = Forward()
        self._feature_layers = tuple(feature_layers)
        wrap_first_norms(model, self._feature_layers)
        self._caches = layer_caches(model, session.cache, self._shared)

    def _run(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        forward = self._shared
        forward.begin(at, rows)
        forward.wanted = self._feature_layers if has_features else ()
        try:
            with self._on_device(), Running(forward):
                logits = self._model(mx.array(ids[None]), cache=self._caches)[0]
                if logits.dtype != mx.float32:
                    logits = logits.astype(mx.float32)
                features = mx.zeros((0,))
                if has_features:
                    inputs = [forward.inputs[layer][0] for layer in self._feature_layers]
                    features = mx.concatenate(inputs, axis=-1).astype(mx.float32)
                mx.eval(logits, cache.arrays, features)
            return np.array(logits), np.array(features)
        finally:
            forward.inputs.clear()

    def _after_failure(self, cache: Any) -> None:
        for layer in self._caches:
            layer.forget()
        with contextlib.suppress(Exception):
            mx.eval(cache.arrays)  # nothing of a failed forward stays to be evaluated later

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._device is None else mx.stream(self._device)
