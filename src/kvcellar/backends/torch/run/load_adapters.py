"""Adapters of a model: read, held against its network, and tried once they hang there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvcellar.backends.torch.adapters.placing import Sizes, linear_sizes
from kvcellar.backends.torch.adapters.updates import Adapters, check_run, hang_updates, named_in
from kvcellar.backends.torch.cpu.modules.parts import Parts
from kvcellar.backends.torch.load.networks import empty_network
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.models.adapters import Adapter, read_adapter
from kvcellar.models.facts import ModelFacts
from kvcellar.models.options import LoadOptions
from kvcellar.registry import make_decode_session

_TRIED = 7
"""Tokens of the forward that shows which layers are run."""


def read_adapters(options: LoadOptions) -> list[Adapter]:
    """Look at the adapters that are asked for.

    Raises:
        ModelError: one is none, or does more than update linear layers.
    """
    return [read_adapter(name, path) for name, path in options.adapters.items()]


def check_adapters(adapters: Sequence[Adapter], raw: Mapping[str, Any]) -> None:
    """Find adapters that are not for a model; no number is read.

    Args:
        adapters: to be loaded beside it.
        raw: the model's ``config.json``.

    Raises:
        ModelError: one is for another model.
    """
    if not adapters:
        return
    network = empty_network(raw)
    layers, heads = linear_sizes(network), names_of_heads(network)
    for adapter in adapters:
        named_in(layers, adapter, heads)


def names_of_heads(network: Any) -> list[str]:
    """Return what the layer that says the logits is called in a network."""
    head = network.get_output_embeddings()
    return [name for name, module in network.named_modules() if module is head]


def load_adapters(
    network: Any, parts: Parts, layers: Sizes, adapters: Sequence[Adapter], facts: ModelFacts
) -> Adapters:
    """Load adapters beside a network, and run a few tokens with them.

    Args:
        network: bound, with its weights as they are held.
        parts: that the CPU kernel computes.
        layers: its linear layers, as they were before.
        adapters: to be loaded.
        facts: of the model.

    Raises:
        ModelError: one is not for this model, or updates what is not run as a linear layer.
    """
    heads = [name for name in names_of_heads(network) if name in layers]
    loaded = hang_updates(network, parts, layers, adapters, heads)
    config = LoadOptions().config_for(facts.params, 4 * _TRIED)
    length = facts.rope.length_for(4 * _TRIED)
    with make_decode_session("torch", config) as session:
        vocab_size = int(network.get_input_embeddings().num_embeddings)
        runner = TorchRunner(
            network, None, facts.params, vocab_size, session, rope_length=length, adapters=loaded
        )
        names = ["", *loaded.names] * _TRIED
        with runner.adapting([(name, 1) for name in names[:_TRIED]]):
            runner.forward(np.arange(_TRIED) % vocab_size, np.arange(_TRIED), [_TRIED - 1])
    check_run(loaded, adapters)
    return loaded
