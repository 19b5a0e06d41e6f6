"""States of recurrent layers of mlx-lm's models: which arrays they are, and how they are stored.

A slot holds states as transformers' modules do, so that one snapshot serves every backend. mlx-lm's
modules differ in three ways:

- A convolution's last inputs are ``[width - 1, channels]``. Stored is ``[channels, width]``; nobody
  reads the oldest input.
- A layer may have a convolution each for q, k and v, where transformers has one for all: the
  convolutions of a layer that have one width are stored as one.
- The state of the gated delta rule has the axes of K and of V the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from kvcellar.states import StateShape


@dataclass(frozen=True, slots=True)
class Held:
    """One array of a cache of states, as a module of mlx-lm gives it.

    Attributes:
        index: which of the cache's arrays.
        shape: of one sequence's.
        dtype: type.
        is_convolution: it is the last inputs of a convolution, ``[width - 1, channels]``.
        is_turned: its last two axes are stored the other way round.
    """

    index: int
    shape: tuple[int, ...]
    dtype: mx.Dtype
    is_convolution: bool = False
    is_turned: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """One state as it is stored, of one array or of the convolutions of a layer.

    Attributes:
        held: the arrays; of several, the channels lie behind each other.
    """

    held: tuple[Held, ...]

    @property
    def shape(self) -> StateShape:
        """Shape of what is stored."""
        shape = self.held[0].shape
        if self.held[0].is_convolution:
            return StateShape("convolution", (sum(one.shape[1] for one in self.held), shape[0] + 1))
        if self.held[0].is_turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return StateShape("recurrent", shape)

    def store(self, arrays: Mapping[int, mx.array]) -> mx.array:
        """Return ``[n, *shape]`` in float32 of a cache's arrays ``[n, ...]`` by index."""
        parts = [arrays[one.index].astype(mx.float32) for one in self.held]
        if self.held[0].is_convolution:
            joined = mx.concatenate([part.swapaxes(1, 2) for part in parts], axis=1)
            return mx.pad(joined, [(0, 0), (0, 0), (1, 0)])
        return parts[0].swapaxes(-1, -2) if self.held[0].is_turned else parts[0]

    def give(self, stored: mx.array) -> dict[int, mx.array]:
        """Return a cache's arrays ``[n, ...]`` by index, of what ``store`` made."""
        if self.held[0].is_turned:
            stored = stored.swapaxes(-1, -2)
        if not self.held[0].is_convolution:
            return {self.held[0].index: stored.astype(self.held[0].dtype)}
        given: dict[int, mx.array] = {}
        first = 0
        for one in self.held:
            last = first + one.shape[1]
            given[one.index] = stored[:, first:last, 1:].swapaxes(1, 2).astype(one.dtype)
            first = last
        return given


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One recurrent layer.

    Attributes:
        place: which of the model's caches.
        n_arrays: arrays of that cache.
        n_mixers: modules that use it.
        states: what is stored: convolutions, then recurrent states.
    """

    place: int
    n_arrays: int
    n_mixers: int
    states: tuple[State, ...]

    def store(self, arrays: Mapping[int, mx.array]) -> list[mx.array]:
        """Return what is stored, ``[n, *shape]`` each, of the cache's arrays by index."""
        return [state.store(arrays) for state in self.states]

    def give(self, stored: list[mx.array]) -> dict[int, mx.array]:
        """Return the cache's arrays by index, of what is stored."""
        pairs = zip(self.states, stored, strict=True)
        return {index: array for state, part in pairs for index, array in state.give(part).items()}
