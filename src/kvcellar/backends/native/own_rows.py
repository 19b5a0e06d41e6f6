"""Rows that a planned model's layers have of their own (per-layer embeddings), of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.native.weights import WeightHolder, floats, typed
from kvcellar.models.plans.plan import OwnRowsPlan
from kvcellar.types import IntArray

Array = NDArray[Any]


class OwnRows:
    """An embedding of tokens for every layer, and what is made of the model's own for each."""

    def __init__(self, plan: OwnRowsPlan, holder: WeightHolder, n_layers: int) -> None:
        """Hold the weights.

        Raises:
            ModelError: a tensor is missing, or is in a type that is not multiplied so.
        """
        self._plan, self._dtype, self._n_layers = plan, holder.dtype, n_layers
        self._embedding = holder.embedding(plan.embedding)
        self._project = holder.linear(plan.project)
        self._norm = floats(holder.norm_weight(plan.norm))

    def of(self, ids: IntArray, x: Array) -> Array:
        """Make the rows of tokens.

        Args:
            ids: int64 ``[T]``, in the vocabulary.
            x: their rows of the model's embedding, ``[T, hidden_size]``, without gaps.

        Returns:
            ``[T, n_layers, size]`` in the type of x.
        """
        plan, shape = self._plan, (len(ids), self._n_layers, self._plan.size)
        own, said = (np.empty((len(ids), shape[1] * shape[2]), x.dtype) for _ in range(2))
        self._embedding.look_up(ids, own)
        self._project.linear(x.ctypes.data, len(ids), self._dtype, said.ctypes.data)
        rows = floats(said).reshape(shape) * np.float32(plan.scale)
        sizes = np.square(rows).mean(-1, keepdims=True, dtype=np.float32)
        rows *= self._norm / np.sqrt(sizes + np.float32(plan.norm.eps))
        rows += floats(own).reshape(shape) * np.float32(plan.own_scale)
        return np.ascontiguousarray(typed(rows * np.float32(plan.mean), x.dtype))
