"""Learns from one short forward, which is only watched, what a network of transformers is.

The network runs on the meta device, where tensors have shapes and no numbers, so a model of any
size takes a fraction of a second. Its attention, its masks, its experts and its cache are stood in
for, by the interfaces that transformers has for each: the mask that a layer's attention is given
carries the function of indices that it would be made of, and says who sees whom at any position.

Nothing is written down of any family. What is not seen to be causal attention over K and V of
single tokens is refused by name.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface

from kvcellar.backends.torch.bind.ropes import hold_ropes
from kvcellar.backends.torch.learn.finding_latents import find_latents
from kvcellar.backends.torch.learn.stepwise import modules_by_token
from kvcellar.backends.torch.learn.visibility import MaskFunction, read_mask
from kvcellar.backends.torch.learn.watched_cache import WatchedCache
from kvcellar.backends.torch.load.networks import empty_network, not_called, unforeseen
from kvcellar.errors import KVCellarError, ModelError
from kvcellar.models.facts import LayerFacts, ModelFacts
from kvcellar.models.files.configs import positions_of, rope_of
from kvcellar.models.latents import Latents

NAME = "kvcellar_probe"
"""Name of what stands in, at each interface of transformers."""

_N_TOKENS = 5

_MOST_NUMBERS = 20_000_000
"""Numbers of a model that is run in memory where it does not run on the meta device."""

_POSITIONS = frozenset({"position_ids", "cache_position"})
"""Tensors that an attention is told and that the cache knows better."""

_watching = threading.local()
"""Has ``seen`` while a thread watches a network."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of a layer's attention.

    Attributes:
        strange: names of tensors that it was given besides.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: MaskFunction | None
    scale: float
    softcap: float | None
    has_sinks: bool
    strange: tuple[str, ...]


@dataclass(slots=True)
class _Seen:
    """Everything that was seen of a forward.

    Attributes:
        calls: of the attention, in their order.
        cache: what the layers have besides, which notes what they ask.
        active: numbers per token inside of the experts that run for it.
        by_token: paths of recurrent modules that go on from a past by single tokens alone.
    """

    calls: list[_Call] = field(default_factory=list)
    cache: WatchedCache = field(default_factory=lambda: WatchedCache(_N_TOKENS))
    active: int = 0
    by_token: frozenset[str] = frozenset()


_TRIED = "a few tokens were run to see what its layers ask of a cache"


def learn_facts(raw: Mapping[str, Any]) -> ModelFacts:
    """Learn the facts of a model by its ``config.json``; no weight is needed.

    Raises:
        ModelError: the config makes no model, or one whose attention caches here cannot serve.
    """
    try:
        return _learn(raw)
    except (KVCellarError, OSError, MemoryError):
        raise
    except Exception as error:  # whatever of its code is like no other model's
        raise unforeseen(raw.get("model_type"), _TRIED, error) from error


def _learn(raw: Mapping[str, Any]) -> ModelFacts:
    """Learn the facts; an error that nobody foresaw comes as it is."""
    network = empty_network(raw, attention=NAME)
    try:
        return probe(network)
    except _UnseenError as error:
        if sum(parameter.numel() for parameter in network.parameters()) > _MOST_NUMBERS:
            return _learn_narrow(raw, network, error)
    from kvcellar.backends.torch.learn.shrink.checkpoints import random_network  # few need it

    return probe(random_network(raw, attention=NAME))


def _learn_narrow(raw: Mapping[str, Any], network: Any, unseen: ModelError) -> ModelFacts:
    """Learn the facts of a large network that reads numbers, from narrow ones in memory.

    Raises:
        ModelError: ``unseen``, where no narrow network can be built, or layers depend on the width.
    """
    from kvcellar.backends.torch.learn.shrink.checkpoints import random_network
    from kvcellar.backends.torch.learn.shrink.narrow import WIDTHS, is_narrow_of, narrow_raw

    try:
        narrow = [random_network(narrow_raw(raw, width), attention=NAME) for width in WIDTHS]
        is_it = all(is_narrow_of(one, network) for one in narrow)
        found = [probe(one) for one in narrow]
    except Exception as error:  # whatever its classes do not like of other sizes
        raise unseen from error
    first, second = (replace(one, hidden_size=1, inner_size=1) for one in found)
    if not is_it or first != second:
        raise unseen
    return replace(
        found[0],
        hidden_size=int(network.config.hidden_size),
        inner_size=_inner_size(network, _Seen(active=_active(network))),
        vocab_size=int(network.get_input_embeddings().weight.shape[0]),
    )


def _active(network: Any) -> int:
    """Return the numbers per token inside of the experts that run for it, by their parameters."""
    n_chosen = int(getattr(network.config, "num_experts_per_tok", None) or 1)
    experts = [
        [max(weight.shape[1:]) for weight in module.parameters(recurse=False) if weight.dim() == 3]
        for module in network.modules()
    ]
    return n_chosen * max((min(widths) for widths in experts if widths), default=0)


def probe(network: Any) -> ModelFacts:
    """Learn the facts of a network that was built with the attention of this module's name.

    Args:
        network: as :func:`~kvcellar.backends.torch.load.networks.empty_network` returns it; on the
            meta device, or a small one in memory.

    Raises:
        ModelError: its attention is not what caches here can serve, or is not seen.
    """
    config = network.config
    family = str(config.model_type)
    seen = _watch(network, family)
    states, others = seen.cache.states(seen.by_token), seen.cache.others
    if not seen.calls and not states and not others:
        raise not_called(family)
    with _seeing():
        latents = find_latents(network)
    layers = _with_latents(_layers_of(family, seen.calls), latents)
    keeps = {at.layer for at in layers} | {at.layer for at in states} | {at for at, _ in others}
    _check_whole(config, layers, keeps, is_hybrid=bool(states or others))
    return ModelFacts(
        family=family,
        layers=layers,
        others=others,
        n_layers=max(max(keeps) + 1, int(config.num_hidden_layers)),
        hidden_size=int(config.hidden_size),
        inner_size=_inner_size(network, seen),
        vocab_size=int(network.get_input_embeddings().weight.shape[0]),
        max_positions=positions_of(config),
        rope=rope_of(config),
        states=states,
    )


# Watching ----------------------------------------------------------------------------------------


def _watch(network: Any, family: str) -> _Seen:
    """Run a few tokens through a network; return what was seen.

    Raises:
        ModelError: it does not run, or takes no positions.
    """
    if "position_ids" not in inspect.signature(network.forward).parameters:
        if network._is_stateful:
            raise ModelError(
                f"architecture {family!r} has recurrent layers alone, and caches here begin with "
                f"rows of attention; choose another model"
            )
        raise ModelError(
            f"architecture {family!r} takes no position_ids, so that its tokens cannot be run in "
            f"pieces; choose another model"
        )
    for module in network.modules():
        if isinstance(module, PreTrainedModel):
            module.set_experts_implementation(NAME)
    hold_ropes(network)
    device = network.get_input_embeddings().weight.device
    try:
        with _seeing() as seen, seen.cache.watching(network), torch.inference_mode():
            network(
                input_ids=torch.zeros(1, _N_TOKENS, dtype=torch.long, device=device),
                position_ids=torch.arange(_N_TOKENS, device=device)[None],
                past_key_values=seen.cache,
                use_cache=False,
                # All of them: given a number, Gemma 4 cuts the masks of its last layers.
                logits_to_keep=torch.arange(_N_TOKENS, device=device),
            )
        seen.by_token = modules_by_token(seen.cache)
    except Exception as error:  # whatever its layers do not like
        if isinstance(error, AttributeError) and isinstance(error.obj, WatchedCache):
            raise _UnseenError(
                f"architecture {family!r} asks for a cache of its own ({error.name}), which none "
                f"here stands in for; choose another model"
            ) from error
        raise _UnseenError(str(unforeseen(family, _TRIED, error))) from error
    return seen


@contextmanager
def _seeing() -> Iterator[_Seen]:
    """Note what networks do that this thread runs while the block lasts."""
    seen = _watching.seen = _Seen()
    try:
        yield seen
    finally:
        del _watching.seen


class _UnseenError(ModelError):
    """A network did not run: some read numbers, which the meta device has not."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Note a call of a layer's attention; return zeros ``[1, T, n_heads, v_head_dim]``."""
    call = _Call(
        layer=-1 if module.layer_idx is None else int(module.layer_idx),
        query=query,
        key=key,
        value=value,
        mask=getattr(attention_mask, "mask_function", None),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        has_sinks=s_aux is not None,
        strange=tuple(
            name
            for name, given in others.items()
            if isinstance(given, Tensor) and name not in _POSITIONS
        ),
    )
    _watching.seen.calls.append(call)
    _watching.seen.cache.note_attention()
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: MaskFunction,
    device: torch.device,
    **others: Any,
) -> Tensor:
    """Return a mask without values that carries the function which a real one is made of."""
    mask = torch.zeros(batch_size, 1, q_length, kv_length, device=device)
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Note how many experts run for a token; return zeros in the shape of ``hidden``."""
    matrices = [weight for weight in module.parameters(recurse=False) if weight.dim() == 3]
    inner = min(max(matrix.shape[1:]) for matrix in matrices)  # gate and up lie in one
    seen = _watching.seen
    seen.active = max(seen.active, int(chosen.shape[-1]) * inner)
    return torch.zeros_like(hidden)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


# What was seen -----------------------------------------------------------------------------------


def _layers_of(family: str, calls: list[_Call]) -> tuple[LayerFacts, ...]:
    """Return the facts of each layer's attention, ascending.

    Raises:
        ModelError: an attention that no cache here can serve.
    """
    often = [layer for layer, n in Counter(call.layer for call in calls).items() if n > 1]
    if any(call.layer < 0 for call in calls):
        raise ModelError(
            f"architecture {family!r} has one attention module for several layers, whose histories "
            f"no cache here can tell apart; choose another model"
        )
    if often:
        raise ModelError(
            f"architecture {family!r} attends more than once in layer {often[0]}, which no cache "
            f"here can serve; choose another model"
        )
    kinds: dict[MaskFunction | None, tuple[int | None, int | None] | None] = {}
    facts: list[LayerFacts] = []
    for i, call in enumerate(calls):
        _check_call(family, call)
        if call.mask not in kinds:
            kinds[call.mask] = None if call.mask is None else read_mask(call.mask)
        kind = kinds[call.mask]
        if kind is None:
            raise ModelError(
                f"architecture {family!r} lets a token of layer {call.layer} see others than those "
                f"before it, all of them or of a window or chunk, which no cache here can serve; "
                f"choose a causal model"
            )
        earlier = (at for at, other in zip(facts, calls[:i], strict=True) if _shares(call, other))
        facts.append(_facts_of(call, kind, next(earlier, None)))
    return tuple(sorted(facts, key=lambda layer: layer.layer))


def _check_call(family: str, call: _Call) -> None:
    """Refuse an attention that is given more than caches here know of.

    Raises:
        ModelError: so it is.
    """
    if call.strange:
        raise ModelError(
            f"architecture {family!r} gives the attention of layer {call.layer} "
            f"{', '.join(call.strange)} beside Q, K and V, which no cache here can serve; choose "
            f"another model"
        )
    n_heads, n_kv_heads = call.query.shape[1], call.key.shape[1]
    if n_heads % n_kv_heads or call.value.shape[1] != n_kv_heads:
        raise ModelError(
            f"architecture {family!r} has {n_heads} query heads over {n_kv_heads} heads of K and "
            f"{call.value.shape[1]} of V in layer {call.layer}; num_key_value_heads must divide "
            f"num_attention_heads; check the config"
        )


def _shares(call: _Call, other: _Call) -> bool:
    """Return true if two layers attend over the same K and V."""
    return call.key is other.key and call.value is other.value and call.mask is other.mask


def _facts_of(
    call: _Call, kind: tuple[int | None, int | None], source: LayerFacts | None
) -> LayerFacts:
    """Write down what a call says of its layer."""
    window, chunk = kind
    return LayerFacts(
        layer=call.layer,
        n_heads=call.query.shape[1],
        n_kv_heads=call.key.shape[1],
        head_dim=call.key.shape[-1],
        v_head_dim=call.value.shape[-1],
        scale=call.scale,
        window=window,
        chunk=chunk,
        softcap=call.softcap,
        has_sinks=call.has_sinks,
        source=None if source is None else source.layer,
    )


def _with_latents(
    layers: tuple[LayerFacts, ...], found: Mapping[int, Latents]
) -> tuple[LayerFacts, ...]:
    """Return layers whose K and V are expanded from latents as layers of latent rows.

    Those that share K and V with others stay as they are.
    """
    shared = {at.source for at in layers} | {at.layer for at in layers if at.source is not None}
    return tuple(
        replace(
            at,
            n_kv_heads=1,
            head_dim=found[at.layer].rotary_dim,
            v_head_dim=found[at.layer].latent_dim,
            is_latent=True,
            latents=found[at.layer],
        )
        if at.layer in found and at.layer not in shared
        else at
        for at in layers
    )


def _check_whole(
    config: Any, layers: tuple[LayerFacts, ...], keeps: set[int], *, is_hybrid: bool
) -> None:
    """Make sure that every layer was seen, and did what the config says.

    Args:
        config: of the text part.
        layers: facts of its attention.
        keeps: the layers that keep something.
        is_hybrid: some keep states; others may then keep nothing.

    Raises:
        ModelError: a layer keeps nothing that was seen, or a cap on the logits is ignored.
    """
    family = config.model_type
    missing = sorted(set(range(int(config.num_hidden_layers))) - keeps)
    if missing and not is_hybrid:
        raise ModelError(
            f"architecture {family!r} has {len(missing)} layers of {config.num_hidden_layers} "
            f"whose attention is not seen, from layer {missing[0]} on, so that no cache of ours "
            f"can stand in; choose another model"
        )
    if getattr(config, "attn_logit_softcapping", None) and not any(at.softcap for at in layers):
        raise ModelError(
            f"the {family} config asks for attn_logit_softcapping, which its class in transformers "
            f"ignores; the result would not be the model's"
        )


def _inner_size(network: Any, seen: _Seen) -> int:
    """Return the numbers per token inside of a layer's MLP, all active experts together."""
    ends = (network.get_output_embeddings(), network.get_input_embeddings())
    widths: list[int] = [
        max(weight.shape)
        for module in network.modules()
        if module not in ends and not isinstance(module, torch.nn.Embedding)
        for weight in module.parameters(recurse=False)
        if weight.dim() == 2
    ]
    return max([seen.active, *widths])
