"""NumPy pools of states: for each state of each recurrent layer, one array with a row per slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcellar.bookkeeping.cells.growth import STEP_SLOTS, grown_size
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import ShapeError
from kvcellar.states import StateGroup
from kvcellar.types import IntArray

States = Sequence[Sequence[NDArray[np.float32]]]
"""Per recurrent layer, per state of it: ``[n, *shape]`` for n slots."""


class StatePools:
    """The bytes of every slot. Growth doubles the slots, up to ``n_slots`` of the config."""

    def __init__(self, group: StateGroup, config: CacheConfig) -> None:
        """Create pools without slots."""
        self._most = config.n_slots
        self._chunk = STEP_SLOTS if config.budget is None else 0
        self.layers = [
            [np.empty((0, *state.shape), np.float32) for state in states] for states in group.layers
        ]
        """Per recurrent layer, per state of it: ``[n_slots, *shape]``; growth makes others."""

    @property
    def size_bytes(self) -> int:
        """Bytes that the pools have allocated."""
        return sum(pool.nbytes for pools in self.layers for pool in pools)

    def ensure(self, n_slots: int) -> None:
        """Hold at least so many slots; those that are there keep what they have."""
        held = len(self.layers[0][0])
        if n_slots <= held:
            return
        size = grown_size(n_slots, held, self._chunk, self._most)
        for pools in self.layers:
            for i, pool in enumerate(pools):
                pools[i] = np.zeros((size, *pool.shape[1:]), np.float32)
                pools[i][:held] = pool

    def read(self, slots: Sequence[int] | IntArray) -> States:
        """Return copies of the states in some slots."""
        rows = np.asarray(slots, dtype=np.int64)
        return [[pool[rows] for pool in pools] for pools in self.layers]

    def write(self, slots: Sequence[int] | IntArray, states: States) -> None:
        """Store states in as many slots, which the pools hold then.

        Raises:
            ShapeError: they are not states of these layers, or not so many; nothing was written.
        """
        rows = np.asarray(slots, dtype=np.int64)
        want = [[(len(rows), *pool.shape[1:]) for pool in pools] for pools in self.layers]
        got = [[np.shape(part) for part in parts] for parts in states]
        if got != want:
            raise ShapeError(f"states of {len(rows)} slots are {want} by layer, got {got}")
        if not len(rows):
            return
        self.ensure(int(rows.max()) + 1)
        for pools, parts in zip(self.layers, states, strict=True):
            for pool, part in zip(pools, parts, strict=True):
                pool[rows] = part
