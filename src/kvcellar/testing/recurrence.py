"""A made-up recurrence: states that any difference in the order of tokens or slots would show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcellar.states import NO_SLOT, StateGroup, StateShape
from kvcellar.testing.dense import Array, Token

States = list[list[Array]]
"""Per recurrent layer its states, float32."""


class Recurrence:
    """States of one sequence after each of its tokens, which are one number each.

    It is computed in float64 and rounded to float32 after every token, so that a history gives the
    same bits whether it comes at once or in parts.
    """

    def __init__(self, group: StateGroup) -> None:
        """Make up a recurrence with states of these shapes."""
        self.group = group

    def zeros(self) -> States:
        """Return the states of a sequence without a past."""
        return [[np.zeros(s.shape, np.float32) for s in layer] for layer in self.group.layers]

    def step(self, layer: int, states: list[Array], token: float) -> list[Array]:
        """Return a layer's states after one more token."""
        shapes = self.group.layers[layer]
        return [
            _after(shape, state.astype(np.float64), token * (layer + 1)).astype(np.float32)
            for shape, state in zip(shapes, states, strict=True)
        ]

    def steps(self, states: States, token: float) -> States:
        """Return the states of all layers after one more token."""
        return [self.step(layer, states[layer], token) for layer in range(len(states))]


def read_slot(cache: Any, slot: int) -> States:
    """Return what a cache holds in one slot."""
    layers = cache.read_states(np.array([slot]))
    return [[np.asarray(state)[0] for state in states] for states in layers]


class StateForward:
    """One forward through the recurrent layers of a cache, as its plan says."""

    def __init__(
        self,
        cache: Any,
        recurrence: Recurrence | None,
        tokens: Sequence[Token],
        numbers: Sequence[float],
    ) -> None:
        """Begin with tokens, and the number that each of them is.

        Args:
            cache: where the states are.
            recurrence: how they go on; None: no layer is recurrent.
            tokens: of the flat batch, with the states that the oracle expects after each.
            numbers: one per token.
        """
        self._cache = cache
        self._recurrence = recurrence
        self._tokens = tokens
        self._numbers = numbers
        self._written: dict[int, States] = {}
        self._done: set[tuple[int, int]] = set()  # slots and layers that were computed

    def run(self, layer: int) -> None:
        """Take the states of one layer on; those of all are written with the last one's."""
        recurrence = self._recurrence
        assert recurrence is not None, "the model has recurrent layers"
        positions = [token.pos for token in self._tokens]
        plan = self._cache.steps.plan_states(layer, len(positions), positions)
        assert [i for a in plan.advances for i in range(a.q_start, a.q_start + a.n_tokens)] == list(
            range(len(positions))
        ), "every token comes once"
        for q_start, n_tokens, src, dst in plan.advances:
            states = self._states_of(src, layer)
            assert dst not in {a.src for a in plan.advances if a.q_start < q_start} - {src}
            for number in self._numbers[q_start : q_start + n_tokens]:
                states = recurrence.step(layer, states, number)
            self._written.setdefault(dst, recurrence.zeros())[layer] = states
            self._done.add((dst, layer))
            for got, want in zip(
                states, self._tokens[q_start + n_tokens - 1].states[layer], strict=True
            ):
                np.testing.assert_array_equal(got, want, err_msg=f"recurrent layer {layer}")
        if layer == len(recurrence.group.layers) - 1:
            self._write()

    def _states_of(self, slot: int, layer: int) -> list[Array]:
        """Return a layer's states in a slot: this forward's, or those of before."""
        assert self._recurrence is not None
        if slot == NO_SLOT:
            return self._recurrence.zeros()[layer]
        if (slot, layer) in self._done:
            return self._written[slot][layer]
        return read_slot(self._cache, slot)[layer]

    def _write(self) -> None:
        """Store what was computed, all slots at once, and have it count."""
        written = self._written
        n_layers = len(next(iter(written.values())))
        layers = [
            [np.stack(parts) for parts in zip(*(one[i] for one in written.values()), strict=True)]
            for i in range(n_layers)
        ]
        self._cache.write_states(np.array(list(written)), layers)
        for layer in range(n_layers):
            self._cache.steps.wrote_states(layer)


def _after(shape: StateShape, state: Array, token: float) -> Array:
    """Return a state after one more token: a convolution's inputs move on, others fade."""
    if shape.kind == "convolution":
        inputs = token * np.arange(1, shape.shape[0] + 1)
        moved: Array = np.concatenate([state[:, 1:], inputs[:, None]], axis=1)
        return moved
    weights = np.arange(1, state.size + 1).reshape(state.shape)
    faded: Array = 0.75 * state + token * weights
    return faded
