"""Knowledge of a forward that its layers need, and that no module of transformers hands on to them.

Not every model gives its attention the positions, and none tells a rotary embedding whose session
it runs for; so whoever runs a model says it here.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

_current = threading.local()

RopeLength = int | tuple[int, ...]
"""Length of text whose RoPE factors turn the tokens of a forward: of all, or of each."""


class Positions:
    """Lets the layers that this thread runs know its forward while a ``with`` lasts."""

    __slots__ = ("_positions", "_rope_length")

    def __init__(self, positions: Tensor, rope_length: RopeLength = 0) -> None:
        """Hold positions ``[1, T]``, and the length of text whose RoPE factors turn them."""
        self._positions, self._rope_length = positions, rope_length

    def __enter__(self) -> None:
        """Make this the forward of this thread."""
        _current.positions, _current.rope_length = self._positions, self._rope_length

    def __exit__(self, *error: object) -> None:
        """Leave the forward."""
        _current.positions, _current.rope_length = None, 0


def current_positions() -> Tensor | None:
    """Return the positions ``[1, T]`` of this thread's forward; None: nobody has said them."""
    return getattr(_current, "positions", None)


def current_rope_length() -> RopeLength:
    """Return whose factors turn positions: those of a text of so many; 0: of a short one."""
    return getattr(_current, "rope_length", 0)


class PastLengths(Cache):
    """A cache that keeps nothing and says how many tokens come before those of a forward.

    Some layers count their tokens from there; so it is a number for each token, by which they come
    to the token's own position.
    """

    def __init__(self, positions: Tensor) -> None:
        """Hold positions ``[1, T]``."""
        super().__init__(layers=[])
        at = positions.view(-1)
        self._lengths = at - torch.arange(at.shape[0], device=at.device)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return ``[T]``: each token's position, less its number in the forward."""
        return self._lengths

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return K and V as they are: the op stores them."""
        return key_states, value_states


def tell_past_lengths(network: Any) -> None:
    """Let the layers of a network that ask a cache how much came before be told, in place."""
    for module in network.modules():
        if hasattr(module, "layer_idx") and _asks(module):
            module.register_forward_pre_hook(_with_lengths, with_kwargs=True)


def _asks(module: Any) -> bool:
    """Return true if a module's forward asks a cache for its length."""
    forward: Any = inspect.unwrap(type(module).forward)
    return "get_seq_length" in forward.__code__.co_names


def _with_lengths(
    module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand a module the lengths of this thread's forward, where its runner has said positions."""
    positions = current_positions()
    if positions is None:
        return given, named
    return given, {**named, "past_key_values": PastLengths(positions)}
