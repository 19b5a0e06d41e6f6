"""States of recurrent layers: their shapes, and the plan by which a forward moves them on.

A recurrent layer (a gated delta net, Mamba, a short convolution) keeps one value per sequence in
place of a row per token. Such a state cannot be cut back: a sequence goes on from the states that
somebody kept. A *slot* is the home of the states of all recurrent layers of one sequence at one
position; a slot that is kept is a *snapshot*, and nobody writes to it any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from kvcellar.checks import seen, whole
from kvcellar.errors import ConfigError
from kvcellar.sight import Sight

STATE_SIGHT = Sight(window=2)
"""The sight of states in an index: a token needs what the position before its own has, a slot."""

NO_SLOT = -1
"""The slot of a sequence without a past: its states are zeros."""

STATE_KINDS = ("convolution", "recurrent")
"""Kinds of states: the last inputs of a convolution, and what a recurrence carries on."""

_NUMBER_BYTES = 4


class StateShape(NamedTuple):
    """One state of a layer, of float32 numbers.

    Attributes:
        kind: one of ``STATE_KINDS``.
        shape: of one sequence's: ``[channels, width]`` of a convolution, oldest input first.
    """

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The recurrent layers of a model, whose states of one sequence lie together in one slot.

    Attributes:
        layers: the states of each recurrent layer. These layers are numbered from 0 by themselves:
            a layer of the model may have attention and states.
    """

    layers: tuple[tuple[StateShape, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not self.layers or not all(self.layers):
            raise ConfigError(
                f"a state group names the states of at least one layer, got {seen(self.layers)}"
            )
        object.__setattr__(
            self, "layers", tuple(tuple(map(_checked, states)) for states in self.layers)
        )

    def __str__(self) -> str:
        """Return the group in words, for messages."""
        n = len(self.layers)
        return f"{n} recurrent layer{'s' * (n > 1)}, {self.slot_bytes} bytes of states"

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the states of all layers at one position of one sequence."""
        return sum(self._state_bytes())

    @property
    def most_bytes(self) -> int:
        """Bytes of one slot in the largest state of a layer: what a pool copies when it grows."""
        return max(self._state_bytes())

    def _state_bytes(self) -> list[int]:
        shapes = (state.shape for states in self.layers for state in states)
        return [_NUMBER_BYTES * math.prod(shape) for shape in shapes]


def _checked(state: object) -> StateShape:
    """Return a state's shape with plain numbers.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(state, tuple | list) or len(state) != 2 or state[0] not in STATE_KINDS:
        raise ConfigError(
            f"a state is (kind, shape) of a kind of {', '.join(STATE_KINDS)}, got {seen(state)}"
        )
    shape = state[1]
    if not isinstance(shape, tuple | list) or not shape:
        raise ConfigError(f"the shape of a state has at least one length, got {seen(shape)}")
    lengths = tuple(whole(n, "length of a state") for n in shape)
    if min(lengths) < 1:
        raise ConfigError(f"lengths of a state are at least 1, got {lengths}")
    return StateShape(str(state[0]), lengths)


class Advance(NamedTuple):
    """Consecutive tokens of one sequence take its states from one slot to another.

    Attributes:
        q_start: index of the first token in the flat batch.
        n_tokens: how many.
        src: slot of the states before the first one; ``NO_SLOT``: zeros.
        dst: slot of the states after the last one.
    """

    q_start: int
    n_tokens: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """Plan of one forward's states, for every recurrent layer. Integers only.

    Attributes:
        n_tokens: tokens in the flat batch.
        advances: cover every token once. In their order: one may go on from what an earlier one
            has written. No slot that is written is one that anybody else holds.
        n_slots: one past the highest slot that is read or written: what a pool must hold.
    """

    n_tokens: int
    advances: tuple[Advance, ...]
    n_slots: int
