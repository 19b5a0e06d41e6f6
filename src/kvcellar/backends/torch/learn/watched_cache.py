"""A cache that keeps nothing and notes what layers would have it keep, and which modules ask it.

A module may be given the cache and hand it on to others; who asks is the innermost one that has
the cache among its arguments. By which name it comes there is noted, so that another cache can be
handed to that module in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvcellar.models.facts import StateFacts
from kvcellar.states import StateShape

_CONVOLUTION, _RECURRENT = "convolution", "recurrent"


class WatchedCache(Cache):
    """A cache without a past that notes what it is asked in one forward.

    Attributes:
        n_tokens: of the forward that is watched.
        calls: by path, a module that asks for states and what it was called with.
        asker_arguments: by its path, the name of the argument by which it is given the cache.
    """

    def __init__(self, n_tokens: int = 0) -> None:
        """Create a cache for any number of layers."""
        Cache.__init__(self, layers=[])
        self.n_tokens = n_tokens
        self.calls: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
        self.asker_arguments: dict[str, str] = {}
        self._running: list[tuple[str, str]] = []
        """``(path, argument)`` of each module that runs, outermost first; "": it has no cache."""
        self._called: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
        """By path, each module that was given the cache, and its arguments."""
        self._strange: dict[str, str] = {}
        """Path of a module -> an argument of its that is no number per token."""
        self._attending: set[str] = set()
        """Paths of modules that run while a layer attends."""
        self._states: dict[int, dict[tuple[int, str], Tensor]] = {}
        """By layer, number and kind, a state such as the layer has."""
        self._askers: dict[int, dict[str, str]] = {}
        self._others: dict[int, set[str]] = {}

    # Transformers' protocol --------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return this forward's K and V: there is no past."""
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return None: there is no past."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return None: there is no past."""
        return None

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Note a state of a convolution, and return it."""
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        state = conv_states.new_zeros((*conv_states.shape[:-1], width))
        self._note(layer_idx, state_idx, _CONVOLUTION, state)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Note a recurrent state, and return it."""
        self._note(layer_idx, state_idx, _RECURRENT, torch.zeros_like(recurrent_states))
        return recurrent_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Note keys of an index, and return them."""
        self._others.setdefault(layer_idx, set()).add("indexed attention")
        return indexer_key_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return False: there is no past."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: nothing is recorded."""
        return False

    # What was noted ----------------------------------------------------------------------------

    def note_attention(self) -> None:
        """Note that a layer attends, inside of all modules that run."""
        self._attending.update(path for path, _ in self._running)

    def noted(self, layer: int, index: int, kind: str) -> Tensor:
        """Return a state of zeros such as a layer has, the same object each time."""
        return self._states[layer][index, kind]

    def states(self, by_token: Container[str]) -> tuple[StateFacts, ...]:
        """Return facts of the layers whose states can be served, ascending.

        Args:
            by_token: paths of modules that go on from a past by single tokens alone.
        """
        return tuple(
            StateFacts(
                layer,
                tuple(
                    StateShape(kind, tuple(map(int, state.shape[1:])))
                    for (_, kind), state in sorted(states.items(), key=lambda item: item[0])
                ),
                tuple(index for index, _ in sorted(states)),
                tuple(self._askers[layer].items()),
                any(path in by_token for path in self._askers[layer]),
            )
            for layer, states in sorted(self._states.items())
            if not self._unserved(layer)
        )

    @property
    def others(self) -> tuple[tuple[int, str], ...]:
        """``(layer, kind)`` of layers that keep what cannot be served, ascending."""
        found = {layer: set(kinds) for layer, kinds in self._others.items()}
        for layer in self._states:
            for kind in self._unserved(layer):
                found.setdefault(layer, set()).add(kind)
        return tuple((layer, "+".join(sorted(kinds))) for layer, kinds in sorted(found.items()))

    def _unserved(self, layer: int) -> list[str]:
        """Return why the states of a layer cannot be served: none, where they can."""
        askers = self._askers.get(layer, {})
        reasons = [] if askers else ["a state that no module with a cache asks for"]
        if self._attending & set(askers):
            reasons.append("a state that is moved on around attention")
        strange = {self._strange[path] for path in askers if path in self._strange}
        reasons += [f"a state that depends on {name}" for name in sorted(strange)]
        return reasons

    def _note(self, layer: int, index: int, kind: str, state: Tensor) -> None:
        self._states.setdefault(layer, {})[index, kind] = state
        path, argument = next((at for at in reversed(self._running) if at[1]), ("", ""))
        if argument:
            self._askers.setdefault(layer, {})[path] = argument
            self.calls[path], self.asker_arguments[path] = self._called[path], argument

    @contextmanager
    def watching(self, network: nn.Module) -> Iterator[None]:
        """Note which modules of a network run, and which are given this cache, while it lasts."""
        handles = []
        parameters = {
            kind: list(inspect.signature(kind.forward).parameters)[1:]
            for kind in {type(module) for module in network.modules()}
        }
        for path, module in network.named_modules():
            enter = self._entering(path, parameters[type(module)])
            handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(self._left, always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, path: str, parameters: list[str]) -> Any:
        """Return a hook that notes that the module with a path runs, and what it is given."""

        def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            arguments = {**dict(zip(parameters, given, strict=False)), **named}
            argument = next((name for name, value in arguments.items() if value is self), "")
            self._running.append((path, argument))
            if argument:
                self._called[path] = module, arguments
            for name, value in arguments.items():
                is_tensor = isinstance(value, Tensor)
                if is_tensor and (value.dim() < 2 or value.shape[:2] != (1, self.n_tokens)):
                    self._strange[path] = name

        return enter

    def _left(self, *_: Any) -> None:
        """Note that the innermost module has run."""
        self._running.pop()
