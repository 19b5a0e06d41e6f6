"""A model of transformers whose linear layers, and what lies around them, are the CPU kernel's."""

from __future__ import annotations

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
    _check(model, weights)
    holder = _Holder(model, weights)
    head, embedding = holder.head, holder.embedding
    is_tied = head.weight is embedding.weight and holder.can_hold(head) and holder.bits(head) != 16
    keeps_embedding = not holder.is_packed and not is_tied
    if keeps_embedding:
        holder.arena.move(embedding.parameters())
    _replace_in(model, holder)
    if is_tied:
        model.set_input_embeddings(KernelEmbedding(embedding, model.get_output_embeddings()))
    # What is left would keep the files mapped, with all that was read of them.
    there = [module.weight for module in model.modules() if isinstance(module, KernelLinear)]
    if keeps_embedding:
        there.append(embedding.weight)
    ids = {id(weight) for weight in there}
    holder.arena.move(parameter for parameter in model.parameters() if id(parameter) not in ids)
    for module in model.modules():
        if isinstance(module, KernelLayer):
            module.take_addresses()
    give_back()
    return make_decoder(model)


def _check(model: Any, weights: str) -> None:
    """Refuse a model whose weights the kernel cannot read.

    Raises:
        BackendError: the kernel is not built here, or the model is elsewhere.
    """
    if not levels.is_available():
        raise BackendError(f"weights {weights} are read by the CPU kernel: {levels.why_not()}")
    if model.device.type != "cpu":
        raise BackendError(
            f"weights {weights} are read by the CPU kernel, and the model is on {model.device}; "
            f"leave one of the two out"
        )


class _Holder:
    """Replaces each linear layer of a model by one of the CPU kernel."""

    def __init__(self, model: Any, weights: str) -> None:
        """Choose for a model on the CPU; it stays as it is."""
        self.head, self.embedding = model.get_output_embeddings(), model.get_input_embeddings()
        self.arena = Arena()
        self.is_packed = is_packed(weights)
        self._weights = weights
        by_torch = torch_multiplies_bf16() and not linear.multiplies_packed()
        is_written = self.is_packed or codes_weights()
        is_expanded = is_written and model.dtype == torch.bfloat16 and by_torch
        self._expanded = Expanded(EXPANDED) if is_expanded else None

    def can_hold(self, module: nn.Module) -> bool:
        """Return true if the kernel reads the weights of a module."""
        if type(module) is not nn.Linear:
            return False
        return not self.is_packed or can_pack(module.in_features)

    def bits(self, layer: nn.Linear) -> int:
        """Return how many bits each weight of a layer gets."""
        if self.is_packed:
            return bits_of(self._weights, is_head=layer is self.head)
        return 12 if codes_well(layer.weight.detach()) else 16

    def make(self, layer: nn.Linear) -> KernelLinear:
        """Make the kernel's layer of one of torch's."""
        bits = self.bits(layer)
        is_moved = bits == 16 and layer.weight is self.embedding.weight
        return KernelLinear(layer, bits, self._expanded, None if is_moved else self.arena)


def _replace_in(parent: nn.Module, holder: _Holder) -> None:
    """Put the kernel's layers in the place of linear ones, and of what is made of them."""
    for name, child in list(parent.named_children()):
        linears = [module for module in child.modules() if isinstance(module, nn.Linear)]
        found: nn.Module | None = None
        if holder.can_hold(child):
            found = holder.make(cast(nn.Linear, child))
        elif all(holder.can_hold(layer) for layer in linears):
            found = kernel_layer(child, holder.make)
        if found is not None:
            setattr(parent, name, found)
        _replace_in(found or child, holder)
