"""Bytes of states: one array per state of each recurrent layer, with a row for each slot.

A forward reads some slots and writes others. MLX writes in place only where nobody else holds an
array when the write is evaluated; reads of the same evaluation would. So writes wait until
all that was read has been evaluated: ``settle`` puts them in their places.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcellar.bookkeeping.cells.growth import STEP_SLOTS, grown_size
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import ShapeError
from kvcellar.states import StateGroup
from kvcellar.types import IntArray, runs_of

States = list[list[NDArray[np.float32]]]
"""Per recurrent layer its states ``[n, *shape]`` of n slots."""

GivenStates = Sequence[Sequence[NDArray[np.float32]]]
"""States to be stored, in the order of those that are read; any sequences will do."""


class StatePools:
    """Slots of all recurrent layers: float32, laid out as :class:`StateShape` says."""

    def __init__(self, group: StateGroup, config: CacheConfig) -> None:
        """Create pools without slots."""
        self._group = group
        self._most = config.n_slots
        self._chunk = STEP_SLOTS if config.budget is None else 0
        self._layers = [
            [mx.zeros((0, *state.shape), dtype=mx.float32) for state in states]
            for states in group.layers
        ]
        self._waiting: list[tuple[int, IntArray, list[mx.array]]] = []
        self.n_slots = 0
        """Slots that are allocated."""

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, and what waits to be written: to be evaluated with the forward's result."""
        pools = [array for states in self._layers for array in states]
        return pools + [array for _, _, states in self._waiting for array in states]

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return self.n_slots * self._group.slot_bytes

    def ensure(self, n_slots: int) -> None:
        """Hold at least ``n_slots``: doubled, and never more than there may be."""
        if n_slots <= self.n_slots:
            return
        size = grown_size(n_slots, self.n_slots, self._chunk, self._most)
        for states in self._layers:
            for at, old in enumerate(states):
                new = mx.zeros((size, *old.shape[1:]), dtype=old.dtype)
                if self.n_slots:
                    new[: self.n_slots] = old
                states[at] = new
                mx.eval(new)  # each old array goes before the next new one comes
        self.n_slots = size

    def read(self, layer: int, slots: mx.array) -> list[mx.array]:
        """Return a layer's states ``[n, *shape]`` in ``slots [n]``."""
        return [mx.take(state, slots, axis=0) for state in self._layers[layer]]

    def write(self, layer: int, slots: IntArray, states: Sequence[mx.array]) -> None:
        """Have states ``[n, *shape]`` of a layer written to ``slots [n]`` by ``settle``."""
        self._waiting.append((layer, slots, list(states)))

    def settle(self) -> None:
        """Put what waits in its place; all of it has been evaluated."""
        waiting, self._waiting = self._waiting, []
        for layer, slots, states in waiting:
            for pool, state in zip(self._layers[layer], states, strict=True):
                first = 0
                for start, length in runs_of(slots):  # ten times as fast as by index
                    pool[start : start + length] = state[first : first + length]
                    first += length
        mx.eval(self._layers)

    def forget(self) -> None:
        """Let go of what waits: the forward failed."""
        self._waiting.clear()

    def read_states(self, slots: Sequence[int] | IntArray) -> States:
        """Return copies of the states in ``slots [n]``."""
        rows = mx.array(np.asarray(slots, dtype=np.int64))
        return [
            [np.array(state) for state in self.read(layer, rows)]
            for layer in range(len(self._layers))
        ]

    def write_states(self, slots: Sequence[int] | IntArray, states: GivenStates) -> None:
        """Store states in ``slots [n]``, evaluated.

        Raises:
            ShapeError: they are not those of so many slots; nothing was written.
        """
        want = [[(len(slots), *s.shape) for s in of_layer] for of_layer in self._group.layers]
        got = [[np.shape(state) for state in of_layer] for of_layer in states]
        if got != want:
            raise ShapeError(f"{len(slots)} slots take states of {want}, got {got}")
        rows = np.asarray(slots, dtype=np.int64)
        if not len(rows):
            return
        self.ensure(int(rows.max()) + 1)
        for layer, of_layer in enumerate(states):
            given = [mx.array(np.asarray(state, np.float32)) for state in of_layer]
            self.write(layer, rows, given)
        mx.eval(self.arrays)
        self.settle()
