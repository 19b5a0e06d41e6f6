"""States of recurrent layers by slot, and a forward's plan of them put in tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcellar.backends.torch.cache import memory
from kvcellar.bookkeeping.cells.growth import STEP_SLOTS, grown_size
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import ShapeError
from kvcellar.states import NO_SLOT, Advance, StateGroup, StatePlan
from kvcellar.types import IntArray

StateArrays = list[list[NDArray[np.float32]]]
"""Per recurrent layer and state, ``[n, *shape]`` of some slots."""


class StatePools:
    """States of every recurrent layer: tensors of float32 that grow by doubling.

    Always holds: a layer's states lie on the device of the first that came for it; a slot that has
    been written is not written again before its owner let go of it.
    """

    def __init__(self, group: StateGroup, config: CacheConfig) -> None:
        """Create pools without slots."""
        self._config = config
        self.device = torch.device("cpu")
        """Where states go that come before a layer has any."""
        self.shapes = tuple(tuple(state.shape for state in states) for states in group.layers)
        self.of_layer: list[list[Tensor]] = [
            [torch.empty(0, *shape) for shape in shapes] for shapes in self.shapes
        ]
        """Per layer and state ``[n_slots, *shape]``; a layer that grows has other tensors."""

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(state.nbytes for states in self.of_layer for state in states)

    def ensure(self, layer: int, n_slots: int, device: torch.device) -> list[Tensor]:
        """Have a layer hold at least ``n_slots``; return its states ``[n_slots, *shape]``."""
        states = self.of_layer[layer]
        have = states[0].shape[0]
        if n_slots > have:
            chunk = STEP_SLOTS if self._config.budget is None else 0
            size = grown_size(n_slots, have, chunk, self._config.n_slots)
            device = states[0].device if have else device
            with torch.inference_mode(False):  # pools outlive any inference_mode block
                grown = [
                    memory.empty((size, *shape), torch.float32, device)
                    for shape in self.shapes[layer]
                ]
                for new, old in zip(grown, states, strict=True):
                    new[:have] = old
            states[:] = grown
        return states

    def read(self, slots: Sequence[int] | IntArray) -> StateArrays:
        """Return copies of the states of some slots, in host memory."""
        at = np.asarray(slots, np.int64)
        found: StateArrays = []
        for layer, states in enumerate(self.of_layer):
            if len(at):
                self.ensure(layer, int(at.max()) + 1, self.device)
            where = torch.from_numpy(at).to(states[0].device)
            found.append([state.index_select(0, where).cpu().numpy() for state in states])
        return found

    def check(
        self, slots: Sequence[int] | IntArray, states: Sequence[Sequence[NDArray[np.float32]]]
    ) -> None:
        """Refuse what are no states of so many slots of this model.

        Raises:
            ShapeError: so it is.
        """
        n = len(slots)
        wanted = [[(n, *shape) for shape in shapes] for shapes in self.shapes]
        got = [[state.shape for state in of_layer] for of_layer in states]
        if got != wanted:
            raise ShapeError(
                f"states of {n} slots of this model have the shapes {wanted}, got {got}"
            )

    def write(
        self, slots: Sequence[int] | IntArray, states: Sequence[Sequence[NDArray[np.float32]]]
    ) -> None:
        """Put states as ``read`` gives them in slots.

        Raises:
            ShapeError: they are not those of so many slots of this model; nothing was written.
        """
        self.check(slots, states)
        at = np.asarray(slots, np.int64)
        if not len(at):
            return
        home = next((s[0].device for s in self.of_layer if len(s[0])), self.device)
        for layer, given in enumerate(states):
            pools = self.ensure(layer, int(at.max()) + 1, home)
            where = torch.from_numpy(at).to(pools[0].device)
            for pool, array in zip(pools, given, strict=True):
                numbers = torch.from_numpy(np.ascontiguousarray(array, np.float32))
                pool.index_copy_(0, where, numbers.to(pool.device))


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Advances of one forward that are run together, as a batch of sequences of one length.

    Attributes:
        n: how many.
        n_tokens: of each.
        tokens: ``[n * n_tokens]``, their tokens in the flat batch, one advance after the other; a
            slice where they are consecutive.
        src: ``[n]`` slots of the states that they go on from; None: they have no past.
        dst: ``[n]`` slots of the states that they come to.
    """

    n: int
    n_tokens: int
    tokens: Tensor | slice
    src: Tensor | None
    dst: Tensor

    def by_token(self) -> Iterator[Stretches]:
        """Yield the same as advances of one token each, in an order that works."""
        all_tokens = self.tokens
        if isinstance(all_tokens, slice):
            all_tokens = torch.arange(all_tokens.start, all_tokens.stop, device=self.dst.device)
        for at, tokens in enumerate(all_tokens.view(self.n, self.n_tokens).unbind(1)):
            yield Stretches(self.n, 1, tokens, self.dst if at else self.src, self.dst)

    def read(self, states: Tensor) -> Tensor:
        """Return copies ``[n, *shape]`` of the states ``[n_slots, *shape]`` they go on from."""
        assert self.src is not None, "there is a past"
        return states.index_select(0, self.src)

    def write(self, states: Tensor, given: Tensor) -> None:
        """Store the states ``[n, *shape]`` that they came to in the pool."""
        states.index_copy_(0, self.dst, given.to(states.dtype))


class StateKeeper(ABC):
    """The face that a cache has for recurrent layers: their turns, states and slots."""

    @property
    @abstractmethod
    def keeps_states(self) -> bool:
        """True if the model has recurrent layers whose states are here."""

    @abstractmethod
    def begin_states(
        self, layer: int, n_tokens: int, position: Tensor | None, device: torch.device
    ) -> list[Tensor]:
        """Let a recurrent layer have its turn in a forward, whose plan is then in ``stretches``.

        Args:
            layer: its number among the recurrent layers.
            n_tokens: of the flat batch.
            position: one per token; None where they are known.
            device: of the layer's states.

        Returns:
            Its states ``[n_slots, *shape]``, which hold all slots of the plan. Whoever has written
            them calls ``wrote_states``.

        Raises:
            StepError, PositionError: from the steps.
        """

    @abstractmethod
    def states_of(self, layer: int) -> list[Tensor]:
        """Return the states ``[n_slots, *shape]`` of a layer that has had its turn."""

    @property
    @abstractmethod
    def stretches(self) -> tuple[Stretches, ...]:
        """Advances of the last forward that has come to a recurrent layer, in tensors."""

    @abstractmethod
    def wrote_states(self, layer: int) -> None:
        """Note that a layer's states are stored."""


class Together(NamedTuple):
    """Advances that can run as one call, in integers.

    Attributes:
        n: how many.
        n_tokens: of each.
        tokens: ``[n * n_tokens]``, their tokens in the flat batch, one advance after the other.
        src: ``[n]`` slots that they go on from; None: they have no past.
        dst: ``[n]`` slots that they come to.
    """

    n: int
    n_tokens: int
    tokens: IntArray
    src: IntArray | None
    dst: IntArray

    @property
    def is_run(self) -> bool:
        """True if the tokens are consecutive."""
        first = int(self.tokens[0])
        return bool((self.tokens == np.arange(first, first + len(self.tokens))).all())


def together(plan: StatePlan) -> list[Together]:
    """Return a plan's advances in groups that can run as one call each, in an order that works.

    Advances of one group have as many tokens each, all of them a past or none, and none goes on
    from what another one of the group, or of a later group, writes.
    """
    levels: dict[int, int] = {}
    groups: dict[tuple[int, int, bool], list[Advance]] = {}
    for advance in plan.advances:
        level = levels.get(advance.src, 0)
        levels[advance.dst] = level + 1
        key = level, advance.n_tokens, advance.src != NO_SLOT
        groups.setdefault(key, []).append(advance)
    return [_joined(advances) for _, advances in sorted(groups.items(), key=lambda g: g[0])]


def _joined(advances: Sequence[Advance]) -> Together:
    """Put advances of one length in arrays."""
    starts, lengths, src, dst = np.array(advances, np.int64).T
    n_tokens = int(lengths[0])
    tokens = (starts[:, None] + np.arange(n_tokens)).reshape(-1)
    return Together(len(advances), n_tokens, tokens, None if src[0] == NO_SLOT else src, dst)


def stretches_of(plan: StatePlan, device: torch.device) -> tuple[Stretches, ...]:
    """Return what ``together`` finds in tensors on a device."""
    with torch.inference_mode(False):
        return tuple(_on_device(one, device) for one in together(plan))


def _on_device(one: Together, device: torch.device) -> Stretches:
    tokens: Tensor | slice = slice(int(one.tokens[0]), int(one.tokens[-1]) + 1)
    if not one.is_run:
        tokens = torch.from_numpy(one.tokens).to(device)
    src, dst = (
        None if slots is None else torch.tensor(slots, device=device)
        for slots in (one.src, one.dst)
    )
    assert dst is not None, "every advance comes to a slot"
    return Stretches(one.n, one.n_tokens, tokens, src, dst)
