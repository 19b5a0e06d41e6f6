"""A model of transformers whose linear layers, and what lies around them, are the CPU kernel's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from kvcellar.backends.torch.fast.decoder import KernelDecoder, make_decoder
from kvcellar.backends.torch.fast.layers import KernelEmbedding, KernelLayer, kernel_layer
from kvcellar.backends.torch.fast.linears import (
    EXPANDED,
    Expanded,
    KernelLinear,
    codes_weights,
    codes_well,
    torch_multiplies_bf16,
)
from kvcellar.backends.torch.memory import Arena, give_back
from kvcellar.errors import BackendError
from kvcellar.kernel import levels, linear
from kvcellar.models.weights import bits_of, can_pack, is_packed


def hold_weights(model: Any, weights: str) -> KernelDecoder | None:
    """Put linear layers that the kernel reads in the place of a model's own. Other layers stay.

    Args:
        model: of transformers, on a CPU, in evaluation mode; in bfloat16 for ``bf16``. What it
            keeps of its own is moved to large pages; the files that it came from are read no more.
        weights: a name of ``WEIGHTS``. The last layer has 8 bits where others have 4.

    Returns:
        The model as one call of the kernel; None where not all of its parts are the kernel's.

    Raises:
        BackendError: the kernel is not built here, or the model is elsewhere; it is unchanged.
    """
    if not levels.is_available():
        raise BackendError(f"weights {weights} are read by the CPU kernel: {levels.why_not()}")
    if model.device.type != "cpu":
        raise BackendError(
            f"weights {weights} are read by the CPU kernel, and the model is on {model.device}; "
            f"leave one of the two out"
        )
    packed = is_packed(weights)
    by_torch = torch_multiplies_bf16() and not linear.multiplies_packed()
    is_written = packed or codes_weights()
    is_expanded = is_written and model.dtype == torch.bfloat16 and by_torch
    expanded = Expanded(EXPANDED) if is_expanded else None
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    arena = Arena()

    def can_hold(module: nn.Module) -> bool:
        return type(module) is nn.Linear and (not packed or can_pack(module.in_features))

    def bits_for(linear: nn.Linear) -> int:
        if packed:
            return bits_of(weights, is_head=linear is head)
        return 12 if codes_well(linear.weight.detach()) else 16

    def make(linear: nn.Linear) -> KernelLinear:
        bits = bits_for(linear)
        is_moved = bits == 16 and linear.weight is embedding.weight
        return KernelLinear(linear, bits, expanded, None if is_moved else arena)

    is_tied = head.weight is embedding.weight and can_hold(head) and bits_for(head) != 16
    if not packed and not is_tied:
        arena.move(embedding.parameters())
    _replace_in(model, can_hold, make)
    if is_tied:
        model.set_input_embeddings(KernelEmbedding(embedding, model.get_output_embeddings()))
    # What is left would keep the files mapped, with all that was read of them.
    there = [module.weight for module in model.modules() if isinstance(module, KernelLinear)]
    if not packed and not is_tied:
        there.append(embedding.weight)
    ids = {id(weight) for weight in there}
    arena.move(parameter for parameter in model.parameters() if id(parameter) not in ids)
    for module in model.modules():
        if isinstance(module, KernelLayer):
            module.take_addresses()
    give_back()
    return make_decoder(model)


def _replace_in(
    parent: nn.Module,
    can_hold: Callable[[nn.Module], bool],
    make: Callable[[nn.Linear], KernelLinear],
) -> None:
    """Linear layers below a module, and what is made of several of them, by the kernel's."""
    for name, child in list(parent.named_children()):
        linears = [module for module in child.modules() if isinstance(module, nn.Linear)]
        found: nn.Module | None = None
        if can_hold(child):
            found = make(cast(nn.Linear, child))
        elif all(can_hold(linear) for linear in linears):
            found = kernel_layer(child, make)
        if found is not None:
            setattr(parent, name, found)
        _replace_in(found or child, can_hold, make)
