"""A model of transformers whose weights go to a card in few bits, and its parts with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.cpu.find.finding import outermost
from kvcellar.backends.torch.cpu.hold import Held, beside_experts, find_parts, names_of
from kvcellar.backends.torch.cpu.holdable import held_embeddings, held_linears, linear_of
from kvcellar.backends.torch.cpu.modules.blocks import Kept, fitted, unread_of
from kvcellar.backends.torch.cpu.modules.layers import join_biases
from kvcellar.backends.torch.cpu.modules.mixtures import (
    SILU,
    ExpertRows,
    FoundExperts,
    Weights,
    n_numbers,
    replace_experts,
)
from kvcellar.backends.torch.cpu.modules.parts import Kinds, Part, build
from kvcellar.backends.torch.cpu.modules.recurrent import MixerPart
from kvcellar.backends.torch.cpu.modules.sorted_experts import replace_sorted
from kvcellar.backends.torch.gpu.weights.layers import CardAttention, CardLayer, CardMlp
from kvcellar.backends.torch.gpu.weights.linears import (
    CardEmbedding,
    CardExperts,
    CardLinear,
    CardNorm,
)
from kvcellar.backends.torch.gpu.weights.matrices import (
    CardMatrices,
    experts_on_card,
    floats,
    packed,
    placed,
)
from kvcellar.errors import BackendError
from kvcellar.kernel import levels
from kvcellar.models.weights import (
    FILE,
    MOST_EXACT_BITS,
    bits_of,
    can_pack,
    is_fitted,
    is_packed,
)

_KINDS = Kinds(CardNorm, CardMlp, CardAttention, CardLayer)

FLOATS = 16
"""Bits of weights that stay as they are; those of float32 as well."""


def hold_on_card(
    model: Any,
    weights: str,
    device: torch.device,
    known: Path | None = None,
    blocks: Mapping[str, Kept] | None = None,
) -> Held:
    """Put a model on a card: linear layers, embeddings and experts in few bits, parts as launches.

    Weights are the CPU kernel's to the last bit; inputs are not rounded to 8 bits, as they are
    there.

    Args:
        model: of transformers, in main memory, in evaluation mode; in bfloat16 for ``bf16``.
        weights: a name of ``WEIGHTS``, or ``file``; see ``fast.hold.hold_weights``.
        device: where it goes.
        known: where its parts are kept once they are found; None: they are found again.
        blocks: for ``file``, parameters that stay as a file has them, by name; others stay plain.

    Raises:
        BackendError: the kernel of this package, which tries the parts and packs int4, is not built
            here; the model is unchanged.
    """
    if not levels.is_available():
        raise BackendError(
            f"weights {weights} are looked at and packed by the CPU kernel before they go to "
            f"{device}: {levels.why_not()}"
        )
    holder = _CardHolder(model, weights, device, blocks or {})
    n_weights = n_numbers(model)
    parts, _, _, why_none = find_parts(model, holder.linears, known)
    parts = {name: part for name, part in parts.items() if not isinstance(part, MixerPart)}
    holder.hold_embeddings()
    holder.hold_parts(parts)
    holder.hold_others()
    holder.hold_experts()
    names = model.named_parameters()
    left = [name for name, one in names if one.numel() > 1 and not any(one.stride())]
    assert not left, f"nobody holds {left[:3]}, whose numbers were not read"
    model.to(device)
    return Held(None, n_weights, holder.n_held, 0, parts, why_none)


def hold_experts_on_card(model: Any, device: torch.device) -> None:
    """Put the experts of a model on a card, in the types that they have; all else stays torch's.

    torch multiplies groups of float32 and float16 rows one after the other, whose sizes it copies
    to main memory: for these every layer would wait, and no step could be a graph.

    Args:
        model: of transformers, in evaluation mode.
        device: where they go.
    """
    make = partial(card_experts, weights="bf16", device=device)
    replace_experts(model, make, {})
    replace_sorted(model, make)


class _CardHolder:
    """Replaces modules of a model by some of a card.

    Attributes:
        linears: inputs, outputs and whether there is a bias, of layers that can be held, by name.
        n_held: numbers of weights that are held by now.
    """

    def __init__(
        self, model: Any, weights: str, device: torch.device, blocks: Mapping[str, Kept]
    ) -> None:
        """Choose for a model in main memory; it stays as it is."""
        self.n_held = 0
        self._model, self._weights, self._device = model, weights, device
        self._head, self._embedding = model.get_output_embeddings(), model.get_input_embeddings()
        self._unread = unread_of(model, blocks)
        self._blocks, self._experts = self._unread.blocks, self._unread.experts
        self.linears = {
            name: (one.in_features, one.out_features, one.bias is not None)
            for name, one in held_linears(model).items()
        }
        self._names = names_of(model)
        self._times = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
        self._shared: dict[int, tuple[Tensor, CardMatrices]] = {}

    def make(self, modules: Sequence[nn.Module]) -> CardLinear:
        """Make a layer of one of torch's, or of several behind one another."""
        linears = [one for one in map(linear_of, modules) if one is not None]
        is_head = modules[0] is self._head
        bias = join_biases(linears)
        found = [self._matrix(one.weight, is_head=is_head) for one in linears]
        return CardLinear(found, None if bias is None else bias.to(self._device))

    def _matrix(self, weight: Tensor, *, is_head: bool) -> CardMatrices:
        """Return a weight on the card; of one that is in several places the same one."""
        known = self._shared.get(id(weight))
        if known is not None:
            return known[1]
        made = self._made(weight, is_head=is_head)
        if self._times[id(weight)] > 1 or weight is self._embedding.weight:
            self._shared[id(weight)] = weight, made  # with it, so that nothing else gets its id
        return made

    def _made(self, weight: Tensor, *, is_head: bool) -> CardMatrices:
        n_in, is_to_pack = weight.shape[1], self._weights not in (FILE, "bf16")
        if id(weight) in self._blocks:
            found = placed(self._blocks[id(weight)], self._device)
        elif is_fitted(self._weights, n_in, is_head):
            found = placed(fitted(weight), self._device)
        elif is_to_pack and can_pack(n_in):
            found = packed(weight, MOST_EXACT_BITS, self._device)
        else:
            found = floats(weight, self._device)
            self.n_held += found.n_weights * (self._weights == "bf16")
            return found
        self.n_held += found.n_weights
        return found

    def hold_embeddings(self) -> None:
        """Put embeddings on the card, with their head where they are its, too."""
        for name, rows in held_embeddings(self._model).items():
            embedding: Any = self._model.get_submodule(name)
            weight = embedding.weight
            found = self._matrix(weight, is_head=True)
            if found.form.bits == FLOATS and not is_packed(self._weights):
                numbers = found.parts.numbers[0]
                embedding.weight = nn.Parameter(numbers, requires_grad=False)
                if self._head is not None and self._head.weight is weight:
                    self._shared[id(embedding.weight)] = embedding.weight, found
                continue
            held = CardLinear([found], None)
            self._put(name, CardEmbedding(held, weight.dtype, rows.scale))

    def hold_parts(self, parts: Mapping[str, Part]) -> None:
        """Put the card's modules in the place of parts; those in mixtures' blocks come first."""
        for name, _ in beside_experts(parts):
            self._put(name, self._built(name, parts))
        for name in outermost(parts):
            self._put(name, self._built(name, parts))

    def _built(self, name: str, parts: Mapping[str, Part]) -> nn.Module:
        return build(name, self._model.get_submodule(name), parts, self.make, _KINDS)

    def hold_others(self) -> None:
        """Replace the linear layers that are no part of anything larger."""
        for name in held_linears(self._model):
            module = self._model.get_submodule(name)
            if not isinstance(module, CardLinear):
                self._put(name, self.make([module]))

    def hold_experts(self) -> None:
        """Have the experts of mixtures on the card."""
        make = partial(card_experts, weights=self._weights, device=self._device)
        self.n_held += replace_experts(self._model, make, self._experts)
        self.n_held += replace_sorted(self._model, make)

    def _put(self, name: str, held: nn.Module) -> None:
        """Put a module wherever the model has the one of a name."""
        for one in self._names.get(name, [name]):
            self._model.set_submodule(one, held)


def card_experts(found: FoundExperts, weights: str, device: torch.device) -> CardExperts:
    """Put the experts of a mixture on a card.

    Args:
        found: them, in main memory.
        weights: as of ``hold_on_card``; those that were shipped or stored otherwise stay so.
        device: where they go.
    """
    up, down = (experts_on_card(one, _bits(one, weights), device) for one in (found.up, found.down))
    up_bias, down_bias = (
        None if one is None else one.to(device).contiguous()
        for one in (found.up_bias, found.down_bias)
    )
    biases = up_bias, down_bias
    return CardExperts(
        (up, down), biases, found.between, found.after, is_silu=found.gate_numbers == SILU
    )


def _bits(experts: Weights, weights: str) -> int:
    """Return how many bits weights of experts get, where they are numbers."""
    is_to_pack = weights not in (FILE, "bf16")
    if not isinstance(experts, ExpertRows) or not is_to_pack:
        return FLOATS
    return bits_of(weights) if can_pack(experts[0].shape[1]) else FLOATS
