"""The plan of a network that the CPU kernel runs whole; see :mod:`kvcellar.models.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from kvcellar.backends.torch.cpu.decoder import Whole
from kvcellar.backends.torch.cpu.parts import (
    AttentionPart,
    LayerPart,
    MlpPart,
    NormPart,
    Parts,
)
from kvcellar.models.facts import ModelFacts
from kvcellar.models.plan import LayerPlan, LinearPlan, ModelPlan, NormPlan, RopePlan

_PLACES = (0, 1, 2, 3, 17, 255, 1000, 4095)
"""Positions at which frequencies are held against the module that they were read of."""


def plan_of(network: Any, whole: Whole, parts: Parts, facts: ModelFacts) -> ModelPlan | None:
    """Make the plan of a network, before its parts are replaced.

    Args:
        network: of transformers, on a CPU.
        whole: what it is made of.
        parts: by name.
        facts: of the model.

    Returns:
        The plan; None where the network has something that a plan cannot say.
    """
    names = {id(one): name for name, one in reversed(list(network.named_parameters()))}
    planner = _Planner(network, parts, names)
    rope = _rope_of(network.get_submodule(whole.rotary)) if facts.rope.is_fixed else None
    layers = [planner.layer(name) for name in whole.layers]
    norm = planner.norm(whole.norm)
    embedding = network.get_submodule(whole.embedding)
    is_plain = type(embedding).forward is nn.Embedding.forward
    if rope is None or norm is None or not is_plain:
        return None
    known = [layer for layer in layers if layer is not None]
    if len(known) != len(layers):
        return None
    head = planner.linear("", [whole.head])
    return ModelPlan(facts, names[id(embedding.weight)], tuple(known), norm, head, rope)


class _Planner:
    """Names the tensors of a network's parts."""

    def __init__(self, network: Any, parts: Parts, names: dict[int, str]) -> None:
        self._network, self._parts, self._names = network, parts, names

    def linear(self, within: str, names: Sequence[str]) -> LinearPlan:
        """Plan linear layers whose outputs lie one behind the other."""
        modules = [self._network.get_submodule(_in(within, name)) for name in names]
        biases = [None if one.bias is None else self._names[id(one.bias)] for one in modules]
        return LinearPlan(tuple(self._names[id(one.weight)] for one in modules), tuple(biases))

    def norm(self, name: str) -> NormPlan | None:
        """Plan a norm; None where its weight is none of the network's tensors."""
        part = self._parts[name]
        if not isinstance(part, NormPart) or not part.is_own:
            return None
        own = next(self._network.get_submodule(name).parameters())
        return NormPlan(self._names[id(own)], part.eps)

    def layer(self, name: str) -> LayerPlan | None:
        """Plan a decoder layer; None where it has an activation or a mixture of its own."""
        part = self._parts[name]
        assert isinstance(part, LayerPart), "the whole of a network is layers"
        attention = self._parts[_in(name, part.attention)]
        mlp = self._parts.get(_in(name, part.mlp))
        if not isinstance(attention, AttentionPart) or not isinstance(mlp, MlpPart) or mlp.act:
            return None
        at, of_mlp = _in(name, part.attention), _in(name, part.mlp)
        before, between = (self.norm(_in(name, one)) for one in (part.before, part.between))
        q, k = [self.norm(_in(at, one)) for one in attention.norms or ()] or (None, None)
        if before is None or between is None or (attention.norms and (q is None or k is None)):
            return None
        return LayerPlan(
            before=before,
            qkv=self.linear(at, attention.qkv),
            q_norm=q,
            k_norm=k,
            o=self.linear(at, [attention.o]),
            between=between,
            gate_up=self.linear(of_mlp, mlp.gate_up),
            down=self.linear(of_mlp, [mlp.down]),
            heads=attention.heads,
            scale=attention.scaling,
        )


def _in(within: str, name: str) -> str:
    return f"{within}.{name}" if within else name


def _rope_of(rotary: Any) -> RopePlan | None:
    """Read frequencies off a rotary embedding; None where they do not say what it makes."""
    frequencies = getattr(rotary, "inv_freq", None)
    scale = getattr(rotary, "attention_scaling", 1.0)
    if not isinstance(frequencies, torch.Tensor) or not isinstance(scale, float | int):
        return None
    places = torch.tensor(_PLACES)
    with torch.inference_mode():
        sides = rotary(torch.empty(0, dtype=torch.float32), places[None])
    angles = places[:, None].float().numpy() * frequencies.float().numpy()
    both = np.concatenate((angles, angles), axis=1).astype(np.float64)
    for side, of in zip(sides, (np.cos, np.sin), strict=True):
        if side.shape != (1, *both.shape) or not np.allclose(side[0], of(both) * scale, atol=1e-5):
            return None
    return RopePlan(tuple(map(float, frequencies.tolist())), float(scale))
