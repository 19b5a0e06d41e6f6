"""Networks of transformers, made ready to run on caches of ours."""

from __future__ import annotations

from typing import Any

import torch

from kvcellar.backends.torch.bind.latent import bind_latents
from kvcellar.backends.torch.bind.mixers import bind_states, spare_advice
from kvcellar.backends.torch.bind.positions import tell_past_lengths
from kvcellar.backends.torch.bind.ropes import hold_ropes
from kvcellar.models.facts import ModelFacts


def bind_network(network: Any, facts: ModelFacts, device: torch.device | None = None) -> None:
    """Have a network's layers find what they need of a forward in the cache that is active.

    Args:
        network: of transformers, with its weights and with its attention on the op.
        facts: what was learnt of it.
        device: where it is going to run; None: where it is.

    Raises:
        ModelError: it is another network than the one that was looked at.
    """
    # Imported here, where loading is quiet: transformers imports all that it can find.
    from kvcellar.backends.torch.bind.model_attention import number_layers

    hold_ropes(network)
    tell_past_lengths(network)
    bind_latents(network, facts.latents)
    number_layers(network, facts.attention_numbers)
    bind_states(network, facts)
    if facts.states and (network.device if device is None else device).type == "cpu":
        spare_advice()
