"""A planned model and a session: the runner of the native backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcellar.backends.native.decoder import NativeDecoder
from kvcellar.errors import ConfigError
from kvcellar.models.runner import BoundRunner, FloatArray
from kvcellar.registry import CacheSession
from kvcellar.types import IntArray, ModelCacheParams


class NativeRunner(BoundRunner):
    """One model bound to one session; a :class:`~kvcellar.models.runner.Runner`."""

    def __init__(
        self,
        decoder: NativeDecoder,
        params: ModelCacheParams,
        session: CacheSession[Any],
        feature_layers: Sequence[int] = (),
    ) -> None:
        """Bind a model.

        Args:
            decoder: the model.
            params: of its cache.
            session: open, of this backend.
            feature_layers: whose inputs are wanted.

        Raises:
            ConfigError: its cache stores K rotated.
        """
        n_features = len(feature_layers) * decoder.hidden_size
        super().__init__(session, params, decoder.vocab_size, n_features)
        if session.cache.is_rotated:
            raise ConfigError(
                f"kv_dtype {session.cache.config.kv_dtype} stores K rotated, which models of the "
                f"native backend do not; leave :rot out, or choose the backend torch"
            )
        self._decoder, self._feature_layers = decoder, tuple(feature_layers)

    def forward_hidden(
        self, token_ids: Sequence[int] | IntArray, positions: Sequence[int] | IntArray
    ) -> FloatArray:
        """See :meth:`kvcellar.models.runner.HiddenRunner.forward_hidden`."""
        return self._forward(self._hidden, token_ids, positions, None, has_features=False)[0]

    def _hidden(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Run the model below its head; there are neither rows nor features."""
        return self._decoder.hidden(cache, ids, at), np.empty((len(ids), 0), np.float32)

    def _run(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        wanted = np.array([len(ids) - 1], np.int64) if rows is None else rows
        layers = self._feature_layers if has_features else ()
        return self._decoder.forward(cache, ids, at, wanted, layers)
