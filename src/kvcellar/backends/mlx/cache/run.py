"""One sequence for whoever attends by one mask over all that is there: mlx-lm's own models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvcellar.backends.mlx.cache.attention import joined
from kvcellar.backends.mlx.cache.caches import MlxContiguousCache
from kvcellar.backends.mlx.cache.codecs import Stored, rotate
from kvcellar.backends.mlx.cache.pools import ExactPool
from kvcellar.bookkeeping.layouts.reads import whole_reads
from kvcellar.cache_config import CacheConfig
from kvcellar.types import Run


class MlxRunCache(MlxContiguousCache):
    """A contiguous cache whose K and V are read as one piece."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        super().__init__(config, reads=whole_reads)

    def __deepcopy__(self, memo: dict[int, Any]) -> MlxRunCache:
        """Copy the history. Bytes are shared until one of the two is written to."""
        made = type(self)(self.config)
        made.adopt(self.length, [self.held(group.layers[0]) for group in self.pools.groups])
        made.pools.exact = copy.deepcopy(self.pools.exact)
        for pool, mine in zip(made.pools.of_layer, self.pools.of_layer, strict=True):
            sides = [(pool.k, mine.k), (pool.v, mine.v)]
            if isinstance(pool, ExactPool) and isinstance(mine, ExactPool):
                sides += [(pool.exact.k, mine.exact.k), (pool.exact.v, mine.exact.v)]
            for new, old in sides:
                new.parts, new.n_cells = copy.deepcopy(old.parts), old.n_cells
        return made

    def adopt_rows(self, length: int, rows: Sequence[tuple[mx.array, mx.array]]) -> None:
        """Start a history of ``length`` tokens with K and V that were computed elsewhere.

        Args:
            length: tokens of the history.
            rows: per layer K and V ``[1, n_kv_heads, n, dim]`` of its last n tokens.

        Raises:
            RewindError, CacheFullError: see ``OneSequence.adopt``; nothing was changed.
        """
        self.adopt(length, [rows[group.layers[0]][0].shape[2] for group in self.steps.groups])
        for pool, (k, v) in zip(self.pools.of_layer, rows, strict=True):
            pool.ensure(k.shape[2])
            pool.write_run(0, rotate(k) if self.is_rotated else k, v)
            mx.eval(pool.parts)

    def read_last(self, layer: int, n: int) -> tuple[Stored, Stored]:
        """K and V ``[1, n_kv_heads, n, dim]`` of the last ``n`` tokens of a layer.

        Views as they are stored; where K is rotated or ends are exact, copies in float32.
        """
        first = self.held(layer) - n
        exact = self.pools.exact[self.steps.group_of(layer)]
        if exact is None and not self.is_rotated:
            return self.pools.of_layer[layer].read(first, n)
        cells = np.arange(first, first + n)
        runs = [Run(first, n)] if exact is None else exact.runs(cells)
        return self._numbers(layer, runs, mx.float32, mx.float32)

    def update_run(self, layer: int, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Store this forward's K and V of one layer; return all that its queries read together.

        For whoever attends by one mask: query i of T at position p sees the last of the cells that
        are returned but for T - 1 - i, and of these the window.

        Args:
            layer: which layer.
            k: ``[1, n_kv_heads, T, head_dim]``, rotated by position.
            v: ``[1, n_kv_heads, T, v_head_dim]``.

        Returns:
            K and V ``[1, n_kv_heads, L, dim]`` in the types of ``k`` and ``v``.

        Raises:
            ShapeError, StepError, CacheFullError: nothing was written.
        """
        rows = rotate(k) if self.is_rotated else k
        prepared = self._prepare(layer, None, rows, v)
        plan = prepared.plan
        self._write(layer, prepared, rows, v)
        exact = self.pools.exact[self.steps.group_of(layer)]
        (read,) = plan.reads if exact is None else exact.rewrite(plan)[0].reads
        return self._numbers(layer, read.runs, k.dtype, v.dtype)

    def _numbers(
        self, layer: int, runs: Sequence[Run], k_dtype: mx.Dtype, v_dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array]:
        pool = self.pools.of_layer[layer]
        parts = [pool.read(*run) for run in runs]
        values = joined([v for _, v in parts], v_dtype)
        if not self.is_rotated:
            return joined([k for k, _ in parts], k_dtype), values
        keys = rotate(joined([k for k, _ in parts], mx.float32))  # it is its own inverse
        return keys.astype(k_dtype), values
