"""A model of transformers whose linear layers, and what lies around them, are the CPU kernel's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from kvcellar.backends.host_memory import give_back
from kvcellar.backends.torch.bind.mixers import Mixer
from kvcellar.backends.torch.cache.memory import Arena
from kvcellar.backends.torch.cpu.decoder import KernelDecoder, Whole, find_whole
from kvcellar.backends.torch.cpu.find.finding import PartFinder, outermost
from kvcellar.backends.torch.cpu.holdable import (
    EmbeddingRows,
    held_embeddings,
    held_linears,
    linear_of,
)
from kvcellar.backends.torch.cpu.kept import keep_parts, key_of, read_parts
from kvcellar.backends.torch.cpu.modules.blocks import (
    BlockLinear,
    Kept,
    Placer,
    fitted,
    unread_of,
)
from kvcellar.backends.torch.cpu.modules.layers import (
    Beside,
    KernelEmbedding,
    KernelLayer,
    join,
    join_biases,
)
from kvcellar.backends.torch.cpu.modules.linears import (
    EXPANDED,
    Expanded,
    KernelLinear,
    codes_weights,
    codes_well,
    torch_multiplies_bf16,
)
from kvcellar.backends.torch.cpu.modules.mixtures import hold_experts, n_numbers
from kvcellar.backends.torch.cpu.modules.parts import LayerPart, Part, Parts, build
from kvcellar.backends.torch.cpu.modules.sorted_experts import hold_sorted_experts
from kvcellar.backends.torch.cpu.planning import plan_of
from kvcellar.errors import BackendError
from kvcellar.kernel import levels, linear
from kvcellar.models.facts import ModelFacts
from kvcellar.models.plans.plan import ModelPlan
from kvcellar.models.weights import FILE, MOST_EXACT_BITS, can_pack, is_fitted, is_packed


@dataclass(frozen=True)
class Held:
    """A model's weights as they are held, and the parts of it that are the kernel's.

    Attributes:
        decoder: the model as one call of the kernel; None where not all of its parts are.
        n_weights: numbers that the model has.
        n_held: those that the kernel holds.
        n_compiled: decoder layers that are two calls of the kernel each for a few tokens.
        parts: modules of the model that are the kernel's, by name.
        why_none: what kept parts from being looked for; None: nothing did.
        plan: of the model, where one can say what it is.
    """

    decoder: KernelDecoder | None
    n_weights: int
    n_held: int
    n_compiled: int
    parts: dict[str, Part]
    why_none: str | None
    plan: ModelPlan | None = None

    def said(self, weights: str) -> str:
        """Say in one line how much of a model the kernel has.

        Args:
            weights: what was asked for.
        """
        held = "the file's own" if weights == FILE else weights
        share = f"{100 * self.n_held / max(1, self.n_weights):.0f}% of the weights are {held}"
        if self.decoder is not None:
            return f"{share}, and a step is one call of the kernel"
        if self.n_compiled:
            return f"{share}, and {self.n_compiled} layers are two calls of the kernel each"
        return share


def hold_weights(
    model: Any,
    weights: str,
    known: Path | None = None,
    blocks: Mapping[str, Kept] | None = None,
    facts: ModelFacts | None = None,
) -> Held:
    """Put what the kernel computes in the place of a model's own modules. Others stay.

    Args:
        model: of transformers, on a CPU, in evaluation mode; in bfloat16 for ``bf16``. What it
            keeps of its own is moved to large pages; the files that it came from are read no more.
        weights: a name of ``WEIGHTS``. The last layer has 8 bits where others have 4, and so have
            embeddings.
        known: where its parts are kept once they are found; None: they are found again.
        blocks: for ``file``, parameters that stay as a file has them, by name; others stay plain.
        facts: of the model, for its plan; None: no plan is made.

    Raises:
        BackendError: the kernel is not built here, or the model is elsewhere; it is unchanged.
    """
    _check(model, weights)
    holder = _Holder(model, weights, blocks or {})
    n_weights = n_numbers(model)
    parts, whole, plan, why_none = find_parts(model, holder.linears, known, facts)
    holder.hold_embeddings()
    for name in outermost(parts):
        holder.put(name, build(name, model.get_submodule(name), parts, holder.make))
    for name, place in beside_experts(parts):
        held = build(name, model.get_submodule(place), parts, holder.make)
        model.set_submodule(place, held)
    holder.hold_others()
    holder.hold_experts()
    holder.move_rest()
    compiled = [module for module in model.modules() if isinstance(module, KernelLayer)]
    for layer in compiled:
        layer.take_addresses()
    give_back()
    n_compiled = sum(layer.is_native for layer in compiled)
    layers = [model.get_submodule(name) for name in (() if whole is None else whole.layers)]
    is_whole = all(layer.is_native for layer in layers)
    decoder = KernelDecoder(model, whole) if whole is not None and is_whole else None
    return Held(decoder, n_weights, holder.n_held, n_compiled, parts, why_none, plan)


def hold_mixers(model: Any, known: Path | None = None) -> Mapping[str, Part]:
    """Put the kernel's recurrent modules in the place of a network's own; all else stays torch's.

    Args:
        model: of transformers, in evaluation mode, its recurrent modules bound to states.
        known: where its parts are kept once they are found; None: they are found again.

    Returns:
        The modules, by name; none where the kernel is not built here, or the model is elsewhere.
    """
    has_states = any(isinstance(vars(one).get("forward"), Mixer) for one in model.modules())
    if not has_states or not levels.is_available() or model.device.type != "cpu":
        return {}
    linears = {
        name: (one.in_features, one.out_features, one.bias is not None)
        for name, one in held_linears(model).items()
    }
    key = key_of(model, linears)
    kept = None if known is None else read_parts(known, key)
    parts = _find_mixers(model, linears) if kept is None else kept[0]
    if known is not None and kept is None:
        keep_parts(known, key, parts, None)
    for name in parts:
        held = build(name, model.get_submodule(name), parts, _joined)
        model.set_submodule(name, held)
    return parts


def _find_mixers(model: Any, linears: Mapping[str, tuple[int, int, bool]]) -> dict[str, Part]:
    """Find the recurrent modules that the kernel computes; none in what cannot be tried."""
    sizes = {id(model.get_submodule(name)): size for name, size in linears.items()}
    try:
        finder = PartFinder(model, lambda module: sizes.get(id(module)))
        finder.find_mixers()
    except Exception:  # whatever does not like random numbers: it runs as it is
        return {}
    return finder.parts


def _joined(modules: Sequence[nn.Module]) -> nn.Module:
    return join([one for one in map(linear_of, modules) if one is not None])


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


def find_parts(
    model: Any,
    linears: Mapping[str, tuple[int, int, bool]],
    known: Path | None,
    facts: ModelFacts | None = None,
) -> tuple[dict[str, Part], Whole | None, ModelPlan | None, str | None]:
    """Find parts whose linear layers can all be held; the model as a whole; its plan; or why not.

    Args:
        model: of transformers, on a CPU.
        linears: inputs, outputs and whether there is a bias, of layers that can be held, by name.
        known: where parts are kept once they are found; None: they are found again.
        facts: of the model, for its plan; None: none is made.
    """
    key = key_of(model, linears)
    is_planned = facts is not None
    kept = None if known is None else read_parts(known, key, with_plan=is_planned)
    if kept is not None:
        return *kept, None
    sizes = {id(model.get_submodule(name)): size for name, size in linears.items()}
    try:
        finder = PartFinder(model, lambda module: sizes.get(id(module)))
        finder.find()
        parts, whole = finder.parts, find_whole(finder)
        plan = None if facts is None else plan_of(model, finder, facts)
    except Exception as error:  # whatever does not like random numbers: it runs as it is
        return {}, None, None, f"{type(error).__name__}: {error}"
    if known is not None:
        keep_parts(known, key, parts, whole, plan, is_planned=is_planned)
    return parts, whole, plan, None


class _Holder:
    """Replaces linear layers and embeddings of a model by some of the CPU kernel.

    Attributes:
        linears: inputs, outputs and whether there is a bias, of layers that can be held, by name.
        n_held: numbers of weights that are held by now.
    """

    def __init__(self, model: Any, weights: str, blocks: Mapping[str, Kept]) -> None:
        """Choose for a model on the CPU; it stays as it is."""
        self.n_held = 0
        self._model, self._weights = model, weights
        self._head, self._embedding = model.get_output_embeddings(), model.get_input_embeddings()
        self._arena, self._placer = Arena(), Placer()
        self._is_packed = is_packed(weights)
        self._unread = unread_of(model, blocks)
        self._blocks, self._experts = self._unread.blocks, self._unread.experts
        by_torch = torch_multiplies_bf16() and not linear.multiplies_packed()
        is_written = self._is_packed or codes_weights()
        is_expanded = is_written and model.dtype == torch.bfloat16 and by_torch
        self._expanded = Expanded(EXPANDED) if is_expanded else None
        found = held_linears(model).items()
        # Their sizes alone: each layer's weights are to be free as soon as it is replaced.
        self.linears = {
            name: (one.in_features, one.out_features, one.bias is not None)
            for name, one in found
            if self._can_hold(one)
        }
        self._left = WeakSet(model.get_submodule(name) for name in self.linears)
        self._embeddings = held_embeddings(model)
        self._names = names_of(model)
        self._times = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
        self._shared: dict[tuple[int, ...], tuple[KernelLinear | BlockLinear, list[nn.Linear]]] = {}
        self._tied = self._find_tied()
        self._keeps_embedding = not self._is_packed and self._tied is None

    def _can_hold(self, layer: nn.Linear) -> bool:
        if self._weights == FILE:
            return id(layer.weight) in self._blocks
        return not self._is_packed or can_pack(layer.in_features)

    def _find_tied(self) -> tuple[str, EmbeddingRows] | None:
        """Return the embedding that is to read rows of the last layer; None for two of them."""
        head = None if self._head is None else linear_of(self._head)
        name = _name_in(self._model, self._embedding)
        is_one = self._head is not None and self._head.weight is self._embedding.weight
        if head is None or not is_one or name not in self._embeddings:
            return None
        if not self._can_hold(head) or self._bits(head) == 16:
            return None
        return name, self._embeddings[name]

    def _bits(self, layer: nn.Linear) -> int:
        """Return how many bits each weight of a layer gets."""
        if self._is_packed:
            return MOST_EXACT_BITS  # or fewer, in blocks
        return 12 if codes_well(layer.weight.detach()) else 16

    def put(self, name: str, held: nn.Module) -> None:
        """Put a module wherever the model has the one of a name."""
        for one in self._names.get(name, [name]):
            self._model.set_submodule(one, held)

    def make(self, modules: Sequence[nn.Module]) -> nn.Module:
        """Make the kernel's layer of one of torch's, or of several behind one another.

        Layers that have the same weights get the same one; what cannot be held is torch's.
        """
        linears = [one for one in map(linear_of, modules) if one is not None]
        if not all(map(self._can_hold, linears)):
            if not any(id(one.weight) in self._blocks for one in linears):
                return join(linears)
            return Beside(
                [
                    self._make([one], is_head=False) if self._can_hold(one) else one
                    for one in linears
                ]
            )
        if all(self._times[id(one.weight)] <= 1 for one in linears):
            return self._make(linears, is_head=modules[0] is self._head)
        key = tuple(id(parameter) for one in linears for parameter in one.parameters())
        if key not in self._shared:  # with the layers, so that nothing else gets their ids
            made = self._make(linears, is_head=modules[0] is self._head)
            self._shared[key] = made, linears
        return self._shared[key][0]

    def _make(self, linears: Sequence[nn.Linear], *, is_head: bool) -> KernelLinear | BlockLinear:
        self.n_held += sum(one.in_features * one.out_features for one in linears)
        if self._weights == FILE:
            stored = [self._blocks[id(one.weight)] for one in linears]
            return BlockLinear(stored, join_biases(linears), self._arena, self._placer)
        if is_fitted(self._weights, linears[0].in_features, is_head):
            made = [fitted(one.weight) for one in linears]
            return BlockLinear(made, join_biases(linears), self._arena)
        layer = join(linears)
        bits = self._bits(layer)
        is_moved = bits == 16 and layer.weight is self._embedding.weight
        return KernelLinear(layer, bits, self._expanded, None if is_moved else self._arena)

    def hold_embeddings(self) -> None:
        """Put packed rows in the place of embeddings that are not the last layer's weights."""
        if self._keeps_embedding:
            self._arena.move(self._embedding.parameters())
        for name, rows in self._embeddings.items():
            embedding: Any = self._model.get_submodule(name)
            is_tied = self._tied is not None and name == self._tied[0]
            weight = embedding.weight
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer.weight = weight
            if not self._is_packed or is_tied or not self._can_hold(layer):
                continue
            held: KernelLinear | BlockLinear
            if self._weights == FILE:
                held = self._make([layer], is_head=False)
            else:
                held = KernelLinear(layer, MOST_EXACT_BITS, self._expanded, self._arena)
                self.n_held += weight.numel()
            self.put(name, KernelEmbedding(held, weight.dtype, rows.scale))

    def hold_others(self) -> None:
        """Replace the linear layers that are no part of anything larger; the tied embedding too."""
        there = self._model.named_modules(remove_duplicate=False)
        for name in [name for name, module in there if module in self._left]:
            self._model.set_submodule(name, self.make([self._model.get_submodule(name)]))
        if self._tied is not None:
            name, rows = self._tied
            held, dtype = self._model.get_output_embeddings(), self._embedding.weight.dtype
            self.put(name, KernelEmbedding(held, dtype, rows.scale))

    def hold_experts(self) -> None:
        """Have the kernel hold the experts of mixtures."""
        to = self._weights, self._arena
        self.n_held += hold_experts(self._model, *to, self._experts)
        self.n_held += hold_sorted_experts(self._model, *to)

    def move_rest(self) -> None:
        """Move what else the model has; it would keep the files mapped, with all that was read."""
        names = self._model.named_parameters()
        left = [name for name, one in names if one.numel() > 1 and not any(one.stride())]
        assert not left, f"no kernel holds {left[:3]}, whose numbers were not read"
        self._placer.run()
        modules = list(self._model.modules())
        there = [module.weight for module in modules if isinstance(module, KernelLinear)]
        if self._keeps_embedding:
            there.append(self._embedding.weight)
        ids = {id(weight) for weight in there}
        self._arena.move(one for one in self._model.parameters() if id(one) not in ids)


def beside_experts(parts: Parts) -> Iterator[tuple[str, str]]:
    """Yield parts inside the mixtures of layers, and where they lie once the layer is replaced."""
    for layer, part in parts.items():
        block = f"{layer}.{part.mlp}" if isinstance(part, LayerPart) else ""
        if block and block not in parts:
            for name in outermost([one for one in parts if one.startswith(f"{block}.")]):
                yield name, f"{layer}.mlp.own{name.removeprefix(block)}"


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each module that a model has in more than one place, by the first."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        found[id(module)].append(name)
    return {names[0]: names for names in found.values() if len(names) > 1}


def _name_in(model: nn.Module, module: nn.Module) -> str:
    names = {id(one): name for name, one in model.named_modules()}
    return str(names[id(module)])
