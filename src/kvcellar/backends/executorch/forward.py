"""Forwards of one cache, handed over whole: then a layer's op needs no Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcellar.backends.executorch import native
from kvcellar.backends.torch.cache.forward import (
    GroupStep,
    can_plan,
    compiled_steps,
    pools_of,
)
from kvcellar.errors import ShapeError
from kvcellar.kernel import attend
from kvcellar.types import IntArray


class Forwards:
    """Plans each forward of a cache and says when it is done. One forward at a time."""

    def __init__(self, cache: Any) -> None:
        """Create a planner of a cache's forwards; the cache has to satisfy ``can_run``."""
        self._cache = cache
        self._layers = np.zeros(cache.steps.n_layers, native.LAYER)
        groups = cache.steps.groups
        self._group_layers = [np.array(group.layers) for group in groups]
        for group in groups:
            self._layers["softcap"][list(group.layers)] = group.softcap or 0.0
        self._forward = native.ForwardRecord(cache.steps.n_layers, self._layers.ctypes.data)
        self.address = ctypes.addressof(self._forward)
        """Address of the ``native.ForwardRecord``, which stays."""
        self._pools: list[tuple[attend.Pool, attend.Pool | None]] = []
        self._steps: list[GroupStep] = []  # keeps plans alive that the runtime has addresses of

    @staticmethod
    def can_run(cache: object) -> bool:
        """Return true if the CPU kernel alone can run this cache's forwards."""
        return can_plan(cache)

    def plan_for(self, layer: int, shape: native.Shape, positions: Sequence[int]) -> int:
        """Plan the forward whose first layer asks; what it brings is looked at before.

        Raises:
            ShapeError: it does not have the cache's heads and dims; nothing was planned.
            StepError, PositionError, CacheFullError: as ``plan``.
        """
        group = self._cache.steps.groups[self._cache.steps.group_of(layer)]
        wanted = (group.n_kv_heads, group.head_dim, group.v_head_dim)
        if tuple(shape[2:]) != wanted or shape.n_heads % group.n_kv_heads:
            raise ShapeError(
                f"layer {layer} brings {shape.n_heads} query heads, {shape.n_kv_heads} KV heads of "
                f"{shape.head_dim} and v rows of {shape.v_head_dim}; this cache holds {wanted[0]} "
                f"KV heads of {wanted[1]} and {wanted[2]}"
            )
        return self.plan(shape.n_tokens, positions)

    def plan(self, n_tokens: int, positions: Sequence[int] | IntArray | None) -> int:
        """Plan a forward of all layers; return the address of its ``ForwardRecord``.

        Args:
            n_tokens: tokens of the flat batch.
            positions: one per token.

        Raises:
            StepError, PositionError, CacheFullError: from the cache; nothing was written.
        """
        self.finish()
        self._steps = compiled_steps(self._cache, n_tokens, positions)
        layers = self._layers
        pools = pools_of(self._cache)
        for index, (pool, exact) in enumerate(pools):
            if index >= len(self._pools) or self._pools[index] != (pool, exact):
                layers["pool"][index] = pool.address
                layers["exact_pool"][index] = exact.address if exact is not None else 0
        self._pools = pools
        for group, step in zip(self._group_layers, self._steps, strict=True):
            layers["plan"][group] = step.plan.address
            layers["exact_plan"][group] = 0 if step.to_exact is None else step.to_exact.address
        layers["is_ready"] = 1
        return self.address

    def finish(self) -> None:
        """Count the forward's tokens where every layer has run."""
        if self._steps and not self._layers["is_ready"].any():
            self._steps = []
            self._cache.steps.wrote_all()

    def forget(self) -> None:
        """Forget the plans of a forward that failed."""
        self._steps = []
        self._layers["is_ready"] = 0
