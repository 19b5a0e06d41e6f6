"""A model of mlx-lm and a session: the runner of the MLX backend."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvcellar.backends.mlx.bind.binding import Forward, Running, bind_features
from kvcellar.backends.mlx.learn.learning import Learnt
from kvcellar.errors import ConfigError
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
            forward.hidden = None

    def forward_hidden(
        self, token_ids: Sequence[int] | IntArray, positions: Sequence[int] | IntArray
    ) -> FloatArray:
        """See :meth:`kvcellar.models.runner.HiddenRunner.forward_hidden`.

        Raises:
            ConfigError: the module that makes logits was not found, nor what it is given.
        """
        if not self._is_head_bound:
            raise ConfigError(
                "what this model makes logits of is not known, so it has no hidden states; ask "
                "another model"
            )
        rows = list(range(len(token_ids)))
        return self._forward(self._hidden, token_ids, positions, rows, has_features=False)[0]

    def _hidden(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Run the model; what its head is given is evaluated, and logits, being lazy, are not."""
        forward = self._shared
        forward.begin(at, rows)
        forward.wanted = ()
        try:
            with self._on_device(), Running(forward):
                self._model(mx.array(ids[:, None]), cache=self._caches)
                assert forward.hidden is not None, "the head was given something"
                states = forward.hidden[:, 0].astype(mx.float32)
                cache.settle(states)
            return np.array(states), np.empty((len(ids), 0), np.float32)
        finally:
            forward.hidden = None

    def _wanted(self, logits: mx.array) -> mx.array:
        """Return ``[R, vocab]`` of logits ``[R, 1, vocab]``, or of all tokens' where no head is."""
        rows = None if self._is_head_bound else self._shared.rows
        return logits[:, 0] if rows is None else mx.take(logits[:, 0], rows, axis=0)

    def _after_failure(self, cache: Any) -> None:
        self._shared.end()
        cache.forget()

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._device is None else mx.stream(self._device)
