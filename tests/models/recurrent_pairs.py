"""Small models with recurrent layers, each twice: on our caches, and as transformers runs it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from kvcellar.backends.torch.bind.binding import bind_network
from kvcellar.backends.torch.learn.probe import learn_facts
from kvcellar.backends.torch.learn.shrink.checkpoints import (
    default_raw,
    random_network,
    started_network,
    twin_raw,
)
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.models.facts import ModelFacts


class Pair:
    """One small model twice: on our caches, and as transformers runs it."""

    def __init__(self, family: str) -> None:
        raw = twin_raw(default_raw(family))
        self.facts: ModelFacts = learn_facts(raw)
        self.theirs = random_network(raw, attention="eager")
        self.ours = started_network(raw)
        self.ours.load_state_dict(self.theirs.state_dict())
        bind_network(self.ours, self.facts)

    def want(self, *tokens: int) -> np.ndarray:
        """The logits behind the last of some tokens."""
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            at = torch.arange(len(tokens))[None]
            return self.theirs(input_ids=ids, position_ids=at, use_cache=False).logits[0].numpy()

    def bind(self, session: Any, network: Any = None) -> TorchRunner:
        network = self.ours if network is None else network
        return TorchRunner(network, None, self.facts.params, self.facts.vocab_size, session)


@functools.cache
def pair(family: str) -> Pair:
    return Pair(family)
