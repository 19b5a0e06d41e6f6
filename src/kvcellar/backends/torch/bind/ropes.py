"""RoPE whose factors depend on a text's length, said for each token of a forward.

transformers picks the factors of ``longrope`` and ``dynamic`` anew in each forward, by the longest
position in it, so that K which is cached would be of other factors than the query, and a short text
of others beside a long one. Here whoever runs a forward says of each token how long its text is.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.bind.positions import current_rope_length

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
        length = current_rope_length()
        if isinstance(length, int):
            return self.at(length)(*args, **kwargs)
        of_all = {one: self.at(one)(*args, **kwargs) for one in sorted(set(length))}
        return _chosen(of_all, length)

    def at(self, length: int) -> Any:
        """Return the module with the factors of texts of ``length``; 0: of short ones."""
        found = self._fixed.get(length)
        if found is None:
            found = self._fixed[length] = _fixed(self.module, length)
        return found


def _chosen(of_all: dict[int, Any], lengths: tuple[int, ...]) -> Any:
    """Return for each token what was computed with the factors of its own text's length.

    Args:
        of_all: by length: a tensor ``[1, T, ...]``, or a tuple of them.
        lengths: ``[T]``.
    """
    (_, found), *others = of_all.items()
    if isinstance(found, tuple):
        parts = ({one: value[i] for one, value in of_all.items()} for i in range(len(found)))
        return tuple(_chosen(part, lengths) for part in parts)
    found = found.clone()
    for length, other in others:
        own = torch.tensor([one == length for one in lengths], device=found.device)
        found[:, own] = other[:, own]
    return found


class KeptFactors:
    """The factors of a rotary embedding whose forward would make them anew, in main memory.

    A step that is recorded as a graph copies nothing from there.
    """

    def __init__(self, module: Any) -> None:
        """Stand in for the function by which a module of transformers makes its factors."""
        self._module, self._make = module, module.rope_init_fn
        self._made: tuple[Tensor, Any] | None = None

    def __call__(self, config: Any) -> tuple[Tensor, Any]:
        """Return the factors where the module is, and what they are scaled by."""
        device = self._module.inv_freq.device
        if self._made is None or self._made[0].device != device:
            factors, scaling = self._make(config)
            self._made = factors.to(device), scaling
        return self._made


def hold_ropes(network: Any) -> None:
    """Replace what makes or moves factors in the forwards of a network's rotary embeddings."""
    for module in network.modules():
        if _makes_factors(module):
            module.rope_init_fn = KeptFactors(module)
    for parent in list(network.modules()):
        for name, module in list(parent.named_children()):
            if not isinstance(parent, SessionRope) and any(map(_moves, _kinds(module).values())):
                setattr(parent, name, SessionRope(module))


def _makes_factors(module: Any) -> bool:
    """Return true if a module's forward makes the factors that it turns by."""
    forward: Any = inspect.unwrap(type(module).forward)
    made_by = getattr(module, "rope_init_fn", None)
    is_known = made_by is None or isinstance(made_by, KeptFactors)
    return not is_known and "rope_init_fn" in forward.__code__.co_names


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
