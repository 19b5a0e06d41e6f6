"""Finds a network's linear layers where they are once others have taken their place.

The CPU kernel's modules hold several linear layers as one, whose outputs stand one behind the
other: an update of one of them is an update of some outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from kvcellar.backends.torch.bind.latent import LatentLinear
from kvcellar.backends.torch.cpu.holdable import linear_of
from kvcellar.backends.torch.cpu.modules.parts import AttentionPart, LayerPart, MlpPart, Part, Parts
from kvcellar.backends.torch.cpu.modules.recurrent import MixerPart

Sizes = Mapping[str, tuple[int, int]]
"""Inputs and outputs of linear layers, by name."""


class LayerPlace(NamedTuple):
    """A module that multiplies, and which of its outputs are a layer's.

    Attributes:
        module: where it is in the network.
        first: the first output.
    """

    module: str
    first: int


def linear_sizes(network: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of every linear layer of a network, by name."""
    found = {}
    for name, module in network.named_modules():
        linear = linear_of(module)
        if linear is not None:
            found[name] = linear.in_features, linear.out_features
    return found


def place_of(network: nn.Module, parts: Parts, sizes: Sizes, name: str) -> LayerPlace | None:
    """Return where a linear layer is now; None: it is not computed as one any more.

    Args:
        network: whose parts may be the kernel's.
        parts: of it, by the names of the modules that they took the place of.
        sizes: of its linear layers as they were.
        name: of the layer.
    """
    now = _moved(parts, name)
    if _multiplies(network, now):
        return LayerPlace(now, 0)
    for end in reversed([i for i, letter in enumerate(name) if letter == "."]):
        owner, child = name[:end], name[end + 1 :]
        if owner in parts:
            for place, joined in _joined(parts[owner]):
                if child in joined:
                    before = joined[: joined.index(child)]
                    first = sum(sizes[f"{owner}.{one}"][1] for one in before)
                    found = LayerPlace(f"{_moved(parts, owner)}.{place}", first)
                    return found if _multiplies(network, found.module) else None
    return None


def _multiplies(network: nn.Module, name: str) -> bool:
    """Return true if a network has a module of a name that multiplies by weights."""
    try:
        module = network.get_submodule(name)
    except AttributeError:
        return False
    return not isinstance(module, LatentLinear)  # which hands on what it is given


def _moved(parts: Parts, name: str) -> str:
    """Return where what a layer has by a name is in the kernel's layer."""
    for layer, part in parts.items():
        if not isinstance(part, LayerPart) or not name.startswith(f"{layer}."):
            continue
        block = "mlp" if f"{layer}.{part.mlp}" in parts else "mlp.own"
        for old, new in ((part.attention, "self_attn"), (part.mlp, block)):
            if name == f"{layer}.{old}" or name.startswith(f"{layer}.{old}."):
                return f"{layer}.{new}{name[len(layer) + 1 + len(old) :]}"
    return name


def _joined(part: Part) -> list[tuple[str, Sequence[str]]]:
    """Return the kernel's linear layers of a part, and the names of those that each is made of."""
    if isinstance(part, AttentionPart):
        return [("qkv_proj", part.qkv), ("o_proj", [part.o])]
    if isinstance(part, MlpPart):
        return [("gate_up_proj", part.gate_up), ("down_proj", [part.down])]
    if isinstance(part, MixerPart):
        chains = {"gate": part.gate, "decay": part.decay}
        behind = [(f"behind.{of}", [chain[1]]) for of, chain in chains.items() if chain]
        return [("in_proj", part.inputs), ("out_proj", [part.out]), *behind]
    return []
