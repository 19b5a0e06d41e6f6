"""RoPE whose factors depend on a text's length, held still while a session lasts.

transformers picks the factors of ``longrope`` and ``dynamic`` anew in each forward, by the longest
position in it, so that K which is cached would be of other factors than the query. Here a session
has the factors of the longest text that it can hold, from its first token on: what transformers
computes for a text of that length.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from kvcellar.backends.torch.positions import current_rope_length

_MOVING = ("dynamic", "longrope")


class SessionRope(nn.Module):
    """A rotary embedding that turns positions by the factors of the forward's session."""

    def __init__(self, module: Any) -> None:
        """Stand in for a module of transformers, whose own buffers stay as they are."""
        super().__init__()
        self.module = module
        self._fixed: dict[int, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, with factors that no position changes."""
        return self.at(current_rope_length())(*args, **kwargs)

    def at(self, length: int) -> Any:
        """Return the module with the factors of texts of ``length``; 0: of short ones."""
        found = self._fixed.get(length)
        if found is None:
            found = self._fixed[length] = _fixed(self.module, length)
        return found


def hold_ropes(network: Any) -> None:
    """Replace the rotary embeddings of a network whose factors would move, in place."""
    for parent in list(network.modules()):
        for name, module in list(parent.named_children()):
            if not isinstance(parent, SessionRope) and any(map(_moves, _kinds(module).values())):
                setattr(parent, name, SessionRope(module))


def _kinds(module: Any) -> dict[str | None, str]:
    """Return the kinds of RoPE of a module: one, or one for each kind of layer."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return kind
    return {None: kind} if isinstance(kind, str) else {}


def _moves(kind: str) -> bool:
    return any(name in kind for name in _MOVING)


def _fixed(module: Any, length: int) -> Any:
    """Return a copy of a module whose factors are those of texts of ``length``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fixed = copy.deepcopy(module)
    for hooks in (fixed._forward_hooks, fixed._forward_pre_hooks):
        hooks.clear()  # whoever watches the module does not watch its copies
    kinds = _kinds(fixed)
    for layer_type, kind in kinds.items():
        if not _moves(kind):
            continue
        prefix = "" if layer_type is None else f"{layer_type}_"
        before = getattr(fixed, f"{prefix}inv_freq")
        if length:
            make: Any = ROPE_INIT_FUNCTIONS[kind]
            given = {} if layer_type is None else {"layer_type": layer_type}
            factors, scaling = make(fixed.config, before.device, seq_len=length, **given)
            setattr(fixed, f"{prefix}inv_freq", factors)
            setattr(fixed, f"{prefix}attention_scaling", scaling)
        kinds[layer_type] = "default"
    fixed.rope_type = kinds.get(None, kinds)
    return fixed
