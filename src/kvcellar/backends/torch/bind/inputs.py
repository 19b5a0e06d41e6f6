"""Inputs of some of a network's modules, seen while it runs: features that heads guess from."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def modules_given(model: Any, layers: Sequence[int]) -> list[Any]:
    """Return, for each layer, the module of a transformers model that is given its input.

    Behind the last layer that is the last norm.
    """
    if not layers:
        return []
    modules = [*model.model.layers, model.model.norm]
    return [modules[layer] for layer in layers]


@contextmanager
def inputs_of(modules: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the first argument of each module's next call, in their order.

    Calls of this thread alone: others may run the same modules at the same time. Nothing stays
    behind.
    """
    mine = threading.get_ident()
    seen: list[torch.Tensor] = []

    def see(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        if threading.get_ident() == mine:
            seen.append(given[0])

    hooks = [module.register_forward_pre_hook(see) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
