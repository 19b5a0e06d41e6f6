"""Recurrent modules that go on from a past by single tokens alone, and how they are found.

transformers' code for several tokens at once leaves the state that a cache gives out of account in
some modules (Jamba): right for a prompt, wrong for its second chunk. So each kind of module that a
watched forward has run is run once more, with a past: what it is given and looks at no further is a
state that it ignores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcellar.backends.torch.learn.watched_cache import WatchedCache


def modules_by_token(seen: WatchedCache) -> frozenset[str]:
    """Return the paths of modules that must be given one token at a time where there is a past.

    Args:
        seen: what a forward has noted; its modules are run again.

    Raises:
        Exception: whatever a module raises that is given a past.
    """
    kinds: dict[type, bool] = {}
    for path, (module, arguments) in seen.calls.items():
        if type(module) not in kinds:
            named = {**arguments, seen.asker_arguments[path]: (past := _Past(seen))}
            with past, torch.inference_mode():
                type(module).forward(module, **named)
            kinds[type(module)] = past.is_ignored
    return frozenset(path for path, (module, _) in seen.calls.items() if kinds[type(module)])


class _Past(WatchedCache, TorchDispatchMode):
    """A cache with a past, which sees whether the states that it gives are computed with."""

    def __init__(self, seen: WatchedCache) -> None:
        """Have a past of the states that were noted before, of any numbers."""
        WatchedCache.__init__(self)
        TorchDispatchMode.__init__(self)
        self._seen = seen
        self._given: dict[int, Tensor] = {}
        self._used: set[int] = set()

    @property
    def is_ignored(self) -> bool:
        """True if a state was given that nothing was computed with."""
        return bool(set(self._given) - self._used)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the last inputs of a convolution."""
        return self._give(layer_idx, state_idx, "convolution")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return a recurrent state."""
        return self._give(layer_idx, state_idx, "recurrent")

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the inputs of a convolution behind those of before, which are used thereby."""
        before = self._give(layer_idx, state_idx, "convolution")
        return torch.cat((before, conv_states), dim=-1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Return a recurrent state."""
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return True: there is a past."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note which states an operation takes, and run it."""
        kwargs = kwargs or {}
        self._used.update(id(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        return func(*args, **kwargs)

    def _give(self, layer: int, index: int, kind: str) -> Tensor:
        state = self._seen.noted(layer, index, kind)
        self._given[id(state)] = state
        return state
