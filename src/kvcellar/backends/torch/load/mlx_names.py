"""Tensors of checkpoints for MLX, by the names and in the forms that transformers has.

mlx-lm keeps most tensors as it found them. It stacks experts under names of its own, puts the axes
of convolutions in another order, and adds to some norms what transformers' own code adds later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.cpu.modules.mixtures import mixtures
from kvcellar.errors import ModelError

_STACKED = re.compile(r"\.(switch_mlp|experts|switch_glu)\.(gate|up|down)_proj\.(weight|bias)$")
"""Ends of mlx-lm's names of stacked experts."""

_CONV = re.compile(r"conv(1d)?\.weight$")
"""Ends of names of convolutions."""

_WRAPPED = {
    "language_model.model.": ("model.language_model.", "model."),
    "language_model.lm_head.": ("lm_head.",),
}
"""Beginnings of mlx-lm's names in a wrapper -> transformers' for the same."""

_BY_NUMBER = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""mlx-lm's names of layers -> those of families that number them."""

_ADDED_TO = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Types of config whose norms mlx-lm adds 1 to, as far as their names end like this:"""

_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)

_MULTIPLIED = ("falcon_h1",)
"""Types of config whose weights mlx-lm multiplies by factors that others apply to activations."""

Make = Callable[[], Tensor]


def for_transformers(
    makers: Mapping[str, Make], shapes: Mapping[str, tuple[int, ...]], network: Any
) -> dict[str, Make]:
    """Return what makes each tensor by transformers' names, of what makes it by mlx-lm's.

    Args:
        makers: by mlx-lm's names; those that are not known keep theirs, and are refused later.
        shapes: of the tensors as they are stored, by the same names.
        network: of the checkpoint's config, on the meta device.

    Raises:
        ModelError: mlx-lm stored other numbers than the model's.
    """
    wanted = network.state_dict().keys()
    text = network.config.get_text_config(decoder=True).model_type
    if text in _MULTIPLIED:
        raise ModelError(
            f"weights of {text} were multiplied by factors of their config when they were "
            f"converted for MLX, which is not undone here; load the checkpoint with the backend "
            f"mlx, or download the same model in GGUF or bfloat16"
        )
    turned = {key for key, shape in shapes.items() if _CONV.search(key) and _is_turned(shape)}
    is_added = text in _ADDED_TO and bool(turned)
    stacks = stacks_of(makers, network)
    used = {key for parts in stacks.values() for key in parts.values()}
    found: dict[str, Make] = {}
    for key in makers.keys() - used:
        name = name_of(key, wanted)
        added = 1.0 if is_added and name.endswith(_NORMS) else 0.0
        found[name] = partial(_alike, makers[key], key in turned, added)
    for (name, kind), keys in stacks.items():
        parts = {part: makers[key] for part, key in keys.items()}
        found |= _together(name, kind, parts, network.get_submodule(name))
    return found


def stacks_of(keys: Iterable[str], network: Any) -> dict[tuple[str, str], dict[str, str]]:
    """Return mlx-lm's names of stacked experts, by their module in a network and what they are.

    Args:
        keys: names of tensors, of which others are left out.
        network: of the checkpoint's config.

    Returns:
        Names of ``gate``, ``up`` and ``down``, by the module's name and ``weight`` or ``bias``.
    """
    modules = {_layer(name): name for name in _named_mixtures(network)}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key in keys:
        match = _STACKED.search(key)
        if match is not None and _layer(key) in modules:
            found.setdefault((modules[_layer(key)], match[3]), {})[match[2]] = key
    return found


def _named_mixtures(network: nn.Module) -> list[str]:
    """Return the names of the modules of experts of a network."""
    ids = {id(one) for one in mixtures(network)}
    return [name for name, one in network.named_modules() if id(one) in ids]


def _layer(name: str) -> int:
    """Return the number of the layer that a name is of; -1: of none."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return -1 if match is None else int(match[1])


def name_of(key: str, wanted: Collection[str]) -> str:
    """Return the name that a network has for a tensor; its own where it has none."""
    names = [key]
    for start, others in _WRAPPED.items():
        if key.startswith(start):
            names += [other + key.removeprefix(start) for other in others]
    for ours, theirs in _BY_NUMBER.items():
        names += [name.replace(f".{ours}.", f".{theirs}.") for name in tuple(names)]
    return next((name for name in names if name in wanted), key)


def _is_turned(shape: tuple[int, ...]) -> bool:
    """Return true if a convolution's weights have their axes in MLX's order: inputs last."""
    return len(shape) == 3 and shape[2] == 1 and shape[1] > 1


def _alike(make: Make, is_turned: bool, added: float) -> Tensor:
    """Make a tensor as transformers has it."""
    made = make()
    if is_turned:
        made = made.mT.contiguous()
    return (made.to(torch.float32) - added).to(made.dtype) if added else made


def _together(name: str, kind: str, parts: Mapping[str, Make], module: Any) -> dict[str, Make]:
    """Return what makes the parameters of a module of experts of its three matrices, or biases."""
    end = "_bias" if kind == "bias" else ""
    found: dict[str, Make] = {}
    if "down" in parts:
        found[f"{name}.down_proj{end}"] = partial(_turned, parts["down"], module, kind)
    if {"gate", "up"} <= parts.keys():
        both = partial(_joined, parts["gate"], parts["up"], module.is_concatenated, kind)
        found[f"{name}.gate_up_proj{end}"] = partial(_turned, both, module, kind)
    return found


def _joined(gate: Make, up: Make, is_concatenated: bool, kind: str) -> Tensor:
    """Join gates and ups of experts along their outputs: one behind the other, or by turns."""
    axis = 1
    if is_concatenated:
        return torch.cat((gate(), up()), axis)
    return torch.stack((gate(), up()), axis + 1).flatten(axis, axis + 1)


def _turned(make: Make, module: Any, kind: str) -> Tensor:
    """Make the matrices of experts, with their axes as the module has them."""
    made = make()
    return made.mT.contiguous() if module.is_transposed and kind == "weight" else made
