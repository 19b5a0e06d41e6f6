"""Has a kernel hold what it can of a network: the CPU's its weights and parts, or a card's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcellar.backends.torch.cpu.hold import Held, hold_mixers, hold_weights
from kvcellar.backends.torch.cpu.modules.blocks import Kept
from kvcellar.backends.torch.cpu.modules.parts import Parts
from kvcellar.backends.torch.gpu.choice import is_gpu
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.cache_config import make_config
from kvcellar.models.facts import ModelFacts
from kvcellar.registry import make_decode_session

_FEW, _APART = 4, 0.05
"""Tokens by which a whole decoder is compared with the modules that it stands for; and most that
their logits may differ by rounding in another order, as a share of the logits' norm."""


def hold_parts(
    network: Any,
    weights: str | None,
    device: torch.device,
    known: Path,
    blocks: Mapping[str, Kept],
    facts: ModelFacts,
) -> tuple[Held | None, Parts]:
    """Have a kernel hold what it can of a network, which is on its device afterwards.

    Args:
        network: bound, with its weights.
        weights: how linear layers hold theirs, a name of ``WEIGHTS``; None: as torch does.
        device: where it runs.
        known: where its parts are kept once they are found.
        blocks: parameters that stay as a file has them, by name.
        facts: of the model.

    Returns:
        What is held, None where torch has all weights but a card's of experts; and the parts that
        are a kernel's.
    """
    if weights is None and is_gpu(device):
        from kvcellar.backends.torch.gpu.weights.hold import (
            hold_experts_on_card,  # it imports Triton
        )

        hold_experts_on_card(network, device)
        return None, {}
    if weights is None:
        return None, hold_mixers(network, known)
    if is_gpu(device):
        from kvcellar.backends.torch.gpu.weights.hold import hold_on_card  # it imports Triton

        held = hold_on_card(network, weights, device, known=known, blocks=blocks)
        return held, held.parts
    is_first = not known.is_file()
    held = hold_weights(network, weights, known=known, blocks=blocks, facts=facts)
    if is_first and held.decoder is not None and not _says_the_same(network, held, facts):
        known.unlink(missing_ok=True)  # the next load looks again
        held = replace(held, decoder=None, plan=None)
    return held, held.parts


def _says_the_same(network: Any, held: Held, facts: ModelFacts) -> bool:
    """Return true if a model's decoder gives the logits of its modules, for a few tokens.

    Its parts were tried one by one without weights; this is all of it, with them and over a cache.
    """
    config = make_config(facts.params, 2 * _FEW, "float32")
    length = facts.rope.length_for(2 * _FEW)
    found = []
    for decoder in (held.decoder, None):
        with make_decode_session("torch", config) as session:
            runner = TorchRunner(
                network, decoder, facts.params, facts.vocab_size, session, rope_length=length
            )
            logits = [runner.forward([at + 1], [at], [0]) for at in range(_FEW)]
        found.append(np.concatenate(logits))
    ours, theirs = found
    return bool(np.linalg.norm(ours - theirs) <= _APART * np.linalg.norm(theirs))
