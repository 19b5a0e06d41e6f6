"""Recurrent modules of a network, as its plan says them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvcellar.backends.torch.cpu.modules.recurrent import MixerPart
from kvcellar.models.plans.recurrent import CONVOLUTION, RecurrentPlan


def plan_recurrent(
    own: Any, part: MixerPart, names: Mapping[int, str], *, rounds: bool
) -> RecurrentPlan | None:
    """Plan a recurrent module that the kernel was found to compute.

    Args:
        own: the network's module.
        part: what it was found to be.
        names: of the network's parameters, by their ids.
        rounds: true if its norm rounds between.

    Returns:
        The plan; None where no plan can say it.
    """
    if part.scale != 1.0 or part.scales or part.gate or part.decay:
        return None

    def tensor(name: str) -> str | None:
        return names[id(own.get_parameter(name))] if name else None

    conv = own.get_submodule(part.conv)
    norm = next(own.get_submodule(part.norm).parameters()) if part.norm else None
    gates_first, is_sigmoid, _ = part.gating
    made = RecurrentPlan(
        kind=part.kind,
        at=part.at,
        conv=names[id(conv.weight)],
        conv_shape=(conv.weight.shape[0], conv.weight.shape[-1]),
        conv_bias=None if conv.bias is None else names[id(conv.bias)],
        has_silu=part.has_silu,
        by_key_heads=part.is_by_head,
    )
    if part.kind == CONVOLUTION:
        return made
    n_heads, second, third, fourth = part.heads
    made = replace(
        made,
        heads=(n_heads, second, third, fourth),
        rates=tensor(part.rates),
        shifts=tensor(part.shifts),
        skips=tensor(part.skips),
        beta_scale=part.beta_scale,
        norm=None if norm is None else names[id(norm)],
        eps=part.eps,
        group=part.group,
        gating=(gates_first, is_sigmoid, rounds),
    )
    sizes = own.get_parameter(part.shifts).numel(), made.n_normed if norm is None else norm.numel()
    return made if sizes == (n_heads, made.n_normed) else None
