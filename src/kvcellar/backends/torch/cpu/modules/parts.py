"""Descriptions of modules that the kernel computes, and its modules for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.cpu.modules.layers import (
    KernelAttention,
    KernelLayer,
    KernelMlp,
    KernelNorm,
)
from kvcellar.backends.torch.cpu.modules.recurrent import KernelMixer, MixerPart
from kvcellar.backends.torch.cpu.modules.rotations import Rotation
from kvcellar.backends.torch.cpu.modules.routed import KernelMixture

MakeLinear = Callable[[Sequence[nn.Module]], nn.Module]
"""Makes one layer of several whose outputs are to lie one behind the other."""


@dataclass(frozen=True)
class NormPart:
    """RMSNorm; its weight is the module's own, or what one reads off its results."""

    dim: int
    eps: float
    is_own: bool


@dataclass(frozen=True)
class MlpPart:
    """A gated MLP; ``act`` is a submodule, or None for silu, and the rest are linear layers."""

    gate_up: tuple[str, ...]
    down: str
    act: str | None


@dataclass(frozen=True)
class AttentionPart:
    """Attention; ``qkv`` are linear layers whose outputs are q, k and v one behind the other."""

    qkv: tuple[str, ...]
    o: str
    norms: tuple[str, str] | None
    heads: tuple[int, int, int]
    scaling: float
    rotation: Rotation


@dataclass(frozen=True)
class LayerPart:
    """A decoder layer; all four are submodules, the last an MLP or a mixture's block."""

    before: str
    attention: str
    between: str
    mlp: str


Part = NormPart | MlpPart | AttentionPart | LayerPart | MixerPart
Parts = Mapping[str, Part]


class Kinds(NamedTuple):
    """Modules that are made for parts: the CPU kernel's, or a card's.

    Attributes:
        norm: of a weight and what is added to the mean of squares.
        mlp: of its linear layers and the activation.
        attention: as :class:`KernelAttention`.
        layer: of a module and its parts, the last an MLP of these kinds or a mixture's block.
    """

    norm: Callable[[Tensor, float], nn.Module]
    mlp: Callable[[Any, Any, nn.Module | None], nn.Module]
    attention: Callable[..., nn.Module]
    layer: Callable[..., nn.Module]


def _kernel_layer(
    own: nn.Module, before: Any, attention: Any, between: Any, mlp: nn.Module
) -> nn.Module:
    mlp = mlp if isinstance(mlp, KernelMlp) else KernelMixture(mlp)
    return KernelLayer(own, before, attention, between, mlp)


OF_KERNEL = Kinds(KernelNorm, KernelMlp, KernelAttention, _kernel_layer)


def build(
    name: str, module: nn.Module, parts: Parts, make: MakeLinear, kinds: Kinds = OF_KERNEL
) -> nn.Module:
    """Make the kernel's module, or a card's, for a part of a network.

    Args:
        name: of the module in its network.
        module: what it stands in for; linear layers, norms and weights are taken from it.
        parts: of the network, by name; this one is among them, with what it is made of.
        make: holds linear layers.
        kinds: modules that are made.
    """

    def linears(names: Sequence[str]) -> nn.Module:
        return make([module.get_submodule(one) for one in names])

    def child(relative: str) -> Any:
        inner, full = module.get_submodule(relative), f"{name}.{relative}"
        return build(full, inner, parts, make, kinds) if full in parts else inner

    part = parts[name]
    if isinstance(part, NormPart):
        own = next(module.parameters()).detach()
        return kinds.norm(own if part.is_own else read_weight(module, part.dim), part.eps)
    if isinstance(part, MlpPart):
        act = None if part.act is None else module.get_submodule(part.act)
        return kinds.mlp(linears(part.gate_up), linears([part.down]), act)
    if isinstance(part, MixerPart):
        chains = {"gate": part.gate, "decay": part.decay}
        behind = {of: linears([chain[1]]) for of, chain in chains.items() if chain}
        return KernelMixer(module, part, linears(part.inputs), behind, linears([part.out]))
    if isinstance(part, LayerPart):
        before, attention, between, mlp = (
            child(one) for one in (part.before, part.attention, part.between, part.mlp)
        )
        return kinds.layer(module, before, attention, between, mlp)
    norms = None if part.norms is None else (child(part.norms[0]), child(part.norms[1]))
    qkv, o = linears(part.qkv), linears([part.o])
    return kinds.attention(module, part.heads, part.scaling, part.rotation, qkv, o, norms)


def read_weight(module: nn.Module, dim: int) -> Tensor:
    """Read off a norm's results what each number is multiplied with, ``[dim]`` in its own type."""
    dtype = next(module.parameters()).dtype
    with torch.inference_mode():
        result: Tensor = copy.deepcopy(module).float()(torch.full((1, 1, dim), _LARGE))
    return result[0, 0].to(dtype).clone()


def read_eps(module: nn.Module, dim: int) -> float:
    """Read off a norm's results what it adds to the mean of squares; in float32."""
    with torch.inference_mode():
        large, small = (module(torch.full((1, 1, dim), size)) for size in (_LARGE, _SMALL))
    size = float((large / small).double().mean())
    found = _SMALL**2 * (size**2 - 1)
    named = [value for value in vars(module).values() if isinstance(value, float)]
    return next((value for value in named if abs(value - found) <= 1e-3 * value), found)


_LARGE, _SMALL = 1e3, 1e-3
"""Numbers whose squares make what is added to them nothing, and much."""
