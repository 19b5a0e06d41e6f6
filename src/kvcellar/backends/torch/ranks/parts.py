"""A rank's part of a model: read as transformers' plan says, and the KV heads that it came to."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kvcellar.backends.torch.bind.binding import bind_network
from kvcellar.backends.torch.bind.positions import Positions
from kvcellar.backends.torch.cache.state_pools import StateKeeper, Stretches
from kvcellar.backends.torch.load.networks import empty_networks, load_network
from kvcellar.backends.torch.load.weights import DTYPES
from kvcellar.backends.torch.ranks.commands import Load
from kvcellar.cache import Cache
from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.installed import pip_command
from kvcellar.models.facts import ModelFacts
from kvcellar.registry import use_cache
from kvcellar.types import LayerGroup, ModelCacheParams


def check_division(raw: Mapping[str, Any], name: str, device: torch.device, n_ranks: int) -> None:
    """Refuse a model or a device that cannot be divided among so many ranks.

    Raises:
        BackendError: a package is missing, or there are not as many cards.
        ConfigError: transformers has no plan for the model, or its heads cannot be shared out.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise BackendError(
            "to divide a model among ranks transformers needs the package 'accelerate'; install it "
            f"with: {pip_command('tp')}"
        )
    _check_device(device, n_ranks)
    whole, network = empty_networks(raw)
    config = network.config
    if not config.base_model_tp_plan:
        raise ConfigError(
            f"transformers has no plan to divide a model of type {config.model_type!r} among "
            f"ranks, and {name!r} is one; leave --tp out"
        )
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    n_heads = int(config.num_attention_heads)
    n_kv_heads = int(getattr(config, "num_key_value_heads", None) or n_heads)
    heads = get_kv_heads_per_rank(whole.tp_plan, n_kv_heads, n_ranks)
    if heads is None or n_heads % n_ranks:
        raise ConfigError(
            f"{n_ranks} ranks cannot share out the heads of {name!r} evenly: it has {n_heads}, and "
            f"{n_kv_heads} of K and V; ask for a --tp that divides both"
        )


def _check_device(device: torch.device, n_ranks: int) -> None:
    """Refuse a device that has no process group, or too few cards.

    Raises:
        ConfigError: so it is.
    """
    has_cards = torch.cuda.is_available()
    if device.type == "cuda" and device.index is None:
        if torch.cuda.device_count() >= n_ranks:
            return
        raise ConfigError(
            f"--tp {n_ranks} takes a card for each rank, and this machine has "
            f"{torch.cuda.device_count()}; ask for fewer"
        )
    if device.type != "cpu" or has_cards:
        raise ConfigError(
            f"ranks run on all cards of a machine (--device cuda), or on the CPU of one without "
            f"any; {str(device)!r} was asked for; choose another device, or leave --tp out"
        )


def read_part(what: Load, device: torch.device) -> tuple[Any, tuple[LayerGroup, ...]]:
    """Read a rank's part of a model; all ranks do so at the same time.

    Args:
        what: the model.
        device: of this rank.

    Returns:
        The network, bound, with plain tensors; and the model's layer groups with the KV heads that
        this rank has.

    Raises:
        ModelError: the weights cannot be read, or the plan divides what caches cannot.
    """
    dtype = DTYPES[what.dtype]
    network = load_network(what.folder, what.raw, dtype=dtype, device=device, n_ranks=what.n_ranks)
    bind_network(network, what.facts, device)
    return network, _groups_of(network, what.facts, what.n_ranks)


def _groups_of(network: Any, facts: ModelFacts, n_ranks: int) -> tuple[LayerGroup, ...]:
    """Run one token to see how many KV heads each layer has here; return the groups with these.

    Raises:
        ModelError: layers of one group have different numbers, or states are divided.
    """
    seen = _HeadCounts(facts.params)
    token = torch.zeros(1, 1, dtype=torch.int64, device=network.device)
    try:
        with use_cache(cast(Cache, seen)), torch.inference_mode(), Positions(token):
            network(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1)
    except (RuntimeError, IndexError) as error:
        raise ModelError(
            f"the plan of transformers divides {facts.family} as caches here cannot follow: "
            f"{error}; leave --tp out"
        ) from error
    return tuple(_group_of(group, seen.n_heads, n_ranks) for group in facts.params.groups)


def _group_of(group: LayerGroup, n_heads: Mapping[int, int], n_ranks: int) -> LayerGroup:
    found = {n_heads[layer] for layer in group.layers}
    (n, *others) = sorted(found)
    if others or n not in (group.n_kv_heads, group.n_kv_heads / n_ranks):
        raise ModelError(
            f"layers of {group} have {sorted(found)} KV heads on each of {n_ranks} ranks; leave "
            f"--tp out"
        )
    return replace(group, n_kv_heads=n)


class _HeadCounts(StateKeeper):
    """A cache that keeps nothing and knows how many KV heads each layer has brought."""

    def __init__(self, params: ModelCacheParams) -> None:
        """Have seen no layer."""
        self.n_heads: dict[int, int] = {}
        self._state = params.state
        self._states: list[Tensor] = []
        self._device = torch.device("cpu")

    def update_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, position: Any, layer_id: int, *rest: Any
    ) -> Tensor:
        """Note K's heads; return zeros of the result's shape."""
        self.n_heads[layer_id] = k.shape[1]
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))

    @property
    def keeps_states(self) -> bool:
        """True if the model has recurrent layers."""
        return self._state is not None

    def begin_states(
        self, layer: int, n_tokens: int, position: Tensor | None, device: torch.device
    ) -> list[Tensor]:
        """Return states ``[1, *shape]`` as the whole model has them."""
        assert self._state is not None, "the model has recurrent layers"
        self._device = device
        shapes = [state.shape for state in self._state.layers[layer]]
        self._states = [torch.zeros(1, *shape, device=device) for shape in shapes]
        return self._states

    def states_of(self, layer: int) -> list[Tensor]:
        """Return those of the layer that has its turn."""
        return self._states

    @property
    def stretches(self) -> tuple[Stretches, ...]:
        """One token of one sequence without a past."""
        slot = torch.zeros(1, dtype=torch.int64, device=self._device)
        return (Stretches(1, 1, slice(0, 1), None, slot),)

    def wrote_states(self, layer: int) -> None:
        """Note nothing."""
